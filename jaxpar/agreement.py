"""What the processes of a run must decide alike: one decides and tells the others, or all say whether they succeeded.

With one process nothing is sent. Otherwise every process must come here, in the same order.
"""

import contextlib
import json
from collections.abc import Iterator
from typing import TypeVar

import jax
import numpy as np
from jax.experimental import multihost_utils

__all__ = ["agreed", "all_or_none", "failures"]

T = TypeVar("T")

_MESSAGE_BYTES = 1024


def agreed(value: T) -> T:
    """The first process's value, which JSON can hold."""
    if jax.process_count() == 1:
        return value
    encoded = np.frombuffer(json.dumps(value).encode(), np.uint8)
    size = int(multihost_utils.broadcast_one_to_all(np.int32(encoded.size)))
    own = np.zeros(size, np.uint8)
    own[: encoded.size] = encoded[:size]
    # By value and not by sum: JAX adds bytes as int32 and gives them back as what they were.
    return json.loads(np.asarray(multihost_utils.broadcast_one_to_all(own)).astype(np.uint8).tobytes())


def failures(message: str | None) -> list[str]:
    """The messages of those processes that have one, each with its process where there are several."""
    if jax.process_count() == 1:
        return [message] if message else []
    own = np.zeros(_MESSAGE_BYTES, np.uint8)
    encoded = (message or "").encode()[:_MESSAGE_BYTES]
    own[: len(encoded)] = np.frombuffer(encoded, np.uint8)
    rows = np.asarray(multihost_utils.process_allgather(own)).astype(np.uint8)
    texts = [row.tobytes().rstrip(b"\0").decode(errors="replace") for row in rows]
    return [f"process {index}: {text}" for index, text in enumerate(texts) if text]


@contextlib.contextmanager
def all_or_none() -> Iterator[None]:
    """A block that fails in every process if it fails in one; nothing inside may wait for another process.

    Raises:
      ValueError: it failed elsewhere; the message names the process. What fails here is raised as it is.
    """
    try:
        yield
    except Exception as error:
        failures(str(error) or type(error).__name__)
        raise
    failed = failures(None)
    if failed:
        raise ValueError("\n".join(failed))
