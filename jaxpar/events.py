"""`events.jsonl`: what happened to a run, who did it, when and from where. Used by one process of a run only.

Lines are only ever appended. Each has the SHA-256 of the line before it, so that a line which is changed, removed or
put in between shows; checkpoints keep the hash of the line that was the last when they were saved, so that a file which
was cut off or written anew shows too. A line that a kill cut off stays, and the next one says that it is incomplete.
"""

import errno
import getpass
import hashlib
import json
import os
import socket
import sys
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self

from jaxpar.config.credentials import masked

__all__ = ["Events", "History", "read_events"]

_START = "0" * 64
_INCOMPLETE = "incomplete line"


@dataclass(frozen=True)
class History:
    """The events of a run, the hash of each line in their order, and what is wrong with the file."""

    events: tuple[Mapping[str, Any], ...]
    hashes: tuple[str, ...]
    problems: tuple[str, ...]


class Events:
    """The open file, continued where it ends; may be used from several threads. Without a path it records nothing.

    `before` are the kinds of events that were there when it was opened.

    Raises:
      ValueError: it cannot be written.
    """

    def __init__(self, path: Path | None) -> None:
        self._lock = threading.Lock()
        self._head, self.before = _START, frozenset[str]()
        self._file: IO[bytes] | None = None
        if path is not None:
            self._open(path)

    def _open(self, path: Path) -> None:
        try:
            before = path.read_bytes() if path.exists() else b""
            # Without a buffer: what a full disk refuses is not written later, after its place in the chain is gone.
            self._file = path.open("ab", buffering=0)
        except OSError as error:
            raise ValueError(f"{path} cannot be written: {error.strerror}") from error
        lines = before.split(b"\n")
        torn = lines.pop()
        if torn:
            self._write(b"\n")
            lines.append(torn)
        if lines:
            self._head = _hash(lines[-1])
        entries = [entry for line in lines if (entry := _parse(line))]
        self.before = frozenset(entry["event"] for entry in entries)
        # Also if it was the next process, which had ended the line, that was killed before it could say so.
        if lines and _parse(lines[-1]) is None:
            self.record(_INCOMPLETE, bytes=len(lines[-1]), text="the process that wrote it was killed")

    @property
    def head(self) -> str:
        """The hash of the last line."""
        return self._head

    def record(self, event: str, **details: Any) -> None:
        """Appends a line and waits until it is on disk. Credentials in texts are masked."""
        if self._file is None:
            return
        with self._lock:
            line = {
                "time": datetime.now(UTC).isoformat(timespec="milliseconds"),
                "event": event,
                **_masked(details),
                "user": _user(),
                "host": socket.gethostname(),
                "pid": os.getpid(),
                "from": masked(str(Path.cwd())),
                "command": masked(" ".join(sys.argv)),
                "previous": self._head,
            }
            encoded = json.dumps(line, ensure_ascii=False).encode(errors="replace")
            self._write(encoded + b"\n")
            self._head = _hash(encoded)

    def close(self) -> None:
        """Closes the file."""
        if self._file is not None:
            self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _write(self, text: bytes) -> None:
        assert self._file is not None
        length = os.fstat(self._file.fileno()).st_size
        try:
            if self._file.write(text) != len(text):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            os.fsync(self._file.fileno())
        except OSError:
            self._file.truncate(length)
            raise


def read_events(path: Path) -> History:
    """The events in a file, and every place where it is not what `Events` wrote; nothing if it does not exist."""
    if not path.exists():
        return History((), (), ())
    lines = path.read_bytes().split(b"\n")
    problems = []
    torn = lines.pop()
    if torn:
        problems.append(f"line {len(lines) + 1} is incomplete: the process that wrote it was killed, or is at it")
    events: list[Mapping[str, Any]] = []
    head, incomplete = _START, 0
    for number, line in enumerate(lines, start=1):
        entry = _parse(line)
        if incomplete and (entry is None or entry["event"] != _INCOMPLETE):
            problems.append(f"line {incomplete} is not an event")
        incomplete = number if entry is None else 0
        if entry is not None:
            if entry["previous"] != head:
                problems.append(f"line {number} does not follow on line {number - 1}: something was changed or removed")
            events.append(entry)
        head = _hash(line)
    if incomplete:
        problems.append(f"line {incomplete} is not an event")
    return History(tuple(events), tuple(_hash(line) for line in lines), tuple(problems))


def _parse(line: bytes) -> Mapping[str, Any] | None:
    try:
        entry = json.loads(line)
    except ValueError:
        return None
    is_event = isinstance(entry, dict) and {"time", "event", "previous"} <= entry.keys()
    return entry if is_event else None


def _masked(value: Any) -> Any:
    if isinstance(value, str):
        return masked(value)
    if isinstance(value, Mapping):
        return {key: _masked(item) for key, item in value.items()}
    return [_masked(item) for item in value] if isinstance(value, list | tuple) else value


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a number without a name, as in containers
        return str(os.getuid())


def _hash(line: bytes) -> str:
    return hashlib.sha256(line).hexdigest()
