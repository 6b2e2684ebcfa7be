"""Digests of arrays: 64 bits each, the same for every layout of the values over devices and on the host.

Each element is mixed with its place, and the results are summed modulo 2^32, which no order of summation changes:

    a = f(word XOR f(place)),  b = f(a + c·place),  digest = (Σ a, Σ b),  place = Σ over dims of (odd constant · index)

where f is MurmurHash3's finaliser, a bijection of 32 bits: a change of one element always shows, another change with
probability 1 − 2^-64. That guards against faults of memory, disks and networks, not against somebody who computes a
collision.

A dim may be padded: then the elements within the extent, the shape without padding, and those beyond have a digest
each. The place of an element along the first dim of a stack of layers is the layer's number, wherever the layer lies;
rows without a layer count in neither.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding

from jaxpar.extent import Extent
from jaxpar.parallel.dispatch import one_at_a_time
from jaxpar.parallel.offload import is_on_host
from jaxpar.parallel.pipeline.partition import EMPTY

__all__ = ["Digest", "digest_arrays", "digest_blocks"]

_WORDS = {1: "uint8", 2: "uint16", 4: "uint32", 8: "uint32"}


@dataclass(frozen=True)
class Digest:
    """Of the elements within the extent, and of those beyond; 16 hexadecimal digits each."""

    content: str
    padding: str


def digest_arrays(arrays: Mapping[str, jax.Array], extents: Mapping[str, Extent]) -> dict[str, Digest]:
    """The digest of each array, computed where it lies; one that is in the host's memory visits its device.

    Every process of a run must call this, and all get the same.
    """
    on_device = {path: array for path, array in arrays.items() if not is_on_host(array.sharding)}
    sums = _computed(tuple(on_device.values()), tuple(extents[path] for path in on_device))
    found = dict(zip(on_device, sums, strict=True))
    for path, array in arrays.items():
        if path not in found:
            # One after the other: together they may not fit.
            moved = jax.device_put(array, array.sharding.with_memory_kind("device"))
            (found[path],) = _computed((moved,), (extents[path],))
    return {path: _digest(found[path]) for path in arrays}


def digest_blocks(blocks: Iterable[tuple[int, np.ndarray]], shape: Sequence[int]) -> Digest:
    """The same digest of an array on the host that comes in blocks: (first index along the first dim, entries).

    `shape` is the extent's; the layers of a stack come in their order.

    >>> whole = np.arange(6, dtype=np.float32).reshape(2, 3)
    >>> one, padded = [(0, whole)], [(0, whole[:1]), (1, np.pad(whole[1:], ((0, 1), (0, 0))))]
    >>> digest_blocks(one, (2, 3)).content == digest_blocks(padded, (2, 3)).content
    True
    """
    sums = np.zeros(4, np.uint32)
    extent = Extent(tuple(shape) or (1,))
    with np.errstate(over="ignore"):
        for start, block in blocks:
            block = np.ascontiguousarray(block if block.ndim else block.reshape(1))
            itemsize = block.dtype.itemsize
            words = block.view(_WORDS[itemsize]).astype(np.uint32, copy=False)
            dims = (*block.shape, 2) if itemsize == 8 else block.shape
            sums += _sums(np, words.reshape(dims), _extent_of(itemsize, extent), start)
    return _digest(sums)


def _computed(arrays: tuple[jax.Array, ...], extents: tuple[Extent, ...]) -> list[np.ndarray]:
    if not arrays:
        return []
    shapes = tuple(jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=array.sharding) for array in arrays)
    return jax.device_get(_program(shapes, extents)(*arrays))


@lru_cache(maxsize=64)
def _program(shapes: tuple[jax.ShapeDtypeStruct, ...], extents: tuple[Extent, ...]) -> Callable[..., list[jax.Array]]:
    """The compiled sums of arrays of these shapes."""

    def sums(*arrays: jax.Array) -> list[jax.Array]:
        return [_sums_of(array, extent) for array, extent in zip(arrays, extents, strict=True)]

    sharding = shapes[0].sharding
    program = jax.jit(sums)
    if not isinstance(sharding, NamedSharding):
        return program
    assert isinstance(sharding.mesh, Mesh)
    return one_at_a_time(program, sharding.mesh)


def _sums_of(array: jax.Array, extent: Extent) -> jax.Array:
    if array.ndim == 0:
        array, extent = array.reshape(1), Extent((1,))
    if array.dtype == jnp.bool_:
        array = array.astype(jnp.uint8)
    itemsize = array.dtype.itemsize
    words = jax.lax.bitcast_convert_type(array, _WORDS[itemsize]).astype(jnp.uint32)
    return _sums(jnp, words, _extent_of(itemsize, extent), 0)


def _extent_of(itemsize: int, extent: Extent) -> Extent:
    return replace(extent, shape=(*extent.shape, 2)) if itemsize == 8 else extent


def _sums(xp: Any, words: Any, extent: Extent, start: int) -> Any:
    """Four sums: a and b of the content, a and b of the padding. `start` is the first index along the first dim."""
    place = xp.zeros((1,) * words.ndim, xp.uint32)
    inside = has_layer = None
    for dim, size in enumerate(words.shape):
        shape = tuple(size if other == dim else 1 for other in range(words.ndim))
        first = start if dim == 0 else 0
        index = xp.arange(first, first + size, dtype=xp.uint32).reshape(shape)
        if dim == 0 and extent.rows:
            rows = np.asarray(extent.rows).reshape(shape)
            index, has_layer = xp.asarray(rows.astype(np.uint32)), xp.asarray(rows != EMPTY)
        elif extent.shape[dim] < first + size:
            within = index < xp.uint32(extent.shape[dim])
            inside = within if inside is None else inside & within
        place = place + index * xp.uint32(_constant(dim))
    place = xp.broadcast_to(place, words.shape)
    a = _mixed(xp, words ^ _mixed(xp, place))
    b = _mixed(xp, a + place * xp.uint32(0x9E3779B1))
    if has_layer is not None:
        a, b = (xp.where(has_layer, each, xp.uint32(0)) for each in (a, b))
    content = (a, b)
    padding: tuple[Any, ...] = (xp.zeros(1, xp.uint32), xp.zeros(1, xp.uint32))
    if inside is not None:
        content, padding = (
            tuple(xp.where(chosen, each, xp.uint32(0)) for each in (a, b)) for chosen in (inside, ~inside)
        )
    return xp.stack([part.sum(dtype=xp.uint32) for part in (*content, *padding)])


def _mixed(xp: Any, word: Any) -> Any:
    """MurmurHash3's 32-bit finaliser."""
    word = (word ^ (word >> xp.uint32(16))) * xp.uint32(0x85EBCA6B)
    word = (word ^ (word >> xp.uint32(13))) * xp.uint32(0xC2B2AE35)
    return word ^ (word >> xp.uint32(16))


def _constant(dim: int) -> int:
    """An odd number for each dim, far from the multiples of the others'."""
    return (0x9E3779B97F4A7C15 * (2 * dim + 3) >> 24) & 0xFFFFFFFF | 1


def _digest(sums: np.ndarray) -> Digest:
    a, b, padding_a, padding_b = (int(value) for value in sums)
    return Digest(f"{a:08x}{b:08x}", f"{padding_a:08x}{padding_b:08x}")
