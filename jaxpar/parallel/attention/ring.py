"""Attention in which each device keeps its queries, and the keys and values of the others come to it.

Ring attention (Liu 2023): blocks of keys and values go around the devices that share the sequence, each sent on while
the one before is computed with, and an online softmax joins what they give. The backward pass goes around again, with
the blocks' gradients travelling along. "all_gather" has all blocks come at once instead (Llama 3, section 3.3.2), and
scatters their gradients.

Each device has two chunks of the sequence (`jaxpar.parallel.sequence_order`), so that against any block of another
device it has the same work: either all its queries see the block's earlier chunk, or its later queries see both.

Shapes as in `jaxpar.parallel.attention.tiles`; all arrays are one device's part, except the arguments of
`ring_attention` and the segment ids, which every device has of all columns.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec

from jaxpar.parallel.attention.tiles import (
    Form,
    Keys,
    Partial,
    Queries,
    Rows,
    Tiles,
    by_head,
    by_token,
    no_gradients,
    nothing_seen,
    with_gradients,
    with_tiles,
)
from jaxpar.parallel.constrain import constrain, current_execution
from jaxpar.parallel.manual import active_axes, axis_index, device_by_device, spec_of

__all__ = ["ring_attention"]

_NEVER_SEEN = 2**30
"""The place of what fills a chunk up to whole tiles: later than every query."""


def ring_attention(
    q_BTKGN: jax.Array,
    k_BTKN: jax.Array,
    v_BTKN: jax.Array,
    segment_ids_BT: jax.Array | None,
    *,
    window: int | None,
    softcap: float | None,
    scale: float,
    block: int,
    gathers: bool,
) -> jax.Array:
    """What `reference_attention` computes, of a sequence that devices share in zigzag order; with `gathers` keys and
    values are gathered instead of going around.

    What it keeps for the backward pass is named "attention_output" and "attention_logsumexp" for remat policies.
    """
    execution = current_execution()
    assert execution.mesh is not None
    axes = active_axes(execution, execution.activations, "sequence")
    num_devices = math.prod(execution.mesh.shape[axis] for axis in axes)
    chunk = q_BTKGN.shape[1] // (2 * num_devices)
    even_block = math.ceil(chunk / math.ceil(chunk / block))
    form = Form(window, softcap, scale, even_block, skips=True)
    shared = _Shared(form, axes, num_devices, chunk, gathers)
    # Segment ids do not travel: to gather these few bytes is one message, the same for all layers.
    segments = None if segment_ids_BT is None else constrain(segment_ids_BT, ("batch", None))
    return _attend(shared, q_BTKGN, k_BTKN, v_BTKN, segments)


@dataclass(frozen=True)
class _Shared:
    """How a sequence is shared: over `num_devices` along mesh axes, each with two chunks of `chunk` tokens."""

    form: Form
    axes: tuple[str, ...]
    num_devices: int
    chunk: int
    gathers: bool

    @property
    def tiles_of_chunk(self) -> int:
        return math.ceil(self.chunk / self.form.block)

    @property
    def padded_chunk(self) -> int:
        return self.tiles_of_chunk * self.form.block


class _Block(NamedTuple):
    """A device's keys and values as they travel, [B, S, K, N]."""

    k: jax.Array
    v: jax.Array


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(of: _Shared, q: jax.Array, k: jax.Array, v: jax.Array, segments: jax.Array | None) -> jax.Array:
    return _forward(of, q, k, v, segments)[0]


def _forward(
    of: _Shared, q: jax.Array, k: jax.Array, v: jax.Array, segments: jax.Array | None
) -> tuple[jax.Array, tuple]:
    specs = _specs(q, k)
    local = device_by_device(
        current_execution(),
        partial(_local_forward, of),
        in_specs=(specs["q"], specs["kv"], specs["kv"], specs["segments"]),
        out_specs=(specs["q"], specs["lse"]),
    )
    out, lse = local(q, k, v, segments)
    out = checkpoint_name(out, "attention_output")
    lse = checkpoint_name(lse, "attention_logsumexp")
    return out, (q, k, v, segments, out, lse)


