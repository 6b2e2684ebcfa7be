"""Checkpoints hold the state at the moment of saving, come back on other layouts, and show what happened to them."""

import contextlib
import errno
import hashlib
import json
import os
import resource
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from orbax.checkpoint import v1 as ocp

from jaxpar import checkpoint
from jaxpar.checkpoint import Checkpoints, SaveFailedError, SaveTimeoutError, open_checkpoints
from jaxpar.checkpoint_store import CheckpointStore, DamagedCheckpointError, Notes, Retention
from jaxpar.extent import Extent
from jaxpar.state import TrainState


def _shardings(shape: tuple[int, int]) -> TrainState:
    """`params` split over both axes, `optimizer` over one and repeated over the other, `step` everywhere."""
    devices = np.array(jax.devices()[: shape[0] * shape[1]], dtype=object).reshape(shape)
    mesh = Mesh(devices, ("fsdp", "tensor"), axis_types=(AxisType.Auto, AxisType.Auto))
    split, partly, whole = (NamedSharding(mesh, PartitionSpec(*axes)) for axes in (("fsdp", "tensor"), ("fsdp",), ()))
    return TrainState(step=whole, params={"w": split}, optimizer={"w": {"first": partly}})


def _state(shardings: TrainState, rows: int = 8, step: int = 0) -> TrainState:
    """Arrays of which every entry is the step."""
    values = jnp.full((rows, 64), float(step))
    start = TrainState(
        step=jnp.int32(step), params={"w": values}, optimizer={"w": {"first": values.astype(jnp.bfloat16)}}
    )
    return jax.device_put(start, shardings)


def _abstract(state: TrainState, shardings: TrainState) -> TrainState:
    return jax.tree.map(lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), state, shardings)


def _extents(state: TrainState) -> dict[str, Extent]:
    return {path: Extent(array.shape) for path, array in state.by_path().items()}


def _save(checkpoints: Checkpoints, state: TrainState, step: int, loss: float | None = None) -> None:
    notes = Notes(
        step=step, config=f"of step {step}", tokenizer="bytes", data="", padded_vocab_size=8,
        num_updates=step, next_sequence=4 * step, loss=loss, saved_at="", events="", arrays={},
    )  # fmt: skip
    checkpoints.save(state, notes, _extents(state))


def _restore(checkpoints: Checkpoints, step: int, shardings: TrainState, rows: int = 8) -> TrainState:
    state = _state(shardings, rows)
    return checkpoints.restore(checkpoints.notes(step), _abstract(state, shardings), _extents(state))


def _assert_at(state: TrainState, step: int) -> None:
    assert all((np.asarray(leaf) == step).all() for leaf in jax.tree.leaves(state)), f"not the state of step {step}"


Opened = Callable[..., contextlib.AbstractContextManager[Checkpoints]]


@pytest.fixture
def recorded() -> list[tuple[str, dict[str, Any]]]:
    return []


@pytest.fixture
def opened(tmp_path: Path, recorded: list[tuple[str, dict[str, Any]]]) -> Opened:
    """The checkpoints in `tmp_path`."""

    @contextlib.contextmanager
    def make(timeout_seconds: float = 60, **kept: int) -> Iterator[Checkpoints]:
        def record(event: str, **details: Any) -> None:
            recorded.append((event, details))

        retention = Retention(**{"newest": 3, **kept})
        with open_checkpoints(
            CheckpointStore(str(tmp_path)), retention, timeout_seconds=timeout_seconds, record=record
        ) as checkpoints:
            yield checkpoints

    return make


def _names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


