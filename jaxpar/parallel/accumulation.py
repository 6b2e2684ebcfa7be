"""Gradients of a batch computed a microbatch at a time."""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from jaxpar.parallel.constrain import constrain, constrain_gradient, num_shards
from jaxpar.parallel.rules import LogicalAxes

__all__ = ["accumulated", "microbatches"]


def accumulated(
    gradients: Callable, num_microbatches: int, by_path: Callable[[Any], Mapping], names: Mapping[str, LogicalAxes]
) -> Callable:
    """`gradients(params, batch, keys, weight)` summed over equal parts of the batch in float32, in one scanned loop.

    The results are sums over tokens, weighted alike in every part, so that unequal numbers of valid tokens in the parts
    do not matter. Each part has sequences of every device.

    Args:
      gradients: returns gradients and a dict of sums.
      by_path: from a pytree of gradients to path → gradient; `names` has the logical axes of each.
    """
    if num_microbatches == 1:
        return gradients

    def in_place(grads: Any) -> Any:
        placed = [constrain_gradient(gradient, names[path]) for path, gradient in by_path(grads).items()]
        return jax.tree.unflatten(jax.tree.structure(grads), placed)

    def summed(params: Any, batch: Any, keys_B: jax.Array | None, weight: jax.Array) -> tuple[Any, dict]:
        parts = microbatches((batch, keys_B), num_microbatches)
        shapes = jax.eval_shape(gradients, params, *jax.tree.map(lambda x: x[0], parts), weight)
        grads, sums = jax.tree.map(lambda shape: jnp.zeros(shape.shape, jnp.float32), shapes)

        def add(total: tuple[Any, dict], part: tuple) -> tuple[tuple[Any, dict], None]:
            grads, sums = jax.tree.map(
                lambda old, new: old + new.astype(jnp.float32), total, gradients(params, *part, weight)
            )
            return (in_place(grads), sums), None

        total, _ = jax.lax.scan(add, (in_place(grads), sums), parts)
        return total

    return summed


def microbatches(batch: Any, number: int) -> Any:
    """Arrays [B, ...] as [number, B / number, ...], each part with sequences of every device that shares the batch."""
    num_devices = num_shards("batch")

    def split(x: jax.Array) -> jax.Array:
        own = x.reshape(num_devices, number, -1, *x.shape[1:])
        parts = jnp.swapaxes(own, 0, 1).reshape(number, -1, *x.shape[1:])
        return constrain(parts, (None, "batch", *(("sequence",) if x.ndim > 1 else ())))

    return jax.tree.map(split, batch)
