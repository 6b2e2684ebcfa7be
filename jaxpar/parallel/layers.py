"""Runs a stack of layers: scanned or unrolled, with what the remat policy recomputes."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jaxpar.parallel.constrain import current_execution, record_call
from jaxpar.parallel.offload import fetched, is_streamed

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
      stacked: pytree of arrays whose first dim is the layer; those in the host's memory are fetched layer by layer.
      extras: pytree of arrays that every layer sees.
      period: layers in one turn of the pattern; `slot` (0 <= slot < period) is the static position in it, so that
        layers may differ in what must be known when compiling, such as the window of their attention.
    """
    record_call("scan_layers")
    execution = current_execution()
    stacks, tree = jax.tree.flatten(stacked, is_leaf=is_streamed)
    sliced = [stack.proxy if is_streamed(stack) else stack for stack in stacks]
    # One stack a slot, split outside the loop: what the backward pass needs of a weight is then the stack itself, not
    # a copy.
    slots = (
        [jax.tree.map(lambda a, slot=slot: a[slot::period], sliced) for slot in range(period)]
        if period > 1
        else [sliced]
    )

    def whole_layer(slices: list, carry: jax.Array, extras: Any, index: jax.Array, slot: int) -> jax.Array:
        parts = [
            fetched(stack, index, part) if is_streamed(stack) else part
            for stack, part in zip(stacks, slices, strict=True)
        ]
        return body(jax.tree.unflatten(tree, parts), carry, extras, index, slot)

    def turn(carry: jax.Array, item: tuple) -> tuple[jax.Array, None]:
        turn_index, layers = item
        for slot, layer in enumerate(layers):
            recomputed = execution.remat(lambda layer, x, extras, i, slot=slot: whole_layer(layer, x, extras, i, slot))
            carry = recomputed(layer, carry, extras, turn_index * period + slot)
        return carry, None

    turns = jnp.arange(num_layers // period)
    carry, _ = jax.lax.scan(turn, carry, (turns, slots), unroll=execution.unroll_layers)
    return carry
