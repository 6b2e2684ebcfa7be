"""The order in which devices that share a sequence hold its tokens.

A causal query sees the keys before it: were the sequence cut into as many parts as there are devices, the last device
would have most of the work. In the zigzag order it is cut into twice as many chunks, and device i of c has chunks i
and 2c − 1 − i, which makes the work equal (Llama 3, section 3.3.2).

The arrays of a batch are put in that order once, before anything else; what is downstream sees columns in another
order, and what depends on where a token stands (masks of attention and of dropout) asks for its logical place.
"""

from collections.abc import Mapping

import jax
import numpy as np

from jaxpar.parallel.constrain import Execution, constrain, current_execution, num_shards

__all__ = ["ZIGZAG_METHODS", "column_of", "is_zigzag", "logical_places", "reordered", "zigzag_chunks"]

ZIGZAG_METHODS = ("ring", "all_gather")
"""The values of `parallel.context_method` whose work depends on where a device's tokens stand."""


def zigzag_chunks(num_devices: int) -> np.ndarray:
    """The chunk in each of 2c places, device by device.

    >>> zigzag_chunks(3).tolist()
    [0, 5, 1, 4, 2, 3]
    """
    first = np.arange(num_devices)
    return np.stack([first, 2 * num_devices - 1 - first], axis=1).reshape(-1)


def is_zigzag(execution: Execution) -> bool:
    """Whether the plan's devices hold a sequence in zigzag order."""
    return execution.context_method in ZIGZAG_METHODS and num_shards("sequence") > 1


def logical_places(length: int) -> np.ndarray:
    """The place in its sequence of each column, int32 [length], by the active plan."""
    columns = np.arange(length, dtype=np.int32)
    if not is_zigzag(current_execution()):
        return columns
    chunks = zigzag_chunks(num_shards("sequence"))
    return columns.reshape(len(chunks), -1)[chunks].reshape(-1)


def column_of(place: jax.Array, length: int) -> jax.Array:
    """The column that has the token at a logical place, by the active plan; the inverse of `logical_places`."""
    columns = np.argsort(logical_places(length)).astype(np.int32)
    return jax.numpy.asarray(columns)[place]


def reordered(batch: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
    """A batch's arrays [B, T] from logical order into that in which the active plan's devices hold a sequence.

    They are gathered for that: a few integers a token, against the keys and values of every layer.
    """
    if not is_zigzag(current_execution()):
        return dict(batch)
    chunks = zigzag_chunks(num_shards("sequence"))

    def in_order(x: jax.Array) -> jax.Array:
        whole = constrain(x, ("batch", None))
        parts = whole.reshape(x.shape[0], len(chunks), -1)[:, chunks]
        return constrain(parts.reshape(x.shape), ("batch", "sequence"))

    return {name: in_order(x) for name, x in batch.items()}
