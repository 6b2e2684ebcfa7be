"""Attention one square tile of scores at a time (FlashAttention-2, Dao 2023), in plain JAX.

Memory is linear in the sequence: the forward pass keeps the output and the log-sum-exp of each query's scores, and the
backward pass computes the scores again. Tiles that causality or the window rules out are not in the list that is
scanned, so neither pass spends anything on them.

Shapes: B batch, T query tokens, S key tokens, K key/value heads, G queries per key/value head, N head dim. No product
contracts its first operand's leading dim, which XLA:CPU does 2 to 5 times slower; dk and dv are made transposed.
"""

import math
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name

from jaxpar.parallel.attention.masks import MASKED, visible

__all__ = ["blockwise_attention"]


def blockwise_attention(
    q_BTKGN: jax.Array,
    k_BTKN: jax.Array,
    v_BTKN: jax.Array,
    segment_ids_BT: jax.Array | None,
    *,
    window: int | None,
    softcap: float | None,
    scale: float,
    block: int,
) -> jax.Array:
    """What `reference_attention` computes, in tiles of at most `block` queries and keys.

    What it keeps for the backward pass is named "attention_output" and "attention_logsumexp" for remat policies.
    """
    num_tokens = q_BTKGN.shape[1]
    even_block = math.ceil(num_tokens / math.ceil(num_tokens / block))
    return _attend(_Form(window, softcap, scale, even_block), q_BTKGN, k_BTKN, v_BTKN, segment_ids_BT)


@dataclass(frozen=True)
class _Form:
    """What is known when compiling."""

    window: int | None
    softcap: float | None
    scale: float
    block: int


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(form: _Form, q: jax.Array, k: jax.Array, v: jax.Array, segments: jax.Array | None) -> jax.Array:
    return _forward(form, q, k, v, segments)[0]


def _forward(
    form: _Form, q_BTKGN: jax.Array, k_BSKN: jax.Array, v_BSKN: jax.Array, segments: jax.Array | None
) -> tuple[jax.Array, tuple]:
    q, k, v = _by_head(q_BTKGN), _by_head(k_BSKN), _by_head(v_BSKN)
    out_BKGTN, lse_BKGT = _forward_tiles(form, q, k, v, segments)
    out = checkpoint_name(_by_token(out_BKGTN), "attention_output")
    lse = checkpoint_name(lse_BKGT, "attention_logsumexp")
    return out, (q, k, v, segments, out, lse)


def _backward(form: _Form, residuals: tuple, dout_BTKGN: jax.Array) -> tuple:
    # Without the barrier XLA finds the forward pass's scores again and keeps them all instead of recomputing them.
    q, k, v, segments, out, lse_BKGT = jax.lax.optimization_barrier(residuals)
    delta_BTKG = jnp.sum(out.astype(jnp.float32) * dout_BTKGN.astype(jnp.float32), axis=-1)
    rows = _Rows(q, _by_head(dout_BTKGN), lse_BKGT, jnp.einsum("btkg->bkgt", delta_BTKG))
    dq_BKGTN, dk_BKNS, dv_BKNS = _backward_tiles(form, rows, k, v, segments)
    dk, dv = (jnp.einsum("bkns->bskn", d.astype(k.dtype)) for d in (dk_BKNS, dv_BKNS))
    return _by_token(dq_BKGTN.astype(q.dtype)), dk, dv, None


_attend.defvjp(_forward, _backward)


class _Rows(NamedTuple):
    """What the backward pass needs of the queries."""

    q_BKGTN: jax.Array
    dout_BKGTN: jax.Array
    lse_BKGT: jax.Array
    delta_BKGT: jax.Array


def _by_head(x: jax.Array) -> jax.Array:
    """Tokens moved behind the heads: [B, T, K, N] -> [B, K, T, N] and [B, T, K, G, N] -> [B, K, G, T, N]."""
    return jnp.moveaxis(x, 1, -2)


def _by_token(x: jax.Array) -> jax.Array:
    """The inverse of `_by_head`."""
    return jnp.moveaxis(x, -2, 1)


