"""The checkpoints of a run as they lie in a directory or behind a URL: what is there, what it says of itself, removal.

A checkpoint is a directory named by its step. It is complete once it has `commit_success.txt`, which Orbax writes last;
until then it has another name or no such file. Beside the arrays it has notes, which are JSON: nothing is unpickled.
"""

import hashlib
import json
import math
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
import tensorstore

from jaxpar.config.credentials import masked
from jaxpar.extent import Extent, as_slice

__all__ = ["COMMITTED", "ArrayNotes", "CheckpointStore", "DamagedCheckpointError", "Notes", "Retention", "brief"]

COMMITTED = "commit_success.txt"
"""The file that Orbax writes last."""
_METADATA = "_CHECKPOINT_METADATA"
_TEMPORARY = ".orbax-checkpoint-tmp"
ASIDE = ".damaged"
"""End of the name of a checkpoint that could not be read and is kept out of the way."""
_STATE = "state"
_BLOCK_BYTES = 1 << 26
_CACHE_BYTES = 1 << 26


class DamagedCheckpointError(Exception):
    """A checkpoint cannot be read, or is not what was saved; the text says in what."""


@dataclass(frozen=True)
class ArrayNotes:
    """An array when it was saved: shape as it lies, dtype, shape in every layout with the layer of each row, digests
    of what is within that and beyond."""

    shape: tuple[int, ...]
    dtype: str
    extent: Extent
    content: str
    padding: str


@dataclass(frozen=True)
class Notes:
    """What is saved with the state.

    `config` is the resolved configuration (TOML), `tokenizer` and `data` are digests. `num_updates` counts steps that
    changed the parameters. `next_sequence` is the data's cursor: how many sequences all processes together have read.
    Like randomness it follows from `step` and the configuration. `loss` is the held-out loss at this
    step, if it was evaluated. `events` is the hash of the last line of `events.jsonl` before the save. `arrays` are the
    state's arrays by path.
    """

    step: int
    config: str
    tokenizer: str
    data: str
    padded_vocab_size: int
    num_updates: int
    next_sequence: int
    loss: float | None
    saved_at: str
    events: str
    arrays: Mapping[str, ArrayNotes]

    def to_json(self) -> dict[str, Any]:
        """As JSON can hold it, with a hash of all of it."""
        values = asdict(self)
        return {"notes": values, "sha256": _hash(values)}

    @classmethod
    def from_json(cls, saved: Any) -> "Notes":
        """Raises DamagedCheckpointError if it is not what `to_json` gave."""
        try:
            values = dict(saved["notes"])
            if saved["sha256"] != _hash(values):
                raise DamagedCheckpointError("its notes are not those that were saved")
            arrays = {path: _array_notes(entry) for path, entry in values["arrays"].items()}
            return cls(**{**values, "arrays": arrays})
        except (KeyError, TypeError, ValueError) as error:
            raise DamagedCheckpointError(f"it has no notes of jaxpar's ({type(error).__name__}: {error})") from error


@dataclass(frozen=True)
class Retention:
    """What is kept: the newest, those of every so many steps, those with the lowest held-out loss; 0 is none."""

    newest: int
    every_steps: int = 0
    best: int = 0

    def kept(self, losses: Mapping[int, float | None]) -> set[int]:
        """Which of the checkpoints stay, given as step → held-out loss, if one is known.

        >>> sorted(Retention(newest=1, every_steps=4, best=1).kept({2: 1.0, 4: 3.0, 6: None, 7: 2.0}))
        [2, 4, 7]
        """
        steps = sorted(losses)
        known = sorted((loss, -step) for step, loss in losses.items() if loss is not None)
        regular = {step for step in steps if self.every_steps and step % self.every_steps == 0}
        return {*steps[-self.newest :], *regular, *(-step for _, step in known[: self.best])}


