"""Which rows of a batch a process must read, and global arrays made of what each process has."""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Sharding

__all__ = ["from_own_rows", "from_whole", "own_rows"]


def own_rows(sharding: Sharding, num_rows: int, row_length: int) -> tuple[int, ...]:
    """The rows of a [num_rows, row_length] array that this process's devices hold, ascending.

    Where devices of several processes share rows (along `tensor`, `pipe` and `context`), each of the processes reads
    them.
    """
    indices = sharding.addressable_devices_indices_map((num_rows, row_length))
    return tuple(sorted({row for index in indices.values() for row in range(num_rows)[_rows(index)]}))


def from_own_rows(
    rows: Sequence[int], arrays: Mapping[str, Any], sharding: Sharding, num_rows: int
) -> dict[str, jax.Array]:
    """Global arrays of `num_rows` rows, of which each process gives its own; the transfer goes on in the background.

    `arrays` hold the rows that `own_rows` named, in that order.
    """
    own = np.asarray(rows)

    def make(array: np.ndarray) -> jax.Array:
        assert len(array) == len(own)

        shape = (num_rows, *array.shape[1:])

        def part(index: tuple[slice, ...] | None) -> np.ndarray:
            assert index is not None
            first, last, _ = _rows(index).indices(num_rows)
            start = int(np.searchsorted(own, first))
            return array[start : start + last - first][:, index[1]]

        indices = sharding.addressable_devices_indices_map(shape)
        # Put on devices by name: jax.make_array_from_callback is refused where transfers must be asked for.
        parts = jax.device_put([part(index) for index in indices.values()], list(indices))
        return jax.make_array_from_single_device_arrays(shape, sharding, parts)

    return {name: make(array) for name, array in arrays.items()}


def from_whole(value: np.ndarray | np.generic, sharding: Sharding) -> jax.Array:
    """The global array of which every process has all entries.

    `jax.device_put` would do, but first compares the processes' values by a program on all devices.
    """
    value = np.asarray(value)
    places = sharding.addressable_devices_indices_map(value.shape)
    parts = jax.device_put([value[index] for index in places.values()], list(places))
    return jax.make_array_from_single_device_arrays(value.shape, sharding, parts)


def _rows(index: tuple[slice, ...] | None) -> slice:
    assert index is not None
    return index[0]
