"""`python -m jaxpar.launched PID CONFIG [KEY=VALUE ...]`: `jaxpar.train`, until the launcher of that PID ends.

The launcher starts it; a function that subprocess would call between fork and exec is no place for this, since JAX's
threads may hold locks then.
"""

import ctypes
import os
import signal
import sys

from jaxpar.exit_status import FAULT

__all__ = ["die_with"]

_PR_SET_PDEATHSIG = 1


def die_with(parent: int) -> None:
    """Has the kernel kill this process when its parent ends, however that ends."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        sys.exit(FAULT)


if __name__ == "__main__":
    die_with(int(sys.argv[1]))
    from jaxpar.train import main

    sys.exit(main(sys.argv[2:]))
