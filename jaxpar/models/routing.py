"""Which experts a token goes to, and with what weight: routers as functions of their logits, each from its paper.

A group is what a router balances and, with a capacity, what it drops tokens within: a sequence or a part of one. What
a router decides for a group depends on nothing outside of it, so that neither the mesh nor microbatches change it.
Padding is routed nowhere and counts in no statistic. Everything is float32.

Shapes: G groups, S tokens of a group, E experts, K experts of a token, N nodes (sets of E/N experts).
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

__all__ = [
    "Routing",
    "balance_loss",
    "expert_choice",
    "gshard_top_2",
    "hierarchical",
    "noisy_top_k",
    "sigmoid_top_k",
    "softmax_top_k",
    "z_loss",
]


class Routing(NamedTuple):
    """Where tokens go.

    experts_GSK: int32 expert of each choice, the first choice first.
    gates_GSK: float32 weight of what that expert computes; 0 where it is not used.
    used_GSK: whether the choice counts: not for padding, and not where a router leaves it out.
    losses_G: auxiliary losses of each group, mean over its valid tokens, times their coefficients.
    """

    experts_GSK: jax.Array
    gates_GSK: jax.Array
    used_GSK: jax.Array
    losses_G: jax.Array


def softmax_top_k(
    logits_GSE: jax.Array,
    valid_GS: jax.Array,
    k: int,
    *,
    normalised: bool,
    balance_coefficient: float = 0.0,
) -> Routing:
    """The k largest of softmax(logits) with their probabilities as gates, divided by their sum if `normalised`.

    With k = 1, unnormalised, this is Switch (Fedus 2021, section 2.1); with k = 2, normalised, Mixtral (Jiang 2024,
    section 2.1). The loss is `balance_loss`.

    >>> logits, valid = jnp.zeros((1, 2, 4)).at[0, :, 3].set(9.0), jnp.array([[True, False]])
    >>> routing = softmax_top_k(logits, valid, 2, normalised=True)
    >>> routing.experts_GSK[0, 0].tolist(), routing.used_GSK[0].tolist()
    ([3, 0], [[True, True], [False, False]])
    """
    probabilities_GSE = jax.nn.softmax(logits_GSE, axis=-1)
    gates_GSK, experts_GSK = jax.lax.top_k(probabilities_GSE, k)
    if normalised:
        gates_GSK /= gates_GSK.sum(-1, keepdims=True)
    used_GSK = jnp.broadcast_to(valid_GS[..., None], experts_GSK.shape)
    losses_G = balance_coefficient * balance_loss(probabilities_GSE, experts_GSK, used_GSK, valid_GS)
    return Routing(experts_GSK, jnp.where(used_GSK, gates_GSK, 0.0), used_GSK, losses_G)


def gshard_top_2(
    logits_GSE: jax.Array, valid_GS: jax.Array, uniform_GS: jax.Array | None, *, balance_coefficient: float
) -> Routing:
    """Top-2 gating (Lepikhin 2020, algorithm 1): gates are normalised over both; the second expert is used with
    probability min(1, 2·g₂); the loss is mean over experts of (share of first choices) · (mean gate), times E² here, so
    that it is 1 at balance as Switch's is.

    `uniform_GS` are random numbers in [0, 1); without them, as in evaluation, the second expert is always used.
    """
    probabilities_GSE = jax.nn.softmax(logits_GSE, axis=-1)
    gates_GSK, experts_GSK = jax.lax.top_k(probabilities_GSE, 2)
    gates_GSK /= gates_GSK.sum(-1, keepdims=True)
    second_GS = valid_GS if uniform_GS is None else valid_GS & (uniform_GS < 2.0 * gates_GSK[..., 1])
    used_GSK = jnp.stack([valid_GS, second_GS], axis=-1)
    first = balance_loss(probabilities_GSE, experts_GSK[..., :1], used_GSK[..., :1], valid_GS)
    return Routing(experts_GSK, jnp.where(used_GSK, gates_GSK, 0.0), used_GSK, balance_coefficient * first)


def noisy_top_k(
    logits_GSE: jax.Array,
    deviations_GSE: jax.Array,
    normal_GSE: jax.Array | None,
    valid_GS: jax.Array,
    k: int,
    *,
    importance_coefficient: float,
    load_coefficient: float,
) -> Routing:
    """Noisy top-k gating (Shazeer 2017, section 2.1 and appendix A).

    H = logits + normal · deviations, gates are the softmax over the k largest of H. The losses are the squared
    coefficients of variation of importance (Σ gates of an expert) and of load: the expected number of tokens that an
    expert gets if their noise for it were drawn again.

    Args:
      deviations_GSE: softplus(x·W_noise), more than 0.
      normal_GSE: standard normal noise; None for none, as in evaluation, where the load is not defined and costs
        nothing.
    """
    noisy_GSE = logits_GSE if normal_GSE is None else logits_GSE + normal_GSE * deviations_GSE
    largest_GSK, experts_GSK = jax.lax.top_k(noisy_GSE, k)
    used_GSK = jnp.broadcast_to(valid_GS[..., None], experts_GSK.shape)
    gates_GSK = jnp.where(used_GSK, jax.nn.softmax(largest_GSK, axis=-1), 0.0)
    importance_GE = (gates_GSK[..., None] * jax.nn.one_hot(experts_GSK, logits_GSE.shape[-1])).sum((1, 2))
    losses_G = importance_coefficient * _squared_variation(importance_GE)
    if normal_GSE is not None and k < logits_GSE.shape[-1]:
        load_GE = _expected_load(logits_GSE, deviations_GSE, noisy_GSE, valid_GS, k)
        losses_G += load_coefficient * _squared_variation(load_GE)
    return Routing(experts_GSK, gates_GSK, used_GSK, losses_G)


def sigmoid_top_k(
    logits_GSE: jax.Array,
    bias_E: jax.Array,
    valid_GS: jax.Array,
    k: int,
    *,
    num_nodes: int = 1,
    nodes_per_token: int = 1,
    scale: float = 1.0,
    balance_coefficient: float = 0.0,
) -> Routing:
    """Gates σ(logits) without an auxiliary loss's balance (DeepSeek-V3, Liu 2024, section 2.1.2).

    Experts are chosen by σ(logits) + bias, within the `nodes_per_token` nodes whose two best experts score highest
    together; the gates are σ(logits) of those chosen, divided by their sum, times `scale`. No gradient goes to the
    bias. The loss is the sequence-wise balance of σ/Σσ.
    """
    scores_GSE = jax.nn.sigmoid(logits_GSE)
    choice_GSE = scores_GSE + jax.lax.stop_gradient(bias_E)[None, None]
    if nodes_per_token < num_nodes:
        choice_GSE = jnp.where(_allowed(choice_GSE, num_nodes, nodes_per_token), choice_GSE, -jnp.inf)
    experts_GSK = jax.lax.top_k(choice_GSE, k)[1]
    gates_GSK = jnp.take_along_axis(scores_GSE, experts_GSK, axis=-1)
    gates_GSK *= scale / (gates_GSK.sum(-1, keepdims=True) + 1e-20)
    used_GSK = jnp.broadcast_to(valid_GS[..., None], experts_GSK.shape)
    shares_GSE = scores_GSE / (scores_GSE.sum(-1, keepdims=True) + 1e-20)
    losses_G = balance_coefficient * balance_loss(shares_GSE, experts_GSK, used_GSK, valid_GS)
    return Routing(experts_GSK, jnp.where(used_GSK, gates_GSK, 0.0), used_GSK, losses_G)


def expert_choice(logits_GSE: jax.Array, valid_GS: jax.Array, capacity: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Each expert takes the `capacity` tokens of a group that want it most (Zhou 2022, section 3.1).

    Returns tokens_GEC (int32 places in the group), their gates, softmax over experts, and which are used: not padding.
    A token may get any number of experts. What a token gets depends on those behind it: training sees the future.
    """
    probabilities_GSE = jnp.where(valid_GS[..., None], jax.nn.softmax(logits_GSE, axis=-1), 0.0)
    gates_GEC, tokens_GEC = jax.lax.top_k(jnp.swapaxes(probabilities_GSE, 1, 2), capacity)
    used_GEC = jax.vmap(lambda valid_S, tokens_EC: valid_S[tokens_EC])(valid_GS, tokens_GEC)
    return tokens_GEC, jnp.where(used_GEC, gates_GEC, 0.0), used_GEC