def _scores(form: _Form, q_BKGTN: jax.Array, k_BKSN: jax.Array) -> jax.Array:
    """Scaled and capped scores of one tile, float32, before masking."""
    scores = jnp.einsum("bkgtn,bksn->bkgts", q_BKGTN, k_BKSN, preferred_element_type=jnp.float32)
    if form.softcap is None:
        return scores * form.scale
    return form.softcap * jnp.tanh(scores * (form.scale / form.softcap))


def _forward_tile(
    form: _Form, q_BKGTN: jax.Array, k_BKSN: jax.Array, v_BKSN: jax.Array, seen_BTS: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Output (float32) and log-sum-exp of some queries over some keys."""
    scores = jnp.where(seen_BTS[:, None, None], _scores(form, q_BKGTN, k_BKSN), MASKED)
    largest = jnp.max(scores, axis=-1, keepdims=True)
    weights = jnp.exp(scores - largest)
    total = jnp.sum(weights, axis=-1, keepdims=True)
    out_BKGTN = jnp.einsum(
        "bkgts,bksn->bkgtn", weights.astype(v_BKSN.dtype), v_BKSN, preferred_element_type=jnp.float32
    )
    return out_BKGTN / total, (largest + jnp.log(total))[..., 0]


def _backward_tile(
    form: _Form, rows: _Rows, k_BKSN: jax.Array, v_BKSN: jax.Array, seen_BTS: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """What some queries and some keys add to dq [B,K,G,T,N], dk [B,K,N,S] and dv [B,K,N,S] (float32).

    With P = exp(scores - lse), D = rowsum(dout · out): dv = Pᵀ dout, dS = P (dout vᵀ - D), dq = dS k, dk = dSᵀ q.
    """
    dtype = rows.q_BKGTN.dtype
    product = partial(jnp.einsum, preferred_element_type=jnp.float32)
    scores = _scores(form, rows.q_BKGTN, k_BKSN)
    weights = jnp.exp(jnp.where(seen_BTS[:, None, None], scores, MASKED) - rows.lse_BKGT[..., None])
    dweights = product("bkgtn,bksn->bkgts", rows.dout_BKGTN, v_BKSN)
    dscores = weights * (dweights - rows.delta_BKGT[..., None])
    if form.softcap is not None:
        dscores *= 1.0 - jnp.square(scores / form.softcap)
    weights, dscores = weights.astype(dtype), dscores.astype(dtype)
    q_BKNGT, dout_BKNGT = (jnp.einsum("bkgtn->bkngt", x) for x in (rows.q_BKGTN, rows.dout_BKGTN))
    dq_BKGTN = product("bkgts,bksn->bkgtn", dscores, k_BKSN) * form.scale
    dk_BKNS = product("bkngt,bkgts->bkns", q_BKNGT, dscores) * form.scale
    dv_BKNS = product("bkngt,bkgts->bkns", dout_BKNGT, weights)
    return dq_BKGTN, dk_BKNS, dv_BKNS


class _Tile(NamedTuple):
    """First query and first key of a square tile."""

    query: jax.Array
    key: jax.Array


def _tiles(form: _Form, num_tokens: int) -> _Tile:
    """The tiles that are not masked as a whole.

    Each query's diagonal tile is first: there it sees itself, so that what is merged later has a finite log-sum-exp.
    """
    tiles = []
    for query in range(0, num_tokens, form.block):
        first_key = 0 if form.window is None else max(0, query - form.window + 1)
        tiles += [(query, key) for key in range(query, first_key // form.block * form.block - 1, -form.block)]
    queries, keys = np.asarray(tiles, np.int32).T
    return _Tile(jnp.asarray(queries), jnp.asarray(keys))


def _forward_tiles(
    form: _Form, q_BKGTN: jax.Array, k_BKSN: jax.Array, v_BKSN: jax.Array, segments: jax.Array | None
) -> tuple[jax.Array, jax.Array]:
    num_tokens = q_BKGTN.shape[3]
    q, k, v = (_padded(x, form.block, axis=-2) for x in (q_BKGTN, k_BKSN, v_BKSN))
    segments = None if segments is None else _padded(segments, form.block, axis=-1)

    def step(carry: tuple[jax.Array, jax.Array], tile: _Tile) -> tuple[tuple[jax.Array, jax.Array], None]:
        out, lse = carry
        tile_k, tile_v = (_cut(x, tile.key, form.block, axis=2) for x in (k, v))
        seen = _seen_in_tile(form, segments, tile)
        new_out, new_lse = _forward_tile(form, _cut(q, tile.query, form.block, axis=3), tile_k, tile_v, seen)
        old_out, old_lse = (_cut(x, tile.query, form.block, axis=3) for x in carry)
        total_lse = jnp.logaddexp(old_lse, new_lse)
        merged = old_out * jnp.exp(old_lse - total_lse)[..., None] + new_out * jnp.exp(new_lse - total_lse)[..., None]
        out = jax.lax.dynamic_update_slice_in_dim(out, merged, tile.query, axis=3)
        lse = jax.lax.dynamic_update_slice_in_dim(lse, total_lse, tile.query, axis=3)
        return (out, lse), None

    # full_like, so that in a shard_map the carry varies over the same manual mesh axes as what is added to it.
    start = (jnp.full_like(q, 0.0, jnp.float32), jnp.full_like(q, MASKED, jnp.float32, q.shape[:-1]))
    (out, lse), _ = jax.lax.scan(step, start, _tiles(form, q.shape[3]))
    return out[..., :num_tokens, :].astype(q.dtype), lse[..., :num_tokens]


def _backward_tiles(
    form: _Form, rows: _Rows, k_BKSN: jax.Array, v_BKSN: jax.Array, segments: jax.Array | None
) -> tuple[jax.Array, jax.Array, jax.Array]:
    num_tokens = rows.q_BKGTN.shape[3]
    rows = _Rows(*(_padded(x, form.block, axis=3) for x in rows))
    k, v = (_padded(x, form.block, axis=2) for x in (k_BKSN, v_BKSN))
    segments = None if segments is None else _padded(segments, form.block, axis=-1)

    def step(gradients: tuple[jax.Array, ...], tile: _Tile) -> tuple[tuple[jax.Array, ...], None]:
        tile_rows = _Rows(*(_cut(x, tile.query, form.block, axis=3) for x in rows))
        tile_k, tile_v = (_cut(x, tile.key, form.block, axis=2) for x in (k, v))
        parts = _backward_tile(form, tile_rows, tile_k, tile_v, _seen_in_tile(form, segments, tile))
        places = ((tile.query, 3), (tile.key, 3), (tile.key, 3))
        added = (_add_at(x, part, *place) for x, part, place in zip(gradients, parts, places, strict=True))
        return tuple(added), None

    start = tuple(jnp.zeros_like(x, jnp.float32) for x in (rows.q_BKGTN, jnp.swapaxes(k, 2, 3), jnp.swapaxes(v, 2, 3)))
    (dq, dk, dv), _ = jax.lax.scan(step, start, _tiles(form, rows.q_BKGTN.shape[3]))
    return dq[..., :num_tokens, :], dk[..., :num_tokens], dv[..., :num_tokens]


def _seen_in_tile(form: _Form, segments_BT: jax.Array | None, tile: _Tile) -> jax.Array:
    index = jnp.arange(form.block)
    ids = [None if segments_BT is None else _cut(segments_BT, start, form.block, axis=1) for start in tile]
    return visible(tile.query + index, tile.key + index, ids[0], ids[1], form.window)


def _cut(x: jax.Array, start: jax.Array, size: int, axis: int) -> jax.Array:
    return jax.lax.dynamic_slice_in_dim(x, start, size, axis)


def _add_at(x: jax.Array, part: jax.Array, start: jax.Array, axis: int) -> jax.Array:
    total = _cut(x, start, part.shape[axis], axis) + part
    return jax.lax.dynamic_update_slice_in_dim(x, total, start, axis)


def _padded(x: jax.Array, multiple: int, axis: int) -> jax.Array:
    """`x` with zeros after its tokens: causality keeps every real query from them, and their gradients are zero."""
    widths = [(0, 0)] * x.ndim
    widths[axis] = (0, -x.shape[axis] % multiple)
    return jnp.pad(x, widths)
