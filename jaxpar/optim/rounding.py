"""Stochastic rounding, and random bits that do not depend on how arrays are laid out."""

import zlib

import jax
import jax.numpy as jnp
import numpy as np

__all__ = ["random_key", "stochastically_rounded"]


def random_key(seed: int, name: str, count: jax.Array, layer: jax.Array | int) -> jax.Array:
    """A key that is a function of its arguments only: `name` is a parameter's path and the purpose."""
    key = jax.random.fold_in(jax.random.key(seed), np.uint32(zlib.crc32(name.encode())))
    return jax.random.fold_in(jax.random.fold_in(key, count), layer)


def stochastically_rounded(x: jax.Array, key: jax.Array) -> jax.Array:
    """The float32 `x` as bfloat16, rounded up or down with the probabilities that make the expectation `x`.

    bfloat16 is float32 without its lower 16 bits: 16 random bits are added to them, and the sum is cut off. The bits
    are drawn for the logical shape, so that the result is the same on every mesh.
    """
    noise = jax.random.bits(key, x.shape, jnp.uint16).astype(jnp.uint32)
    bits = (jax.lax.bitcast_convert_type(x, jnp.uint32) + noise) >> 16
    rounded = jax.lax.bitcast_convert_type(bits.astype(jnp.uint16), jnp.bfloat16)
    return jnp.where(jnp.isnan(x), jnp.asarray(jnp.nan, jnp.bfloat16), rounded)
