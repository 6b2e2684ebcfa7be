"""Saves the state with Orbax, asynchronously, every array in parts, whole or not at all; and restores it.

A restored array goes straight to where the plan wants it, part by part, whatever mesh it was saved from. Saving goes on
while training does, although the next step donates the arrays: on accelerators Orbax copies them to the host first, and
on CPU, where it holds views of them, XLA leaves an array that has a view alone and writes the step's result elsewhere.

A save that fails is reported and tried again at the next; the one that a run ends with must succeed.
"""

import contextlib
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any

import jax
from orbax.checkpoint import v1 as ocp

from jaxpar.checkpoint_store import (
    ArrayNotes,
    CheckpointStore,
    DamagedCheckpointError,
    Notes,
    Retention,
    brief,
)
from jaxpar.digest import digest_arrays
from jaxpar.extent import Extent
from jaxpar.parallel.agreement import failures, of_the_first, rest
from jaxpar.restore import read_arrays
from jaxpar.state import TrainState

__all__ = ["Checkpoints", "SaveFailedError", "SaveTimeoutError", "open_checkpoints"]

_GRACE_SECONDS = 1.0

Record = Callable[..., None]
"""`record(event, **details)`, as of `jaxpar.events.Events`."""


class SaveFailedError(Exception):
    """The state could not be saved, and the run cannot go on or end without that."""


class SaveTimeoutError(SaveFailedError):
    """A save does not end; the threads that are at it cannot be stopped."""


@dataclass
class _Save:
    """A save on its way. Once it has ended: what went wrong here, and what went wrong in any process (None until the
    processes have told each other)."""

    step: int
    deadline: float
    thread: threading.Thread | None = None
    error: str = ""
    timed_out: bool = False
    failures: list[str] | None = None


@contextlib.contextmanager
def open_checkpoints(
    store: CheckpointStore, retention: Retention, *, timeout_seconds: float, record: Record | None = None
) -> Iterator["Checkpoints"]:
    """The checkpoints of a run, without what killed saves left there.

    Raises:
      ValueError: the directory cannot be made or read.
    """
    error = None
    if jax.process_index() == 0:
        try:
            store.prepare()
            for name in store.remove_leftovers():
                (record or _nowhere)("cleaned up", directory=str(store), name=name)
        except Exception as caught:
            error = f"checkpoint.directory={str(store)!r} cannot be used: {brief(caught)}; name another directory"
    if failed := failures(error):
        raise ValueError(failed[0])
    checkpoints = Checkpoints(store, retention, timeout_seconds=timeout_seconds, record=record)
    try:
        yield checkpoints
    finally:
        checkpoints.join()


