"""`benchmarks/pipeline.py`: what it measures without a clock, its tables for timing, and the table of its README."""

import importlib.util
import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import jax
import numpy as np
import pytest

from jaxpar.config import load_config
from jaxpar.parallel.pipeline.catalogue import SCHEDULES, build_schedule
from jaxpar.parallel.pipeline.routing import route
from jaxpar.parallel.pipeline.schedule import Geometry, Kind
from jaxpar.plan import make_plan

ROOT = Path(__file__).parents[1]
TINY = [
    "model.num_layers=4",
    "model.embed_dim=32",
    "model.num_heads=2",
    "model.mlp_dim=64",
    "model.vocab_size=128",
    "data.sequence_length=16",
]


@pytest.fixture(scope="module")
def modules() -> tuple[ModuleType, ModuleType]:
    """The script, and the tables that it times."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / "benchmarks"))
        import tick_times

        spec = importlib.util.spec_from_file_location("pipeline_benchmark", ROOT / "benchmarks" / "pipeline.py")
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module
        spec.loader.exec_module(module)
    return module, tick_times


@pytest.fixture(scope="module")
def pipeline(modules: tuple[ModuleType, ModuleType]) -> ModuleType:
    return modules[0]


def test_memory_is_flat_but_for_what_autodiff_keeps() -> None:
    """1F1B's temporary bytes grow by a microbatch's tokens, the scan's by its activations; the script ends at once if
    losses or gradients differ."""
    chosen = ["--schedules", "1f1b", "--scans", "scan", "--policies", "none", "--microbatches", "4", "8"]
    arguments = ["--memory-only", *chosen, "parallel.simulated_devices=4", *TINY]
    script = str(ROOT / "benchmarks" / "pipeline.py")
    done = subprocess.run([sys.executable, script, *arguments], capture_output=True, text=True, timeout=300, check=True)
    result = json.loads(done.stdout.splitlines()[-1])
    assert 0 < result["largest_difference"] < 1e-5
    found = {(row["name"], row["microbatches"]): row["temporary_bytes"] for row in result["programs"]}
    growth = {name: (found[name, 8] - found[name, 4]) / 4 for name in ("1f1b", "scan")}
    # A sequence of 16 tokens is 32 floats wide.
    layer_input = 16 * 32 * 4
    assert growth["1f1b"] < layer_input / 2
    # A layer keeps at least the inputs of its norms and of its matrices.
    assert growth["scan"] >= 6 * layer_input
    assert result["tick_seconds"] == {}


def test_a_wrong_gradient_ends_it(pipeline: ModuleType) -> None:
    config = load_config(ROOT / "benchmarks" / "pipeline.toml", TINY)
    cases = list(pipeline.planned(config, ["1f1b"], ["scan"], ["none"], [4]))
    assert [str(case) for case in cases] == ["1f1b, remat none, 4 microbatches", "scan, remat none, 4 microbatches"]

    @dataclass
    class Program:
        case: object
        gradient: float

        def results(self) -> dict[str, np.ndarray]:
            return {"loss": np.ones(()), "output": np.array([2.0, self.gradient])}

    def difference(gradient: float) -> float:
        return pipeline._largest_difference([Program(cases[0], gradient), Program(cases[1], 1.0)])

    assert difference(1.0001) == pytest.approx(5e-5)
    with pytest.raises(AssertionError, match=r"1f1b, remat none, 4 microbatches: Difference\(name='output', rel"):
        difference(1.0003)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["parallel.pip=4"], "on the command line: unknown key parallel.pip (did you mean parallel.pipe?)"),
        (["--schedules", "1f2b"], 'pipeline.schedule="1f2b" is unknown'),
        (["--microbatches", "4", "6"], "--microbatches 6 must be a multiple of parallel.pipe=4"),
        (["--microbatches", "4", "pipeline.microbatches=3"], "train.batch_size=16 must be a multiple of pipeline.m"),
        (["parallel.pipe=1"], "parallel.pipe=1 must be 2 or more"),
        (["--policies", "some"], "--policies some: legal values are none, full, dots"),
        (["--scans", "rolled"], "--scans rolled: legal values are scan, scan_checkpointed"),
        (["model.num_layers=2"], "parallel.pipe=4 × pipeline.chunks=1 = 4 stages"),
    ],
)
def test_what_the_user_got_wrong_is_one_message(
    arguments: list[str], message: str, pipeline: ModuleType, capsys: pytest.CaptureFixture
) -> None:
    assert pipeline.main(arguments) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith(message)
    assert len(captured.err.splitlines()) == 1


def test_phases_are_gpipe(modules: tuple[ModuleType, ModuleType]) -> None:
    phases = modules[1].phases(Geometry(4, 8))
    assert phases.table == build_schedule("gpipe", 4, 8).table


@pytest.mark.parametrize(("kind", "split"), [(Kind.FORWARD, False), (Kind.BACKWARD, False), (Kind.WEIGHT, True)])
def test_a_repeated_tick_is_of_layers_on_all_ranks(
    kind: Kind, split: bool, modules: tuple[ModuleType, ModuleType]
) -> None:
    overrides = [*TINY, "pipeline.schedule=gpipe", "pipeline.microbatches=4"]
    config = load_config(ROOT / "benchmarks" / "pipeline.toml", overrides)
    plan = make_plan(config, jax.devices(), 128)
    repeating = modules[1].repeating
    plain, longer = (repeating(plan, chosen, 5, split=split).pipeline.routed for chosen in (None, kind))
    assert plain.kind.shape[0] == route(plain.schedule).kind.shape[0]
    start = next(tick for tick in range(len(plain.kind)) if (plain.kind[tick] == kind).all())
    more = slice(start + 1, start + 6)
    for name, array in longer.arrays.items():
        np.testing.assert_array_equal(np.delete(array, more, axis=0), getattr(plain, name), err_msg=name)
    assert (longer.kind[more] == kind).all()
    assert not longer.is_first[more].any()
    assert not longer.is_last[more].any()


def test_the_readme_has_the_tables_figures(pipeline: ModuleType) -> None:
    rows = (ROOT / "benchmarks" / "README.md").read_text(encoding="utf-8").splitlines()
    for name, recipe in SCHEDULES.items():
        found = pipeline.table_figures(build_schedule(name, 4, 8, recipe.legal_chunks[0]), (1.0, 1.0, 1.0))
        cells = [
            f"`{name}`", str(found["ticks"]), f"{found['idle']:.1%}", f"{found['in_flight']:g}", f"{found['room']:g}",
            f"{found['predicted']:.2f}",
        ]  # fmt: skip
        start = f"| {' | '.join(cells)} |"
        assert any(row.startswith(start) for row in rows), start
