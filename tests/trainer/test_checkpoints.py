"""`python -m jaxpar.checkpoints` on a run: what is there, whether it is whole, what differs; less of it, and parts."""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

from jaxpar import checkpoints
from jaxpar.checkpoint import Checkpoints
from jaxpar.checkpoint_store import CheckpointStore, Notes, Retention
from jaxpar.config import Config
from jaxpar.extent import Extent
from jaxpar.resume import stored_config
from jaxpar.run_directory import run_directory
from jaxpar.state import TrainState

SECTIONS: dict[str, dict[str, Any]] = {
    "train": {"num_steps": 8, "batch_size": 4, "ema_decay": 0.5},
    "checkpoint": {"every_steps": 2, "keep": 4, "keep_every_steps": 4},
    "evaluation": {"every_steps": 4, "batch_size": 6},
}


@pytest.fixture
def made(config_of: Callable[..., Config], run_of: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory) -> Any:
    """(run.dir, last state) of a run of 8 steps, made once and copied for each test."""

    def make(directory: Path) -> tuple[Path, Any]:
        if not _MADE:
            original = tmp_path_factory.mktemp("made") / "run"
            _MADE["run"] = original, run_of(config_of(run={"dir": str(original)}, **SECTIONS)).state
        original, state = _MADE["run"]
        shutil.copytree(original, directory)
        return directory, state

    return make


_MADE: dict[str, Any] = {}


@pytest.fixture
def run(made: Any, tmp_path: Path) -> Path:
    return made(tmp_path / "run")[0]


@pytest.fixture
def command(capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[int, str, str]]:
    """Status, output and errors of the command."""

    def call(*arguments: Any) -> tuple[int, str, str]:
        try:
            status = checkpoints.main([str(argument) for argument in arguments])
        except SystemExit as ended:
            status = int(str(ended.code))
        return status, *capsys.readouterr()

    return call


Command = Callable[..., tuple[int, str, str]]


def _rows(table: str) -> list[list[str]]:
    lines = [line for line in table.splitlines() if line.startswith("│")]
    return [[cell.strip() for cell in line.strip("│").split("│")] for line in lines]


def _flip(directory: Path) -> None:
    path = max((directory / "state").rglob("*"), key=lambda path: path.stat().st_size if path.is_file() else 0)
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def test_a_run_lists_its_checkpoints(run: Path, command: Command) -> None:
    (run / "checkpoints" / "6" / "commit_success.txt").unlink()
    for arguments in ((run,), (run, "list"), (run / "checkpoints",)):
        status, out, err = command(*arguments)
        assert (status, err) == (0, "")
        rows = _rows(out)
        assert [row[0] for row in rows] == ["2", "4", "6", "8"]
        assert rows[2][-1] == "its save was not completed"
        assert rows[0][-1] == rows[3][-1] == "complete"
        assert [row[3] for row in rows] == ["2", "4", "", "8"]
        assert [row[4] for row in rows] == ["8", "16", "", "32"], "four sequences a step"
        assert [bool(row[5]) for row in rows] == [False, True, False, True], "losses of the steps that were evaluated"
    assert _rows(command(run)[1])[1][6] == "newest, every 4"


def test_verify_finds_what_changed(run: Path, command: Command) -> None:
    status, out, _ = command(run, "verify")
    assert (status, out.count("as it was saved")) == (0, 4)
    assert "every line follows on the one before" in out
    _flip(run / "checkpoints" / "6")
    status, out, _ = command(run, "verify")
    assert (status, out.count("as it was saved")) == (1, 3)
    assert "is not what was saved" in _rows(out)[2][2] or "cannot be read" in _rows(out)[2][2]
    assert command(run, "verify", 2, 4)[0] == 0
    lines = (run / "events.jsonl").read_bytes().splitlines(keepends=True)
    (run / "events.jsonl").write_bytes(b"".join(lines[:3]))
    status, out, _ = command(run, "verify", 8)
    assert status == 1
    assert "was its last when step 8 was saved is missing: it was cut off or written anew" in " ".join(out.split())
    (run / "events.jsonl").write_bytes(b"".join([lines[0], *lines[2:]]))
    assert "line 2 does not follow on line 1" in command(run, "verify", 8)[1]
    (run / "events.jsonl").unlink()
    assert "it is missing" in command(run, "verify", 8)[1]


def test_diff_says_what_differs_and_how_much(run: Path, made: Any, command: Command) -> None:
    assert command(run, "diff", 4, 4)[:1] == (0,)
    status, out, _ = command(run, "diff", 4, 8)
    assert status == 1
    assert "the configurations are equal" in out
    rows = {row[0]: row[1:] for row in _rows(out)}
    assert rows["step"] == ["4", "1"]
    assert 0 < float(rows["params/blocks/attention/key"][0]) < 1
    assert "guard/skipped" not in rows


