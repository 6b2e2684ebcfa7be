"""Checkpoints hold the state at the moment of saving, come back on other layouts, and stay few."""

import errno
import fcntl
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from jaxpar.checkpoint import Checkpoints, run_directory, write_whole
from jaxpar.state import TrainState


def _shardings(shape: tuple[int, int]) -> TrainState:
    """`params` split over both axes, `optimizer` over one and repeated over the other, `step` everywhere."""
    devices = np.array(jax.devices()[: shape[0] * shape[1]], dtype=object).reshape(shape)
    mesh = Mesh(devices, ("fsdp", "tensor"), axis_types=(AxisType.Auto, AxisType.Auto))
    split, partly, whole = (NamedSharding(mesh, PartitionSpec(*axes)) for axes in (("fsdp", "tensor"), ("fsdp",), ()))
    return TrainState(step=whole, params={"w": split}, optimizer=({"mu": partly},))


def _state(shardings: TrainState, rows: int) -> TrainState:
    """Zeros, then arrays of which every entry is the step."""
    start = TrainState(
        step=jnp.int32(0), params={"w": jnp.zeros((rows, 64))}, optimizer=({"mu": jnp.zeros((rows, 64), jnp.bfloat16)},)
    )
    return jax.device_put(start, shardings)


def _abstract(state: TrainState, shardings: TrainState) -> TrainState:
    return jax.tree.map(lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), state, shardings)


def _assert_at(state: TrainState, step: int) -> None:
    assert all((np.asarray(leaf) == step).all() for leaf in jax.tree.leaves(state)), f"not the state of step {step}"


@pytest.mark.parametrize("shape", [(4, 2), (1, 1)], ids=["8 devices", "1 device"])
def test_training_on_does_not_change_what_is_being_saved(tmp_path: Path, shape: tuple[int, int]) -> None:
    """Each step donates its state, and the arrays (16 MiB) are still being written when it runs."""
    shardings = _shardings(shape)
    state = _state(shardings, rows=1 << 16)
    train = jax.jit(lambda state: jax.tree.map(lambda x: x + 1, state), donate_argnums=0, out_shardings=shardings)
    with Checkpoints(tmp_path, keep=2) as checkpoints:
        assert checkpoints.newest_step is None
        for step in (10, 20, 30):
            for _ in range(10):
                state = train(state)
            checkpoints.save(step, state, {"config": f"of step {step}"})
        for _ in range(10):
            state = train(state)
        abstract = _abstract(state, shardings)
    _assert_at(state, 40)
    other = _shardings((2, 4))
    with Checkpoints(tmp_path, keep=2) as checkpoints:
        assert checkpoints.newest_step == 30
        assert sorted(path.name for path in tmp_path.iterdir()) == ["20", "30"]
        assert checkpoints.notes(20) == {"config": "of step 20"}
        _assert_at(checkpoints.restore(20, abstract), 20)
        restored = checkpoints.restore(30, _abstract(state, other))
    _assert_at(restored, 30)
    assert jax.tree.map(lambda x: x.sharding, restored) == other
    assert [leaf.dtype for leaf in jax.tree.leaves(restored)] == [jnp.int32, jnp.float32, jnp.bfloat16]


def test_what_a_killed_process_left_is_no_checkpoint_and_a_step_is_saved_once(tmp_path: Path) -> None:
    shardings = _shardings((2, 1))
    state = _state(shardings, rows=8)
    with Checkpoints(tmp_path, keep=3) as checkpoints:
        checkpoints.save(4, state, {})
        written = checkpoints.newest_step
    before = (tmp_path / "4").stat().st_mtime_ns
    (tmp_path / "4").rename(tmp_path / "8.orbax-checkpoint-tmp-1")
    with Checkpoints(tmp_path, keep=3) as checkpoints:
        assert (written, checkpoints.newest_step) == (4, None)
        checkpoints.save(4, state, {})
        checkpoints.save(4, state, {})
        assert checkpoints.newest_step == 4
    assert [path.name for path in tmp_path.iterdir()] == ["4"]
    assert (tmp_path / "4").stat().st_mtime_ns > before


def test_one_process_writes_into_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    with run_directory("~/runs/a", is_writer=True) as directory:
        assert directory == tmp_path / "runs" / "a"
        with pytest.raises(ValueError, match=r"^run.dir='~/runs/a' is in use by another process"):
            run_directory("~/runs/a", is_writer=True).__enter__()
        with run_directory("~/runs/a", is_writer=False):
            pass
    with run_directory("~/runs/a", is_writer=True):
        pass

    def no_locks(*_: Any) -> None:
        raise OSError(errno.ENOLCK, "no locks available")

    monkeypatch.setattr(fcntl, "flock", no_locks)
    with run_directory("~/runs/a", is_writer=True):
        pass


def test_a_directory_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for name, reason in (("file", "there is a file of this name"), ("file/run", "Not a directory")):
        with pytest.raises(ValueError, match=rf"^run.dir='{tmp_path / name}' cannot be written: {reason}"):
            run_directory(str(tmp_path / name), is_writer=True).__enter__()


def test_a_file_is_written_whole(tmp_path: Path) -> None:
    path = tmp_path / "config.toml"
    path.write_text("old")
    with pytest.raises(UnicodeEncodeError):
        write_whole(path, "new \ud800")
    assert path.read_text() == "old"
    write_whole(path, "näu")
    assert path.read_text(encoding="utf-8") == "näu"
    assert [each.name for each in tmp_path.iterdir()] == ["config.toml"]
