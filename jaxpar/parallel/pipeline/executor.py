"""Runs a schedule's table: one shard_map, manual over `pipe`, in which each rank reads its own column.

A tick is a task on each rank and a permute of what the tasks made. Nothing is differentiated through the loop over
ticks: a forward task keeps the residuals of its stage in a slot of a buffer, the backward task takes them from there,
so that memory is what the schedule keeps in flight, whatever the number of microbatches. The other mesh axes stay with
the automatic partitioner.

Where all ranks run the same kind of task in a tick, they run it together, and idle ranks drop the result: then a stage
may contain any collective. In other tables each rank branches on its own task, and a stage may contain reductions and
gathers of its own devices only: a collective-permute would wait for ranks that are in another branch.
Embedding, head and loss are always in a branch of the rank that has them.

Shapes: R ranks, V chunks of a rank, n layers of a chunk (padded), m microbatches, X what travels between stages.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from jaxpar.parallel.pipeline.backward import CutVjp, SplitBackward, reads
from jaxpar.parallel.pipeline.divergence import AXIS
from jaxpar.parallel.pipeline.routing import RoutedSchedule
from jaxpar.parallel.pipeline.schedule import Kind
from jaxpar.parallel.pipeline.tick_loops import KnownTick, loops

__all__ = ["PipelineFunctions", "Results", "pipeline_gradients", "pipeline_sums"]

Tree = Any
Item = Any
"""What a microbatch brings: a pytree of arrays."""


@dataclass(frozen=True)
class PipelineFunctions:
    """A model in parts. All are traced inside the shard_map.

    `embed(shared, item) -> X`. `layers(chunk's weights, X, item, stage) -> (X, auxiliary)`, with the stage's number as
    a traced int32, and of auxiliary losses and other sums a pytree of float32 arrays. `head(shared, X, item) -> (loss,
    sums)`: the loss summed over the microbatch, float32, and a dict of float32 sums to report. `place_stacked`,
    `place_shared` lay out gradients, [V, n, ...] and whole.
    """

    embed: Callable[[Tree, Item], jax.Array]
    layers: Callable[[Tree, jax.Array, Item, jax.Array], tuple[jax.Array, Tree]]
    head: Callable[[Tree, jax.Array, Item], tuple[jax.Array, dict[str, jax.Array]]]
    place_stacked: Callable[[Tree], Tree] = lambda tree: tree
    place_shared: Callable[[Tree], Tree] = lambda tree: tree


class Results(NamedTuple):
    """Sums over all microbatches: gradients of weight · loss + Σ auxiliary_weights · auxiliary sums in float32, the
    head's sums, the auxiliary ones."""

    stacked: Tree
    shared: Tree
    sums: dict[str, jax.Array]
    auxiliary: Tree


def pipeline_gradients(
    functions: PipelineFunctions,
    routed: RoutedSchedule,
    stacked: Tree,
    shared: Tree,
    items: Item,
    *,
    weight: jax.Array,
    auxiliary_weights: Tree,
) -> Results:
    """Gradients of a model on the microbatches `items`.

    Args:
      stacked: weights of the layers, [R·V·n, ...], those of rank r's chunk c from (r·V + c)·n on, split over `pipe`.
      shared: all other weights, the same on every rank.
      items: [m, ...] each.
      auxiliary_weights: a pytree like that of the auxiliary sums.
    """
    return _on_ranks(_Rank, functions, routed, stacked, shared, items, (weight, auxiliary_weights))


def pipeline_sums(
    functions: PipelineFunctions, routed: RoutedSchedule, stacked: Tree, shared: Tree, items: Item
) -> dict[str, jax.Array]:
    """The head's sums over the microbatches `items`, by forward tasks alone; arguments as of `pipeline_gradients`."""
    return _on_ranks(_ForwardRank, functions, routed, stacked, shared, items, ()).sums


