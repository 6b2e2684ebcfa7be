"""A directory in which a tiny run is launched, in processes that can be told to die at a step."""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from jaxpar.checkpoint_store import CheckpointStore
from jaxpar.config import load_config
from jaxpar.plan import make_plan
from jaxpar.restore import read_arrays
from jaxpar.state import abstract_state, state_extents
from jaxpar.step import Step

ROOT = Path(__file__).parents[2]
TIMING = {"step_seconds", "tokens_per_second", "mfu"}
CONFIG = """
[model]
name = "transformer"
num_layers = 1
embed_dim = 16
num_heads = 4
mlp_dim = 32
dropout = 0.1

[data]
sequence_length = 32
sources = [{ name = "text", paths = ["texts/*.txt"] }]
tokenizer = { name = "bytes" }
cache_dir = "cache"

[train]
num_steps = 12
batch_size = 8

[schedule]
name = "constant"
warmup_steps = 2

[parallel]
data = 2
fsdp = 2
simulated_devices = 4

[evaluation]
every_steps = 6
sample_prompt = "one fish "
sample_tokens = 5

[checkpoint]
every_steps = 4

[logging]
every_steps = 1

[hardware]
peak_tflops = 0.1

[runtime]
"""

# As `python -m jaxpar.train`; each process notes the rows that it reads, and may be told to do something at a step.
_PROCESS = """
import json, os, signal, sys, time
from jaxpar import step, train
from jaxpar.data import loader

index = int(dict(argument.split("=", 1) for argument in sys.argv[3:]).get("distributed.process_id", 0))
attempt = sum(name.startswith(f"started.{index}.") for name in os.listdir(DIRECTORY)) + 1
open(os.path.join(DIRECTORY, f"started.{index}.{attempt}"), "w").close()
rows = open(os.path.join(DIRECTORY, f"rows.{index}"), "a")
locate = loader.locate
def noted(row, shares):
    print(row, file=rows, flush=True)
    return locate(row, shares)
loader.locate = noted

class Told(step.Step):
    def __init__(self, plan):
        super().__init__(plan)
        original, self.calls = self.train, 0
        def train(state, batch):
            result = original(state, batch)
            self.calls += 1
            for place in EVENTS.get(f"{attempt}", []):
                if place[:2] == [index, self.calls]:
                    os.kill(os.getpid(), getattr(signal, place[2]))
            return result
        self.train = train

train.Step = Told
sys.exit(train.main(sys.argv[2:]))
"""

_LAUNCHER = """
import sys
from jaxpar import launch
launch._PROGRAM = ("-u", "-c", sys.argv[1])
launch._FIRST_PAUSE_SECONDS = 0.1
launch._OTHERS_SECONDS = 2.0
sys.exit(launch.main(sys.argv[2:]))
"""


class Work:
    """A directory with a configuration and texts, and runs in it."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        cache = ROOT / ".cache" / "tests" / "jax"
        (directory / "run.toml").write_text(f'{CONFIG}compilation_cache = "{cache}"\n')
        (directory / "texts").mkdir()
        for number in range(12):
            text = " ".join(f"{(5 * number + place) % 11} fish" for place in range(40 + number))
            (directory / "texts" / f"{number:02}.txt").write_text(text)

    def start(
        self,
        run_dir: str,
        *overrides: str,
        options: Sequence[str] = ("--processes", "2"),
        events: Any = None,
        program: str = "",
    ) -> "subprocess.Popen[str]":
        """Launches the run; `events` is {attempt: [[process, step of the attempt, signal to itself]]}.

        `program` is what each process runs instead.
        """
        (self.directory / run_dir).mkdir(exist_ok=True)
        program = program or f"DIRECTORY, EVENTS = {run_dir!r}, {json.dumps(events or {})}\n{_PROCESS}"
        return subprocess.Popen(
            [sys.executable, "-c", _LAUNCHER, program, *options, "--", "run.toml", f"run.dir={run_dir}", *overrides],
            cwd=self.directory, env=os.environ | {"PYTHONPATH": str(ROOT)}, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )  # fmt: skip

    def run(self, run_dir: str, *overrides: str, timeout: float = 240, **keys: Any) -> tuple[int, str, str]:
        process = self.start(run_dir, *overrides, **keys)
        out, err = process.communicate(timeout=timeout)
        return process.returncode, out, err

    def metrics(self, run_dir: str) -> list[dict[str, Any]]:
        """`metrics.jsonl` without what a clock decides."""
        lines = (self.directory / run_dir / "metrics.jsonl").read_text().splitlines()
        return [{key: value for key, value in json.loads(line).items() if key not in TIMING} for line in lines]

    def rows(self, run_dir: str, process: int) -> set[int]:
        """The rows that a process read, as numbers within their batch of 8."""
        return {int(line) % 8 for line in (self.directory / run_dir / f"rows.{process}").read_text().splitlines()}

    def state(self, run_dir: str, step: int) -> dict[str, np.ndarray]:
        directory = self.directory / run_dir
        plan = make_plan(load_config(directory / "config.toml"), jax.devices()[:4], 257)
        abstract = abstract_state(plan, Step(plan).optimizer)
        store = CheckpointStore(str(directory / "checkpoints"))
        return jax.device_get(read_arrays(store, store.notes(step), abstract.by_path(), state_extents(plan, abstract)))


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Work:
    return Work(tmp_path_factory.mktemp("work"))
