"""A run that was killed and goes on is the straight run, bit by bit; one whose newest checkpoint is damaged too."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from jaxpar.config import Config

FLOAT16 = {"compute": "float16", "scale_initial": 32.0, "scale_min": 16.0, "scale_growth_steps": 2}
EVERY_LINE = {"every_steps": 1, "progress": "off"}
# Each has packing and, from the fixture, dropout 0.2.
RUNS: dict[str, dict[str, dict[str, Any]]] = {
    "float32": {},
    "bfloat16, stochastic rounding, accumulation": {
        "precision": {"parameters": "bfloat16", "compute": "bfloat16", "rounding": "stochastic"},
        "train": {"num_steps": 9, "batch_size": 4, "microbatches": 2},
    },
    "float16, loss scale, moving average": {
        "precision": FLOAT16 | {"parameters": "float16", "master_weights": True},
        "train": {"num_steps": 9, "batch_size": 4, "ema_decay": 0.5},
        "evaluation": {"every_steps": 3, "batch_size": 6, "parameters": "ema"},
    },
    "8-bit moments, several epochs of a mixture": {
        "optimizer": {"name": "adamw8bit", "learning_rate": 1e-2, "block_size": 64},
        "train": {"num_steps": 9, "batch_size": 16},
    },
    "moments on the host": {"offload": {"optimizer_state": "host"}},
}


def _config(config_of: Callable[..., Config], texts: Path, directory: Path, name: str) -> Config:
    sections: dict[str, dict[str, Any]] = {"run": {"dir": str(directory)}, "logging": EVERY_LINE, **RUNS[name]}
    if "mixture" in name:
        parts = [f"{texts}/0[0-5].txt", f"{texts}/*[6-9].txt"]
        sources = [
            {"name": "text", "paths": [path], "weight": weight} for path, weight in zip(parts, (3, 1), strict=True)
        ]
        sections["data"] = {"sources": sources}
    return config_of(**sections)


@pytest.mark.parametrize("name", RUNS)
def test_a_killed_run_that_goes_on_is_the_straight_run(
    config_of: Callable[..., Config],
    texts: Path,
    tmp_path: Path,
    run_of: Callable[..., Any],
    assert_same_bits: Callable[..., None],
    name: str,
) -> None:
    """Killed in step 7, after the checkpoint of step 4: the lines of steps 5 and 6 are there and are made again."""
    straight = run_of(_config(config_of, texts, tmp_path / "straight", name))
    config = _config(config_of, texts, tmp_path / "killed", name)
    killed = run_of(config, kill_after=6)
    assert [line["step"] for line in killed.lines][-1] >= 5
    again = run_of(config)
    assert again.messages[0] == "continuing after step 4 of 9"
    assert_same_bits(again.state, straight.state)
    assert again.lines == straight.lines
    for step in range(5, 10):
        assert (again.tokens[step] == straight.tokens[step]).all()


def _flip_arrays(checkpoint: Path) -> None:
    for path in (checkpoint / "state").rglob("*"):
        if path.is_file() and path.parent.name == "d":
            content = bytearray(path.read_bytes())
            content[len(content) // 3] ^= 4
            path.write_bytes(content)


@pytest.mark.parametrize("damage", ["flipped bits", "half written"])
def test_a_damaged_checkpoint_is_named_and_the_one_before_is_taken(
    config_of: Callable[..., Config],
    tmp_path: Path,
    run_of: Callable[..., Any],
    assert_same_bits: Callable[..., None],
    damage: str,
) -> None:
    straight = run_of(config_of(run={"dir": str(tmp_path / "straight")}, logging=EVERY_LINE))
    config = config_of(logging=EVERY_LINE)
    run_of(config, kill_after=8)
    checkpoints = Path(config.run.dir) / "checkpoints"
    if damage == "half written":
        (checkpoints / "8" / "commit_success.txt").unlink()
    else:
        _flip_arrays(checkpoints / "8")
    again = run_of(config)
    assert again.messages[0].startswith(f"WARNING: the checkpoint of step 8 in {checkpoints} is damaged: ")
    assert again.messages[1] == (
        "WARNING: going back to the checkpoint of step 4; later steps are made again, and what could not be read is "
        "kept as STEP.damaged"
    )
    assert again.messages[2] == "continuing after step 4 of 9"
    assert_same_bits(again.state, straight.state)
    assert again.lines == straight.lines
    kinds = [event["event"] for event in again.events]
    assert kinds.index("damaged checkpoint") < kinds.index("restore") < kinds.index("fallback") < kinds.index("resume")
    assert sorted(path.name for path in checkpoints.iterdir()) == ["4", "8", "8.damaged", "9"], "8 was saved again"


def test_without_any_whole_checkpoint_there_is_an_error_and_nothing_is_changed(
    config_of: Callable[..., Config], run_of: Callable[..., Any]
) -> None:
    config = config_of()
    run_of(config, kill_after=8)
    directory = Path(config.run.dir)
    for step in ("4", "8"):
        _flip_arrays(directory / "checkpoints" / step)
    before = (directory / "metrics.jsonl").read_bytes()
    with pytest.raises(ValueError, match=r"step 8 in (.|\n)*step 4 in (.|\n)*has no checkpoint that is whole; put one"):
        run_of(config)
    assert (directory / "metrics.jsonl").read_bytes() == before
    shutil.rmtree(directory / "checkpoints")
    with pytest.raises(ValueError, match=r"holds a run that saved checkpoints, but there are none in "):
        run_of(config)


def test_a_run_that_was_killed_before_its_first_checkpoint_starts_again_and_says_so(
    config_of: Callable[..., Config], run_of: Callable[..., Any]
) -> None:
    config = config_of()
    assert not any("no checkpoint was completed" in message for message in run_of(config, kill_after=3).messages)
    os.mkdir(Path(config.run.dir) / "checkpoints" / "4.orbax-checkpoint-tmp")
    again = run_of(config, stop_after=1)
    assert again.messages[0] == (
        "WARNING: no checkpoint was completed yet: starting from the beginning, what metrics.jsonl has is dropped"
    )
    kinds = [event["event"] for event in again.events]
    assert kinds == ["start", "cleaned up", "start", "save", "saved", "end"]
    assert [json.dumps(event).count("sha256") for event in again.events] == [0] * 6
