"""Locks on files, which end with the process that holds them."""

import errno
import fcntl
from typing import IO

__all__ = ["lock_file"]

_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP)


def lock_file(file: IO, *, wait: bool) -> bool:
    """Locks an open file for this process alone; returns False where the file system has no locks.

    Raises:
      BlockingIOError: another process holds the lock, and `wait` is False.
    """
    try:
        fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
        return False
    return True