@pytest.mark.parametrize("shape", [(4, 2), (1, 1)], ids=["8 devices", "1 device"])
def test_training_on_does_not_change_what_is_being_saved(
    tmp_path: Path, opened: Opened, shape: tuple[int, int]
) -> None:
    """Each step donates its state, and the arrays (16 MiB) are still being written when it runs."""
    shardings = _shardings(shape)
    state = _state(shardings, rows=1 << 16)
    train = jax.jit(lambda state: jax.tree.map(lambda x: x + 1, state), donate_argnums=0, out_shardings=shardings)
    with opened(newest=2) as checkpoints:
        assert checkpoints.steps() == []
        for step in (10, 20, 30):
            for _ in range(10):
                state = train(state)
            _save(checkpoints, state, step)
        for _ in range(10):
            state = train(state)
    _assert_at(state, 40)
    other = _shardings((2, 4))
    with opened(newest=2) as checkpoints:
        assert checkpoints.steps() == [30, 20]
        assert _names(tmp_path) == ["20", "30"]
        assert (checkpoints.notes(20).config, checkpoints.notes(20).next_sequence) == ("of step 20", 80)
        _assert_at(_restore(checkpoints, 20, shardings, rows=1 << 16), 20)
        restored = _restore(checkpoints, 30, other, rows=1 << 16)
    _assert_at(restored, 30)
    assert jax.tree.map(lambda x: x.sharding, restored) == other
    assert [leaf.dtype for leaf in jax.tree.leaves(restored)] == [jnp.int32, jnp.float32, jnp.bfloat16]


def test_what_is_kept_is_the_newest_the_regular_and_the_best(tmp_path: Path, opened: Opened) -> None:
    shardings = _shardings((1, 1))
    losses = {1: 3.0, 2: 1.0, 3: None, 4: 2.0, 5: 1.5}
    with opened(newest=1, every_steps=3, best=1) as checkpoints:
        for step, loss in losses.items():
            _save(checkpoints, _state(shardings, step=step), step, loss)
    assert _names(tmp_path) == ["2", "3", "5"]
    with opened(newest=1, best=1) as checkpoints:
        checkpoints.goes_on_from(5)
        _save(checkpoints, _state(shardings, step=6), 6, 4.0)
    assert _names(tmp_path) == ["2", "6"], "the loss of step 2 is known from its notes"


