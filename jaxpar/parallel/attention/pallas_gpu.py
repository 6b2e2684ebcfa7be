"""The Pallas flash attention kernel that JAX ships for GPUs: it keeps attention within packed documents."""

import warnings
from collections.abc import Callable

import jax
import jax.numpy as jnp

from jaxpar.parallel.attention.splash import ShardAttention

__all__ = ["pallas_gpu_attention"]

_SMALLEST_TILE = 16
"""Matrix units multiply 16 rows at a time."""

_FORWARD_TILE = 64
_BACKWARD_TILE = 32
"""Upper limits: with these the kernels fit the shared memory of every GPU since Ampere (99 KiB) at head dim 128."""


def pallas_gpu_attention(
    q_BTKGN: jax.Array,
    k_BTKN: jax.Array,
    v_BTKN: jax.Array,
    segment_ids_BT: jax.Array | None,
    *,
    scale: float,
    block: int,
    shard: ShardAttention | None = None,
    interpret: bool = False,
) -> jax.Array:
    """What `reference_attention` computes without window and soft cap; 16-bit operands on a GPU.

    The kernel has one key/value head for each query head: keys and values are repeated, G times their memory.

    Args:
      block: upper limit of the queries and keys in one tile: a power of two from 16 to 64 (32 in the backward pass).
        The sequence is padded to a multiple of the tile.
      shard: required where the operands are split over devices, as in `splash_attention`.
      interpret: run the kernel step by step on any backend, to test it.
    """
    limit = min(max(block, _SMALLEST_TILE), _FORWARD_TILE)
    tile = 1 << (limit.bit_length() - 1)

    def local(q: jax.Array, k: jax.Array, v: jax.Array, segment_ids: jax.Array | None) -> jax.Array:
        B, T, K, G, N = q.shape
        heads = (q.reshape(B, T, K * G, N), jnp.repeat(k, G, axis=2), jnp.repeat(v, G, axis=2))
        q_BTHN, k_BTHN, v_BTHN = (_padded(x, tile) for x in heads)
        ids = None if segment_ids is None else _padded(segment_ids, tile)
        out_BTHN = _kernel(scale, tile, interpret)(q_BTHN, k_BTHN, v_BTHN, ids)
        return out_BTHN[:, :T].reshape(q.shape)

    return (local if shard is None else shard(local))(q_BTKGN, k_BTKN, v_BTKN, segment_ids_BT)


def _kernel(scale: float, tile: int, interpret: bool) -> Callable[..., jax.Array]:
    with warnings.catch_warnings():
        # From 0.12 on JAX announces that the module will move to another package; every supported version has it.
        warnings.filterwarnings("ignore", r"jax\.experimental\.pallas\.ops\.gpu\.attention", DeprecationWarning)
        # Imported here: Pallas takes a second to import, and only GPUs need it.
        from jax.experimental.pallas.ops.gpu import attention as flash

    backward = min(tile, _BACKWARD_TILE)
    sizes = flash.BlockSizes(
        block_q=tile,
        block_k=tile,
        block_q_dkv=backward,
        block_kv_dkv=backward,
        block_q_dq=backward,
        block_kv_dq=backward,
    )

    def run(q_BTHN: jax.Array, k_BTHN: jax.Array, v_BTHN: jax.Array, segment_ids_BT: jax.Array | None) -> jax.Array:
        # Positional: the kernel's gradient is defined so.
        out: jax.Array = flash.mha(
            q_BTHN, k_BTHN, v_BTHN, segment_ids_BT, scale, True, sizes, "triton", None, 2, None, interpret
        )
        return out

    return run


def _padded(x_BT: jax.Array, tile: int) -> jax.Array:
    """Zeros after the tokens: causality keeps every real query from them."""
    widths = [(0, 0)] * x_BT.ndim
    widths[1] = (0, -x_BT.shape[1] % tile)
    return jnp.pad(x_BT, widths)