def hierarchical(first: Routing, second: Routing, experts_per_branch: int) -> Routing:
    """Two-level gating (Shazeer 2017, appendix B): each branch that `first` chooses chooses among its own experts.

    The gate of an expert is the product of both: y = Σᵢ Σⱼ gᵢ(x)·gᵢⱼ(x)·Eᵢⱼ(x).

    Args:
      second: for every choice of `first`: experts [G, S, K1·K2] within the branch of choice s·K1 + i, K2 of each.
    """
    G, S, K1 = first.experts_GSK.shape
    inner = [array.reshape(G, S, K1, -1) for array in (second.experts_GSK, second.gates_GSK, second.used_GSK)]
    experts = first.experts_GSK[..., None] * experts_per_branch + inner[0]
    gates = first.gates_GSK[..., None] * inner[1]
    used = first.used_GSK[..., None] & inner[2]
    flat = [array.reshape(G, S, -1) for array in (experts, jnp.where(used, gates, 0.0), used)]
    return Routing(flat[0], flat[1], flat[2], first.losses_G + second.losses_G)


def balance_loss(
    probabilities_GSE: jax.Array, experts_GSK: jax.Array, used_GSK: jax.Array, valid_GS: jax.Array
) -> jax.Array:
    """E · Σ_e f_e · P_e of each group, 1 at balance (Fedus 2021, equation 4): f_e the share of choices that are expert
    e, through which no gradient goes, P_e its mean probability, both over valid tokens; 0 without any."""
    E, K = probabilities_GSE.shape[-1], experts_GSK.shape[-1]
    tokens_G1 = jnp.maximum(valid_GS.sum(-1, keepdims=True), 1)
    choices_GSKE = jax.nn.one_hot(experts_GSK, E) * used_GSK[..., None]
    share_GE = choices_GSKE.sum((1, 2)) / (K * tokens_G1)
    mean_GE = (probabilities_GSE * valid_GS[..., None]).sum(1) / tokens_G1
    return E * (share_GE * mean_GE).sum(-1)


