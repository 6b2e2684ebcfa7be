"""`python -m jaxpar.train` as a user meets it: what it prints and leaves; stopped, killed, continued, refused."""

import fcntl
import json
import os
import pty
import re
import shutil
import signal
import struct
import subprocess
import sys
import termios
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from jaxpar import backend
from jaxpar.checkpoint import open_checkpoints
from jaxpar.checkpoint_store import CheckpointStore, Retention
from jaxpar.config import load_config
from jaxpar.plan import make_plan
from jaxpar.state import TrainState, abstract_state, state_extents
from jaxpar.step import Step
from jaxpar.train import main

ROOT = Path(__file__).parents[1]
TIMING = {"step_seconds", "tokens_per_second", "mfu"}
CONFIG = """
[model]
name = "transformer"
num_layers = 1
embed_dim = 16
num_heads = 2
mlp_dim = 32
dropout = 0.1

[data]
sequence_length = 32
sources = [{ name = "text", paths = ["texts/*.txt"] }]
tokenizer = { name = "bytes" }
cache_dir = "cache"

[train]
num_steps = 12
batch_size = 4

[schedule]
name = "constant"
warmup_steps = 2

[parallel]
data = 1
fsdp = 2
simulated_devices = 2

[evaluation]
every_steps = 6
batch_size = 2
sample_prompt = "one fish "
sample_tokens = 5

[checkpoint]
every_steps = 4

[logging]
every_steps = 2

[hardware]
peak_tflops = 0.1

[runtime]
xla_flags = []
"""


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where a user works: `run.toml` and texts."""
    directory = tmp_path_factory.mktemp("work")
    cache = ROOT / ".cache" / "tests" / "jax"
    (directory / "run.toml").write_text(f'{CONFIG}compilation_cache = "{cache}"\n')
    (directory / "texts").mkdir()
    for number in range(12):
        text = " ".join(f"{(5 * number + place) % 11} fish" for place in range(40 + number))
        (directory / "texts" / f"{number:02}.txt").write_text(text)
    return directory


@dataclass(frozen=True)
class Done:
    """A process that has ended."""

    status: int
    out: str
    err: str


def run(directory: Path, *arguments: str, driver: Sequence[str] = ("-m", "jaxpar.train")) -> Done:
    """The command line in a process of its own, without a terminal."""
    done = subprocess.run(
        [sys.executable, *driver, "run.toml", *arguments],
        cwd=directory, env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    return Done(done.returncode, done.stdout, done.stderr)


# As `python -m jaxpar.train`, with a signal to itself just after a step is dispatched.
_SIGNALLED = """
import os, signal, sys
from jaxpar import step, train

class Signalled(step.Step):
    def __init__(self, plan):
        super().__init__(plan)
        original, self.calls = self.train, 0
        def train(state, batch):
            result = original(state, batch)
            self.calls += 1
            if self.calls == {calls}:
                os.kill(os.getpid(), signal.{name})
            return result
        self.train = train

