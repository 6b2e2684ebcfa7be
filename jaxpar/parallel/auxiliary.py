"""What a model with experts adds up beside its predictions, over tokens, layers and devices.

Shapes: L layers with experts, E experts.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

__all__ = ["LayerSums", "LossWeights", "expert_metrics", "parted", "weighted"]


class LayerSums(NamedTuple):
    """Sums over tokens that are no padding, float32.

    auxiliary_loss: over layers too; Σ over groups of (tokens of the group · its loss), so that the mean over tokens is
      that of the groups. Only this is differentiated.
    load_LE: choices of each expert.
    dropped_L: choices that no expert had a place for.
    entropy_L: of tokens' probabilities of experts, nats.
    """

    auxiliary_loss: jax.Array
    load_LE: jax.Array
    dropped_L: jax.Array
    entropy_L: jax.Array


class LossWeights(NamedTuple):
    """What the sums are multiplied by before they are differentiated: one over the number of tokens, and the loss
    scale, of the loss over tokens with a target and of the auxiliary losses over all that are no padding."""

    loss: jax.Array
    auxiliary: jax.Array


def parted(result: Any) -> tuple[Any, LayerSums | None]:
    """What a model returns, and what its layers have added up."""
    if isinstance(result, tuple) and len(result) == 2 and isinstance(result[1], LayerSums):
        return result
    return result, None


def weighted(weights: LossWeights, loss: jax.Array, sums: LayerSums | None) -> jax.Array:
    """What is differentiated."""
    total = weights.loss * loss
    return total if sums is None else total + weights.auxiliary * sums.auxiliary_loss


def expert_metrics(sums: LayerSums, tokens: jax.Array) -> dict[str, jax.Array]:
    """Scalars to report, of sums over a step, and the load of each expert as a share of its layer's choices [L, E].

    `tokens`: how many there were, padding left out. The violation of balance is the largest load over the mean one,
    less 1 (Wang 2024, MaxVio), of the layer where it is largest.
    """
    choices_L = jnp.maximum(sums.load_LE.sum(-1), 1.0)
    shares_LE = sums.load_LE / choices_L[:, None]
    count = jnp.maximum(tokens, 1).astype(jnp.float32)
    return {
        "experts/auxiliary_loss": sums.auxiliary_loss / count,
        "experts/dropped_share": sums.dropped_L.sum() / choices_L.sum(),
        "experts/entropy": sums.entropy_L.mean() / count,
        "experts/max_violation": (shares_LE.max(-1) * shares_LE.shape[-1] - 1.0).max(),
        "experts/load": shares_LE,
    }
