"""The loop over a stage's layers: what waits for the backward pass is activations, and the backward pass may be two."""

from collections.abc import Callable
from typing import Any

import jax

from jaxpar.parallel.pipeline.backward import CutVjp, SplitBackward

__all__ = ["layer_loop"]

Turn = Callable[[Any, Any, tuple[jax.Array, Any]], Any]
"""`(extras, carry, (number, weights of this turn)) -> carry`."""


def layer_loop(
    turn: Turn, carry: Any, turns: jax.Array, weights: Any, extras: Any, *, split: bool, unroll: bool
) -> Any:
    """`carry` after `turn(extras, carry, (number, weights of this turn))` for each of `turns`.

    Nothing is differentiated through the extras. What the backward pass of a turn needs that does not depend on the
    carry, such as weights rounded to float8, it makes again: a loop's own derivative would keep that for every
    microbatch in flight.

    With `split` the backward pass is a loop for the carry's gradient and, after it, one for the weights' gradients,
    each of which `SplitBackward` can put at another tick. What the second needs of the first, the cotangents within a
    layer, is kept for each turn.
    """
    cut = CutVjp(lambda weights, carry, context: turn(context[1], carry, (context[0], weights)))

    # Whatever the backward pass needs must come to it from the forward pass, which was traced in another branch.
    @jax.custom_vjp
    def loop(weights: Any, carry: Any, extras: Any, turns: jax.Array) -> Any:
        body = lambda carry, item: (turn(extras, carry, item), None)  # noqa: E731
        return jax.lax.scan(body, carry, (turns, weights), unroll=unroll)[0]

    def forward(weights: Any, carry: Any, extras: Any, turns: jax.Array) -> tuple[Any, Any]:
        def one(carry: Any, item: tuple) -> tuple[Any, list[jax.Array]]:
            return cut.forward(item[1], carry, (item[0], extras))

        carry, residuals = jax.lax.scan(one, carry, (turns, weights), unroll=unroll)
        return carry, (weights, extras, turns, residuals)

    def backward(kept: Any, cotangent: Any) -> tuple[Any, Any, None, None]:
        weights, extras, turns, residuals = kept
        loops = _two_loops if split else _one_loop
        cotangent, gradient = loops(cut, cotangent, (turns, weights, residuals), extras, unroll=unroll)
        return gradient, cotangent, None, None

    loop.defvjp(forward, backward)
    return loop(weights, carry, extras, turns)


def _one_loop(cut: CutVjp, cotangent: Any, items: tuple, extras: Any, *, unroll: bool) -> tuple[Any, Any]:
    """Gradients of the carry and of the weights."""

    def one(cotangent: Any, item: tuple) -> tuple[Any, Any]:
        number, weights, residuals = item
        gradient, cotangent = cut.backward(weights, (number, extras), residuals, cotangent)
        return cotangent, gradient

    return jax.lax.scan(one, cotangent, items, reverse=True, unroll=unroll)


def _two_loops(cut: CutVjp, cotangent: Any, items: tuple, extras: Any, *, unroll: bool) -> tuple[Any, Any]:
    """As `_one_loop`; the second of the gradients comes from a loop of its own."""
    split = SplitBackward(cut.backward)

    def inputs(cotangent: Any, item: tuple) -> tuple[Any, list[jax.Array]]:
        number, weights, residuals = item
        return split.inputs(weights, (number, extras), residuals, cotangent)

    def gradients(_: None, item: tuple) -> tuple[None, Any]:
        number, weights, crossing = item
        return None, split.weights(weights, (number, extras), crossing)

    cotangent, crossing = jax.lax.scan(inputs, cotangent, items, reverse=True, unroll=unroll)
    turns, weights, _ = items
    return cotangent, jax.lax.scan(gradients, None, (turns, weights, crossing), unroll=unroll)[1]
