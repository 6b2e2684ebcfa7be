"""Tokens in their experts' places, against a loop over them; and back."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpar.parallel.experts import places_of_choices, through_experts

G, S, E, K, D = 2, 6, 3, 2, 4


def choices() -> tuple[Any, Any, Any]:
    random = np.random.default_rng(0)
    experts = np.stack([[random.permutation(E)[:K] for _ in range(S)] for _ in range(G)])
    gates = random.random((G, S, K)).astype(np.float32)
    used = random.random((G, S, K)) < 0.8
    return experts.astype(np.int32), gates, used


def by_hand(capacity: int) -> tuple[list, np.ndarray]:
    """For each group and expert a list of (token, gate): first choices of all tokens, then second ones."""
    experts, gates, used = choices()
    places = [[[] for _ in range(E)] for _ in range(G)]
    dropped = np.zeros(G, int)
    for g in range(G):
        for k in range(K):
            for s in range(S):
                if used[g, s, k]:
                    place = places[g][experts[g, s, k]]
                    if len(place) < capacity:
                        place.append((s, gates[g, s, k]))
                    else:
                        dropped[g] += 1
    return places, dropped


@pytest.mark.parametrize("capacity", [1, 2, 12])
def test_first_choices_come_first_and_then_tokens_in_their_order(capacity: int) -> None:
    found, dropped = places_of_choices(*choices(), E, capacity)
    expected, expected_dropped = by_hand(capacity)
    np.testing.assert_array_equal(dropped, expected_dropped)
    assert (expected_dropped > 0).any() == (capacity < 12)
    for g in range(G):
        for e in range(E):
            want = expected[g][e]
            assert found.tokens_GEC[g, e, : len(want)].tolist() == [token for token, _ in want]
            np.testing.assert_allclose(found.gates_GEC[g, e, : len(want)], [gate for _, gate in want])
            assert not found.gates_GEC[g, e, len(want) :].any()


@pytest.mark.parametrize("capacity", [1, 12])
def test_a_token_gets_the_weighted_sum_of_its_experts(capacity: int) -> None:
    """And gradients go the same way back; experts compute x times their number plus one."""
    x = np.random.default_rng(1).normal(size=(G, S, D)).astype(np.float32)
    factors = jnp.arange(1.0, E + 1)

    def total(x: jax.Array, gates: jax.Array) -> tuple[jax.Array, jax.Array]:
        experts, _, used = choices()
        places, _ = places_of_choices(experts, gates, used, E, capacity)
        y = through_experts(x, places, lambda inputs: inputs * factors[None, :, None, None])
        return (y * jnp.arange(1.0, D + 1)[None, None]).sum(), y

    gates = choices()[1]
    (_, y), (dx, dgates) = jax.value_and_grad(total, (0, 1), has_aux=True)(x, gates)
    weight, used_gates = np.zeros((G, S)), np.zeros((G, S))
    for g, group in enumerate(by_hand(capacity)[0]):
        for e, place in enumerate(group):
            for token, gate in place:
                weight[g, token] += gate * (e + 1)
                used_gates[g, token] += 1
    np.testing.assert_allclose(y, x * weight[..., None], rtol=1e-5)
    np.testing.assert_allclose(dx, weight[..., None] * np.arange(1.0, D + 1), rtol=1e-5)
    assert ((np.asarray(dgates) != 0).sum(-1) == used_gates).all()
