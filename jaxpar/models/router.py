"""Routers as modules: their weights, their randomness, and what they decide. The mathematics is in `routing`.

Logits are float32, of float32 inputs and of weights that no compute format rounds (Fedus 2021, section 2.4).
Shapes: B batch, D embed, G groups, S tokens of a group, E experts, C places of an expert in a group.
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from jaxpar.models.experts_config import (
    ExpertChoice,
    ExpertsConfig,
    GShardTop2,
    Hierarchical,
    NoisyTopK,
    SigmoidTopK,
    SwitchTop1,
    TopK,
)
from jaxpar.models.layers import normal, zeros
from jaxpar.models.routing import (
    Routing,
    expert_choice,
    gshard_top_2,
    hierarchical,
    noisy_top_k,
    sigmoid_top_k,
    softmax_top_k,
    z_loss,
)
from jaxpar.parallel.constrain import constrain
from jaxpar.parallel.experts import Places, places_of_choices

__all__ = ["Decision", "make_router"]

_AXES = ("embed", "router")


class Decision(NamedTuple):
    """Where tokens go: `places`, and of each group its auxiliary loss; over all groups the choices of each expert, the
    choices without a place, and the entropy of tokens' probabilities in nats, all float32."""

    places: Places
    losses_G: jax.Array
    load_E: jax.Array
    dropped: jax.Array
    entropy: jax.Array


def make_router(settings: ExpertsConfig, dim: int, std: float, *, rngs: nnx.Rngs) -> "_Router":
    """The router that the configuration names."""
    return _ROUTERS[type(settings.router)](settings, dim, std, rngs)


class _Router(nnx.Module):
    """Logits x·W, and what follows from them.

    Calling it with x [G, S, D], which tokens are valid [G, S], and a key for each sequence ([B], none in evaluation)
    gives a `Decision`.
    """

    choices: Callable[[jax.Array, jax.Array, jax.Array | None], tuple[Routing, jax.Array]]
    """Where tokens would go, and the probabilities [G, S, E] of that, float32."""

    def __init__(self, settings: ExpertsConfig, dim: int, std: float, rngs: nnx.Rngs):
        self.settings = settings
        self.kernel = normal(rngs, (dim, settings.num_experts), _AXES, std)

    def __call__(self, x_GSD: jax.Array, valid_GS: jax.Array, keys_B: jax.Array | None, capacity: int) -> Decision:
        routing, probabilities_GSE = self.choices(x_GSD.astype(jnp.float32), valid_GS, keys_B)
        E = self.settings.num_experts
        places, dropped_G = places_of_choices(routing.experts_GSK, routing.gates_GSK, routing.used_GSK, E, capacity)
        load_E = jnp.bincount(jnp.where(routing.used_GSK, routing.experts_GSK, E).reshape(-1), length=E)
        return Decision(
            places,
            routing.losses_G,
            load_E.astype(jnp.float32),
            dropped_G.sum().astype(jnp.float32),
            _entropy(probabilities_GSE, valid_GS),
        )


class _SoftmaxRouter(_Router):
    def choices(self, x_GSD: jax.Array, valid_GS: jax.Array, keys_B: jax.Array | None) -> tuple[Routing, jax.Array]:
        router = self.settings.router
        assert isinstance(router, TopK | SwitchTop1)
        if keys_B is not None and router.jitter:
            low, high = 1.0 - router.jitter, 1.0 + router.jitter
            x_GSD *= _drawn(lambda key, shape: jax.random.uniform(key, shape, minval=low, maxval=high), keys_B, x_GSD)
        logits_GSE = _product(x_GSD, self.kernel)
        routing = softmax_top_k(
            logits_GSE, valid_GS, router.experts_per_token,
            normalised=router.normalised,
            balance_coefficient=router.balance_coefficient,
        )  # fmt: skip
        return _with_z_loss(routing, router.z_coefficient, logits_GSE, valid_GS), jax.nn.softmax(logits_GSE, axis=-1)


