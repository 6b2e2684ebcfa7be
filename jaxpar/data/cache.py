"""Directories that are computed once, kept by content, and appear whole or not at all."""

import contextlib
import errno
import hashlib
import json
import logging
import os
import shutil
import tempfile
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from jaxpar.locks import lock_file

__all__ = ["cached_directory", "content_key"]

_META = "meta.json"
_CHUNK_BYTES = 1 << 22

_logger = logging.getLogger(__name__)


def content_key(*parts: Any) -> str:
    """Return a hash of values that JSON can hold."""
    return hashlib.blake2b(json.dumps(parts).encode(), digest_size=16).hexdigest()


def cached_directory(cache_dir: str, name: str, build: Callable[[Path], None]) -> Path:
    """Return the directory `cache_dir/name`, filled by `build` unless it is there complete.

    `build` writes files into a temporary directory, which is then renamed: no reader ever sees a part of it. One
    process builds while others wait for its lock; where the file system has no locks they all build, and the first to
    finish wins. The files' sizes and checksums are recorded, and a directory that does not match them is built again
    with a warning.

    Raises:
      ValueError: `data.cache_dir` cannot be written.
    """
    directory = Path(cache_dir).expanduser() / name
    if directory.exists() and _damage(directory) is None:
        return directory
    try:
        directory.parent.mkdir(parents=True, exist_ok=True)
        with _lock(directory.with_name(f"{directory.name}.lock")) as locked:
            if locked:
                _remove_leftovers(directory)
            damage = _damage(directory) if directory.exists() else "missing"
            if damage is not None:
                _fill(directory, build, damage)
    except OSError as error:
        raise ValueError(f"data.cache_dir={cache_dir!r} cannot be written: {error}; name another directory") from error
    return directory


def _fill(directory: Path, build: Callable[[Path], None], damage: str) -> None:
    temporary = Path(tempfile.mkdtemp(prefix=f"{directory.name}.tmp-", dir=directory.parent))
    try:
        if directory.exists():
            _logger.warning("%s is damaged (%s); it is made again", directory, damage)
            os.replace(directory, temporary / "damaged")
        fresh = temporary / "fresh"
        fresh.mkdir()
        build(fresh)
        files = {path.name: [path.stat().st_size, _checksum(path)] for path in sorted(fresh.iterdir())}
        (fresh / _META).write_text(json.dumps({"files": files}))
        for path in fresh.iterdir():
            _to_disk(path)
        try:
            os.replace(fresh, directory)
        except OSError as error:
            # Only without a lock: another process finished first, and its result is as good.
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST) or _damage(directory) is not None:
                raise
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _damage(directory: Path) -> str | None:
    """Return what is wrong with a directory that was built, None if nothing is."""
    try:
        for name, (size, checksum) in json.loads((directory / _META).read_text())["files"].items():
            found = (directory / name).stat().st_size
            if found != size:
                return f"{name} has {found} bytes and not {size}"
            if _checksum(directory / name) != checksum:
                return f"{name} is not what was written"
    except (OSError, ValueError, TypeError, AttributeError, KeyError) as error:
        return f"{type(error).__name__}: {error}"
    return None


def _checksum(path: Path) -> int:
    """CRC-32, which is there against faults of disks and is as fast as they are."""
    checksum = 0
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            checksum = zlib.crc32(chunk, checksum)
    return checksum


@contextlib.contextmanager
def _lock(path: Path) -> Iterator[bool]:
    """Hold an exclusive lock that ends with the process; yield False where the file system has none."""
    with path.open("a") as file:
        try:
            locked = lock_file(file, wait=False)
        except BlockingIOError:
            _logger.info("waiting for another process that makes %s", path.with_suffix(""))
            locked = lock_file(file, wait=True)
        yield locked


def _remove_leftovers(directory: Path) -> None:
    """Remove what a process that was killed while building has left; the caller holds the lock."""
    for path in directory.parent.glob(f"{directory.name}.tmp-*"):
        shutil.rmtree(path, ignore_errors=True)


def _to_disk(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())
