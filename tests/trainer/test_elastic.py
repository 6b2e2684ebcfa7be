"""A run goes on on another mesh: state, order of the data, dropout and loss are those of the run that stayed."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from jaxpar import checkpoints
from jaxpar.checkpoint_store import CheckpointStore
from jaxpar.config import Config
from jaxpar.export import export_parameters
from jaxpar.parallel.pipeline.table_file import read_table

TRAIN = {"num_steps": 9, "batch_size": 4, "ema_decay": 0.5, "on_nonfinite": "skip"}
# Each stage's layout, and the padding of a vocabulary of 257 that follows from `tensor`.
BEFORE: dict[str, dict[str, Any]] = {"parallel": {"data": 2, "fsdp": 2, "zero_stage": 3}}
AFTER: dict[str, dict[str, dict[str, Any]]] = {
    "one device": {"parallel": {"data": 1, "fsdp": 1}},
    "8 devices, other axes, ZeRO 1, unrolled, padded": {
        "parallel": {"data": 2, "fsdp": 2, "tensor": 2, "zero_stage": 1},
        "kernels": {"unroll_layers": True},
    },
    "ZeRO 0, in microbatches, state on the host": {
        "parallel": {"data": 2, "fsdp": 1, "zero_stage": 0},
        "train": TRAIN | {"microbatches": 2},
        "offload": {"optimizer_state": "host"},
    },
}


def _config(config_of: Callable[..., Config], directory: Path, *layouts: dict[str, dict[str, Any]]) -> Config:
    sections: dict[str, dict[str, Any]] = {
        "run": {"dir": str(directory)},
        # No multiple: the padding follows from the mesh. Two layers, so that unrolling means something.
        "model": {"vocab_multiple": 1, "num_layers": 2},
        "train": TRAIN,
        "evaluation": {"every_steps": 3, "batch_size": 4},
        "logging": {"every_steps": 1, "progress": "off"},
    }
    for layout in layouts:
        sections |= layout
    return config_of(**sections)


_MADE: list[Any] = []


@pytest.fixture
def stayed(config_of: Callable[..., Config], tmp_path: Path, run_of: Callable[..., Any]) -> Any:
    """The run that stays where it is, made once."""
    if not _MADE:
        _MADE.append(run_of(_config(config_of, tmp_path / "stayed", BEFORE)))
    return _MADE[0]


@pytest.mark.parametrize("name", AFTER)
def test_a_run_that_moves_is_the_run_that_stays(
    config_of: Callable[..., Config], tmp_path: Path, run_of: Callable[..., Any], stayed: Any, name: str
) -> None:
    straight = stayed
    run_of(_config(config_of, tmp_path / "moved", BEFORE), kill_after=5)
    moved = run_of(_config(config_of, tmp_path / "moved", BEFORE, AFTER[name]))
    assert moved.messages[0] == "continuing after step 4 of 9"
    assert any("(the same mathematics, rounded otherwise)" in message for message in moved.messages)
    assert [event["step"] for event in moved.events if event["event"] == "config change"] == [4]

    for step in range(5, 10):
        np.testing.assert_array_equal(moved.tokens[step], straight.tokens[step], err_msg=f"sequences of step {step}")
    assert [(line["step"], *line) for line in moved.lines] == [(line["step"], *line) for line in straight.lines]
    for found, expected in zip(moved.lines, straight.lines, strict=True):
        assert found == pytest.approx(expected, rel=2e-5), f"step {expected['step']}"

    found, expected = moved.state.by_path(), straight.state.by_path()
    assert found.keys() == expected.keys()
    assert any(path.endswith("first") for path in found)
    assert any(path.endswith("average") for path in found)
    for path, array in expected.items():
        ours = np.asarray(found[path])
        content = ours[tuple(slice(size) for size in array.shape)]
        np.testing.assert_allclose(content, np.asarray(array), rtol=2e-3, atol=2e-6, err_msg=path)
        if "moments" in path or path.endswith(("first", "second")):
            assert np.abs(np.asarray(array)).max() > 0, f"{path} is as in a fresh run"
    padded = [path for path in found if found[path].shape != expected[path].shape]
    assert bool(padded) == ("padded" in name)
    # What no gradient trains.
    for path in ("step", "optimizer/count", "guard/skipped", "guard/in_a_row"):
        assert int(found[path]) == int(expected[path]), path


def test_a_run_goes_there_and_back(
    config_of: Callable[..., Config], tmp_path: Path, run_of: Callable[..., Any], stayed: Any
) -> None:
    """Saved on 4 devices, again on 8 with a wider padding, then on 4 again; whatever is restored has its digests."""
    there = AFTER["8 devices, other axes, ZeRO 1, unrolled, padded"]
    for layout, kill_after in (({}, 5), (there, 8), ({}, 0)):
        run = run_of(_config(config_of, tmp_path / "run", BEFORE, layout), kill_after=kill_after)
    assert run.messages[0] == "continuing after step 8 of 9"
    assert [event["step"] for event in run.events if event["event"] == "restore"] == [4, 8]
    assert not [event for event in run.events if event["event"] in ("damaged checkpoint", "fallback")]
    for found, expected in zip(run.lines, stayed.lines, strict=True):
        assert found == pytest.approx(expected, rel=2e-5), f"step {expected['step']}"


LAYERS = {"vocab_multiple": 1, "num_layers": 4}
# Stages of the same four layers, none of which has them where the one before had them.
STAGES: dict[str, dict[str, dict[str, Any]]] = {
    "2 ranks of 2 chunks": {
        "parallel": {"fsdp": 1, "pipe": 2},
        "pipeline": {"schedule": "interleaved_aligned", "chunks": 2, "microbatches": 2},
    },
    "2 uneven stages, padded": {
        "parallel": {"fsdp": 1, "pipe": 2, "tensor": 2},
        "pipeline": {"schedule": "1f1b_aligned", "layers_per_stage": [1, 3], "microbatches": 2},
    },
}


def _exported(directory: Path, step: int, output: Path, *, average: bool) -> dict[str, np.ndarray]:
    store = CheckpointStore(str(directory / "checkpoints"))
    (path,) = export_parameters(store, store.notes(step), output, average=average, file_bytes=1 << 30)
    return load_file(path)


def test_layers_move_between_stages(
    config_of: Callable[..., Config], tmp_path: Path, run_of: Callable[..., Any]
) -> None:
    """A run without a pipeline, with two of them, and without again, has the weights and moments of each layer that
    the run without one has; so have its checkpoints when they are exported.

    A public report: a checkpoint of one stage gave two stages the wrong layers.
    """
    rest: dict[str, dict[str, Any]] = {
        "model": LAYERS,
        "checkpoint": {"every_steps": 2, "keep": 9},
        "evaluation": {"every_steps": 0, "batch_size": 4},
    }
    straight = run_of(_config(config_of, tmp_path / "stayed", BEFORE, rest))
    moves = ({}, *STAGES.values(), {})
    table, tables = tmp_path / "moved/pipeline_schedule.txt", []
    for layout, kill_after in zip(moves, (3, 5, 7, 0), strict=True):
        moved = run_of(_config(config_of, tmp_path / "moved", BEFORE, layout, rest), kill_after=kill_after)
        tables.append(read_table(table).name if table.exists() else "")
    assert tables == ["", "interleaved_aligned", "1f1b_aligned", ""]
    assert [event["step"] for event in moved.events if event["event"] == "restore"] == [2, 4, 6]
    assert not [event for event in moved.events if event["event"] in ("damaged checkpoint", "fallback")]
    for found, expected in zip(moved.lines, straight.lines, strict=True):
        assert found == pytest.approx(expected, rel=2e-5), f"step {expected['step']}"
    arrays = moved.state.by_path()
    for path, expected in straight.state.by_path().items():
        np.testing.assert_allclose(arrays[path], expected, rtol=2e-3, atol=2e-6, err_msg=path)
        if "blocks" in path:
            assert len({layer.tobytes() for layer in np.asarray(expected)}) == 4, f"{path}: layers differ"

    rows = [
        CheckpointStore(str(tmp_path / "moved/checkpoints")).notes(step).arrays["params/blocks/mlp/up"].extent.rows
        for step in (2, 4, 6)
    ]
    assert rows == [(), (0, 2, 1, 3), (0, -1, -1, 1, 2, 3)]
    for step, average in ((4, False), (6, True)):
        found, expected = (
            _exported(tmp_path / run, step, tmp_path / f"{run}-{step}", average=average) for run in ("moved", "stayed")
        )
        assert found.keys() == expected.keys()
        for name, array in expected.items():
            np.testing.assert_allclose(found[name], array, rtol=2e-3, atol=2e-6, err_msg=f"{name} at step {step}")
    assert checkpoints.main([str(tmp_path / "moved"), "verify"]) == 0
