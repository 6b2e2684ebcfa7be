"""The Pallas "splash" kernel that JAX ships for TPUs: flash attention that skips the blocks its mask rules out."""

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp

__all__ = ["LocalAttention", "ShardAttention", "splash_attention"]

LocalAttention = Callable[[jax.Array, jax.Array, jax.Array, jax.Array | None], jax.Array]
"""(q_BTKGN, k_BTKN, v_BTKN, segment_ids_BT or None) -> out_BTKGN."""

ShardAttention = Callable[[LocalAttention], LocalAttention]
"""Wraps attention so that each device runs it on its own part of the batch and of the key/value heads."""

_LANES = 128


def splash_attention(
    q_BTKGN: jax.Array,
    k_BTKN: jax.Array,
    v_BTKN: jax.Array,
    segment_ids_BT: jax.Array | None,
    *,
    window: int | None,
    softcap: float | None,
    scale: float,
    block: int,
    shard: ShardAttention | None = None,
    interpret: bool = False,
) -> jax.Array:
    """What `reference_attention` computes, on a TPU.

    Args:
      block: upper limit of the queries and keys in one tile. The sequence is padded to a multiple of 128, and a tile is
        the largest multiple of 128 within the limit (128 if there is none) that divides it.
      shard: required where the operands are split over devices, because XLA cannot partition a Pallas kernel:
        `lambda f: jax.shard_map(f, in_specs=..., out_specs=..., check_vma=False)` over the axes of batch and heads.
      interpret: run the kernel step by step on any backend, to test it.
    """

    num_tokens = math.ceil(q_BTKGN.shape[1] / _LANES) * _LANES

    def local(q: jax.Array, k: jax.Array, v: jax.Array, segment_ids: jax.Array | None) -> jax.Array:
        B, T, K, G, N = q.shape
        kernel = _kernel(K * G, num_tokens, window, softcap, block, interpret)
        heads = ((q * scale).astype(q.dtype).reshape(B, T, K * G, N), k, v)
        operands = [jnp.swapaxes(_padded(x, num_tokens), 1, 2) for x in heads]
        if segment_ids is not None:
            operands.append(_padded(segment_ids, num_tokens))
        out_BHTN = jax.vmap(kernel)(*operands)
        return jnp.swapaxes(out_BHTN, 1, 2)[:, :T].reshape(q.shape)

    return (local if shard is None else shard(local))(q_BTKGN, k_BTKN, v_BTKN, segment_ids_BT)


def _kernel(
    num_heads: int, num_tokens: int, window: int | None, softcap: float | None, block: int, interpret: bool
) -> Callable[..., jax.Array]:
    # Imported here: Pallas takes a second to import, and only TPUs need it.
    from jax.experimental.pallas.ops.tpu import splash_attention as splash

    shape = (num_tokens, num_tokens)
    mask: splash.Mask = splash.CausalMask(shape)
    if window is not None:
        mask = splash.LocalMask(shape, window_size=(window - 1, 0), offset=0)
    sizes = range(_LANES, max(block, _LANES) + 1, _LANES)
    tile = max(size for size in sizes if num_tokens % size == 0)
    kernel = splash.make_splash_mha_single_device(
        splash.MultiHeadMask([mask] * num_heads),
        block_sizes=splash.BlockSizes(
            block_q=tile, block_kv=tile, block_q_dkv=tile, block_kv_dkv=tile, block_q_dq=tile, block_kv_dq=tile
        ),
        attn_logits_soft_cap=softcap,
        residual_checkpoint_name="attention_output",
        interpret=interpret,
    )

    def run(q_HTN: jax.Array, k_KTN: jax.Array, v_KTN: jax.Array, segment_ids_T: jax.Array | None = None) -> jax.Array:
        segments = None if segment_ids_T is None else splash.SegmentIds(q=segment_ids_T, kv=segment_ids_T)
        return kernel(q_HTN, k_KTN, v_KTN, segments)

    return run


def _padded(x_BT: jax.Array, num_tokens: int) -> jax.Array:
    """Zeros after the tokens: causality keeps every real query from them."""
    widths = [(0, 0)] * x_BT.ndim
    widths[1] = (0, num_tokens - x_BT.shape[1])
    return jnp.pad(x_BT, widths)
