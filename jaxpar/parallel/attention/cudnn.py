"""cuDNN's fused attention on NVIDIA GPUs, through `jax.nn.dot_product_attention`."""

import jax

from jaxpar.parallel.attention.splash import ShardAttention

__all__ = ["cudnn_attention"]


def cudnn_attention(
    q_BTKGN: jax.Array,
    k_BTKN: jax.Array,
    v_BTKN: jax.Array,
    *,
    window: int | None,
    scale: float,
    shard: ShardAttention | None = None,
) -> jax.Array:
    """What `reference_attention` computes without segments and soft cap; 16-bit operands on a GPU.

    Through the public interface packed segments would need a mask [B, 1, T, T] in memory, and there is no soft cap.

    Args:
      shard: as in `splash_attention`. JAX's own partitioning of the kernel fails where some mesh axes are manual.
    """

    def local(q: jax.Array, k: jax.Array, v: jax.Array, _: jax.Array | None) -> jax.Array:
        B, T, K, G, N = q.shape
        out = jax.nn.dot_product_attention(
            q.reshape(B, T, K * G, N),
            k,
            v,
            scale=scale,
            is_causal=True,
            # Tokens to the left of the query, without it.
            local_window_size=None if window is None else (window - 1, 0),
            implementation="cudnn",
        )
        return out.reshape(q.shape)

    return (local if shard is None else shard(local))(q_BTKGN, k_BTKN, v_BTKN, None)
