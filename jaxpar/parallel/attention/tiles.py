"""Attention one square tile of scores at a time (FlashAttention-2, Dao 2023), in plain JAX.

Queries and keys are known by their logical places in the sequence, so that they may be any parts of it. Tiles are
added to what was computed before: forward by an online softmax, backward by sums.

Shapes: B batch, T query tokens, S key tokens, K key/value heads, G queries per key/value head, N head dim. No product
contracts its first operand's leading dim, which XLA:CPU does 2 to 5 times slower; dk and dv are made transposed.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxpar.parallel.attention.masks import MASKED, visible

__all__ = [
    "Form",
    "Gradients",
    "Keys",
    "Partial",
    "Queries",
    "Rows",
    "Tiles",
    "by_head",
    "by_token",
    "no_gradients",
    "nothing_seen",
    "with_gradients",
    "with_tiles",
]


@dataclass(frozen=True)
class Form:
    """What is known when compiling; `block` queries and keys are a tile. With `skips`, tiles of the list that the
    window rules out are skipped when they are met."""

    window: int | None
    softcap: float | None
    scale: float
    block: int
    skips: bool = False


class Queries(NamedTuple):
    """Queries in whole tiles, each with its logical place and its segment."""

    q_BKGTN: jax.Array
    place_T: jax.Array
    segments_BT: jax.Array | None


class Keys(NamedTuple):
    """Keys and values in whole tiles, each with its logical place and its segment."""

    k_BKSN: jax.Array
    v_BKSN: jax.Array
    place_S: jax.Array
    segments_BS: jax.Array | None


class Tiles(NamedTuple):
    """The first query and the first key of each tile, as columns of the arrays."""

    query: Any
    key: Any


class Partial(NamedTuple):
    """Output (float32) and log-sum-exp of queries over the keys that were met so far."""

    out_BKGTN: jax.Array
    lse_BKGT: jax.Array


class Rows(NamedTuple):
    """What the backward pass needs of the queries, beside `Queries`; delta is rowsum(dout · out)."""

    dout_BKGTN: jax.Array
    lse_BKGT: jax.Array
    delta_BKGT: jax.Array


class Gradients(NamedTuple):
    """Sums in float32."""

    dq_BKGTN: jax.Array
    dk_BKNS: jax.Array
    dv_BKNS: jax.Array


def by_head(x: jax.Array) -> jax.Array:
    """Tokens moved behind the heads: [B, T, K, N] -> [B, K, T, N] and [B, T, K, G, N] -> [B, K, G, T, N]."""
    return jnp.moveaxis(x, 1, -2)


def by_token(x: jax.Array) -> jax.Array:
    """The inverse of `by_head`."""
    return jnp.moveaxis(x, -2, 1)


def nothing_seen(queries: Queries) -> Partial:
    """The start: a log-sum-exp that any real one outweighs, and that keeps arithmetic finite."""
    # full_like, so that in a shard_map the carry varies over the same manual mesh axes as what is added to it.
    q = queries.q_BKGTN
    return Partial(jnp.full_like(q, 0.0, jnp.float32), jnp.full_like(q, MASKED, jnp.float32, q.shape[:-1]))


def no_gradients(queries: Queries, keys: Keys) -> Gradients:
    """The start of the backward pass."""
    k, v = (jnp.swapaxes(x, 2, 3) for x in (keys.k_BKSN, keys.v_BKSN))
    return Gradients(*(jnp.zeros_like(x, jnp.float32) for x in (queries.q_BKGTN, k, v)))


def with_tiles(form: Form, tiles: Tiles, queries: Queries, keys: Keys, before: Partial) -> Partial:
    """`before` with the keys of these tiles.

    A query whose first tiles show it nothing has a finite but meaningless output, until a tile that does: its
    log-sum-exp then outweighs what was there by so much that nothing of it is left.
    """

    def step(carry: Partial, tile: Tiles) -> Partial:
        def merged() -> Partial:
            k, v = (_cut(x, tile.key, form.block, axis=2) for x in (keys.k_BKSN, keys.v_BKSN))
            q = _cut(queries.q_BKGTN, tile.query, form.block, axis=3)
            new_out, new_lse = _forward_tile(form, q, k, v, _seen(form, queries, keys, tile))
            old_out, old_lse = (_cut(x, tile.query, form.block, axis=3) for x in carry)
            lse = jnp.logaddexp(old_lse, new_lse)
            out = old_out * jnp.exp(old_lse - lse)[..., None] + new_out * jnp.exp(new_lse - lse)[..., None]
            return Partial(*(_put(x, part, tile.query) for x, part in zip(carry, (out, lse), strict=True)))

        return _unless_skipped(form, queries, keys, tile, merged, carry)

    return _one_by_one(step, before, tiles)


def with_gradients(form: Form, tiles: Tiles, queries: Queries, rows: Rows, keys: Keys, before: Gradients) -> Gradients:
    """`before` with what these tiles add."""

    def step(carry: Gradients, tile: Tiles) -> Gradients:
        def added() -> Gradients:
            k, v = (_cut(x, tile.key, form.block, axis=2) for x in (keys.k_BKSN, keys.v_BKSN))
            q, *of_rows = (_cut(x, tile.query, form.block, axis=3) for x in (queries.q_BKGTN, *rows))
            parts = _backward_tile(form, q, Rows(*of_rows), k, v, _seen(form, queries, keys, tile))
            places = ((tile.query, 3), (tile.key, 3), (tile.key, 3))
            return Gradients(*(_add_at(x, part, *place) for x, part, place in zip(carry, parts, places, strict=True)))

        return _unless_skipped(form, queries, keys, tile, added, carry)

    return _one_by_one(step, before, tiles)


def _one_by_one(step: Callable[[Any, Tiles], Any], before: Any, tiles: Tiles) -> Any:
    """`step` with each tile in turn.

    Not a scan: where layers are scanned and differentiated, JAX takes out of that loop what does not depend on the
    layer, and of a scan it can take a part. That would be the masks, of all tiles at once: quadratic in the sequence.
    """
    queries, keys = map(jnp.asarray, tiles)

    def body(state: tuple[jax.Array, Any]) -> tuple[jax.Array, Any]:
        index, carry = state
        return index + 1, step(carry, Tiles(queries[index], keys[index]))

    return jax.lax.while_loop(lambda state: state[0] < len(queries), body, (jnp.int32(0), before))[1]


def _scores(form: Form, q_BKGTN: jax.Array, k_BKSN: jax.Array) -> jax.Array:
    """Scaled and capped scores of one tile, float32, before masking."""
    scores = jnp.einsum("bkgtn,bksn->bkgts", q_BKGTN, k_BKSN, preferred_element_type=jnp.float32)
    if form.softcap is None:
        return scores * form.scale
    return form.softcap * jnp.tanh(scores * (form.scale / form.softcap))


def _forward_tile(
    form: Form, q_BKGTN: jax.Array, k_BKSN: jax.Array, v_BKSN: jax.Array, seen_BTS: jax.Array
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
    form: Form, q_BKGTN: jax.Array, rows: Rows, k_BKSN: jax.Array, v_BKSN: jax.Array, seen_BTS: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """What some queries and some keys add to dq [B,K,G,T,N], dk [B,K,N,S] and dv [B,K,N,S] (float32).

    With P = exp(scores - lse), D = rowsum(dout · out): dv = Pᵀ dout, dS = P (dout vᵀ - D), dq = dS k, dk = dSᵀ q.
    """
    dtype = q_BKGTN.dtype
    product = partial(jnp.einsum, preferred_element_type=jnp.float32)
    scores = _scores(form, q_BKGTN, k_BKSN)
    weights = jnp.exp(jnp.where(seen_BTS[:, None, None], scores, MASKED) - rows.lse_BKGT[..., None])
    dweights = product("bkgtn,bksn->bkgts", rows.dout_BKGTN, v_BKSN)
    dscores = weights * (dweights - rows.delta_BKGT[..., None])
    if form.softcap is not None:
        dscores *= 1.0 - jnp.square(scores / form.softcap)
    weights, dscores = weights.astype(dtype), dscores.astype(dtype)
    q_BKNGT, dout_BKNGT = (jnp.einsum("bkgtn->bkngt", x) for x in (q_BKGTN, rows.dout_BKGTN))
    dq_BKGTN = product("bkgts,bksn->bkgtn", dscores, k_BKSN) * form.scale
    dk_BKNS = product("bkngt,bkgts->bkns", q_BKNGT, dscores) * form.scale
    dv_BKNS = product("bkngt,bkgts->bkns", dout_BKNGT, weights)
    return dq_BKGTN, dk_BKNS, dv_BKNS


def _seen(form: Form, queries: Queries, keys: Keys, tile: Tiles) -> jax.Array:
    def cut(x: jax.Array | None, start: jax.Array) -> jax.Array | None:
        return None if x is None else _cut(x, start, form.block, axis=x.ndim - 1)

    query_places, key_places = (
        _cut(x, start, form.block, axis=0) for x, start in ((queries.place_T, tile.query), (keys.place_S, tile.key))
    )
    segments = cut(queries.segments_BT, tile.query), cut(keys.segments_BS, tile.key)
    return visible(query_places, key_places, *segments, form.window)


def _unless_skipped(
    form: Form, queries: Queries, keys: Keys, tile: Tiles, computed: Callable[[], Any], before: Any
) -> Any:
    if not form.skips or form.window is None:
        return computed()
    # The tile's nearest pair: its first query, and its last key, which is no further than a block behind its first.
    nearest = queries.place_T[tile.query] - keys.place_S[tile.key] - (form.block - 1)
    return jax.lax.cond(nearest < form.window, computed, lambda: before)


def _cut(x: jax.Array, start: jax.Array, size: int, axis: int) -> jax.Array:
    return jax.lax.dynamic_slice_in_dim(x, start, size, axis)


def _put(x: jax.Array, part: jax.Array, start: jax.Array) -> jax.Array:
    return jax.lax.dynamic_update_slice_in_dim(x, part, start, axis=3)


def _add_at(x: jax.Array, part: jax.Array, start: jax.Array, axis: int) -> jax.Array:
    total = _cut(x, start, part.shape[axis], axis) + part
    return jax.lax.dynamic_update_slice_in_dim(x, total, start, axis)
