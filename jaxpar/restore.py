"""Reads the arrays of a checkpoint to where they are wanted: each process what its own devices hold, and no more.

Layers go to the rows that have them now, from those that had them then, each read once and straight into its place.

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

from jaxpar.checkpoint_store import CheckpointStore, DamagedCheckpointError, Notes, brief
from jaxpar.extent import Extent, as_slice
from jaxpar.parallel.pipeline.partition import EMPTY

__all__ = ["read_arrays"]

_IN_FLIGHT_BYTES = 1 << 30

Index = tuple[tuple[int, int], ...]
"""First and last place along each dim."""
Part = tuple[np.ndarray, Any]
"""A device's part of an array, and the future of its being there."""


def read_arrays(
    store: CheckpointStore,
    notes: Notes,
    abstract: Mapping[str, jax.ShapeDtypeStruct],
    extents: Mapping[str, Extent],
) -> dict[str, jax.Array]:
    """The arrays with the shapes and shardings of `abstract`, their layers in the rows that `extents` say.

    Along dims of another size they are cut off or filled with zeros, which rows without a layer have, too. At most
    1 GiB, or one array, is on its way at a time.

    Raises:
      DamagedCheckpointError: one of them cannot be read.
    """
    opened = store.open_arrays(notes.step, list(abstract))
    read: dict[str, jax.Array] = {}
    on_their_way: deque[tuple[str, dict[Index, Part]]] = deque()
    try:
        for path, leaf in abstract.items():
            while (
                on_their_way
                and sum(_num_bytes(abstract[each], parts) for each, parts in on_their_way) > _IN_FLIGHT_BYTES
            ):
                _arrive(*on_their_way.popleft(), abstract, read)
            on_their_way.append((path, _requested(opened[path], notes.arrays[path].extent, leaf, extents[path])))
        while on_their_way:
            _arrive(*on_their_way.popleft(), abstract, read)
    except Exception as error:
        raise DamagedCheckpointError(f"it cannot be read: {brief(error)}") from error
    return {path: read[path] for path in abstract}


def _requested(
    stored: tensorstore.TensorStore, then: Extent, leaf: jax.ShapeDtypeStruct, now: Extent
) -> dict[Index, Part]:
    """Each part of the array that this process's devices hold."""
    assert leaf.sharding is not None
    places = leaf.sharding.addressable_devices_indices_map(leaf.shape).values()
    wanted = dict.fromkeys(_index(place, leaf.shape) for place in places)
    return {index: _part(stored, then, index, leaf.dtype, now) for index in wanted}


def _part(stored: tensorstore.TensorStore, then: Extent, index: Index, dtype: np.dtype, now: Extent) -> Part:
    values = np.zeros([b - a for a, b in index], dtype)
    # Along a dim of another size, what both have.
    here: list[Any] = [slice(min(a, size), min(b, size)) for (a, b), size in zip(index, stored.shape, strict=True)]
    there: list[Any] = [slice(0, part.stop - part.start) for part in here]
    if now.rows or then.rows:
        # One read for all: read one by one, rows of one chunk of the file would decode it once each.
        layers = np.asarray(now.rows or range(now.shape[0]))[slice(*index[0])]
        (rows,) = np.nonzero(layers != EMPTY)
        here[0], there[0] = as_slice(then.rows_of(layers[rows])), as_slice(rows)
    target = tensorstore.array(values, copy=False, write=True)
    return values, target[tuple(there)].write(stored[tuple(here)])


def _arrive(
    path: str, parts: Mapping[Index, Part], abstract: Mapping[str, jax.ShapeDtypeStruct], read: dict[str, jax.Array]
) -> None:
    leaf = abstract[path]
    for _, written in parts.values():
        written.result()
    read[path] = jax.make_array_from_callback(
        leaf.shape, leaf.sharding, lambda place: parts[_index(place, leaf.shape)][0]
    )


def _index(place: tuple[slice, ...] | None, shape: tuple[int, ...]) -> Index:
    assert place is not None
    return tuple(part.indices(size)[:2] for part, size in zip(place, shape, strict=True))


def _num_bytes(leaf: jax.ShapeDtypeStruct, parts: Mapping[Index, Part]) -> int:
    return leaf.dtype.itemsize * sum(math.prod(b - a for a, b in index) for index in parts)