def _on_ranks(
    kind: "type[_Rank]",
    functions: PipelineFunctions,
    routed: RoutedSchedule,
    stacked: Tree,
    shared: Tree,
    items: Item,
    weights: tuple,
) -> Results:
    num_chunks = routed.schedule.geometry.num_chunks

    def local(stacked: Tree, shared: Tree, items: Item, rows: Mapping[str, jax.Array], weights: tuple) -> Results:
        chunks = jax.tree.map(lambda a: a.reshape(num_chunks, -1, *a.shape[1:]), stacked)
        return kind(functions, routed, chunks, shared, items, *weights).run(rows)

    whole, split = PartitionSpec(), PartitionSpec(AXIS)
    rows = {name: jnp.asarray(column) for name, column in routed.arrays.items()}
    rows["tick_kind"] = jnp.asarray(routed.kind.max(axis=1))
    column_specs = {name: PartitionSpec(None, AXIS) if column.ndim == 2 else whole for name, column in rows.items()}
    return jax.shard_map(
        local,
        in_specs=(split, whole, whole, column_specs, whole),
        out_specs=Results(split, whole, whole, whole),  # type: ignore[arg-type]
        axis_names={AXIS},
        check_vma=False,
    )(stacked, shared, items, rows, weights)


class _State(NamedTuple):
    """What a rank carries from tick to tick; a slot of `received` beyond the last is written where nothing arrives."""

    received: jax.Array
    """[slots + 1, X]"""
    sent: jax.Array
    """What this rank's task of the tick before made: X."""
    residuals: list[jax.Array]
    """[slots, ...] each: from a forward to its backward."""
    crossing: list[jax.Array]
    """[slots, ...] each: from a split backward to its weights' gradients."""
    sums: "_Sums"


class _Sums(NamedTuple):
    stacked: Tree
    shared: list[jax.Array]
    head: dict[str, jax.Array]
    auxiliary: Tree


class _Slots(NamedTuple):
    """The one slot of each buffer that a task reads and writes: whole buffers in a conditional would be copied."""

    residuals: list[jax.Array]
    crossing: list[jax.Array]


class _Tick(NamedTuple):
    """What a rank knows of its task, traced unless noted."""

    row: dict[str, Any]
    item: Item
    weights: Tree
    """Of the chunk: [n, ...]."""

    @property
    def context(self) -> tuple[Item, jax.Array]:
        return self.item, self.row["stage"]


