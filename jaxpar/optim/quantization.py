"""Blockwise dynamic 8-bit codes (Dettmers 2022, sections 2.1 and 3; dynamic codes: Dettmers 2016).

A block is `block_size` neighbours along the last dim (the last one may be shorter); its scale is its largest absolute
value. An element divided by its block's scale is kept as the index of the nearest of 256 values. These are spaced as in
a floating-point format whose exponent, of base ten, takes as many bits as it needs: e zero bits, a one, and the rest is
a fraction, so that values near 1 are fine and values down to a millionth are there.
"""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np

__all__ = ["code_values", "dequantized", "num_blocks", "quantized", "zero_code"]

_DECADES = 7


@functools.cache
def code_values(*, signed: bool) -> np.ndarray:
    """The 256 values in rising order, float32.

    In the decade 10^-e to 10^-(e+1) stand the middles of 2^(b−e) equal parts, e = 0, ..., 6. The unsigned code spends
    its bit on the fraction (b = 7 instead of 6). 0 and 1 complete it.

    >>> values = code_values(signed=True)
    >>> len(values), float(values[0]), float(values[127]), float(values[-1])
    (256, -0.992968738079071, 0.0, 1.0)
    """
    bits = 6 if signed else 7
    positive: list[float] = []
    for decade in range(_DECADES):
        num_parts = 2 ** (bits - decade)
        middles = 0.1 + 0.9 * (np.arange(num_parts) + 0.5) / num_parts
        positive += (middles * 10.0**-decade).tolist()
    negative = [-value for value in positive] if signed else []
    values = np.array(sorted([*negative, 0.0, *positive, 1.0]), np.float32)
    values.setflags(write=False)
    return values


def zero_code(*, signed: bool) -> int:
    """The code of 0."""
    return int(np.searchsorted(code_values(signed=signed), 0.0))


def num_blocks(size: int, block_size: int) -> int:
    """Blocks along a dim of `size`."""
    return math.ceil(size / block_size)


def quantized(x: jax.Array, block_size: int, *, signed: bool) -> tuple[jax.Array, jax.Array]:
    """Codes of the shape of `x` (uint8) and scales [..., num_blocks] (float32).

    An unsigned value that is not 0 never becomes 0: Adam divides by its root.
    """
    scales = _largest(jnp.abs(x), block_size)
    per_element = _per_element(scales, x.shape[-1], block_size)
    normalised = x / jnp.where(per_element > 0, per_element, 1.0)
    values = code_values(signed=signed)
    codes = jnp.searchsorted((values[:-1] + values[1:]) / 2, normalised, method="scan_unrolled").astype(jnp.uint8)
    if not signed:
        codes = jnp.where(x > 0, jnp.maximum(codes, 1), codes)
    return codes, scales


def dequantized(codes: jax.Array, scales: jax.Array, block_size: int, *, signed: bool) -> jax.Array:
    """The float32 values of the shape of `codes`."""
    values = jnp.asarray(code_values(signed=signed)).at[codes].get(mode="promise_in_bounds")
    return values * _per_element(scales, codes.shape[-1], block_size)


def _largest(x: jax.Array, block_size: int) -> jax.Array:
    """The largest of each block, [..., num_blocks]."""
    size, blocks = x.shape[-1], num_blocks(x.shape[-1], block_size)
    padded = jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, blocks * block_size - size)])
    return padded.reshape(*x.shape[:-1], blocks, block_size).max(-1)


def _per_element(scales: jax.Array, size: int, block_size: int) -> jax.Array:
    return jnp.repeat(scales, block_size, axis=-1)[..., :size]
