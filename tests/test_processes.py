"""Which of a run's processes this one is: set, or found by JAX from what started it."""

import re
from typing import Any

import jax
import pytest

from jaxpar.config import load_config, parse_config
from jaxpar.config.operation import DistributedConfig
from jaxpar.processes import Place, find_place, joined, local_parallel, placeless

VARIABLES = ("SLURM_JOB_ID", "SLURM_STEP_NODELIST", "SLURM_NTASKS", "SLURM_PROCID", "SLURM_LOCALID",
             "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_MCA_orte_hnp_uri",
             "OMPI_VERSION", "JAX_COORDINATOR_PORT")  # fmt: skip
SLURM = {"SLURM_JOB_ID": "5000", "SLURM_STEP_NODELIST": "node[007-008]", "SLURM_NTASKS": "4", "SLURM_PROCID": "3",
         "SLURM_LOCALID": "1"}  # fmt: skip
OPEN_MPI = {"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_LOCAL_RANK": "1"}
EXPLICIT = {"coordinator_address": "here:123", "num_processes": 2, "process_id": 1}


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    place(monkeypatch, {})
    return monkeypatch


def place(environment: pytest.MonkeyPatch, variables: dict[str, str], **keys: Any) -> Place | None:
    for name in VARIABLES:
        environment.delenv(name, raising=False)
    for name, value in variables.items():
        environment.setenv(name, value)
    return find_place(DistributedConfig(**keys))


def test_a_process_that_nobody_placed_is_alone(environment: pytest.MonkeyPatch) -> None:
    assert place(environment, {}) is None
    assert place(environment, {}, detect="off") is None
    assert place(environment, SLURM | {"SLURM_NTASKS": "1", "SLURM_PROCID": "0"}) is None
    assert place(environment, SLURM, detect="off") is None
    assert place(environment, {}, coordinator_address="here:123", num_processes=1, process_id=0) is None
    assert place(environment, {}) is None
    config = parse_config({"model": {"name": "transformer"}})
    with joined(config, lambda status, why: None) as member:
        assert member is None


def test_what_is_set_counts(environment: pytest.MonkeyPatch) -> None:
    assert place(environment, {}, **EXPLICIT) == Place(1, 2, "here", 123, None)
    assert place(environment, SLURM, **EXPLICIT, local_device_ids=(4, 5)) == Place(1, 2, "here", 123, (4, 5))
    assert place(environment, {}, **EXPLICIT | {"coordinator_address": "[::1]:9"}) == Place(1, 2, "::1", 9, None)


def test_slurm_is_recognised(environment: pytest.MonkeyPatch) -> None:
    port = 5000 % 4096 + 61440
    assert place(environment, SLURM) == Place(3, 4, "node007", port, (1,))
    assert place(environment, SLURM, detect="slurm", coordinator_address="a:7") == Place(3, 4, "a", 7, (1,))


def test_open_mpi_is_recognised(environment: pytest.MonkeyPatch) -> None:
    uri = {"OMPI_MCA_orte_hnp_uri": "1531576320.0;tcp://10.96.0.1,10.148.0.1:34911"}
    found = place(environment, OPEN_MPI | uri)
    assert found is not None
    assert (found.index, found.count, found.host, found.local_device_ids) == (1, 2, "10.96.0.1", (1,))


def test_one_process_takes_the_gpus_that_are_its(monkeypatch: pytest.MonkeyPatch) -> None:
    updated: dict[str, Any] = {}
    monkeypatch.setattr(jax.config, "update", lambda name, value: updated.update({name: value}))
    config = parse_config({"model": {"name": "transformer"}, "distributed": {"local_device_ids": [2, 3]}})
    with joined(config, lambda status, why: None) as member:
        assert member is None
    assert updated == {"jax_cuda_visible_devices": "2,3"}


def test_open_mpi_5_needs_the_address(environment: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match=r"^distributed\.coordinator_address is not set, and .*detect='auto' does not"):
        place(environment, OPEN_MPI)
    assert place(environment, OPEN_MPI, coordinator_address="a:7") == Place(1, 2, "a", 7, None)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"process_id": 2}, r"distributed\.process_id=2 must be below distributed\.num_processes=2; legal .*: 0 to 1"),
        ({"num_processes": 1}, r"distributed\.process_id=1 must be below distributed\.num_processes=1; .*: 0 to 0"),
        ({"num_processes": 0}, r"distributed\.num_processes is not set, and distributed\.detect='auto' does not find"),
        ({"process_id": -1, "detect": "off"}, r"distributed\.process_id is not set, and .*detect='off' does not"),
        ({"coordinator_address": "here"}, r"distributed\.coordinator_address='here' must be HOST:PORT, for .*'here:12"),
        ({"coordinator_address": "here:x"}, r"distributed\.coordinator_address='here:x' must be HOST:PORT"),
        ({"coordinator_address": "here:70000"}, r"distributed\.coordinator_address='here:70000' must be HOST:PORT"),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else "",
)  # fmt: skip
def test_what_does_not_fit_is_refused(keys: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        find_place(DistributedConfig(**EXPLICIT | keys))


def test_a_scheduler_that_did_not_start_it_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"coordinator_address is not set, and distributed\.detect='slurm' does not"):
        find_place(DistributedConfig(detect="slurm"))


def test_places_are_not_stored_and_timeouts_are() -> None:
    table = {"model": {"name": "transformer"}}
    keys = EXPLICIT | {"local_device_ids": [1], "detect": "off", "heartbeat_timeout_seconds": 7}
    plain = parse_config(table | {"distributed": {"heartbeat_timeout_seconds": 7}})
    assert placeless(parse_config(table | {"distributed": keys})) == plain


def test_simulated_devices_are_shared_by_the_processes() -> None:
    config = parse_config({"model": {"name": "transformer"}, "parallel": {"simulated_devices": 6}})
    assert local_parallel(config, 3).parallel.simulated_devices == 2
    with pytest.raises(ValueError, match=r"simulated_devices=6 must be a multiple of the 4 processes .*: 4, 8$"):
        local_parallel(config, 4)


def test_a_command_of_one_process_refuses_several(tmp_path: Any, capsys: pytest.CaptureFixture) -> None:
    from jaxpar import inspect, verify

    path = tmp_path / "run.toml"
    path.write_text('model = { name = "transformer" }\n[distributed]\nnum_processes = 2\n')
    assert load_config(path).distributed.num_processes == 2
    for command in (inspect, verify):
        assert command.main([str(path)]) == 2
        assert re.match(r"distributed: jaxpar\.\w+ runs in one process; leave out", capsys.readouterr().err)
