"""Which keys a query sees: the one definition that all implementations share or are tested against."""

import jax

__all__ = ["MASKED", "visible"]

MASKED = -1e30
"""Score of a key that is not seen: its weight is exactly 0, and arithmetic on it stays finite."""


def visible(
    query_index_T: jax.Array,
    key_index_S: jax.Array,
    query_segments_BT: jax.Array | None,
    key_segments_BS: jax.Array | None,
    window: int | None,
) -> jax.Array:
    """Booleans [B, T, S], or [1, T, S] without segments: 0 <= t - s < window, and the same segment.

    Every token sees itself, padding (segment 0) too, so that no row of scores is empty and no softmax divides by 0.

    >>> import jax.numpy as jnp
    >>> visible(jnp.arange(3), jnp.arange(3), None, None, window=2)[0].astype(int).tolist()
    [[1, 0, 0], [1, 1, 0], [0, 1, 1]]
    """
    distance_TS = query_index_T[:, None] - key_index_S[None, :]
    seen = distance_TS >= 0
    if window is not None:
        seen &= distance_TS < window
    seen = seen[None]
    if query_segments_BT is not None and key_segments_BS is not None:
        seen = seen & (query_segments_BT[:, :, None] == key_segments_BS[:, None, :])
    return seen