def test_what_cannot_be_read_at_one_moment_is_not_removed(
    tmp_path: Path, opened: Opened, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the older ones the regular one, and the newer one that the run went back from."""
    state = _state(_shardings((1, 1)))
    with opened(newest=1, every_steps=4) as checkpoints:
        for step in (4, 8, 9):
            _save(checkpoints, state, step)
        checkpoints.finish()
    notes = CheckpointStore.notes

    def unreadable(store: CheckpointStore, step: int) -> Notes:
        if step == 4:
            raise DamagedCheckpointError("the disk does not answer")
        return notes(store, step)

    with opened(newest=1, every_steps=4) as checkpoints:
        with monkeypatch.context() as patched:
            patched.setattr(CheckpointStore, "notes", unreadable)
            checkpoints.goes_on_from(8)
        _save(checkpoints, state, 10)
        checkpoints.finish()
    assert _names(tmp_path) == ["10", "4", "8", "9.damaged"]


def test_what_a_killed_save_left_is_removed_and_recorded(
    tmp_path: Path, opened: Opened, recorded: list[tuple[str, dict[str, Any]]]
) -> None:
    shardings = _shardings((2, 1))
    with opened() as checkpoints:
        _save(checkpoints, _state(shardings, step=4), 4)
    (tmp_path / "4").rename(tmp_path / "8.orbax-checkpoint-tmp")
    with opened() as checkpoints:
        assert checkpoints.steps() == []
        assert recorded[-1] == ("cleaned up", {"directory": str(tmp_path), "name": "8.orbax-checkpoint-tmp"})
        _save(checkpoints, _state(shardings, step=4), 4)
        checkpoints.finish()
        _assert_at(_restore(checkpoints, 4, shardings), 4)
    assert _names(tmp_path) == ["4"]
    events = [(event, details.get("step")) for event, details in recorded]
    assert events[-3:] == [("save", 4), ("saved", 4), ("restore", 4)]


def _flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def _arrays_of(checkpoint: Path) -> Path:
    """The file that has the arrays' values."""
    return max((checkpoint / "state").rglob("*"), key=lambda path: path.stat().st_size if path.is_file() else 0)


def _without(name: str) -> Callable[[Path], None]:
    return lambda checkpoint: (checkpoint / name).unlink()


DAMAGES: dict[str, tuple[Callable[[Path], None], str]] = {
    "one bit of an array": (lambda checkpoint: _flip(_arrays_of(checkpoint)), "(it cannot be read|arrays are not)"),
    "an array cut off": (lambda checkpoint: os.truncate(_arrays_of(checkpoint), 100), "it cannot be read"),
    "no arrays": (lambda checkpoint: _arrays_of(checkpoint).unlink(), "it cannot be read"),
    "half written": (_without("commit_success.txt"), "its save was not completed"),
    "no notes": (_without("_CHECKPOINT_METADATA"), "its notes cannot be read: FileNotFoundError"),
    "empty notes": (
        lambda checkpoint: (checkpoint / "_CHECKPOINT_METADATA").write_text(""),
        "its notes cannot be read",
    ),
    "changed notes": (
        lambda checkpoint: (checkpoint / "_CHECKPOINT_METADATA").write_text(
            (checkpoint / "_CHECKPOINT_METADATA").read_text().replace("of step 4", "of step 5")
        ),
        "its notes are not those that were saved",
    ),
}


@pytest.mark.parametrize(("damage", "message"), DAMAGES.values(), ids=DAMAGES)
def test_damage_is_found(tmp_path: Path, opened: Opened, damage: Callable[[Path], None], message: str) -> None:
    shardings = _shardings((2, 1))
    noise = np.random.default_rng(0).normal(size=(512, 64)).astype(np.float32)  # constants would be compressed away
    state = replace(_state(shardings, rows=512, step=4), params=jax.device_put({"w": noise}, shardings.params))
    with opened() as checkpoints:
        _save(checkpoints, state, 4)
    damage(tmp_path / "4")
    with opened() as checkpoints, pytest.raises(DamagedCheckpointError, match=f"^{message}"):
        _restore(checkpoints, 4, shardings, rows=512)


@pytest.mark.parametrize("extent", [[8, 64], {"shape": [8, 64]}, {"shape": [8, 64], "rows": [0, 0]}, None], ids=str)
def test_notes_that_do_not_say_where_layers_lie_are_damaged(tmp_path: Path, opened: Opened, extent: Any) -> None:
    """As an earlier version wrote them, with a hash that is right."""
    shardings = _shardings((2, 1))
    with opened() as checkpoints:
        _save(checkpoints, _state(shardings, step=4), 4)
    path = tmp_path / "4" / "_CHECKPOINT_METADATA"
    metadata = json.loads(path.read_text())
    notes = metadata["custom_metadata"]["notes"]
    notes["arrays"]["params/w"]["extent"] = extent
    digest = hashlib.sha256(json.dumps(notes, sort_keys=True).encode()).hexdigest()
    path.write_text(json.dumps({**metadata, "custom_metadata": {"notes": notes, "sha256": digest}}))
    with opened() as checkpoints, pytest.raises(DamagedCheckpointError, match=r"^it has no notes of jaxpar's \("):
        _restore(checkpoints, 4, shardings)


def test_arrays_that_are_not_those_that_were_saved_are_named(
    tmp_path: Path, opened: Opened, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As when memory or a network changed them on their way, so that what was written is in itself consistent."""
    shardings = _shardings((2, 1))
    original = ocp.save_checkpointables_async

    def changed(path: Any, parts: dict[str, Any], **options: Any) -> Any:
        state = parts["state"]
        params = {"w": state["params"]["w"].at[3, 3].add(1)}
        return original(path, {"state": state | {"params": jax.device_put(params, shardings.params)}}, **options)

    monkeypatch.setattr(ocp, "save_checkpointables_async", changed)
    with opened() as checkpoints:
        _save(checkpoints, _state(shardings, step=4), 4)
        checkpoints.finish()
        with pytest.raises(DamagedCheckpointError, match=r"^arrays are not what was saved: params/w$"):
            _restore(checkpoints, 4, shardings)


def test_another_state_is_an_error_that_names_the_arrays(opened: Opened) -> None:
    shardings = _shardings((2, 1))
    with opened() as checkpoints:
        _save(checkpoints, _state(shardings, step=4), 4)
        message = r"holds another state(.|\n)*params/w: saved float32\[8, 64\], now float32\[16, 64\]"
        with pytest.raises(ValueError, match=message):
            _restore(checkpoints, 4, shardings, rows=16)


def test_a_save_that_fails_is_told_and_made_up_for_by_the_next(
    tmp_path: Path, opened: Opened, recorded: list[tuple[str, dict[str, Any]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A disk that is full when the save begins, or while it goes on in the background."""
    shardings = _shardings((2, 1))
    original = ocp.save_checkpointables_async

    class Failing:
        def result(self, timeout: float) -> None:
            (tmp_path / "12.orbax-checkpoint-tmp").mkdir()
            raise OSError(errno.ENOSPC, "No space left on device")

    def full(*arguments: Any, **options: Any) -> Any:
        raise OSError(errno.ENOSPC, "No space left on device")

    with opened() as checkpoints:
        _save(checkpoints, _state(shardings, step=4), 4)
        checkpoints.finish()
        for step, failing in ((8, full), (12, lambda *_, **__: Failing())):
            monkeypatch.setattr(ocp, "save_checkpointables_async", failing)
            _save(checkpoints, _state(shardings, step=step), step)
            with pytest.raises(SaveFailedError, match=rf"step {step} could not be saved: OSError: .*No space left"):
                checkpoints.finish()
            (message,) = checkpoints.messages()
            assert message.startswith(f"WARNING: step {step} is not saved: OSError: [Errno 28] No space left on device")
            assert message.endswith("; the newest checkpoint is of step 4")
            assert recorded[-1][0] == "save failed"
            assert _names(tmp_path) == ["4"]
        monkeypatch.setattr(ocp, "save_checkpointables_async", original)
        _save(checkpoints, _state(shardings, step=16), 16)
        checkpoints.finish()
        assert checkpoints.messages() == []
        assert checkpoints.newest_step == 16
    assert _names(tmp_path) == ["16", "4"]


def test_a_disk_that_takes_no_more_while_a_save_goes_on(tmp_path: Path, opened: Opened) -> None:
    """The limit on a file's size stands in for it: TensorStore's write fails, far from this code."""
    shardings = _shardings((2, 1))
    noise = np.random.default_rng(0).normal(size=(1 << 13, 64)).astype(np.float32)
    state = replace(_state(shardings, rows=1 << 13, step=8), params=jax.device_put({"w": noise}, shardings.params))
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    with opened() as checkpoints:
        _save(checkpoints, _state(shardings, step=4), 4)
        checkpoints.finish()
        try:
            resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, before[1]))
            _save(checkpoints, state, 8)
            with pytest.raises(SaveFailedError, match=r"step 8 could not be saved: .*File too large"):
                checkpoints.finish()
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
        assert _names(tmp_path) == ["4"]
        _save(checkpoints, state, 8)
        checkpoints.finish()
        _restore(checkpoints, 8, shardings, rows=1 << 13)
        _assert_at(_restore(checkpoints, 4, shardings), 4)


