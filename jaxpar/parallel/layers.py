"""Runs a stack of layers, or of those that a pipeline stage has: scanned or unrolled, recomputed as the policy says."""

import contextlib
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxpar.parallel.constrain import current_execution, record_call
from jaxpar.parallel.offload import fetched, is_streamed
from jaxpar.parallel.pipeline.layer_loop import layer_loop

__all__ = ["REMAT_POLICIES", "Alternating", "StageLayers", "layers_left_out", "scan_layers", "stage_layers"]

Body = Callable[[Any, Any, Any, jax.Array, int], Any]


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


@dataclass(frozen=True)
class StageLayers:
    """The layers that a pipeline stage has: from the model's layer `first` on (traced), `count` of them (traced).

    The stacked weights have one size on all stages, so that some rows may be empty; `is_full` says that none is.
    """

    first: jax.Array
    count: jax.Array
    is_full: bool


@dataclass(frozen=True)
class Alternating:
    """Layers of different parameters in turn: layer i is entry i // n of stack i % n, of n stacks."""

    stacks: tuple[Any, ...]


_stage: ContextVar[StageLayers | None] = ContextVar("stage", default=None)


@contextlib.contextmanager
def stage_layers(layers: StageLayers) -> Iterator[None]:
    """A block in which `scan_layers` gets the weights of a stage's layers, and runs those."""
    token = _stage.set(layers)
    try:
        yield
    finally:
        _stage.reset(token)


_left_out: ContextVar[Callable[[int, Any], None] | None] = ContextVar("left_out", default=None)


@contextlib.contextmanager
def layers_left_out(note: Callable[[int, Any], None]) -> Iterator[None]:
    """A block in which `scan_layers` calls `note(number of layers, extras)` and returns what it was given: what is
    left is what a model does beside its layers."""
    token = _left_out.set(note)
    try:
        yield
    finally:
        _left_out.reset(token)


def scan_layers(body: Body, carry: Any, stacked: Any, extras: Any, *, num_layers: int, period: int = 1) -> Any:
    """`carry` after `num_layers` applications of `body(layer, carry, extras, layer_index, slot)`.

    Args:
      carry: pytree of arrays.
      stacked: pytree of arrays whose first dim is the layer; those in the host's memory are fetched layer by layer. Or
        `Alternating`, where layers differ in their parameters.
      extras: pytree of arrays that every layer sees.
      period: layers in one turn of the pattern; `slot` (0 <= slot < period) is the static position in it, so that
        layers may differ in what must be known when compiling, such as the window of their attention. A multiple of
        the number of alternating stacks.
    """
    stacks = stacked.stacks if isinstance(stacked, Alternating) else (stacked,)
    every = len(stacks)
    assert period % every == 0, (period, every)
    record_call("scan_layers", (num_layers, period))
    if (note := _left_out.get()) is not None:
        note(num_layers // every, extras)
        return carry
    execution, stage = current_execution(), _stage.get()
    opened = [_Stack(*jax.tree.flatten(stack, is_leaf=is_streamed)) for stack in stacks]
    # One stack a slot, split outside the loop: what the backward pass needs of a weight is then the stack itself, not
    # a copy.
    slots = [opened[slot % every].every(slot // every, period // every) for slot in range(period)]

    def turn(extras: Any, carry: Any, item: tuple) -> Any:
        turn_index, layers = item
        for slot, layer in enumerate(layers):
            whole_layer = partial(_whole_layer, body, opened[slot % every], every, slot)
            recomputed = execution.remat(whole_layer)
            place = turn_index * period + slot
            if stage is None:
                carry = recomputed(layer, carry, extras, place)
                continue
            after = recomputed(layer, carry, extras, stage.first + place)
            carry = after if stage.is_full else jax.tree.map(partial(jnp.where, place < stage.count), after, carry)
        return carry

    num_rows = num_layers if stage is None else opened[0].depth * every
    turns, unroll = jnp.arange(num_rows // period), execution.unroll_layers
    if stage is not None:
        return layer_loop(turn, carry, turns, slots, extras, split=execution.split_backward, unroll=unroll)
    return jax.lax.scan(lambda carry, item: (turn(extras, carry, item), None), carry, (turns, slots), unroll=unroll)[0]


class _Stack(NamedTuple):
    """A pytree of stacked arrays, or of what stands in for those on the host."""

    leaves: list[Any]
    tree: Any

    @property
    def _sliced(self) -> list[jax.Array]:
        return [leaf.proxy if is_streamed(leaf) else leaf for leaf in self.leaves]

    @property
    def depth(self) -> int:
        """Its layers."""
        return self._sliced[0].shape[0]

    def every(self, start: int, step: int) -> list[jax.Array]:
        """Every `step`-th layer from `start` on."""
        return [leaf[start::step] for leaf in self._sliced] if step > 1 else self._sliced


def _whole_layer(
    body: Body, stack: _Stack, every: int, slot: int, slices: list, carry: Any, extras: Any, index: jax.Array
) -> Any:
    """One layer, with its weights from wherever they are."""
    parts = [
        fetched(leaf, index // every, part) if is_streamed(leaf) else part
        for leaf, part in zip(stack.leaves, slices, strict=True)
    ]
    return body(jax.tree.unflatten(stack.tree, parts), carry, extras, index, slot)