def test_prune_keeps_what_is_asked_for_and_never_touches_a_live_run(run: Path, command: Command) -> None:
    names = lambda: sorted(path.name for path in (run / "checkpoints").iterdir())  # noqa: E731
    (run / "checkpoints" / "9.orbax-checkpoint-tmp").mkdir()
    (run / "checkpoints" / "6" / "commit_success.txt").unlink()
    status, out, _ = command(run, "prune", "--keep", 1, "--dry-run")
    assert (status, out) == (0, "would remove step 2\nwould remove step 6\nkept: 4, 8\n")
    assert len(names()) == 5
    with run_directory(str(run), is_writer=True):
        status, out, err = command(run, "prune", "--keep", 1)
        assert (status, out) == (2, "")
        assert "is in use by another process (process " in err
        assert command(run / "checkpoints", "prune", "--keep", 1)[::2] == (2, err), "they are the run's"
    status, out, _ = command(run, "prune", "--keep", 1, "--keep-every-steps", 0)
    assert status == 0
    assert names() == ["8"]
    removed = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    assert [event["step"] for event in removed if event["event"] == "prune"] == [2, 4, 6]
    assert command(run, "verify")[0] == 0
    assert "--keep=0 would leave nothing" in command(run, "prune", "--keep", 0)[2]
    assert "argument --keep: '-1' must be a whole number, 0 or more" in command(run, "prune", "--keep=-1")[2]


def test_what_was_set_aside_is_shown_and_removed_when_asked_for(run: Path, command: Command) -> None:
    names = lambda: sorted(path.name for path in (run / "checkpoints").iterdir())  # noqa: E731
    (run / "checkpoints" / "6").rename(run / "checkpoints" / "6.damaged")
    assert "set aside as damaged (prune --damaged removes them): 6.damaged" in command(run)[1]
    assert command(run, "prune")[1] == "kept: 2, 4, 8\n"
    assert "would remove 6.damaged" in command(run, "prune", "--damaged", "--dry-run")[1]
    assert names() == ["2", "4", "6.damaged", "8"]
    assert "removed 6.damaged" in command(run, "prune", "--damaged")[1]
    assert names() == ["2", "4", "8"]
    last = json.loads((run / "events.jsonl").read_text().splitlines()[-1])
    assert (last["event"], last["name"]) == ("prune", "6.damaged")
    assert "set aside" not in command(run)[1]