def test_storage_that_goes_away_harms_no_checkpoint_and_may_come_back(tmp_path: Path, opened: Opened) -> None:
    shardings = _shardings((2, 1))
    directory, away = tmp_path / "checkpoints", tmp_path / "away"
    with open_checkpoints(CheckpointStore(str(directory)), Retention(3), timeout_seconds=60) as checkpoints:
        _save(checkpoints, _state(shardings, step=4), 4)
        checkpoints.finish()
        directory.rename(away)
        directory.write_text("")
        _save(checkpoints, _state(shardings, step=8), 8)
        with pytest.raises(SaveFailedError, match=r"step 8 could not be saved: .*Error"):
            checkpoints.finish()
        directory.unlink()
        away.rename(directory)
        _save(checkpoints, _state(shardings, step=12), 12)
        checkpoints.finish()
        _assert_at(_restore(checkpoints, 4, shardings), 4)
    assert _names(directory) == ["12", "4"]
    with (
        pytest.raises(ValueError, match=r"^checkpoint.directory='.*/12/_CHECKPOINT_METADATA' cannot be used: .*Error"),
        open_checkpoints(
            CheckpointStore(str(directory / "12" / "_CHECKPOINT_METADATA")), Retention(3), timeout_seconds=60
        ),
    ):
        pass