class _Rank:
    """One rank's part of the program."""

    def __init__(
        self,
        functions: PipelineFunctions,
        routed: RoutedSchedule,
        chunks: Tree,
        shared: Tree,
        items: Item,
        *weights: Tree,
    ) -> None:
        geometry = routed.schedule.geometry
        self._functions, self._routed, self._chunks, self._items = functions, routed, chunks, items
        self._shared, self._shared_tree = jax.tree.flatten(shared)
        self._weights_of_losses = weights
        self._is_split, self._hop = geometry.split, geometry.hop
        self._num_ranks, self._num_chunks = geometry.num_ranks, geometry.num_chunks
        self._is_aligned = routed.schedule.aligned
        self._cut = CutVjp(lambda weights, x, context: functions.layers(weights, x, *context))
        self._split = SplitBackward(self._cut.backward)

    def run(self, rows: Mapping[str, jax.Array]) -> Results:
        """All ticks, and the sums over ranks."""
        state = self._start(rows)
        for ticks, known in loops(self._routed):
            state = self._loop(state, {name: column[ticks] for name, column in rows.items()}, known)
        sums = state.sums
        # In float32: XLA:CPU crashes at sums of 16 bits in a shard_map that is manual over some axes only.
        shared, head, auxiliary = jax.lax.psum((sums.shared, sums.head, sums.auxiliary), AXIS)
        stacked = jax.tree.map(lambda a: a.reshape(-1, *a.shape[2:]), sums.stacked)
        return Results(stacked, jax.tree.unflatten(self._shared_tree, shared) if shared else None, head, auxiliary)

    def _loop(self, state: _State, rows: Mapping[str, jax.Array], known: Sequence[KnownTick | None]) -> _State:
        """A scan over groups of ticks, as many as `known` has."""
        group = len(known)
        grouped = {name: column.reshape(-1, group, *column.shape[1:]) for name, column in rows.items()}

        def turn(state: _State, rows: Mapping[str, jax.Array]) -> tuple[_State, None]:
            for place in range(group):
                row = {name: column[place] for name, column in rows.items()}
                row = {name: value[0] if value.ndim else value for name, value in row.items()}
                state = self._tick(state, row, known[place])
            return state, None

        return jax.lax.scan(turn, state, grouped)[0]

    def _tick(self, state: _State, row: dict[str, jax.Array], known: KnownTick | None) -> _State:
        """One tick: exchange, task, exchange (one of the two, as `hop` says)."""
        tick = self._task_of(row)
        slots = _Slots(_at(state.residuals, row["residual_slot"]), _at(state.crossing, row["weight_slot"]))
        inputs = _at(state.received, row["input_slot"]), _at(state.received, row["cotangent_slot"])
        arriving = self._exchanged(state.sent, row, known) if self._hop == 2 else None
        kind = None if known is None else known.kind
        made, slots, sums = self._task(tick, inputs, slots, state.sums, kind)
        arriving = self._exchanged(made, row, known) if arriving is None else arriving
        received = state.received
        for slot, value in zip(("from_previous", "from_next", "own_slot"), (*arriving, made), strict=True):
            received = _put(received, row[slot], value)
        residuals, crossing = state.residuals, state.crossing
        if kind in (None, Kind.FORWARD):
            residuals = _put(residuals, row["residual_slot"], slots.residuals)
        if kind in (None, Kind.BACKWARD) and self._is_split:
            crossing = _put(crossing, row["weight_slot"], slots.crossing)
        return _State(received, made, residuals, crossing, sums)

    def _exchanged(
        self, made: jax.Array, row: dict[str, jax.Array], known: KnownTick | None
    ) -> tuple[jax.Array, jax.Array]:
        """What arrives from the rank before and from the one behind; where no rank sends, whatever."""

        def permuted(step: int) -> jax.Array:
            ring = [(rank, (rank + step) % self._num_ranks) for rank in range(self._num_ranks)]
            return jax.lax.ppermute(made, AXIS, ring)

        if known is not None:
            return permuted(1) if known.from_previous else made, permuted(-1) if known.from_next else made
        if self._hop == 2:
            # In a branch it could not run beside the task.
            return permuted(1), permuted(-1)
        # The same branch on every rank.
        return (
            jax.lax.cond(row["any_from_previous"], lambda: permuted(1), lambda: made),
            jax.lax.cond(row["any_from_next"], lambda: permuted(-1), lambda: made),
        )

    def _task(
        self, tick: _Tick, inputs: tuple[jax.Array, jax.Array], slots: _Slots, sums: _Sums, known: Kind | None
    ) -> tuple[jax.Array, _Slots, _Sums]:
        """What the rank's task makes: X for another stage, and what it changes."""
        x, cotangent = inputs

        def idle(slots: _Slots, sums: _Sums) -> tuple[jax.Array, _Slots, _Sums]:
            return jnp.zeros_like(x), slots, sums

        tasks: list[Callable[[_Slots, _Sums], tuple[jax.Array, _Slots, _Sums]]] = [
            idle,
            partial(self._forward, tick, x),
            partial(self._backward, tick, cotangent),
            *([partial(self._weights, tick, x)] if self._is_split else []),
        ]
        if known is not None:
            return tasks[known](slots, sums)
        kind = tick.row["tick_kind"] if self._is_aligned else tick.row["kind"]
        return jax.lax.switch(kind, [_plain(task) for task in tasks], slots, sums)

    def _forward(self, tick: _Tick, x: jax.Array, slots: _Slots, sums: _Sums) -> tuple[jax.Array, _Slots, _Sums]:
        item = tick.item
        x = _branch(tick.row["is_first"], lambda: self._functions.embed(self._shared_whole(), item), lambda: x)
        (y, auxiliary), residuals = self._cut.forward(tick.weights, x, tick.context)
        auxiliary = self._active(tick, auxiliary, jax.tree.map(jnp.zeros_like, auxiliary))
        sums = sums._replace(auxiliary=jax.tree.map(jnp.add, sums.auxiliary, auxiliary))
        slots = slots._replace(residuals=self._active(tick, residuals, slots.residuals))

        def head(shared: list[jax.Array], head: dict[str, jax.Array]) -> tuple[jax.Array, list, dict]:
            def loss(used: list[jax.Array], y: jax.Array) -> tuple[jax.Array, dict[str, jax.Array]]:
                total, found = self._functions.head(self._shared_whole(used, self._used_by_head), y, item)
                return self._weights_of_losses[0] * total, found

            used = _chosen(self._shared, self._used_by_head)
            (dused, dy), found = jax.grad(loss, (0, 1), has_aux=True)(used, y)
            return dy, self._added(shared, dused, self._used_by_head), jax.tree.map(jnp.add, head, found)

        made, shared, found = _branch(
            tick.row["is_last"], head, lambda shared, head: (y, shared, head), sums.shared, sums.head
        )
        return made, slots, sums._replace(shared=shared, head=found)

    def _backward(
        self, tick: _Tick, cotangent: jax.Array, slots: _Slots, sums: _Sums
    ) -> tuple[jax.Array, _Slots, _Sums]:
        cotangents = cotangent, self._weights_of_losses[1]
        if self._is_split:
            dx, crossing = self._split.inputs(tick.weights, tick.context, slots.residuals, cotangents)
            slots = slots._replace(crossing=self._active(tick, crossing, slots.crossing))
        else:
            dweights, dx = self._cut.backward(tick.weights, tick.context, slots.residuals, cotangents)
            sums = self._with_gradient(tick, sums, dweights)

        def embedding(shared: list[jax.Array]) -> list[jax.Array]:
            def embed(used: list[jax.Array]) -> jax.Array:
                return self._functions.embed(self._shared_whole(used, self._used_by_embed), tick.item)

            _, pullback = jax.vjp(embed, _chosen(self._shared, self._used_by_embed))
            return self._added(shared, pullback(dx)[0], self._used_by_embed)

        shared = _branch(tick.row["is_first"], embedding, lambda shared: shared, sums.shared)
        return dx, slots, sums._replace(shared=shared)

    def _weights(self, tick: _Tick, x: jax.Array, slots: _Slots, sums: _Sums) -> tuple[jax.Array, _Slots, _Sums]:
        gradient = self._split.weights(tick.weights, tick.context, slots.crossing)
        return jnp.zeros_like(x), slots, self._with_gradient(tick, sums, gradient)

    def _with_gradient(self, tick: _Tick, sums: _Sums, gradient: Tree) -> _Sums:
        gradient = self._active(tick, gradient, jax.tree.map(jnp.zeros_like, gradient))
        chunk = tick.row["chunk"]
        total = jax.tree.map(lambda sum_, new: sum_.at[chunk].add(new.astype(sum_.dtype)), sums.stacked, gradient)
        return sums._replace(stacked=self._functions.place_stacked(total))

    def _active(self, tick: _Tick, new: Tree, old: Tree) -> Tree:
        """`new` on the ranks that have a task; where each runs its own, only those come here."""
        if not self._is_aligned:
            return new
        is_active = tick.row["kind"] != Kind.IDLE
        return jax.tree.map(lambda a, b: jnp.where(is_active, a, b), new, old)

    def _shared_whole(self, leaves: Sequence[jax.Array] | None = None, used: Sequence[bool] = ()) -> Tree:
        """The shared weights, those that are `used` taken from `leaves`."""
        if leaves is None:
            return jax.tree.unflatten(self._shared_tree, self._shared)
        given = iter(leaves)
        return jax.tree.unflatten(
            self._shared_tree, [next(given) if u else own for own, u in zip(self._shared, used, strict=True)]
        )

    def _added(self, sums: list[jax.Array], gradients: list[jax.Array], used: Sequence[bool]) -> list[jax.Array]:
        given = iter(gradients)
        total = [a + next(given).astype(a.dtype) if u else a for a, u in zip(sums, used, strict=True)]
        return jax.tree.leaves(self._functions.place_shared(jax.tree.unflatten(self._shared_tree, total)))

    def _first_tick(self, rows: Mapping[str, jax.Array]) -> _Tick:
        row = {name: column[0, 0] if column.ndim == 2 else column[0] for name, column in rows.items()}
        return self._task_of(row)

    def _task_of(self, row: dict[str, Any]) -> _Tick:
        # A traced index would copy the only chunk at every tick.
        chunk = row["chunk"] if self._num_chunks > 1 else 0
        return _Tick(row | {"chunk": chunk}, _at(self._items, row["microbatch"]), _at(self._chunks, chunk))

    def _shapes(self, tick: _Tick) -> tuple[jax.ShapeDtypeStruct, dict[str, jax.ShapeDtypeStruct]]:
        """Of what travels between stages, and of the head's sums."""
        functions, shared = self._functions, self._shared_whole()
        x = jax.eval_shape(lambda: functions.embed(shared, tick.item))
        y, _ = jax.eval_shape(lambda x: functions.layers(tick.weights, x, *tick.context), x)
        if (y.shape, y.dtype) != (x.shape, x.dtype):
            raise ValueError(
                f"the model's embed gives {x.dtype}{list(x.shape)}, its layers {y.dtype}{list(y.shape)}; what travels "
                "between pipeline stages must have one shape and dtype"
            )
        return x, jax.eval_shape(lambda x: functions.head(shared, x, tick.item)[1], x)

    def _start(self, rows: Mapping[str, jax.Array]) -> _State:
        """Empty buffers, of the shapes that one tick makes."""
        tick = self._first_tick(rows)
        x, found = self._shapes(tick)
        embed, head = self._functions.embed, self._functions.head
        self._used_by_embed = reads(lambda shared: embed(shared, tick.item), self._shared_whole())
        self._used_by_head = reads(lambda shared, x: head(shared, x, tick.item), self._shared_whole(), x)
        (_, auxiliary), residuals = jax.eval_shape(lambda x: self._cut.forward(tick.weights, x, tick.context), x)
        crossing = []
        if self._is_split:
            cotangents = x, self._weights_of_losses[1]
            _, crossing = jax.eval_shape(
                lambda *given: self._split.inputs(tick.weights, tick.context, *given), residuals, cotangents
            )
        routed = self._routed
        zeros = partial(jax.tree.map, lambda a: jnp.zeros(a.shape, jnp.float32))
        stacked = self._functions.place_stacked(zeros(self._chunks))
        shared = self._functions.place_shared(zeros(self._shared_whole()))
        return _State(
            received=_buffer(routed.num_receive_slots + 1, x),
            sent=jnp.zeros(x.shape, x.dtype),
            residuals=_buffer(routed.num_residual_slots, residuals),
            crossing=_buffer(routed.num_weight_slots, crossing),
            sums=_Sums(stacked, jax.tree.leaves(shared), zeros(found), zeros(auxiliary)),
        )