def test_the_best_are_kept_also_by_a_run_that_goes_on(
    config_of: Callable[..., Config], run_of: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    losses = iter((2.0, 1.0, 3.0, 4.0))
    monkeypatch.setattr("jaxpar.trainer.evaluate", lambda *arguments: {"eval/loss": next(losses)})
    config = config_of(checkpoint={"every_steps": 3, "keep": 1, "keep_best": 1}, train={"num_steps": 12})
    run_of(config, stop_after=7)
    run = run_of(config)
    assert [line["eval/loss"] for line in run.lines if "eval/loss" in line] == [2.0, 1.0, 3.0, 4.0]
    kept = sorted(int(path.name) for path in (Path(config.run.dir) / "checkpoints").iterdir())
    assert kept == [6, 12], "step 6 is known to be the best from its checkpoint alone"


def test_prune_of_checkpoints_apart_from_a_run_takes_their_own_lock(run: Path, command: Command) -> None:
    apart = (run / "checkpoints").rename(run / "apart")
    with run_directory(str(apart), is_writer=True, key="checkpoint.directory"):
        status, out, err = command(apart, "prune", "--keep", 1)
    assert (status, out) == (2, "")
    assert err.startswith(f"checkpoint.directory={str(apart)!r} is in use by another process (process ")
    assert command(apart, "prune", "--keep", 1)[0] == 0
    assert sorted(path.name for path in apart.iterdir()) == [".lock", "8"]


@pytest.mark.parametrize("which", ["current", "ema"])
def test_export_writes_the_parameters_alone_without_padding(
    made: Any, tmp_path: Path, command: Command, which: str
) -> None:
    run, state = made(tmp_path / "run")
    output = tmp_path / "export"
    status, out, _ = command(run, "export", output, "--parameters", which, "--file-bytes", 2000)
    assert status == 0
    files = sorted(output.glob("*.safetensors"))
    assert len(files) == out.count("safetensors") > 1
    index = json.loads((output / "model.safetensors.index.json").read_text())["weight_map"]
    found = {name: array for path in files for name, array in load_file(path).items()}
    assert index.keys() == found.keys()
    arrays = state.by_path()
    prefix, suffix = ("params/", "") if which == "current" else ("optimizer/arrays/", "/average")
    assert {f"params/{name}" for name in found} == {path for path in arrays if path.startswith("params/")}
    for name, array in found.items():
        expected = np.asarray(arrays[f"{prefix}{name}{suffix}"])
        assert "embed" in name or array.shape == expected.shape, name
        np.testing.assert_array_equal(array, expected[tuple(slice(size) for size in array.shape)])
    assert 257 in found["embedding"].shape if "embedding" in found else any(257 in a.shape for a in found.values())
    assert not any(258 in array.shape for array in found.values())
    assert "[model]" in (output / "config.toml").read_text()
    assert "is not empty" in command(run, "export", output)[2]


def _save_in_rows(directory: Path, step: int, rows: tuple[int, ...], layers: np.ndarray, config: Config) -> None:
    """A checkpoint of these layers, and of nothing where there is none."""
    laid_out = np.stack([layers[row] if row >= 0 else np.zeros_like(layers[0]) for row in rows])
    state = TrainState(step=jnp.int32(step), params={"w": jnp.asarray(laid_out)}, optimizer={})
    extents = {"step": Extent(()), "params/w": Extent((len(layers), 2, 3), rows)}
    notes = Notes(
        step=step, config=stored_config(config), tokenizer="", data="", padded_vocab_size=0, num_updates=step,
        next_sequence=0, loss=None, saved_at="", events="", arrays={},
    )  # fmt: skip
    saving = Checkpoints(CheckpointStore(str(directory)), Retention(9), timeout_seconds=60)
    saving.save(state, notes, extents)
    saving.finish()


def test_checkpoints_of_several_layouts_are_compared_and_exported_layer_by_layer(
    config_of: Callable[..., Config], tmp_path: Path, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In blocks of two layers, and with columns that are padding."""
    monkeypatch.setattr("jaxpar.checkpoint_store._BLOCK_BYTES", 64)
    layers = np.arange(5 * 2 * 4, dtype=np.float32).reshape(5, 2, 4) + 1
    changed = layers.copy()
    changed[3, 1, 2] += 0.5
    directory = tmp_path / "several"
    _save_in_rows(directory, 1, (0, 1, 2, 3, 4), layers, config_of())
    _save_in_rows(directory, 2, (0, 4, -1, 3, 1, 2), layers, config_of())
    _save_in_rows(directory, 3, (0, 2, 4, 1, 3, -1), changed, config_of())
    status, out, _ = command(directory, "diff", 1, 2)
    assert status == 1
    assert [row[0] for row in _rows(out)] == ["step"]
    assert "1 arrays are equal, 1 differ" in out
    rows = {row[0]: row[1:] for row in _rows(command(directory, "diff", 2, 3)[1])}
    norm = 0.5 / np.linalg.norm(layers[:, :, :3])
    assert rows["params/w"] == ["0.5", f"{norm:.3g}"]
    for step in (1, 2, 3):
        output = tmp_path / f"export {step}"
        assert command(directory, "export", output, "--step", step)[0] == 0
        found = load_file(output / "model.safetensors")["w"]
        np.testing.assert_array_equal(found, (changed if step == 3 else layers)[:, :, :3])
    status, out, _ = command(directory, "verify")
    assert (status, out.count("as it was saved")) == (0, 3)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere"], r"nowhere is no directory; RUN is the run.dir of a run"),
        (["{texts}"], r"has neither a config.toml nor checkpoints"),
        (["{run}", "verify", "7"], r"has no checkpoint of step 7; there are: 2, 4, 6, 8"),
        (["{run}", "diff", "4"], r"the following arguments are required|expected 2 arguments"),
        (["{run}", "prun"], r"invalid choice: 'prun'"),
        (["{run}", "export", "{texts}"], r"is not empty; name another directory"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_mistakes_are_named(run: Path, texts: Path, command: Command, arguments: list[str], message: str) -> None:
    status, _, err = command(*(argument.format(run=run, texts=texts) for argument in arguments))
    assert status == 2
    assert re.search(message, err), err


def test_an_average_that_is_not_there_and_a_damaged_checkpoint_are_named(
    config_of: Callable[..., Config], run_of: Callable[..., Any], tmp_path: Path, command: Command
) -> None:
    config = config_of()
    run_of(config, stop_after=2)
    run = Path(config.run.dir)
    status, _, err = command(run, "export", tmp_path / "export", "--parameters", "ema")
    missing = (
        "the checkpoint of step 2 has no moving average, which train.ema_decay keeps; leave out --parameters ema\n"
    )
    assert (status, err) == (2, missing)
    (run / "checkpoints" / "2" / "_CHECKPOINT_METADATA").write_text("{")
    status, _, err = command(run, "diff", 2, 2)
    assert status == 1
    assert err.startswith("the checkpoint is damaged: its notes cannot be read")
