"""The loop over a stage's layers where the backward pass is split: two loops instead of one."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jaxpar.parallel.pipeline.backward import CutVjp, SplitBackward

__all__ = ["split_loop"]

Turn = Callable[[Any, Any, tuple[jax.Array, Any]], Any]
"""`(extras, carry, (number, weights of this turn)) -> carry`."""


def split_loop(turn: Turn, carry: Any, turns: jax.Array, weights: Any, extras: Any, *, unroll: bool) -> Any:
    """`carry` after `turn(extras, carry, (number, weights of this turn))` for each of `turns`.

    The backward pass is a loop for the carry's gradient and, after it, one for the weights' gradients, each of which
    `SplitBackward` can put at another tick.

    What the second needs of the first, the cotangents within a layer, is kept for each turn.
    """
    is_float = [jnp.issubdtype(leaf.dtype, jnp.floating) for leaf in jax.tree.leaves(extras)]
    cut = CutVjp(
        lambda weights, x, context: turn(_joined(x[1], context[1], is_float, extras), x[0], (context[0], weights))
    )
    split = SplitBackward(cut.backward)

    # Whatever the backward pass needs must come to it from the forward pass, which was traced in another branch.
    @jax.custom_vjp
    def loop(weights: Any, carry: Any, floats: list, others: list, turns: jax.Array) -> Any:
        return forward(weights, carry, floats, others, turns)[0]

    def forward(weights: Any, carry: Any, floats: list, others: list, turns: jax.Array) -> tuple[Any, Any]:
        def one(carry: Any, item: tuple) -> tuple[Any, list[jax.Array]]:
            return cut.forward(item[1], (carry, floats), (item[0], others))

        carry, residuals = jax.lax.scan(one, carry, (turns, weights), unroll=unroll)
        return carry, (weights, floats, others, turns, residuals)

    def backward(kept: Any, cotangent: Any) -> tuple[Any, Any, list, None, None]:
        weights, floats, others, turns, residuals = kept

        def inputs(state: tuple, item: tuple) -> tuple[tuple, list[jax.Array]]:
            cotangent, sums = state
            index, weights, residuals = item
            (cotangent, more), crossing = split.inputs(weights, (index, others), residuals, cotangent)
            return (cotangent, jax.tree.map(jnp.add, sums, more)), crossing

        start = (cotangent, jax.tree.map(jnp.zeros_like, floats))
        items = (turns, weights, residuals)
        (cotangent, sums), crossing = jax.lax.scan(inputs, start, items, reverse=True, unroll=unroll)

        def gradients(_: None, item: tuple) -> tuple[None, Any]:
            index, weights, crossing = item
            return None, split.weights(weights, (index, others), crossing)

        _, gradient = jax.lax.scan(gradients, None, (turns, weights, crossing), unroll=unroll)
        return gradient, cotangent, sums, None, None

    loop.defvjp(forward, backward)
    return loop(weights, carry, *_parted(extras, is_float), turns)


def _parted(extras: Any, is_float: list[bool]) -> tuple[list, list]:
    leaves = jax.tree.leaves(extras)
    return (
        [leaf for leaf, chosen in zip(leaves, is_float, strict=True) if chosen],
        [leaf for leaf, chosen in zip(leaves, is_float, strict=True) if not chosen],
    )


def _joined(floats: list, others: list, is_float: list[bool], like: Any) -> Any:
    sources = iter(floats), iter(others)
    return jax.tree.unflatten(jax.tree.structure(like), [next(sources[0 if chosen else 1]) for chosen in is_float])