def test_a_save_that_does_not_end_ends_the_run(opened: Opened, monkeypatch: pytest.MonkeyPatch) -> None:
    shardings = _shardings((2, 1))

    class Silent:
        def result(self, timeout: float) -> None:
            assert not threading.Event().wait(timeout)
            raise TimeoutError

    with opened(timeout_seconds=0.05) as checkpoints:
        monkeypatch.setattr(ocp, "save_checkpointables_async", lambda *_, **__: Silent())
        _save(checkpoints, _state(shardings, step=4), 4)
        with pytest.raises(SaveTimeoutError, match=r"saving step 4 to .* has not ended in checkpoint.timeout_seconds"):
            _save(checkpoints, _state(shardings, step=8), 8)


def test_an_upload_that_does_not_end_ends_the_run_too(opened: Opened, monkeypatch: pytest.MonkeyPatch) -> None:
    ended = threading.Event()
    monkeypatch.setattr(checkpoint, "_GRACE_SECONDS", 0.1)
    with opened(timeout_seconds=1.0) as checkpoints:
        monkeypatch.setattr(checkpoints.store, "publish", lambda step: ended.wait())
        _save(checkpoints, _state(_shardings((2, 1)), step=4), 4)
        with pytest.raises(
            SaveTimeoutError, match=r"saving step 4 to .* has not ended in checkpoint.timeout_seconds=1:"
        ):
            checkpoints.finish()
        ended.set()
    (message,) = checkpoints.messages()
    assert message.startswith("WARNING: step 4 is not saved: it has not ended in checkpoint.timeout_seconds=1 ")


def test_a_save_that_cannot_begin_is_told_before_orbax_makes_others_wait(
    tmp_path: Path, opened: Opened, monkeypatch: pytest.MonkeyPatch
) -> None:
    def called(*_: Any, **__: Any) -> None:
        raise AssertionError("Orbax must not be called")

    monkeypatch.setattr(ocp, "save_checkpointables_async", called)
    with opened() as checkpoints:
        checkpoints.store.directory = tmp_path / "file"
        checkpoints.store.directory.write_text("")
        _save(checkpoints, _state(_shardings((2, 1)), step=4), 4)
        with pytest.raises(SaveFailedError, match=r"step 4 could not be saved: FileExistsError: "):
            checkpoints.finish()


@pytest.mark.parametrize(("mask", "modes"), [(0o077, {0o700, 0o600}), (0o022, {0o755, 0o644})], ids=["0077", "0022"])
def test_files_have_the_users_mask_and_none_is_a_pickle(
    tmp_path: Path, opened: Opened, mask: int, modes: set[int]
) -> None:
    before = os.umask(mask)
    try:
        with opened() as checkpoints:
            _save(checkpoints, _state(_shardings((2, 1)), step=4), 4)
    finally:
        os.umask(before)
    paths = list(tmp_path.rglob("*"))
    assert {path.stat().st_mode & 0o777 for path in paths} == modes
    assert not [path for path in paths if path.is_file() and path.read_bytes().startswith((b"\x80\x04", b"\x80\x05"))]
    json.loads((tmp_path / "4" / "_CHECKPOINT_METADATA").read_text())


def test_saves_leave_no_memory_behind(opened: Opened) -> None:
    """Twenty saves of 6 MiB: what the process holds grows by less than two of them after warming up."""
    shardings = _shardings((4, 2))
    state = _state(shardings, rows=1 << 14)

    def resident_bytes() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    with opened(newest=1) as checkpoints:
        for step in range(1, 31):
            if step == 11:
                checkpoints.finish()
                before = resident_bytes()
            _save(checkpoints, state, step)
        checkpoints.finish()
        assert resident_bytes() - before < 12 << 20
        assert threading.active_count() < 40