class Checkpoints:
    """The checkpoints of one run. Every process of the run must make the same calls, from one thread."""

    def __init__(
        self, store: CheckpointStore, retention: Retention, *, timeout_seconds: float, record: Record | None = None
    ) -> None:
        self.store = store
        self._retention, self._timeout_seconds = retention, timeout_seconds
        self._record = record or _nowhere
        self._is_writer = jax.process_index() == 0
        self._losses: dict[int, float | None] = {}
        self._messages: deque[str] = deque()
        self._last: _Save | None = None

    def steps(self) -> list[int]:
        """Steps that have a directory, complete or not, the newest first."""
        return of_the_first(self.store.steps()[::-1] if self._is_writer else [])

    def notes(self, step: int) -> Notes:
        """What was saved with the state.

        Raises:
          DamagedCheckpointError: they cannot be read.
        """
        found: dict[str, Any] = {}
        if self._is_writer:
            try:
                found = {"notes": self.store.notes(step).to_json()}
            except DamagedCheckpointError as error:
                found = {"error": str(error)}
        found = of_the_first(found)
        if "error" in found:
            raise DamagedCheckpointError(found["error"])
        return Notes.from_json(found["notes"])

    def goes_on_from(self, step: int) -> None:
        """Says that the run continues at a checkpoint. Newer ones, which could not be read, are set aside; older ones
        that cannot be read stay."""
        self._losses = {}
        for other in self.store.steps() if self._is_writer else ():
            if other > step:
                try:
                    self.store.set_aside(other)
                except Exception as error:
                    self._messages.append(f"warning: step {other} in {self.store} stays in the way: {brief(error)}")
                continue
            self._losses[other] = None
            with contextlib.suppress(DamagedCheckpointError):
                self._losses[other] = self.store.notes(other).loss

    @property
    def newest_step(self) -> int | None:
        """The step of the newest checkpoint that was saved or gone on from, as far as this process knows."""
        return max(self._losses, default=None)

    def save(self, state: TrainState, notes: Notes, extents: Mapping[str, Extent]) -> None:
        """Starts to save the state; `notes` get its arrays' digests. Waits for an earlier save to end.

        A failure is kept for `messages` and `finish`.

        Raises:
          SaveTimeoutError: an earlier save does not end.
        """
        self.wait()
        arrays = state.by_path()
        digests = digest_arrays(arrays, extents)
        noted = {
            path: ArrayNotes(array.shape, str(array.dtype), extents[path], digests[path].content, digests[path].padding)
            for path, array in arrays.items()
        }
        saved_at = datetime.now(UTC).isoformat(timespec="seconds")
        notes = replace(notes, arrays=noted, saved_at=saved_at)
        save = self._last = _Save(notes.step, deadline=time.monotonic() + self._timeout_seconds)
        with contextlib.suppress(OSError):  # a full disk: the save itself will tell
            self._record("save", step=notes.step, directory=str(self.store))
        # Orbax would let the other processes wait for minutes for the one that cannot begin.
        if failed := failures(self._obstacle()):
            save.failures = failed
            self._failed(save, failed[0])
            return
        try:
            with self._context():
                response = ocp.save_checkpointables_async(
                    self.store.path(notes.step),
                    {"state": state.parts()},
                    overwrite=True,
                    custom_metadata=notes.to_json(),
                )
        except Exception as error:
            self._failed(save, brief(error))
            return
        save.thread = threading.Thread(target=self._watch, args=(save, response, notes), name="save", daemon=True)
        save.thread.start()

    def restore(self, notes: Notes, abstract: TrainState, extents: Mapping[str, Extent]) -> TrainState:
        """The saved state with the shapes and shardings of `abstract`, whose digests are those that were saved.

        Layers are where `extents` say, wherever they were. Where the vocabulary is padded otherwise than it was, rows
        are cut off or zeros added.

        Raises:
          DamagedCheckpointError: it cannot be read in one of the processes, or is not what was saved.
          ValueError: it holds another state than `abstract`.
        """
        _check_structure(notes, abstract.by_path(), extents)
        arrays = self._read(notes, abstract.by_path(), extents)
        state = abstract.with_arrays(arrays)
        changed = []
        for path, digest in digest_arrays(arrays, extents).items():
            saved = notes.arrays[path]
            same_padding = extents[path].padding(arrays[path].shape) == saved.extent.padding(saved.shape)
            if digest.content != saved.content or (same_padding and digest.padding != saved.padding):
                changed.append(path)
        if changed:
            raise DamagedCheckpointError(f"arrays are not what was saved: {', '.join(sorted(changed))}")
        if int(state.step) != notes.step:
            raise DamagedCheckpointError(f"its state is of step {int(state.step)}")
        self._record("restore", step=notes.step, directory=str(self.store))
        return state

    def messages(self) -> list[str]:
        """What there is to tell of saves since the last call."""
        # One by one: the thread of a save adds to them.
        return [self._messages.popleft() for _ in range(len(self._messages))]

    def wait(self) -> None:
        """Waits until the save that is on its way has ended in every process, well or not.

        Raises:
          SaveTimeoutError: it does not end in this process.
        """
        save = self._last
        if save is None or save.failures is not None:
            return
        # Bounded by itself, and possibly longer than a process may be silent.
        rest()
        self.join()
        save.failures = failures(save.error)
        if save.timed_out:
            raise SaveTimeoutError(
                f"saving step {save.step} to {self.store} has not ended in checkpoint.timeout_seconds="
                f"{self._timeout_seconds:g}: storage or another process does not answer"
            )
        if save.failures and not save.error:
            self._messages.append(f"WARNING: step {save.step} is not saved: {save.failures[0]}")

    def finish(self) -> None:
        """Waits until the last save has ended.

        Raises:
          SaveFailedError: it failed.
        """
        self.wait()
        if self._last is not None and self._last.failures:
            raise SaveFailedError(f"the state of step {self._last.step} could not be saved: {self._last.failures[0]}")

    def join(self) -> None:
        """Waits until this process has ended its part of the last save, but not beyond its bound."""
        save = self._last
        if save is None or save.thread is None:
            return
        save.thread.join(max(0.0, save.deadline - time.monotonic()) + _GRACE_SECONDS)
        if save.thread.is_alive():
            self._timed_out(save)

    def _read(
        self, notes: Notes, abstract: Mapping[str, jax.ShapeDtypeStruct], extents: Mapping[str, Extent]
    ) -> dict[str, jax.Array]:
        """The arrays, or DamagedCheckpointError in every process if one of them cannot read its part."""
        error, arrays = None, {}
        try:
            if self._is_writer:
                self.store.fetch(notes.step)
        except Exception as caught:
            error = f"it cannot be fetched: {brief(caught)}"
        failed = failures(error)
        try:
            if not failed:
                arrays = read_arrays(self.store, notes, abstract, extents)
        except DamagedCheckpointError as caught:
            error = str(caught)
        failed = failed or failures(error)
        if self._is_writer:
            self.store.release(notes.step)
        if failed:
            raise DamagedCheckpointError("; ".join(failed))
        return arrays

    def _obstacle(self) -> str | None:
        """Why no checkpoint can be made, if this process, which makes the directories, sees it already."""
        try:
            if self._is_writer:
                self.store.probe()
        except OSError as error:
            return brief(error)
        return None

    def _context(self) -> ocp.Context:
        context = ocp.Context()
        # Otherwise a directory that cannot be made is waited for, for minutes, instead of being an error.
        context.asynchronous.create_directories_asynchronously = False
        context.asynchronous.timeout_secs = math.ceil(self._timeout_seconds)
        # Restored arrays go where the plan of the day wants them.
        context.array.saving.enable_write_sharding_file = False
        return context

    def _watch(self, save: _Save, response: Any, notes: Notes) -> None:
        """In a thread of its own: waits for the save, then removes what need not be kept."""
        try:
            response.result(timeout=self._timeout_seconds)
        except TimeoutError:
            self._timed_out(save)
            return
        except Exception as error:
            self._failed(save, brief(error))
            return
        try:
            # Its timeouts are those of a connection: such an upload has failed and is made up for.
            if self._is_writer:
                self.store.publish(save.step)
        except Exception as error:
            self._failed(save, brief(error))
            return
        self._losses[save.step] = notes.loss
        if not self._is_writer:
            return
        with contextlib.suppress(OSError):  # a full disk, of which pruning frees a part
            self._record("saved", step=save.step, directory=str(self.store))
        try:
            kept = self._retention.kept(self._losses)
            # Only what this run knows: there may be what another one has just saved.
            for step in [step for step in self.store.steps() if step in self._losses and step not in kept]:
                del self._losses[step]
                self.store.remove(step)
        except Exception as error:
            self._messages.append(f"warning: older checkpoints in {self.store} are left: {brief(error)}")

    def _timed_out(self, save: _Save) -> None:
        if not save.timed_out:
            save.timed_out = True
            self._failed(save, f"it has not ended in checkpoint.timeout_seconds={self._timeout_seconds:g}")

    def _failed(self, save: _Save, reason: str) -> None:
        save.error = f"{reason} ({self.store})"
        newest = (
            f"; the newest checkpoint is of step {self.newest_step}" if self._losses else "; there is no checkpoint"
        )
        self._messages.append(f"WARNING: step {save.step} is not saved: {save.error}{newest}")
        if self._is_writer:
            with contextlib.suppress(Exception):  # the disk may be full, which is what is being told
                self._record("save failed", step=save.step, directory=str(self.store), text=reason)
            if not save.timed_out:
                with contextlib.suppress(Exception):
                    self.store.remove_leftovers()


def _check_structure(notes: Notes, abstract: Mapping[str, Any], extents: Mapping[str, Extent]) -> None:
    saved = {path: (array.extent.shape, array.dtype) for path, array in notes.arrays.items()}
    asked = {path: (extents[path].shape, str(leaf.dtype)) for path, leaf in abstract.items()}
    if saved == asked:
        return
    lines = [f"  {path}: saved {_shown(saved.get(path))}, now {_shown(asked.get(path))}"
             for path in sorted({*saved, *asked}) if saved.get(path) != asked.get(path)]  # fmt: skip
    more = [f"  and {len(lines) - 8} more"] if len(lines) > 8 else []
    raise ValueError(
        f"the checkpoint of step {notes.step} holds another state than this configuration and version of the model "
        "make:\n" + "\n".join([*lines[:8], *more]) + "\ngo back to what it was saved with, or choose another run.dir"
    )


def _shown(array: tuple[tuple[int, ...], str] | None) -> str:
    return "none" if array is None else f"{array[1]}{list(array[0])}"


def _nowhere(event: str, **details: Any) -> None:
    """Records nothing."""
