"""What a checkpoint costs: seconds that the step is blocked, bandwidth against plain files, the host's memory.

    python benchmarks/checkpoint.py [--saves 50] [KEY=VALUE ...]

The state is that of `checkpoint.toml`. An asynchronous save blocks until the arrays have their digests and are copied
or held; the rest happens while the devices train. Its bandwidth, until everything is on disk, and that of a restore
with its digests checked are compared with writing and reading the same bytes as plain files, turn by turn. Then the
state is saved again and again, and the memory that the process holds is read after each.
"""

import json
import os
import resource
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxpar.backend import prepare
from jaxpar.checkpoint import Checkpoints, open_checkpoints
from jaxpar.checkpoint_store import CheckpointStore, Notes, Retention
from jaxpar.config import load_config
from jaxpar.plan import Plan, make_plan
from jaxpar.resume import stored_config
from jaxpar.state import TrainState, abstract_state, init_state, optimizer_of, state_extents

CONFIG = Path(__file__).with_name("checkpoint.toml")
VOCAB_SIZE = 4096
ROUNDS = 5


def main(arguments: Sequence[str] | None = None) -> int:
    """Measures and prints; the last line is JSON."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    num_saves = int(given.pop(given.index("--saves") + 1)) if "--saves" in given else 50
    config = load_config(CONFIG, [each for each in given if each != "--saves"])
    for line in prepare(config.parallel, config.runtime):
        print(line)
    plan = make_plan(config, jax.devices(), VOCAB_SIZE)
    optimizer = optimizer_of(plan)
    abstract = abstract_state(plan, optimizer)
    state = jax.block_until_ready(init_state(plan, optimizer))
    num_bytes = sum(array.nbytes for array in state.by_path().values())
    print(f"state: {num_bytes / 1e6:.0f} MB in {len(state.by_path())} arrays, {plan.mesh.size} device(s)")
    with tempfile.TemporaryDirectory(dir=config.run.dir if Path(config.run.dir).is_dir() else None) as directory:
        where = Path(directory)
        with open_checkpoints(
            CheckpointStore(str(where / "checkpoints")), Retention(1), timeout_seconds=600
        ) as checkpoints:
            run = _Run(plan, state, abstract, checkpoints)
            measured = _bandwidths(run, where, num_bytes)
            measured |= _memory(run, num_saves)
    for name, value in measured.items():
        print(f"{name}: {value:.4g}" if isinstance(value, float) else f"{name}: {value}")
    print(json.dumps(measured | {"state_bytes": num_bytes, "devices": plan.mesh.size}))
    return 0


class _Run:
    """Saves and restores one state under rising steps."""

    def __init__(self, plan: Plan, state: TrainState, abstract: TrainState, checkpoints: Checkpoints) -> None:
        self.state, self.step = state, 0
        self._plan, self._abstract, self._checkpoints = plan, abstract, checkpoints
        self._extents = state_extents(plan, abstract)
        self._add = jax.jit(lambda step: step + 1, out_shardings=plan.replicated)

    def save(self) -> None:
        """Starts a save."""
        self.step += 1
        self.state = self.state.with_arrays(self.state.by_path() | {"step": self._add(self.state.step)})
        notes = Notes(
            step=self.step, config=stored_config(self._plan.config), tokenizer="", data="",
            padded_vocab_size=self._plan.padded_vocab_size, num_updates=self.step, next_sequence=0, loss=None,
            saved_at="", events="", arrays={},
        )  # fmt: skip
        self._checkpoints.save(self.state, notes, self._extents)

    def finish(self) -> None:
        """Waits until it is on disk."""
        self._checkpoints.finish()

    def restore(self) -> None:
        """Reads it, with digests."""
        notes = self._checkpoints.notes(self.step)
        jax.block_until_ready(self._checkpoints.restore(notes, self._abstract, self._extents))


def _bandwidths(run: _Run, where: Path, num_bytes: int) -> dict[str, Any]:
    host = {path: np.asarray(array) for path, array in run.state.by_path().items()}
    plain = where / "plain"
    rounds = []
    for _ in range(ROUNDS + 1):
        started = time.perf_counter()
        run.save()
        blocked = time.perf_counter() - started
        run.finish()
        saved = time.perf_counter() - started
        restored = _seconds(run.restore)
        shutil.rmtree(plain, ignore_errors=True)
        plain.mkdir()
        wrote = _seconds(lambda: _write_plain(plain, host))
        read = _seconds(lambda: _read_plain(plain))
        rounds.append((blocked, saved, wrote, restored, read))
    # The first compiles.
    first, *medians = (statistics.median(times) for times in zip(*rounds[1:], strict=True))
    return {
        "blocked_seconds": first,
        "save_MB_per_second": num_bytes / medians[0] / 1e6,
        "plain_write_MB_per_second": num_bytes / medians[1] / 1e6,
        "restore_MB_per_second": num_bytes / medians[2] / 1e6,
        "plain_read_MB_per_second": num_bytes / medians[3] / 1e6,
    }


def _memory(run: _Run, num_saves: int) -> dict[str, Any]:
    held = []
    for _ in range(num_saves):
        run.save()
        run.finish()
        held.append(_resident_bytes())
    first, last = statistics.median(held[: num_saves // 5]), statistics.median(held[-(num_saves // 5) :])
    return {
        "saves": num_saves,
        "held_after_first_fifth_MB": first / 1e6,
        "held_after_last_fifth_MB": last / 1e6,
        "peak_MB": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e6,
    }


def _write_plain(directory: Path, arrays: dict[str, np.ndarray]) -> None:
    for number, array in enumerate(arrays.values()):
        with (directory / str(number)).open("wb") as file:
            file.write(array.tobytes())
            file.flush()
            os.fsync(file.fileno())


def _read_plain(directory: Path) -> None:
    for path in directory.iterdir():
        np.fromfile(path, np.uint8)


def _seconds(action: Callable[[], None]) -> float:
    started = time.perf_counter()
    action()
    return time.perf_counter() - started


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


if __name__ == "__main__":
    sys.exit(main())