def _backward(of: _Shared, residuals: tuple, dout: jax.Array) -> tuple:
    q, k = residuals[:2]
    specs = _specs(q, k)
    local = device_by_device(
        current_execution(),
        partial(_local_backward, of),
        in_specs=(specs["q"], specs["kv"], specs["kv"], specs["segments"], specs["q"], specs["lse"], specs["q"]),
        out_specs=(specs["q"], specs["kv"], specs["kv"]),
    )
    return *local(*residuals, dout), None


_attend.defvjp(_forward, _backward)


def _specs(q_BTKGN: jax.Array, k_BTKN: jax.Array) -> dict[str, PartitionSpec]:
    execution = current_execution()
    B, T, K, G, _ = q_BTKGN.shape
    shapes = {
        "q": (q_BTKGN.shape, ("batch", "sequence", "heads", None, "head_dim")),
        "kv": (k_BTKN.shape, ("batch", "sequence", "heads", "head_dim")),
        "segments": ((B, T), ("batch", None)),
        "lse": ((B, K, G, T), ("batch", "heads", None, "sequence")),
    }
    table = execution.activations
    return {what: spec_of(execution, "attention", shape, names, table) for what, (shape, names) in shapes.items()}


def _local_forward(
    of: _Shared, q: jax.Array, k: jax.Array, v: jax.Array, segments: jax.Array | None
) -> tuple[jax.Array, jax.Array]:
    """Output [B, T, K, G, N], and log-sum-exp [B, K, G, T]."""
    me, own = axis_index(of.axes), _Block(k, v)
    queries = _queries(of, q, segments, me)

    def seeing(before: Partial, block: _Block, hops: jax.Array | int) -> Partial:
        return with_tiles(of.form, _tiles(of, me, hops), queries, _keys(of, block, segments, me, hops), before)

    def first(block: _Block) -> Partial:
        return with_tiles(of.form, _own_tiles(of), queries, _keys(of, block, segments, me, 0), nothing_seen(queries))

    if of.gathers:
        blocks = _gathered(of, own)

        def step(before: Partial, hops: jax.Array) -> tuple[Partial, None]:
            return seeing(before, _at(blocks, (me - hops) % of.num_devices), hops), None

        found, _ = jax.lax.scan(step, first(own), jnp.arange(1, of.num_devices))
    else:

        def turn(carry: tuple[_Block, Partial], hops: jax.Array) -> tuple[tuple[_Block, Partial], None]:
            block, before = carry
            coming = _sent_on(of, block)  # first, so that it is on its way while this one is computed with
            return (coming, seeing(before, block, hops)), None

        coming = _sent_on(of, own)
        found = first(own)
        (block, found), _ = jax.lax.scan(turn, (coming, found), jnp.arange(1, of.num_devices - 1))
        found = seeing(found, block, of.num_devices - 1)
    out = _without_filling(of, found.out_BKGTN.astype(q.dtype), axis=3)
    return by_token(out), _without_filling(of, found.lse_BKGT, axis=3)


