"""The directory of a run, and the checkpoints in it.

Orbax saves and restores the state; a restored array goes straight to where the plan wants it. Saving goes on while
training does, although the next step donates the arrays: on accelerators Orbax copies them to the host first, and on
CPU, where it holds views of them, XLA leaves an array that has a view alone and writes the step's result elsewhere.
"""

import contextlib
import os
from collections.abc import Iterator, Mapping
from dataclasses import fields
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from orbax.checkpoint import v1 as ocp

from jaxpar.locks import lock_file
from jaxpar.state import TrainState

__all__ = ["Checkpoints", "run_directory", "write_whole"]


class Checkpoints:
    """The checkpoints of one run, in `directory`/<step>; the newest `keep` stay."""

    def __init__(self, directory: Path, *, keep: int):
        self._checkpointer = ocp.training.Checkpointer(
            directory.absolute(),
            preservation_policy=ocp.training.preservation_policies.LatestN(keep),
            cleanup_tmp_directories=True,
        )
        newest = self._checkpointer.latest
        self._newest_step = None if newest is None else newest.step

    @property
    def newest_step(self) -> int | None:
        """The step of the newest checkpoint, which may still be on its way to the disk."""
        return self._newest_step

    def save(self, step: int, state: TrainState, notes: Mapping[str, str]) -> None:
        """Starts to save the state after `step` updates, and notes about it; waits for an earlier save to end."""
        if step == self._newest_step:
            return
        self._checkpointer.wait()
        self._checkpointer.save_checkpointables_async(
            step, {"state": _as_dict(state)}, force=True, custom_metadata=dict(notes)
        )
        self._newest_step = step

    def notes(self, step: int) -> dict[str, str]:
        """The notes that were saved with the state."""
        return dict(self._checkpointer.checkpointables_metadata(step).custom_metadata or {})

    def restore(self, step: int, abstract: TrainState) -> TrainState:
        """The state saved after `step` updates, with the shapes, formats and shardings of `abstract`."""
        loaded = self._checkpointer.load_checkpointables(step, {"state": _as_dict(abstract)})
        return TrainState(**loaded["state"])

    def close(self) -> None:
        """Waits until everything is on disk."""
        self._checkpointer.wait()
        self._checkpointer.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


@contextlib.contextmanager
def run_directory(path: str, *, is_writer: bool) -> Iterator[Path]:
    """The directory of a run, made if it is not there; nobody else may write into it meanwhile.

    Of a run's processes one is the writer, and holds the lock. Where the file system has no locks, nothing is locked.

    Raises:
      ValueError: it cannot be written, or another run writes into it.
    """
    directory = Path(path).expanduser()
    try:
        directory.mkdir(parents=True, exist_ok=True)
        lock = (directory / ".lock").open("a") if is_writer else None
    except OSError as error:
        reason = "there is a file of this name" if directory.is_file() else error.strerror
        raise ValueError(f"run.dir={path!r} cannot be written: {reason}; name another directory") from error
    with lock or contextlib.nullcontext():
        if lock is not None:
            try:
                lock_file(lock, wait=False)
            except BlockingIOError:
                raise ValueError(
                    f"run.dir={path!r} is in use by another process; wait for its end, or name another directory"
                ) from None
        yield directory


def write_whole(path: Path, text: str) -> None:
    """Writes a file that is never seen in part."""
    temporary = path.with_name(f"{path.name}.tmp")
    with temporary.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


def _as_dict(state: TrainState) -> dict[str, Any]:
    parts = {field.name: getattr(state, field.name) for field in fields(state)}
    return {name: part for name, part in parts.items() if part is not None}