train.Step = Signalled
sys.exit(train.main())
"""

# As `python -m jaxpar.train`, with standard input as the terminal whose Ctrl-C it gets.
_ON_A_TERMINAL = """
import fcntl, sys, termios
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
from jaxpar.train import main
sys.exit(main())
"""


def metrics(directory: Path) -> list[dict[str, Any]]:
    """`metrics.jsonl` without what a clock decides."""
    lines = (directory / "metrics.jsonl").read_text().splitlines()
    return [{key: value for key, value in json.loads(line).items() if key not in TIMING} for line in lines]


def saved_state(directory: Path, step: int) -> TrainState:
    plan = make_plan(load_config(directory / "config.toml"), jax.devices()[:2], 257)
    abstract = abstract_state(plan, Step(plan).optimizer)
    with open_checkpoints(
        CheckpointStore(str(directory / "checkpoints")), Retention(3), timeout_seconds=60
    ) as checkpoints:
        return checkpoints.restore(checkpoints.notes(step), abstract, state_extents(plan, abstract))


@pytest.fixture(scope="module")
def straight(directory: Path) -> Done:
    """A run of 12 steps in `a` that nothing interrupts."""
    return run(directory, "run.dir=a")


def test_a_run_prints_what_matters_and_leaves_what_is_needed(directory: Path, straight: Done) -> None:
    assert (straight.status, straight.err) == (0, "")
    assert "transformer: 8,752 parameters, vocabulary 257\n2 cpu device(s): fsdp 2\n" in straight.out
    lines = straight.out.splitlines()
    shown = [line for line in lines if line.startswith("step")]
    steps = [int(re.match(r"step +(\d+)", line)[1]) for line in shown]  # type: ignore[index]
    assert steps == [2, 4, 6, 6, 8, 10, 12, 12]
    assert re.fullmatch(r"step  2/12  loss 5\.\d{4}  .* tokens/s  MFU .*%  ETA 0:00:\d\d", shown[0])
    assert re.fullmatch(r"step 12: held-out loss 5\.\d{4} nats per token, 7\.\d{4} bits per byte", shown[-1])
    assert straight.out.rpartition("\nsample:\n")[2].startswith("one fish ")

    written = metrics(directory / "a")
    assert [line["step"] for line in written] == steps
    assert written[3].keys() == {"step", "eval/loss", "eval/bits_per_byte"}
    assert written[0].keys() >= {"loss", "grad_norm", "learning_rate", "tokens"}
    assert written[-2]["tokens"] == 12 * 4 * 32
    raw = json.loads((directory / "a" / "metrics.jsonl").read_text().splitlines()[1])
    assert raw.keys() >= TIMING
    assert sorted(path.name for path in (directory / "a" / "checkpoints").iterdir()) == ["12", "4", "8"]
    assert load_config(directory / "a" / "config.toml") == load_config(directory / "run.toml", ["run.dir=a"])


def test_a_run_that_was_stopped_and_killed_is_the_straight_run(directory: Path, straight: Done) -> None:
    """Bit by bit, with dropout on: parameters, moments, metrics."""
    stopped = run(directory, "run.dir=b", driver=("-c", _SIGNALLED.format(calls=5, name="SIGTERM")))
    assert (stopped.status, stopped.out.splitlines()[-1]) == (75, "stopped after step 5 of 12")
    assert stopped.err.splitlines()[-1] == "the state is saved in b; the same command goes on"
    killed = run(directory, "run.dir=b", driver=("-c", _SIGNALLED.format(calls=5, name="SIGKILL")))
    assert killed.status == -signal.SIGKILL
    assert "continuing after step 5 of 12" in killed.out
    goes_on = run(directory, "run.dir=b")
    assert (goes_on.status, goes_on.err) == (0, "")
    assert re.search(r"continuing after step [58] of 12", goes_on.out)
    assert metrics(directory / "b") == metrics(directory / "a")
    assert goes_on.out.rpartition("\nsample:\n")[2] == straight.out.rpartition("\nsample:\n")[2]
    found, expected = (jax.tree.leaves_with_path(saved_state(directory / name, 12)) for name in "ba")
    assert len(found) == len(expected) > 30
    for (path, a), (_, b) in zip(found, expected, strict=True):
        np.testing.assert_array_equal(a, b, err_msg=jax.tree_util.keystr(path))


def test_ctrl_c_on_a_terminal_stops_the_bar_and_saves(directory: Path, straight: Done) -> None:
    terminal, child = pty.openpty()
    fcntl.ioctl(child, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 100, 0, 0))
    overrides = ["run.dir=c", "train.num_steps=1_000_000", "checkpoint.every_steps=0", "evaluation.every_steps=0"]
    process = subprocess.Popen(
        [sys.executable, "-c", _ON_A_TERMINAL, "run.toml", *overrides], cwd=directory, start_new_session=True,
        env=os.environ | {"PYTHONPATH": str(ROOT), "TERM": "xterm"}, stdin=child, stdout=child, stderr=child,
    )  # fmt: skip
    os.close(child)
    shown = b""
    try:
        while b"tokens/s" not in shown:
            shown += os.read(terminal, 65536)
        os.write(terminal, b"\x03")
        while True:
            try:
                shown += os.read(terminal, 65536)
            except OSError:  # the other end is closed
                break
        assert process.wait(timeout=60) == 75
    finally:
        process.kill()
        os.close(terminal)
    text = shown.decode()
    assert re.search(r"\d+/1000000", text)
    assert "SIGINT: stopping after this step, with the state saved" in text
    (step,) = re.findall(r"stopped after step (\d+) of 1000000", text)
    assert [path.name for path in (directory / "c" / "checkpoints").iterdir()] == [step]
    assert text.rindex("\x1b[?25h") > text.rindex("\x1b[?25l"), "the cursor is hidden"


@pytest.fixture
def command(directory: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    """The command line in this process, on its 8 devices."""
    monkeypatch.setattr(backend, "prepare", lambda parallel, runtime: [])
    monkeypatch.chdir(directory)
    return lambda *arguments: main(["run.toml", *arguments])


def test_a_run_goes_on_on_another_mesh_and_for_longer(
    directory: Path, straight: Done, command: Callable[..., int], capsys: pytest.CaptureFixture
) -> None:
    shutil.copytree(directory / "a", directory / "d")
    layout = ["parallel.data=4", "parallel.fsdp=1", "parallel.tensor=2", "evaluation.batch_size=8"]
    assert command("run.dir=d", *layout, "train.num_steps=14", "logging.every_steps=1", "logging.progress=lines") == 0
    out, err = capsys.readouterr()
    assert err == ""
    assert "continuing after step 12 of 14\nchanged: train.num_steps 12 → 14 (the run's length)\n" in out
    assert "changed: parallel.data 1 → 4, parallel.fsdp 2 → 1, parallel.tensor 1 → 2" in out
    assert [line["step"] for line in metrics(directory / "d")][-4:] == [12, 13, 14, 14]
    assert command("run.dir=d", *layout, "train.num_steps=14", "logging.progress=lines") == 0
    out = capsys.readouterr().out
    assert "all 14 steps are made" in out
    assert "one fish " in out
    assert command("run.dir=d", "parallel.fsdp=8", "train.batch_size=8", "evaluation.batch_size=8", "run.seed=3") == 2
    assert capsys.readouterr().err.splitlines() == [
        "run.dir='d' holds a run, saved at step 14, that was started with other values:",
        "  run.seed: 0 → 3 (the order of the data and the dropout masks would be another run's)",
        "  train.batch_size: 4 → 8 (the place in the data would be another: sequences would be repeated or left out)",
        "set them back to go on with it, or choose another run.dir",
    ]


def test_a_loss_that_is_not_finite_is_a_fault_in_one_message(
    directory: Path, command: Callable[..., int], capsys: pytest.CaptureFixture
) -> None:
    overrides = ["parallel.data=2", "parallel.tensor=2", "optimizer.learning_rate=1e30", "evaluation.batch_size=4"]
    assert command("run.dir=lost", *overrides) == 1
    err = capsys.readouterr().err
    # Which of the two is met first depends on the machine: a loss, or a gradient of a loss that is still finite.
    met = r"the (loss is|gradient of \S+ is not finite) .* lost and not saved; there is no checkpoint\. A lower"
    assert re.match(rf"step \d+: {met}", err), err
    assert len(err.splitlines()) == 1
    assert list((directory / "lost" / "checkpoints").iterdir()) == []


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["parallel.fsdp=3"], r"^parallel\.fsdp=3 asks for 3 devices, but there are 8; .*legal: .*fsdp=8"),
        (["parallel.data=-1"], r"^train\.batch_size=4 must divide by data=4 × fsdp=2 = 8, .*nearest legal values: 8$"),
        (["parallel.fsdp=1", "parallel.tensor=8"], r"^parallel\.tensor=8 must divide model\.num_heads=2"),
        (["data.sequence_length=9_999_999"], r"^data\.sequence_length=9999999 is a sequence longer than the data"),
        (["data.sources=[{name='text', paths=['none/*']}]"], r"^data\.sources\[0\]\.paths: pattern 'none/\*' matches"),
        (["run.dir=run.toml"], r"^run\.dir='run\.toml' cannot be written: there is a file of this name"),
        (["logging.progress=bar"], r'^logging\.progress="bar" needs a terminal'),
        (["schedule={name='wsd', decay_steps=50}"], r"^schedule\.warmup_steps=100 and schedule\.decay_steps=50 are"),
        (["optimizer.no_decay=['none']"], r"^optimizer\.no_decay: 'none' matches no parameter"),
        # The layout is refused before the text is read.
        (["parallel.fsdp=3", "data.sources=[{name='text', paths=['none/*']}]"], r"^parallel\.fsdp=3"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)  # fmt: skip
def test_what_cannot_work_is_refused_with_one_message(
    command: Callable[..., int], capsys: pytest.CaptureFixture, overrides: list[str], message: str
) -> None:
    fits = ["run.dir=refused", "parallel.fsdp=2", "parallel.data=2", "parallel.tensor=2"]
    given = {override.split("=")[0] for override in overrides}
    if given & {"parallel.fsdp", "parallel.data", "parallel.tensor"}:
        fits = [each for each in fits if each.startswith("run")]
    fits = [each for each in fits if each.split("=")[0] not in given]
    evaluation = "evaluation.batch_size=0"
    assert command(*fits, *overrides, evaluation) == 2
    err = capsys.readouterr().err
    assert re.search(message, err), err
    assert len(err.splitlines()) == 1


def test_a_run_that_is_in_use_is_refused(
    directory: Path, command: Callable[..., int], capsys: pytest.CaptureFixture
) -> None:
    (directory / "used").mkdir()
    with (directory / "used" / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert command("run.dir=used", "parallel.data=2", "parallel.tensor=2", "evaluation.batch_size=0") == 2
    assert capsys.readouterr().err.startswith("run.dir='used' is in use by another process")
