"""A feed-forward layer of experts, of which each token goes through a few.

Shapes as in `jaxpar.models.layers` and `jaxpar.models.routing`: B batch, T sequence, D embed, G groups, S tokens of a
group, E experts, C places of an expert in a group, F width of an expert.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from jaxpar.models.config import TransformerConfig
from jaxpar.models.experts_config import ExpertsConfig
from jaxpar.models.layers import FeedForward, activated, kept, normal, residual_std
from jaxpar.models.router import make_router
from jaxpar.parallel.constrain import constrain
from jaxpar.parallel.contract import contract
from jaxpar.parallel.experts import through_experts

__all__ = ["ExpertFeedForward", "ExpertSums"]

_UP, _DOWN = ("experts", "embed", "mlp"), ("experts", "mlp", "embed")


class ExpertSums(NamedTuple):
    """What a layer of experts adds up over the tokens that it sees, float32; padding is in none of it.

    loss: auxiliary losses, Σ over groups of (tokens of the group · its loss): what has a gradient.
    load_E: choices of each expert, computed or not.
    dropped: choices that found no place.
    entropy: of the router's probabilities, in nats.
    """

    loss: jax.Array
    load_E: jax.Array
    dropped: jax.Array
    entropy: jax.Array


class Experts(nnx.Module):
    """E feed-forward layers: activation(x·up), or activation(x·gate) · (x·up), then a projection back."""

    def __init__(self, config: TransformerConfig, experts: ExpertsConfig, *, rngs: nnx.Rngs):
        E, D, F = experts.num_experts, config.embed_dim, experts.mlp_dim or config.mlp_dim
        self.config, self.rate = config, experts.dropout
        self.gate = normal(rngs, (E, D, F), _UP, config.init_std) if config.gated else None
        self.up = normal(rngs, (E, D, F), _UP, config.init_std)
        self.down = normal(rngs, (E, F, D), _DOWN, residual_std(config))

    def __call__(self, x_GECD: jax.Array, keys_G: jax.Array | None) -> jax.Array:
        inputs = [part[...] for part in (self.gate, self.up) if part is not None]
        h = contract("gecd,edxf->gecxf", x_GECD, inputs, [_UP] * len(inputs), _beside)
        h = checkpoint_name(constrain(h, ("expert_batch", "experts", None, None, "mlp")), "mlp_input")
        h_GECF = _dropout(activated(h, self.config), self.rate, keys_G)
        h_GECF = checkpoint_name(constrain(h_GECF, ("expert_batch", "experts", None, "mlp")), "mlp_activation")
        return contract("gecf,efd->gecd", h_GECF, [self.down[...]], [_DOWN])


class ExpertFeedForward(nnx.Module):
    """Routed experts, and those that every token goes through."""

    def __init__(self, config: TransformerConfig, *, rngs: nnx.Rngs):
        assert config.experts is not None
        self.settings = config.experts
        width = self.settings.mlp_dim or config.mlp_dim
        self.router = make_router(self.settings, config.embed_dim, config.init_std, rngs=rngs)
        self.experts = Experts(config, self.settings, rngs=rngs)
        shared = config.model_copy(update={"mlp_dim": self.settings.num_shared * width, "mlp_bias": False})
        self.shared = FeedForward(shared, rngs=rngs) if self.settings.num_shared else None

    def __call__(self, x_BTD: jax.Array, valid_BT: jax.Array, keys_B: jax.Array | None) -> tuple[jax.Array, ExpertSums]:
        B, T, D = x_BTD.shape
        size = self.settings.group_tokens or T
        if T % size:
            raise ValueError(
                f"model.experts.group_tokens={size} must divide data.sequence_length={T}; nearest legal values: "
                f"{max(n for n in range(1, min(size, T) + 1) if T % n == 0)}, or 0 for the whole sequence"
            )
        x_GSD = constrain(x_BTD.reshape(-1, size, D), ("batch", None, "embed"))
        valid_GS = valid_BT.reshape(-1, size)
        router_keys, keys_G = (None, None) if keys_B is None else _keys(keys_B, T // size)
        found = self.router(x_GSD, valid_GS, router_keys, self.settings.capacity(size))
        y_GSD = through_experts(x_GSD, found.places, lambda x_GECD: self.experts(x_GECD, keys_G))
        y_BTD = constrain(y_GSD.reshape(B, T, D), ("batch", "residual_sequence", "embed"))
        if self.shared is not None:
            y_BTD += self.shared(x_BTD)
        tokens_G = valid_GS.sum(-1).astype(jnp.float32)
        sums = ExpertSums((tokens_G * found.losses_G).sum(), found.load_E, found.dropped, found.entropy)
        return y_BTD, sums


def _dropout(h_GECF: jax.Array, rate: float, keys_G: jax.Array | None) -> jax.Array:
    """A mask of a group's places, which depends on nothing but its key."""
    if keys_G is None or rate == 0.0:
        return h_GECF
    keep = jax.vmap(lambda key: jax.random.bernoulli(key, 1.0 - rate, h_GECF.shape[1:]))(keys_G)
    return kept(h_GECF, constrain(keep, ("expert_batch", "experts", None, "mlp")), rate)


def _keys(keys_B: jax.Array, groups: int) -> tuple[jax.Array, jax.Array]:
    """A key for each sequence's routing, and one for each of its groups [B · groups]."""
    fold = jax.vmap(jax.random.fold_in, (0, None))
    of_groups = jax.vmap(lambda key: jax.vmap(jax.random.fold_in, (None, 0))(key, jnp.arange(groups)))
    return fold(keys_B, 0), of_groups(fold(keys_B, 1)).reshape(-1)


def _beside(*kernels_EDF: jax.Array) -> jax.Array:
    return constrain(jnp.stack(kernels_EDF, axis=2), ("experts", "embed", None, "mlp"))