class _GShardRouter(_Router):
    def choices(self, x_GSD: jax.Array, valid_GS: jax.Array, keys_B: jax.Array | None) -> tuple[Routing, jax.Array]:
        router = self.settings.router
        assert isinstance(router, GShardTop2)
        logits_GSE = _product(x_GSD, self.kernel)
        uniform_GS = None if keys_B is None else _drawn(jax.random.uniform, keys_B, logits_GSE[..., 0])
        routing = gshard_top_2(logits_GSE, valid_GS, uniform_GS, balance_coefficient=router.balance_coefficient)
        return _with_z_loss(routing, router.z_coefficient, logits_GSE, valid_GS), jax.nn.softmax(logits_GSE, axis=-1)


class _NoisyRouter(_Router):
    def __init__(self, settings: ExpertsConfig, dim: int, std: float, rngs: nnx.Rngs):
        super().__init__(settings, dim, std, rngs)
        self.noise = zeros((dim, settings.num_experts), _AXES)

    def choices(self, x_GSD: jax.Array, valid_GS: jax.Array, keys_B: jax.Array | None) -> tuple[Routing, jax.Array]:
        router = self.settings.router
        assert isinstance(router, NoisyTopK)
        logits_GSE, deviations_GSE = _product(x_GSD, self.kernel), jax.nn.softplus(_product(x_GSD, self.noise))
        routing = noisy_top_k(
            logits_GSE, deviations_GSE, _normal_noise(keys_B, logits_GSE), valid_GS, router.experts_per_token,
            importance_coefficient=router.importance_coefficient,
            load_coefficient=router.load_coefficient,
        )  # fmt: skip
        return _with_z_loss(routing, router.z_coefficient, logits_GSE, valid_GS), jax.nn.softmax(logits_GSE, axis=-1)


class _SigmoidRouter(_Router):
    def __init__(self, settings: ExpertsConfig, dim: int, std: float, rngs: nnx.Rngs):
        super().__init__(settings, dim, std, rngs)
        assert isinstance(settings.router, SigmoidTopK)
        bias_E = jnp.zeros((settings.num_experts,), jnp.float32)
        self.balance_bias = nnx.Param(bias_E, out_sharding=("router",), balance_rate=settings.router.bias_rate)

    def choices(self, x_GSD: jax.Array, valid_GS: jax.Array, keys_B: jax.Array | None) -> tuple[Routing, jax.Array]:
        router = self.settings.router
        assert isinstance(router, SigmoidTopK)
        logits_GSE = _product(x_GSD, self.kernel)
        routing = sigmoid_top_k(
            logits_GSE, self.balance_bias[...].astype(jnp.float32), valid_GS, router.experts_per_token,
            num_nodes=router.num_nodes,
            nodes_per_token=router.nodes_per_token,
            scale=router.scale,
            balance_coefficient=router.balance_coefficient,
        )  # fmt: skip
        scores_GSE = jax.nn.sigmoid(logits_GSE)
        shares_GSE = scores_GSE / scores_GSE.sum(-1, keepdims=True)
        return _with_z_loss(routing, router.z_coefficient, logits_GSE, valid_GS), shares_GSE


