"""Reads the arrays of a checkpoint to where they are wanted: each process what its own devices hold, and no more.

Orbax writes arrays as Zarr within an OCDBT database, which TensorStore reads. Orbax's own `load` reads them so too, but
waits for the other processes of a run, which wait for ever if one of them finds its part damaged, and leaves tasks
behind at the first error.
"""

import math
from collections import deque
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
import tensorstore

from jaxpar.checkpoint_store import CheckpointStore, DamagedCheckpointError, brief

__all__ = ["read_arrays"]

_IN_FLIGHT_BYTES = 1 << 30

Index = tuple[tuple[int, int], ...]
"""First and last place along each dim."""


def read_arrays(
    store: CheckpointStore, step: int, abstract: Mapping[str, jax.ShapeDtypeStruct]
) -> dict[str, jax.Array]:
    """The arrays with the shapes and shardings of `abstract`; along dims of another size, cut off or filled with zeros.

    At most 1 GiB, or one array, is on its way at a time.

    Raises:
      DamagedCheckpointError: one of them cannot be read.
    """
    opened = store.open_arrays(step, list(abstract))
    read: dict[str, jax.Array] = {}
    on_their_way: deque[tuple[str, dict[Index, Any]]] = deque()
    try:
        for path, leaf in abstract.items():
            while (
                on_their_way
                and sum(_num_bytes(abstract[each], parts) for each, parts in on_their_way) > _IN_FLIGHT_BYTES
            ):
                _arrive(*on_their_way.popleft(), abstract, read)
            on_their_way.append((path, _requested(opened[path], leaf)))
        while on_their_way:
            _arrive(*on_their_way.popleft(), abstract, read)
    except Exception as error:
        raise DamagedCheckpointError(f"it cannot be read: {brief(error)}") from error
    return {path: read[path] for path in abstract}


def _requested(stored: tensorstore.TensorStore, leaf: jax.ShapeDtypeStruct) -> dict[Index, Any]:
    """A future for each part of the array that this process's devices hold."""
    assert leaf.sharding is not None
    places = leaf.sharding.addressable_devices_indices_map(leaf.shape).values()
    wanted = dict.fromkeys(_index(place, leaf.shape) for place in places)
    return {index: stored[_within(index, stored.shape)].read() for index in wanted}


def _arrive(
    path: str, parts: Mapping[Index, Any], abstract: Mapping[str, jax.ShapeDtypeStruct], read: dict[str, jax.Array]
) -> None:
    leaf = abstract[path]
    values = {index: _filled(part.result(), index) for index, part in parts.items()}
    read[path] = jax.make_array_from_callback(
        leaf.shape, leaf.sharding, lambda place: values[_index(place, leaf.shape)]
    )


def _within(index: Index, shape: tuple[int, ...]) -> tuple[slice, ...]:
    """The part of `index` that an array of this shape has."""
    return tuple(slice(min(a, size), min(b, size)) for (a, b), size in zip(index, shape, strict=True))


def _filled(values: np.ndarray, index: Index) -> np.ndarray:
    missing = [(0, b - a - size) for (a, b), size in zip(index, values.shape, strict=True)]
    return np.pad(values, missing) if any(after for _, after in missing) else values


def _index(place: tuple[slice, ...] | None, shape: tuple[int, ...]) -> Index:
    assert place is not None
    return tuple(part.indices(size)[:2] for part, size in zip(place, shape, strict=True))


def _num_bytes(leaf: jax.ShapeDtypeStruct, parts: Mapping[Index, Any]) -> int:
    return leaf.dtype.itemsize * sum(math.prod(b - a for a, b in index) for index in parts)
