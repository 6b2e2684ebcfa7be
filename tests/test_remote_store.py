"""Checkpoints on S3, that is on a server of its protocol on this machine; and where that goes away."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpar import checkpoints as command
from jaxpar.checkpoint import SaveFailedError, open_checkpoints
from jaxpar.checkpoint_store import CheckpointStore, DamagedCheckpointError, Notes, Retention
from jaxpar.extent import Extent
from jaxpar.remote_store import RemoteStore, open_store
from jaxpar.state import TrainState

URL = "s3://bucket/runs/a"


def _state(step: int) -> TrainState:
    values = jnp.full((64, 8), float(step))
    return TrainState(step=jnp.int32(step), params={"w": values}, optimizer={"count": jnp.int32(step)})


def _save(checkpoints: Any, step: int) -> None:
    notes = Notes(
        step=step, config="", tokenizer="bytes", data="", padded_vocab_size=8, num_updates=step,
        next_sequence=4 * step, loss=None, saved_at="", events="", arrays={},
    )  # fmt: skip
    state = _state(step)
    checkpoints.save(state, notes, {path: Extent(array.shape) for path, array in state.by_path().items()})


def _restore(checkpoints: Any, step: int) -> TrainState:
    sharding = jax.sharding.SingleDeviceSharding(jax.devices()[1])
    state = _state(0)
    abstract = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), state)
    extents = {path: Extent(array.shape) for path, array in state.by_path().items()}
    return checkpoints.restore(checkpoints.notes(step), abstract, extents)


def _objects(bucket: Any) -> set[str]:
    return {name.removeprefix("bucket/runs/a/").partition("/")[0] for name in bucket.find("bucket/runs/a")}


def test_checkpoints_on_s3_are_kept_restored_and_read_by_the_command(
    bucket: Any, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    staging = tmp_path / "staging"
    with open_checkpoints(open_store(URL, staging), Retention(2), timeout_seconds=60) as checkpoints:
        for step in (4, 8, 12):
            _save(checkpoints, step)
        checkpoints.finish()
        assert checkpoints.steps() == [12, 8]
        assert _objects(bucket) == {"12", "8"}
        assert list(staging.iterdir()) == [], "nothing stays here"
        restored = _restore(checkpoints, 8)
        assert (np.asarray(restored.params["w"]) == 8).all()
        assert list(staging.iterdir()) == []
    assert command.main([URL, "verify"]) == 0
    assert capsys.readouterr().out.count("as it was saved") == 2
    assert command.main([URL, "export", str(tmp_path / "export")]) == 0
    assert (tmp_path / "export" / "model.safetensors").stat().st_size > 64 * 8 * 4

    bucket.rm("bucket/runs/a/12/commit_success.txt")
    with open_checkpoints(open_store(URL, staging), Retention(2), timeout_seconds=60) as checkpoints:
        with pytest.raises(DamagedCheckpointError, match=r"its save was not completed"):
            _restore(checkpoints, 12)
        data = max((name for name in bucket.find("bucket/runs/a/8")), key=bucket.size)
        bucket.pipe_file(data, bytes(bucket.size(data)))
        with pytest.raises(DamagedCheckpointError, match=r"cannot be read|not what was saved"):
            _restore(checkpoints, 8)


@pytest.mark.parametrize("kind", [ConnectionError, TimeoutError])
def test_a_store_that_vanishes_is_told_and_an_upload_that_was_cut_off_is_made_up_for(
    bucket: Any, tmp_path: Path, kind: type[OSError]
) -> None:
    staging, monkeypatch = tmp_path / "staging", pytest.MonkeyPatch()
    with open_checkpoints(open_store(URL, staging), Retention(2), timeout_seconds=60) as checkpoints:
        _save(checkpoints, 4)
        checkpoints.finish()

        def vanished(*arguments: Any, **options: Any) -> None:
            raise kind("the store at https://me:hidden@store does not answer")

        monkeypatch.setattr(checkpoints.store._files, "put", vanished)  # type: ignore[attr-defined]
        _save(checkpoints, 8)
        with pytest.raises(SaveFailedError, match=rf"{kind.__name__}: the store at https://\*\*\*@store does not"):
            checkpoints.finish()
        assert checkpoints.steps() == [4]
        monkeypatch.undo()
    with open_checkpoints(open_store(URL, staging), Retention(2), timeout_seconds=60) as checkpoints:
        assert checkpoints.steps() == [8, 4], "the copy that stayed was uploaded"
        assert int(_restore(checkpoints, 8).step) == 8
    assert list(staging.iterdir()) == []


def test_a_url_that_nothing_knows_and_a_missing_package_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert type(open_store(str(tmp_path), tmp_path)) is CheckpointStore
    with pytest.raises(ValueError, match=r"^checkpoint.directory='none://x' cannot be opened: .*none"):
        open_store("none://x", tmp_path)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "gcsfs" else SimpleNamespace())
    with pytest.raises(ValueError, match=r"^checkpoint.directory='gs://bucket/a' needs gcsfs, which is not installed"):
        open_store("gs://bucket/a", tmp_path)


def test_any_other_store_of_fsspec_works_too(tmp_path: Path) -> None:
    store = open_store("memory://runs/b", tmp_path / "staging")
    assert isinstance(store, RemoteStore)
    with open_checkpoints(store, Retention(1), timeout_seconds=60) as checkpoints:
        _save(checkpoints, 4)
        checkpoints.finish()
        assert int(_restore(checkpoints, 4).step) == 4
    assert json.loads(store.read_text(4, "_CHECKPOINT_METADATA"))["custom_metadata"]["notes"]["step"] == 4
