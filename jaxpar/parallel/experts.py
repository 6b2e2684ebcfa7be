"""Tokens to their experts and back, within a capacity.

A group's tokens are copied into one buffer of C places for each expert; the buffers change from being split by group
to being split by expert, which is the all-to-all of expert parallelism, are computed, and come back. What finds no
place adds nothing to the residual stream.

Shapes: G groups, S tokens of a group, E experts, K choices of a token, C places of an expert in a group, D embed.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxpar.parallel.constrain import constrain, record_call

__all__ = ["Places", "places_of_choices", "through_experts"]

_BY_GROUP = ("batch", None, None, "embed")
_BY_EXPERT = ("expert_batch", "experts", None, "embed")


class Places(NamedTuple):
    """What is in each expert's places.

    tokens_GEC: int32 place of the token in its group.
    gates_GEC: float32 weight of the expert's result; 0 in empty places.
    """

    tokens_GEC: jax.Array
    gates_GEC: jax.Array


def places_of_choices(
    experts_GSK: jax.Array, gates_GSK: jax.Array, used_GSK: jax.Array, num_experts: int, capacity: int
) -> tuple[Places, jax.Array]:
    """Places for the tokens' choices, and how many choices of each group found none (int32 [G]).

    First choices go before second ones, and among those tokens in their order (Lepikhin 2020, algorithm 1).

    >>> experts, gates = jnp.array([[[0], [0], [1]]]), jnp.ones((1, 3, 1))
    >>> places, dropped = places_of_choices(experts, gates, gates > 0, num_experts=2, capacity=1)
    >>> places.tokens_GEC[0].tolist(), places.gates_GEC[0].tolist(), dropped.tolist()
    ([[0], [2]], [[1.0], [1.0]], [1])
    """
    return jax.vmap(lambda experts, gates, used: _of_one_group(experts, gates, used, num_experts, capacity))(
        experts_GSK, gates_GSK, used_GSK
    )


def _of_one_group(
    experts_SK: jax.Array, gates_SK: jax.Array, used_SK: jax.Array, num_experts: int, capacity: int
) -> tuple[Places, jax.Array]:
    S, K = experts_SK.shape
    # All first choices, then all second ones; what is not used goes to an expert that does not exist.
    experts, gates = jnp.where(used_SK, experts_SK, num_experts).T.reshape(-1), gates_SK.T.reshape(-1)
    order = jnp.argsort(experts, stable=True)
    counts = jnp.bincount(experts, length=num_experts)
    starts = jnp.cumsum(counts) - counts
    place_C = jnp.arange(capacity)
    choices_EC = order[jnp.minimum(starts[:, None] + place_C[None], S * K - 1)]
    is_filled_EC = place_C[None] < counts[:, None]
    dropped = jnp.maximum(counts - capacity, 0).sum()
    places = Places(
        jnp.where(is_filled_EC, choices_EC % S, 0).astype(jnp.int32), jnp.where(is_filled_EC, gates[choices_EC], 0.0)
    )
    return places, dropped


def through_experts(x_GSD: jax.Array, places: Places, compute: Callable[[jax.Array], jax.Array]) -> jax.Array:
    """Σ over a token's places of gate · `compute`(token), [G, S, D]; `compute` maps [G, E, C, D], each expert its own.

    Sums are float32.
    """
    record_call("experts")
    tokens_GEC, gates_GEC = places
    inputs_GECD = jax.vmap(lambda x_SD, tokens_EC: x_SD[tokens_EC])(x_GSD, tokens_GEC)
    inputs_GECD = constrain(constrain(inputs_GECD, _BY_GROUP), _BY_EXPERT)
    outputs_GECD = compute(inputs_GECD)
    outputs_GECD = constrain(constrain(outputs_GECD, _BY_EXPERT), _BY_GROUP)
    weighted_GECD = outputs_GECD.astype(jnp.float32) * gates_GEC[..., None]

    def gathered(weighted_ECD: jax.Array, tokens_EC: jax.Array) -> jax.Array:
        zeros = jnp.zeros((x_GSD.shape[1], x_GSD.shape[2]), jnp.float32)
        return zeros.at[tokens_EC.reshape(-1)].add(weighted_ECD.reshape(-1, x_GSD.shape[2]))

    return jax.vmap(gathered)(weighted_GECD, tokens_GEC).astype(x_GSD.dtype)
