"""cuDNN's fused attention on NVIDIA GPUs, through `jax.nn.dot_product_attention`."""

import jax

__all__ = ["cudnn_attention"]


def cudnn_attention(
    q_BTKGN: jax.Array, k_BTKN: jax.Array, v_BTKN: jax.Array, *, window: int | None, scale: float
) -> jax.Array:
    """What `reference_attention` computes without segments and soft cap; 16-bit operands on a GPU.

    Through the public interface packed segments would need a mask [B, 1, T, T] in memory, and there is no soft cap.
    """
    B, T, K, G, N = q_BTKGN.shape
    out = jax.nn.dot_product_attention(
        q_BTKGN.reshape(B, T, K * G, N),
        k_BTKN,
        v_BTKN,
        scale=scale,
        is_causal=True,
        # Tokens to the left of the query, without it.
        local_window_size=None if window is None else (window - 1, 0),
        implementation="cudnn",
    )
    return out.reshape(q_BTKGN.shape)
