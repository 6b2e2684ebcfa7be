"""Routers against their papers' formulas, written out token by token in NumPy."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpar.models.routing import (
    Routing,
    balance_loss,
    expert_choice,
    gshard_top_2,
    hierarchical,
    noisy_top_k,
    sigmoid_top_k,
    softmax_top_k,
    z_loss,
)

G, S, E = 3, 7, 6
LOGITS = np.asarray(2.0 * jax.random.normal(jax.random.key(0), (G, S, E)))
VALID = np.arange(S) < np.array([7, 4, 0])[:, None]


def softmax(x: np.ndarray) -> np.ndarray:
    e = np.exp(x - x.max())
    return e / e.sum()


def largest(x: np.ndarray, k: int) -> list[int]:
    return sorted(range(len(x)), key=lambda i: -x[i])[:k]


def balance(probabilities: np.ndarray, choices: list[list[int]], g: int) -> float:
    """E Σ f P of group g, whose valid tokens chose `choices`."""
    tokens = [s for s in range(S) if VALID[g, s]]
    if not tokens:
        return 0.0
    k = len(choices[0])
    total = 0.0
    for e in range(E):
        f = sum(row.count(e) for row in choices) / (k * len(tokens))
        total += f * np.mean([probabilities[g, s, e] for s in tokens])
    return E * total


def assert_routes(found: Routing, choices: dict, losses: list[float]) -> None:
    """`choices[g, s]` is a list of (expert, gate) of a valid token's used choices."""
    for g in range(G):
        for s in range(S):
            want = choices.get((g, s), [])
            used = np.asarray(found.used_GSK[g, s])
            got = [
                (int(e), float(w))
                for e, w, u in zip(found.experts_GSK[g, s], found.gates_GSK[g, s], used, strict=True)
                if u
            ]
            assert [e for e, _ in got] == [e for e, _ in want], (g, s)
            np.testing.assert_allclose([w for _, w in got], [w for _, w in want], rtol=1e-5)
            assert not np.asarray(found.gates_GSK[g, s])[~used].any()
    np.testing.assert_allclose(found.losses_G, losses, rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize(("k", "normalised"), [(1, False), (2, True), (3, False)], ids=["Switch", "Mixtral", "others"])
def test_the_k_most_probable(k: int, normalised: bool) -> None:
    found = softmax_top_k(LOGITS, VALID, k, normalised=normalised, balance_coefficient=0.5)
    found = found._replace(losses_G=found.losses_G + 0.25 * z_loss(LOGITS, VALID))
    probabilities = np.array([[softmax(x) for x in group] for group in LOGITS])
    choices, losses = {}, []
    for g in range(G):
        for s in np.flatnonzero(VALID[g]):
            p = probabilities[g, s]
            of = sum(p[e] for e in largest(p, k)) if normalised else 1.0
            choices[g, int(s)] = [(e, p[e] / of) for e in largest(p, k)]
        rows = [[e for e, _ in choices[g, s]] for s in range(S) if VALID[g, s]]
        z = np.mean([np.log(np.exp(LOGITS[g, s]).sum()) ** 2 for s in np.flatnonzero(VALID[g])] or [0.0])
        losses.append(0.5 * balance(probabilities, rows, g) + 0.25 * z)
    assert_routes(found, choices, losses)


@pytest.mark.parametrize("training", [True, False])
def test_a_second_expert_by_chance(training: bool) -> None:
    uniform = np.asarray(jax.random.uniform(jax.random.key(1), (G, S))) if training else None
    found = gshard_top_2(LOGITS, VALID, uniform, balance_coefficient=0.1)
    probabilities = np.array([[softmax(x) for x in group] for group in LOGITS])
    choices, losses, left_out = {}, [], 0
    for g in range(G):
        rows = []
        for s in np.flatnonzero(VALID[g]):
            p = probabilities[g, s]
            first, second = largest(p, 2)
            gates = p[first] / (p[first] + p[second]), p[second] / (p[first] + p[second])
            choices[g, int(s)] = [(first, gates[0]), (second, gates[1])]
            if training and not uniform[g, s] < 2 * gates[1]:
                choices[g, int(s)].pop()
                left_out += 1
            rows.append([first])
        losses.append(0.1 * balance(probabilities, rows, g))
    assert (left_out > 0) == training
    assert_routes(found, choices, losses)


@pytest.mark.parametrize("training", [True, False])
def test_noisy_gates(training: bool) -> None:
    k = 2
    deviations = np.asarray(jax.nn.softplus(jax.random.normal(jax.random.key(2), (G, S, E))))
    normal = np.asarray(jax.random.normal(jax.random.key(3), (G, S, E))) if training else None
    found = noisy_top_k(LOGITS, deviations, normal, VALID, k, importance_coefficient=0.3, load_coefficient=0.7)
    noisy = LOGITS + normal * deviations if training else LOGITS
    choices, losses = {}, []
    for g in range(G):
        importance, load = np.zeros(E), np.zeros(E)
        for s in np.flatnonzero(VALID[g]):
            best = largest(noisy[g, s], k)
            gates = softmax(noisy[g, s][best])
            choices[g, int(s)] = list(zip(best, gates, strict=True))
            for e, gate in choices[g, int(s)]:
                importance[e] += gate
            for e in range(E):
                kth_of_others = sorted((noisy[g, s, i] for i in range(E) if i != e), reverse=True)[k - 1]
                z = (LOGITS[g, s, e] - kth_of_others) / deviations[g, s, e]
                load[e] += 0.5 * (1 + math.erf(z / math.sqrt(2)))
        variation = [x.var() / x.mean() ** 2 if x.any() else 0.0 for x in (importance, load)]
        losses.append(0.3 * variation[0] + (0.7 * variation[1] if training else 0.0))
    assert_routes(found, choices, losses)


@pytest.mark.parametrize("nodes", [(1, 1), (3, 2), (3, 1)])
def test_sigmoid_gates_with_a_bias_and_few_nodes(nodes: tuple[int, int]) -> None:
    num_nodes, per_token = nodes
    bias = np.linspace(-0.6, 0.6, E).astype(np.float32)
    found = sigmoid_top_k(
        LOGITS, bias, VALID, 2, num_nodes=num_nodes, nodes_per_token=per_token, scale=2.5, balance_coefficient=0.2
    )
    scores = 1 / (1 + np.exp(-LOGITS))
    shares = scores / scores.sum(-1, keepdims=True)
    choices, losses, plain = {}, [], 0
    for g in range(G):
        rows = []
        for s in np.flatnonzero(VALID[g]):
            biased = scores[g, s] + bias
            of_nodes = biased.reshape(num_nodes, -1)
            allowed = largest(np.array([sum(sorted(node)[-2:]) for node in of_nodes]), per_token)
            candidates = np.array([x if e // (E // num_nodes) in allowed else -np.inf for e, x in enumerate(biased)])
            best = largest(candidates, 2)
            gates = 2.5 * scores[g, s][best] / scores[g, s][best].sum()
            choices[g, int(s)] = list(zip(best, gates, strict=True))
            rows.append(best)
            plain += best == largest(scores[g, s], 2)
        losses.append(0.2 * balance(shares, rows, g))
    assert plain < VALID.sum(), "the bias changes some choices"
    assert_routes(found, choices, losses)


def test_the_bias_of_sigmoid_gates_gets_no_gradient_and_the_logits_do() -> None:
    def total(logits: jax.Array, bias: jax.Array) -> jax.Array:
        found = sigmoid_top_k(logits, bias, VALID, 2, balance_coefficient=1.0)
        return found.gates_GSK[..., 0].sum() + found.losses_G.sum()

    dlogits, dbias = jax.grad(total, (0, 1))(jnp.asarray(LOGITS), jnp.zeros(E))
    assert not dbias.any()
    assert dlogits[0].any()
    assert not dlogits[2].any(), "padding"


def test_experts_that_choose() -> None:
    capacity = 3
    tokens, gates, used = expert_choice(jnp.asarray(LOGITS), VALID, capacity)
    for g in range(G):
        probabilities = np.array([softmax(x) if VALID[g, s] else np.zeros(E) for s, x in enumerate(LOGITS[g])])
        for e in range(E):
            want = [s for s in largest(probabilities[:, e], capacity) if VALID[g, s]]
            assert [int(s) for s, u in zip(tokens[g, e], used[g, e], strict=True) if u] == want
            np.testing.assert_allclose(np.asarray(gates[g, e])[: len(want)], probabilities[want, e], rtol=1e-5)
            assert not np.asarray(gates[g, e])[~np.asarray(used[g, e])].any()


def test_two_levels_of_gates() -> None:
    """2 of 3 branches, and in each 1 of its 2 experts; experts are numbered branch by branch."""
    first = softmax_top_k(LOGITS[..., :3], VALID, 2, normalised=True, balance_coefficient=1.0)
    inner = np.asarray(jax.random.normal(jax.random.key(4), (G, S, 3, 2)))
    of_choice = np.take_along_axis(inner, np.asarray(first.experts_GSK)[..., None], axis=2).reshape(G, 2 * S, 2)
    second = softmax_top_k(of_choice, np.repeat(VALID, 2, axis=1), 1, normalised=False)
    found = hierarchical(first, second, 2)
    choices = {}
    for g in range(G):
        for s in np.flatnonzero(VALID[g]):
            outer = softmax(LOGITS[g, s, :3])
            branches = largest(outer, 2)
            of = outer[branches].sum()
            choices[g, int(s)] = []
            for branch in branches:
                p = softmax(inner[g, s, branch])
                (e,) = largest(p, 1)
                choices[g, int(s)].append((2 * branch + e, outer[branch] / of * p[e]))
    assert_routes(found, choices, np.asarray(first.losses_G + second.losses_G).tolist())


def test_losses_are_at_their_least_at_balance_and_linear() -> None:
    even = jnp.tile(jnp.eye(E)[None], (1, 2, 1)) * 1e-3
    valid = np.ones((1, 2 * E), bool)
    experts = jax.lax.top_k(even, 1)[1]
    used = np.ones(experts.shape, bool)
    assert balance_loss(jax.nn.softmax(even), experts, used, valid)[0] == pytest.approx(1.0, rel=1e-4)
    skewed = even.at[:, :, 0].add(1.0)
    chosen = jax.lax.top_k(skewed, 1)[1]
    assert balance_loss(jax.nn.softmax(skewed), chosen, used, valid)[0] > 1.5
    assert z_loss(even, valid)[0] == pytest.approx(math.log(E) ** 2, rel=1e-3)

    def gradient(coefficient: float) -> Any:
        return jax.grad(
            lambda logits: softmax_top_k(
                logits, VALID, 2, normalised=True, balance_coefficient=coefficient
            ).losses_G.sum()
        )(jnp.asarray(LOGITS))

    one, two = gradient(1.0), gradient(2.0)
    assert jnp.abs(one).max() > 1e-3
    np.testing.assert_allclose(two, 2 * one, rtol=1e-5)