class CheckpointStore:
    """The checkpoints in `directory`. Looks at storage at each call; used by one process at a time."""

    def __init__(self, directory: str) -> None:
        self.directory = Path(directory)

    def __str__(self) -> str:
        return masked(str(self.directory))

    def path(self, step: int) -> Path:
        """The directory of one checkpoint."""
        return self.directory / str(step)

    def steps(self) -> list[int]:
        """Steps that have a directory, complete or not, in order."""
        return sorted(int(name) for name in self._names() if name.isdecimal())

    def prepare(self) -> None:
        """Makes the directory."""
        self.directory.mkdir(parents=True, exist_ok=True)

    def probe(self) -> None:
        """Raises OSError if no checkpoint can be made here now."""
        self.directory.mkdir(parents=True, exist_ok=True)
        Path(tempfile.mkdtemp(prefix=f"probe{_TEMPORARY}", dir=self.directory)).rmdir()

    def publish(self, step: int) -> None:
        """Brings a checkpoint that was saved to where it stays; here it is there."""

    def fetch(self, step: int) -> None:
        """Brings a checkpoint to where its arrays can be read; here it is there."""

    def release(self, step: int) -> None:
        """Ends what `fetch` began."""

    def read_text(self, step: int, name: str) -> str:
        """A small file of a checkpoint."""
        return (self.path(step) / name).read_text()

    def is_complete(self, step: int) -> bool:
        """Whether the save has ended."""
        return (self.path(step) / COMMITTED).exists()

    def notes(self, step: int) -> Notes:
        """What was saved with the state.

        Raises:
          DamagedCheckpointError: they cannot be read, or have changed.
        """
        if not self.is_complete(step):
            raise DamagedCheckpointError("its save was not completed")
        try:
            # Not with Orbax's `checkpointables_metadata`, which opens every array first.
            saved = json.loads(self.read_text(step, _METADATA))["custom_metadata"]
        except Exception as error:
            raise DamagedCheckpointError(f"its notes cannot be read: {brief(error)}") from error
        notes = Notes.from_json(saved)
        if notes.step != step:
            raise DamagedCheckpointError(f"it is of step {notes.step}")
        return notes

    def open_arrays(self, step: int, paths: Iterable[str]) -> dict[str, tensorstore.TensorStore]:
        """The arrays of a checkpoint by path, of which nothing is read yet.

        Raises:
          DamagedCheckpointError: one of them cannot be opened.
        """
        # Of its own: a checkpoint may have been replaced since the last look.
        context = tensorstore.Context({"cache_pool": {"total_bytes_limit": _CACHE_BYTES}})
        pending = {}
        for path in paths:
            name = ".".join(PurePosixPath(path).parts)
            base = f"file://{self.path(step) / _STATE}/"
            spec = {"driver": "zarr3", "kvstore": {"driver": "ocdbt", "base": base, "path": f"{name}/"}}
            pending[path] = tensorstore.open(spec, read=True, open=True, context=context)
        try:
            return {path: future.result() for path, future in pending.items()}
        except Exception as error:
            raise DamagedCheckpointError(f"it cannot be read: {brief(error)}") from error

    def blocks(
        self, step: int, array: str, extent: Extent, *, with_padding: bool = False
    ) -> Iterator[tuple[int, np.ndarray]]:
        """One array of a checkpoint, in blocks of some of its first dim: (first index, entries).

        `extent` is that of its notes. The layers of a stack come in their order, without rows that have none, so that
        blocks of the same index are of the same entries, however the array lies; padding comes only `with_padding`.

        Raises:
          DamagedCheckpointError: it cannot be read.
        """
        stored = self.open_arrays(step, [array])[array]
        length, *inner = (stored.shape if with_padding else extent.shape) or (0,)
        length = extent.shape[0] if extent.rows else length
        size = max(1, _BLOCK_BYTES // max(1, stored.dtype.numpy_dtype.itemsize * math.prod(inner)))
        try:
            if stored.ndim == 0:
                yield 0, stored.read().result()
            for start in range(0, length, size):
                stop = min(start + size, length)
                rows = as_slice(extent.rows_of(np.arange(start, stop))) if extent.rows else slice(start, stop)
                yield start, stored[(rows, *map(slice, inner))].read().result()
        except Exception as error:
            raise DamagedCheckpointError(f"{array} cannot be read: {brief(error)}") from error

    def size_bytes(self, step: int) -> int:
        """Bytes on storage."""
        return sum(path.stat().st_size for path in self.path(step).rglob("*") if path.is_file())

    def remove(self, step: int) -> None:
        """Removes a checkpoint, so that it is at no moment a complete one of which a part is missing."""
        (self.path(step) / COMMITTED).unlink(missing_ok=True)
        shutil.rmtree(self.path(step))

    def set_aside(self, step: int) -> None:
        """Gives a checkpoint another name, under which it is neither found nor removed."""
        aside = self.path(step).with_name(f"{step}{ASIDE}")
        shutil.rmtree(aside, ignore_errors=True)
        self.path(step).rename(aside)

    def aside(self) -> list[str]:
        """Names of the checkpoints that were set aside."""
        return sorted(name for name in self._names() if name.endswith(ASIDE))

    def remove_aside(self, name: str) -> None:
        """Removes a checkpoint that was set aside."""
        shutil.rmtree(self.directory / name)

    def remove_leftovers(self) -> list[str]:
        """Removes what killed saves have left under other names; returns those."""
        names = [name for name in self._names() if _TEMPORARY in name]
        for name in names:
            shutil.rmtree(self.directory / name, ignore_errors=True)
        return names

    def _names(self) -> list[str]:
        return [path.name for path in self.directory.iterdir()] if self.directory.exists() else []


def brief(error: BaseException) -> str:
    """The kind and the first line of an error, or of the one that it comes from, without credentials."""
    while error.__cause__ is not None:
        error = error.__cause__
    first = (str(error).strip().splitlines() or [""])[0]
    return masked(f"{type(error).__name__}: {first[:300]}")


def _array_notes(entry: Mapping[str, Any]) -> ArrayNotes:
    extent = Extent(*(tuple(entry["extent"][name]) for name in ("shape", "rows")))
    return ArrayNotes(**{**entry, "shape": tuple(entry["shape"]), "extent": extent})


def _hash(values: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()
