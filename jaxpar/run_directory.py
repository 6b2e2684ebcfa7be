"""The directory of a run, into which one run writes at a time."""

import contextlib
import json
import os
import socket
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, Any

from jaxpar.locks import lock_file

__all__ = ["RunDirectory", "run_directory", "write_whole"]

_LOCK = ".lock"


@dataclass(frozen=True)
class RunDirectory:
    """Where the run's files are; `left_by` says whose lock was found there without its owner, if one was."""

    path: Path
    left_by: str = ""


@contextlib.contextmanager
def run_directory(path: str, *, is_writer: bool, key: str = "run.dir") -> Iterator[RunDirectory]:
    """The directory of a run, made if it is not there; nobody else may write into it meanwhile.

    Of a run's processes one is the writer, and holds the lock, a file with the owner's host and process. The lock ends
    with its process, however that ends. Where the file system has no locks, the file is what counts: an owner on this
    host that is alive, or any on another host, keeps the directory. `key` is what names it in the configuration.

    Raises:
      ValueError: it cannot be written, or another run writes into it.
    """
    directory = Path(path).expanduser()
    with contextlib.ExitStack() as opened:
        try:
            directory.mkdir(parents=True, exist_ok=True)
            lock = opened.enter_context((directory / _LOCK).open("a+")) if is_writer else None
        except OSError as error:
            reason = "there is a file of this name" if directory.is_file() else error.strerror
            raise ValueError(f"{key}={path!r} cannot be written: {reason}; name another directory") from error
        if lock is None:
            yield RunDirectory(directory)
            return
        left_by = _take(lock, path, key)
        try:
            yield RunDirectory(directory, left_by)
        finally:
            lock.truncate(0)


def write_whole(path: Path, text: str) -> None:
    """Writes a file that is never seen in part."""
    temporary = path.with_name(f"{path.name}.tmp")
    with temporary.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


def _take(lock: IO[str], path: str, key: str) -> str:
    """Locks the file and writes the owner into it; returns whose entry was there."""
    try:
        has_locks = lock_file(lock, wait=False)
    except BlockingIOError:
        raise ValueError(_in_use(key, path, _owner(lock))) from None
    owner = _owner(lock)
    if owner and not has_locks and _may_live(owner):
        fix = "" if owner["host"] == socket.gethostname() else f", or remove {Path(path) / _LOCK} if that run is over"
        raise ValueError(_in_use(key, path, owner) + fix)
    lock.truncate(0)
    entry = {"host": socket.gethostname(), "pid": os.getpid(), "since": datetime.now(UTC).isoformat(timespec="seconds")}
    lock.write(json.dumps(entry) + "\n")
    lock.flush()
    return _name(owner) if owner else ""


def _in_use(key: str, path: str, owner: Mapping[str, Any] | None) -> str:
    by = f" ({_name(owner)})" if owner else ""
    return f"{key}={path!r} is in use by another process{by}; wait for its end, or name another directory"


def _owner(lock: IO[str]) -> Mapping[str, Any] | None:
    lock.seek(0)
    try:
        entry = json.loads(lock.read())
    except ValueError:
        return None
    return entry if isinstance(entry, dict) and {"host", "pid", "since"} <= entry.keys() else None


def _name(owner: Mapping[str, Any]) -> str:
    return f"process {owner['pid']} on {owner['host']}, since {owner['since']}"


def _may_live(owner: Mapping[str, Any]) -> bool:
    if owner["host"] != socket.gethostname():
        return True
    try:
        os.kill(int(owner["pid"]), 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return int(owner["pid"]) != os.getpid()
