"""Attention as the formula reads: all scores at once, memory quadratic in the sequence."""

import jax
import jax.numpy as jnp

from jaxpar.parallel.attention.masks import MASKED, visible

__all__ = ["reference_attention"]


def reference_attention(
    q_BTKGN: jax.Array,
    k_BTKN: jax.Array,
    v_BTKN: jax.Array,
    segment_ids_BT: jax.Array | None,
    *,
    window: int | None,
    softcap: float | None,
    scale: float,
) -> jax.Array:
    """softmax(cap(scale · q·k) + mask) · v, where cap(x) = c · tanh(x / c); softmax and sums in float32."""
    index_T = jnp.arange(q_BTKGN.shape[1])
    seen_BTS = visible(index_T, index_T, segment_ids_BT, segment_ids_BT, window)
    scores = jnp.einsum("btkgn,bskn->bkgts", q_BTKGN, k_BTKN, preferred_element_type=jnp.float32) * scale
    if softcap is not None:
        scores = softcap * jnp.tanh(scores / softcap)
    weights = jax.nn.softmax(jnp.where(seen_BTS[:, None, None], scores, MASKED), axis=-1)
    out = jnp.einsum("bkgts,bskn->btkgn", weights.astype(v_BTKN.dtype), v_BTKN, preferred_element_type=jnp.float32)
    return out.astype(q_BTKGN.dtype)