class _HierarchicalRouter(_Router):
    """`kernel` and `noise` [D, E] are those of all branches, next to each other."""

    def __init__(self, settings: ExpertsConfig, dim: int, std: float, rngs: nnx.Rngs):
        super().__init__(settings, dim, std, rngs)
        assert isinstance(settings.router, Hierarchical)
        self.noise = zeros((dim, settings.num_experts), _AXES)
        self.branch_kernel = normal(rngs, (dim, settings.router.num_branches), _AXES, std)
        self.branch_noise = zeros((dim, settings.router.num_branches), _AXES)

    def choices(self, x_GSD: jax.Array, valid_GS: jax.Array, keys_B: jax.Array | None) -> tuple[Routing, jax.Array]:
        router = self.settings.router
        assert isinstance(router, Hierarchical)
        gate = partial(
            noisy_top_k,
            importance_coefficient=router.importance_coefficient,
            load_coefficient=router.load_coefficient,
        )
        outer_keys, inner_keys = (None, None) if keys_B is None else _two(keys_B)
        outer_GSN = _product(x_GSD, self.branch_kernel)
        first = gate(
            outer_GSN, jax.nn.softplus(_product(x_GSD, self.branch_noise)), _normal_noise(outer_keys, outer_GSN),
            valid_GS, router.branches_per_token,
        )  # fmt: skip
        logits_GSE, deviations_GSE = _product(x_GSD, self.kernel), jax.nn.softplus(_product(x_GSD, self.noise))
        noise_GSE = _normal_noise(inner_keys, logits_GSE)

        def chosen(values_GSE: jax.Array) -> jax.Array:
            return _of_branches(values_GSE, first.experts_GSK, router.num_branches)

        second = gate(
            chosen(logits_GSE), chosen(deviations_GSE), None if noise_GSE is None else chosen(noise_GSE),
            jnp.repeat(valid_GS, router.branches_per_token, axis=1), router.experts_per_branch,
        )  # fmt: skip
        routing = hierarchical(first, second, self.settings.num_experts // router.num_branches)
        routing = _with_z_loss(routing, router.z_coefficient, logits_GSE, valid_GS)
        G, S, E = logits_GSE.shape
        inside = jax.nn.softmax(logits_GSE.reshape(G, S, router.num_branches, -1), axis=-1)
        return routing, (jax.nn.softmax(outer_GSN, axis=-1)[..., None] * inside).reshape(G, S, E)


class _ExpertChoiceRouter(_Router):
    def __call__(self, x_GSD: jax.Array, valid_GS: jax.Array, keys_B: jax.Array | None, capacity: int) -> Decision:
        logits_GSE = _product(x_GSD.astype(jnp.float32), self.kernel)
        tokens_GEC, gates_GEC, used_GEC = expert_choice(logits_GSE, valid_GS, capacity)
        load_E = used_GEC.sum((0, 2)).astype(jnp.float32)
        none = jnp.zeros((), jnp.float32)
        entropy = _entropy(jax.nn.softmax(logits_GSE, axis=-1), valid_GS)
        return Decision(Places(tokens_GEC, gates_GEC), jnp.zeros(valid_GS.shape[0]), load_E, none, entropy)


_ROUTERS: dict[type, Callable[..., _Router]] = {
    TopK: _SoftmaxRouter,
    SwitchTop1: _SoftmaxRouter,
    GShardTop2: _GShardRouter,
    NoisyTopK: _NoisyRouter,
    SigmoidTopK: _SigmoidRouter,
    Hierarchical: _HierarchicalRouter,
    ExpertChoice: _ExpertChoiceRouter,
}


def _product(x_GSD: jax.Array, kernel: nnx.Param) -> jax.Array:
    """x·W in float32; on accelerators, too."""
    kernel_DE = constrain(kernel[...].astype(jnp.float32), _AXES)
    return jnp.einsum("gsd,de->gse", x_GSD, kernel_DE, precision=jax.lax.Precision.HIGHEST)


def _drawn(draw: Callable[[jax.Array, tuple[int, ...]], jax.Array], keys_B: jax.Array, like: jax.Array) -> jax.Array:
    """Random numbers of the shape [G, S, ...] of `like`, those of a sequence from its key."""
    G, S, *rest = like.shape
    tokens = G * S // keys_B.shape[0]
    return jax.vmap(lambda key: draw(key, (tokens, *rest)))(keys_B).reshape(like.shape)


def _normal_noise(keys_B: jax.Array | None, like: jax.Array) -> jax.Array | None:
    return None if keys_B is None else _drawn(jax.random.normal, keys_B, like)


def _two(keys_B: jax.Array) -> tuple[jax.Array, jax.Array]:
    pairs = jax.vmap(jax.random.split)(keys_B)
    return pairs[:, 0], pairs[:, 1]


def _of_branches(values_GSE: jax.Array, branches_GSK: jax.Array, num_branches: int) -> jax.Array:
    """The values of each chosen branch's experts: [G, S·K, experts of a branch]."""
    G, S, E = values_GSE.shape
    by_branch = values_GSE.reshape(G, S, num_branches, E // num_branches)
    return jnp.take_along_axis(by_branch, branches_GSK[..., None], axis=2).reshape(G, -1, E // num_branches)


def _with_z_loss(routing: Routing, coefficient: float, logits_GSE: jax.Array, valid_GS: jax.Array) -> Routing:
    return routing._replace(losses_G=routing.losses_G + coefficient * z_loss(logits_GSE, valid_GS))


def _entropy(probabilities_GSE: jax.Array, valid_GS: jax.Array) -> jax.Array:
    entropy_GS = -jnp.where(probabilities_GSE > 0, probabilities_GSE * jnp.log(probabilities_GSE), 0.0).sum(-1)
    return jax.lax.stop_gradient((entropy_GS * valid_GS).sum())
