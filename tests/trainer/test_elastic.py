"""A run goes on on another mesh: state, order of the data, dropout and loss are those of the run that stayed."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxpar.config import Config

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