def z_loss(logits_GSE: jax.Array, valid_GS: jax.Array) -> jax.Array:
    """The mean over a group's valid tokens of logsumexp(logits)² (Zoph 2022, equation 5)."""
    squares_GS = jnp.square(jax.nn.logsumexp(logits_GSE, axis=-1))
    return (squares_GS * valid_GS).sum(-1) / jnp.maximum(valid_GS.sum(-1), 1)


def _squared_variation(x_GE: jax.Array) -> jax.Array:
    """Variance over squared mean; 0 where the mean is."""
    mean_G = x_GE.mean(-1)
    is_zero = mean_G == 0.0
    return jnp.where(is_zero, 0.0, x_GE.var(-1) / jnp.square(jnp.where(is_zero, 1.0, mean_G)))


def _expected_load(
    logits_GSE: jax.Array, deviations_GSE: jax.Array, noisy_GSE: jax.Array, valid_GS: jax.Array, k: int
) -> jax.Array:
    """Σ over tokens of the probability that an expert is among the k largest, all other noise as it is."""
    largest = jax.lax.top_k(noisy_GSE, k + 1)[0]
    with_it, without_it = largest[..., k : k + 1], largest[..., k - 1 : k]
    # The k-th largest of the others: for one that is among the k largest that is the (k + 1)-th of all.
    others_GSE = jnp.where(noisy_GSE > with_it, with_it, without_it)
    probability_GSE = jax.scipy.stats.norm.cdf((logits_GSE - others_GSE) / deviations_GSE)
    return (probability_GSE * valid_GS[..., None]).sum(1)


def _allowed(choice_GSE: jax.Array, num_nodes: int, nodes_per_token: int) -> jax.Array:
    """Whether an expert is in one of its token's nodes."""
    G, S, E = choice_GSE.shape
    of_nodes = choice_GSE.reshape(G, S, num_nodes, -1)
    best_GSN = jax.lax.top_k(of_nodes, min(2, of_nodes.shape[-1]))[0].sum(-1)
    nodes = jax.lax.top_k(best_GSN, nodes_per_token)[1]
    chosen_GSN = jax.nn.one_hot(nodes, num_nodes, dtype=jnp.bool_).any(-2)
    return jnp.repeat(chosen_GSN, E // num_nodes, axis=-1)