class _ForwardRank(_Rank):
    """A rank where there is nothing but forward tasks: no residuals, no gradients."""

    def _forward(self, tick: _Tick, x: jax.Array, slots: _Slots, sums: _Sums) -> tuple[jax.Array, _Slots, _Sums]:
        embed, head, shared = self._functions.embed, self._functions.head, self._shared_whole()
        x = _branch(tick.row["is_first"], lambda: embed(shared, tick.item), lambda: x)
        y, _ = self._functions.layers(tick.weights, x, *tick.context)
        found = _branch(
            tick.row["is_last"],
            lambda before: jax.tree.map(jnp.add, before, head(shared, y, tick.item)[1]),
            lambda before: before,
            sums.head,
        )
        return y, slots, sums._replace(head=found)

    def _start(self, rows: Mapping[str, jax.Array]) -> _State:
        tick = self._first_tick(rows)
        x, found = self._shapes(tick)
        sums = _Sums(None, [], jax.tree.map(lambda a: jnp.zeros(a.shape, jnp.float32), found), None)
        return _State(_buffer(self._routed.num_receive_slots + 1, x), jnp.zeros(x.shape, x.dtype), [], [], sums)


def _branch(condition: jax.Array, true: Callable, false: Callable, *arguments: Any) -> Any:
    return jax.lax.cond(condition, _plain(true), _plain(false), *arguments)


def _plain(branch: Callable) -> Callable:
    """The branch with results that say nothing of how they are laid out: XLA refuses a conditional whose branches say
    different things ("Inconsistent conditional sharding")."""
    return lambda *arguments: jax.lax.optimization_barrier(branch(*arguments))


def _chosen(leaves: Sequence[jax.Array], used: Sequence[bool]) -> list[jax.Array]:
    return [leaf for leaf, chosen in zip(leaves, used, strict=True) if chosen]


def _at(tree: Tree, index: jax.Array | int) -> Tree:
    return jax.tree.map(lambda a: jax.lax.dynamic_index_in_dim(a, index, keepdims=False), tree)


def _put(tree: Tree, index: jax.Array, new: Tree) -> Tree:
    return jax.tree.map(lambda a, b: jax.lax.dynamic_update_index_in_dim(a, b, index, 0), tree, new)


def _buffer(num_slots: int, like: Tree) -> Tree:
    return jax.tree.map(lambda a: jnp.zeros((num_slots, *a.shape), a.dtype), like)
