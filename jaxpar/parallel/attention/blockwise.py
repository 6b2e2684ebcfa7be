"""Attention one square tile of scores at a time, on one device.

Memory is linear in the sequence: the forward pass keeps the output and the log-sum-exp of each query's scores, and the
backward pass computes the scores again. Tiles that causality or the window rules out are not in the list that is
scanned, so neither pass spends anything on them. Shapes as in `jaxpar.parallel.attention.tiles`.
"""

import math
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name

from jaxpar.parallel.attention.tiles import (
    Form,
    Keys,
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
    return _attend(Form(window, softcap, scale, even_block), q_BTKGN, k_BTKN, v_BTKN, segment_ids_BT)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(form: Form, q: jax.Array, k: jax.Array, v: jax.Array, segments: jax.Array | None) -> jax.Array:
    return _forward(form, q, k, v, segments)[0]


def _forward(
    form: Form, q_BTKGN: jax.Array, k_BSKN: jax.Array, v_BSKN: jax.Array, segments: jax.Array | None
) -> tuple[jax.Array, tuple]:
    q, k, v = by_head(q_BTKGN), by_head(k_BSKN), by_head(v_BSKN)
    num_tokens = q.shape[3]
    queries, keys = _in_tiles(form, q, k, v, segments)
    found = with_tiles(form, _tiles(form, num_tokens), queries, keys, nothing_seen(queries))
    out = by_token(found.out_BKGTN[..., :num_tokens, :].astype(q.dtype))
    out = checkpoint_name(out, "attention_output")
    lse = checkpoint_name(found.lse_BKGT[..., :num_tokens], "attention_logsumexp")
    return out, (q, k, v, segments, out, lse)


def _backward(form: Form, residuals: tuple, dout_BTKGN: jax.Array) -> tuple:
    # Without the barrier XLA finds the forward pass's scores again and keeps them all instead of recomputing them.
    q, k, v, segments, out, lse_BKGT = jax.lax.optimization_barrier(residuals)
    num_tokens = q.shape[3]
    delta_BTKG = jnp.sum(out.astype(jnp.float32) * dout_BTKGN.astype(jnp.float32), axis=-1)
    rows = Rows(by_head(dout_BTKGN), lse_BKGT, jnp.einsum("btkg->bkgt", delta_BTKG))
    rows = Rows(*(_padded(x, form.block, axis=3) for x in rows))
    queries, keys = _in_tiles(form, q, k, v, segments)
    tiles = _tiles(form, num_tokens)
    dq_BKGTN, *dkv_BKNS = with_gradients(form, tiles, queries, rows, keys, no_gradients(queries, keys))
    dk, dv = (jnp.einsum("bkns->bskn", d[..., :num_tokens].astype(k.dtype)) for d in dkv_BKNS)
    return by_token(dq_BKGTN[..., :num_tokens, :].astype(q.dtype)), dk, dv, None


_attend.defvjp(_forward, _backward)


def _in_tiles(
    form: Form, q_BKGTN: jax.Array, k_BKSN: jax.Array, v_BKSN: jax.Array, segments: jax.Array | None
) -> tuple[Queries, Keys]:
    q, k, v = (_padded(x, form.block, axis=-2) for x in (q_BKGTN, k_BKSN, v_BKSN))
    segments = None if segments is None else _padded(segments, form.block, axis=-1)
    places = jnp.arange(q.shape[3])
    return Queries(q, places, segments), Keys(k, v, places, segments)


def _tiles(form: Form, num_tokens: int) -> Tiles:
    """The tiles that are not masked as a whole.

    Each query's diagonal tile is first: there it sees itself, so that what is merged later has a finite log-sum-exp.
    """
    tiles = []
    for query in range(0, num_tokens, form.block):
        first_key = 0 if form.window is None else max(0, query - form.window + 1)
        tiles += [(query, key) for key in range(query, first_key // form.block * form.block - 1, -form.block)]
    return Tiles(*np.asarray(tiles, np.int32).T)


def _padded(x: jax.Array, multiple: int, axis: int) -> jax.Array:
    """`x` with zeros after its tokens: causality keeps every real query from them, and their gradients are zero."""
    widths = [(0, 0)] * x.ndim
    widths[axis] = (0, -x.shape[axis] % multiple)
    return jnp.pad(x, widths)
