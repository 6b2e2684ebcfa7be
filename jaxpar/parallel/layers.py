"""Runs a stack of layers: scanned or unrolled, with what the remat policy recomputes."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jaxpar.parallel.constrain import current_execution

__all__ = ["REMAT_POLICIES", "scan_layers"]

Body = Callable[[Any, jax.Array, Any, jax.Array, int], jax.Array]


def _everything(body: Callable) -> Callable:
    return body


def _nothing(body: Callable) -> Callable:
    return jax.checkpoint(body, policy=jax.checkpoint_policies.nothing_saveable)


def _dots(body: Callable) -> Callable:
    policies = jax.checkpoint_policies
    policy = policies.save_from_both_policies(
        policies.dots_with_no_batch_dims_saveable,
        policies.save_only_these_names("attention_output", "attention_logsumexp"),
    )
    return jax.checkpoint(body, policy=policy)


REMAT_POLICIES: dict[str, Callable[[Callable], Callable]] = {"none": _everything, "full": _nothing, "dots": _dots}
"""`remat.policy` → the wrapper of one layer's body."""


def scan_layers(
    body: Body, carry: jax.Array, stacked: Any, extras: Any, *, num_layers: int, period: int = 1
) -> jax.Array:
    """`carry` after `num_layers` applications of `body(layer, carry, extras, layer_index, slot)`.

    Args:
      stacked: pytree of arrays whose first dim is the layer.
      extras: pytree of arrays that every layer sees.
      period: layers in one turn of the pattern; `slot` (0 <= slot < period) is the static position in it, so that
        layers may differ in what must be known when compiling, such as the window of their attention.
    """
    execution = current_execution()
    # One stack a slot, split outside the loop: what the backward pass needs of a weight is then the stack itself, not
    # a copy.
    stacks = (
        [jax.tree.map(lambda a, slot=slot: a[slot::period], stacked) for slot in range(period)]
        if period > 1
        else [stacked]
    )

    def turn(carry: jax.Array, item: tuple) -> tuple[jax.Array, None]:
        turn_index, layers = item
        for slot, layer in enumerate(layers):
            layer_body = execution.remat(lambda layer, x, extras, index, slot=slot: body(layer, x, extras, index, slot))
            carry = layer_body(layer, carry, extras, turn_index * period + slot)
        return carry, None

    carry, _ = jax.lax.scan(turn, carry, (jnp.arange(num_layers // period), stacks), unroll=execution.unroll_layers)
    return carry