def _local_backward(
    of: _Shared,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    segments: jax.Array | None,
    out: jax.Array,
    lse: jax.Array,
    dout: jax.Array,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    me, own = axis_index(of.axes), _Block(k, v)
    queries = _queries(of, q, segments, me)
    delta = jnp.einsum("btkg->bkgt", jnp.sum(out.astype(jnp.float32) * dout.astype(jnp.float32), axis=-1))
    rows = Rows(*(_filled(of, x, axis=3) for x in (by_head(dout), lse, delta)))

    def adding(tiles: Tiles, dq: jax.Array, block: _Block, hops: jax.Array | int) -> tuple[jax.Array, _Gradient]:
        keys = _keys(of, block, segments, me, hops)
        start = no_gradients(queries, keys)._replace(dq_BKGTN=dq)
        found = with_gradients(of.form, tiles, queries, rows, keys, start)
        return found.dq_BKGTN, _Gradient(*(_without_filling(of, x, axis=3) for x in found[1:]))

    def others(dq: jax.Array, block: _Block, hops: jax.Array | int) -> tuple[jax.Array, _Gradient]:
        return adding(_tiles(of, me, hops), dq, block, hops)

    zeros = jnp.zeros_like(queries.q_BKGTN, jnp.float32)
    around = _gathered_backward if of.gathers else _ring_backward
    dq, gradient = around(of, me, own, lambda block: adding(_own_tiles(of), zeros, block, 0), others)
    dq = by_token(_without_filling(of, dq, axis=3)).astype(q.dtype)
    dk, dv = (jnp.einsum("bkns->bskn", d).astype(k.dtype) for d in gradient)
    return dq, dk, dv


class _Gradient(NamedTuple):
    """Of a block's keys and values, [B, K, N, S] in float32."""

    dk: jax.Array
    dv: jax.Array


_First = Callable[[_Block], tuple[jax.Array, _Gradient]]
_Others = Callable[[jax.Array, _Block, jax.Array | int], tuple[jax.Array, _Gradient]]


def _ring_backward(
    of: _Shared, me: jax.Array | int, own: _Block, first: _First, others: _Others
) -> tuple[jax.Array, _Gradient]:
    """The queries' gradients, and those of the device's own block after it went around.

    A block's gradient follows it one turn later, so that it too is on its way while something is computed.
    """
    coming = _sent_on(of, own)
    dq, made = first(own)

    def turn(carry: tuple, hops: jax.Array) -> tuple[tuple, None]:
        dq, block, made = carry
        coming, before = _sent_on(of, block), _sent_on(of, made)
        dq, added = others(dq, block, hops)
        return (dq, coming, jax.tree.map(jnp.add, before, added)), None

    (dq, block, made), _ = jax.lax.scan(turn, (dq, coming, made), jnp.arange(1, of.num_devices - 1))
    before = _sent_on(of, made)
    dq, added = others(dq, block, of.num_devices - 1)
    return dq, _sent_on(of, jax.tree.map(jnp.add, before, added))


def _gathered_backward(
    of: _Shared, me: jax.Array | int, own: _Block, first: _First, others: _Others
) -> tuple[jax.Array, _Gradient]:
    """The queries' gradients, and those of the device's own block, summed over the devices."""
    blocks = _gathered(of, own)
    dq, made = first(own)

    def step(carry: tuple, hops: jax.Array) -> tuple[tuple, None]:
        dq, sums = carry
        device = (me - hops) % of.num_devices
        dq, added = others(dq, _at(blocks, device), hops)
        return (dq, jax.tree.map(lambda x, new: x.at[device].set(new), sums, added)), None

    sums = jax.tree.map(lambda x: jnp.zeros((of.num_devices, *x.shape), x.dtype).at[me].set(x), made)
    (dq, sums), _ = jax.lax.scan(step, (dq, sums), jnp.arange(1, of.num_devices))
    scattered = partial(jax.lax.psum_scatter, axis_name=of.axes, scatter_dimension=0)
    return dq, jax.tree.map(scattered, sums)


def _sent_on(of: _Shared, x: Any) -> Any:
    """What the device before has; `x` goes to the next."""
    ring = [(device, (device + 1) % of.num_devices) for device in range(of.num_devices)]
    return jax.tree.map(lambda leaf: jax.lax.ppermute(leaf, of.axes, ring), x)


def _gathered(of: _Shared, block: _Block) -> _Block:
    """Every device's block, in a new first dim."""
    return jax.tree.map(lambda leaf: jax.lax.all_gather(leaf, of.axes), block)


def _at(blocks: _Block, device: jax.Array) -> _Block:
    return jax.tree.map(lambda leaf: jax.lax.dynamic_index_in_dim(leaf, device, keepdims=False), blocks)


def _queries(of: _Shared, q_BTKGN: jax.Array, segments: jax.Array | None, me: jax.Array | int) -> Queries:
    return Queries(_filled(of, by_head(q_BTKGN), axis=3), _places(of, me), _segments_of(of, segments, me))


def _keys(of: _Shared, block: _Block, segments: jax.Array | None, me: jax.Array | int, hops: jax.Array | int) -> Keys:
    """A block that comes from `hops` devices back."""
    k, v = (_filled(of, by_head(x), axis=2) for x in (block.k, block.v))
    device = (me - hops) % of.num_devices
    return Keys(k, v, _places(of, device), _segments_of(of, segments, device))


def _segments_of(of: _Shared, segments: jax.Array | None, device: jax.Array | int) -> jax.Array | None:
    """A device's part of the segment ids of all columns [B, columns]."""
    if segments is None:
        return None
    own = jax.lax.dynamic_slice_in_dim(segments, device * 2 * of.chunk, 2 * of.chunk, axis=1)
    return _filled(of, own, axis=1)


def _places(of: _Shared, device: jax.Array | int) -> jax.Array:
    """Logical places of a device's tokens, chunk by chunk in whole tiles."""
    within = np.arange(of.padded_chunk, dtype=np.int32)
    chunks = jnp.stack([jnp.asarray(device), 2 * of.num_devices - 1 - jnp.asarray(device)]).astype(jnp.int32)
    places = chunks[:, None] * of.chunk + within[None]
    return jnp.where(within[None] < of.chunk, places, _NEVER_SEEN).reshape(-1)


def _filled(of: _Shared, x: jax.Array, axis: int) -> jax.Array:
    """Each chunk filled up with zeros to whole tiles."""
    if of.padded_chunk == of.chunk:
        return x
    chunks = x.reshape(*x.shape[:axis], 2, of.chunk, *x.shape[axis + 1 :])
    widths = [(0, 0)] * chunks.ndim
    widths[axis + 1] = (0, of.padded_chunk - of.chunk)
    return jnp.pad(chunks, widths).reshape(*x.shape[:axis], 2 * of.padded_chunk, *x.shape[axis + 1 :])


def _without_filling(of: _Shared, x: jax.Array, axis: int) -> jax.Array:
    """The inverse of `_filled`."""
    if of.padded_chunk == of.chunk:
        return x
    chunks = x.reshape(*x.shape[:axis], 2, of.padded_chunk, *x.shape[axis + 1 :])
    kept = jax.lax.slice_in_dim(chunks, 0, of.chunk, axis=axis + 1)
    return kept.reshape(*x.shape[:axis], 2 * of.chunk, *x.shape[axis + 1 :])


def _own_tiles(of: _Shared) -> Tiles:
    """Of a device's queries and its own keys: its later chunk sees the earlier one, and each sees itself, causally.

    Each query's diagonal tile is first: there it sees itself, so that what is merged later has a finite log-sum-exp.
    """
    number = of.tiles_of_chunk
    earlier = [(query, key) for query in range(number) for key in range(query, -1, -1)]
    later = [(query, key) for query in range(number, 2 * number) for key in range(query, -1, -1)]
    return _columns(of, earlier + later)


def _tiles(of: _Shared, me: jax.Array | int, hops: jax.Array | int) -> Tiles:
    """Of a device's queries and a block from `hops` devices back, 0 < hops < devices: an earlier device's, or, from
    around the ring's end, a later one's. Both lists have as many tiles."""
    number = of.tiles_of_chunk
    of_earlier = _columns(of, [(query, key) for query in range(2 * number) for key in range(number)])
    of_later = _columns(of, [(query, key) for query in range(number, 2 * number) for key in range(2 * number)])
    is_earlier = jnp.asarray(me) >= hops
    return Tiles(*(jnp.where(is_earlier, a, b) for a, b in zip(of_earlier, of_later, strict=True)))


def _columns(of: _Shared, tiles: list[tuple[int, int]]) -> Tiles:
    return Tiles(*(np.asarray(tiles, np.int32).T * of.form.block))
