"""The parts of a Transformer layer.

Shapes: B batch, T sequence, D embed, K key/value groups, G queries (and keys, values) of a group, N head width, F
feed-forward width, V vocabulary (padded). Suffixes name logical dims.
"""

import math
from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from jaxpar.models.config import RopeScaling, TransformerConfig
from jaxpar.parallel.attention import attention
from jaxpar.parallel.constrain import constrain, current_execution, num_shards
from jaxpar.parallel.contract import contract
from jaxpar.parallel.embedding import lookup
from jaxpar.parallel.rules import LogicalAxes
from jaxpar.parallel.sequence_order import logical_places

__all__ = [
    "Attention",
    "Embedding",
    "FeedForward",
    "Norm",
    "activated",
    "dropout",
    "kept",
    "normal",
    "residual_std",
    "rotary_angles",
    "rotate",
    "zeros",
]

ACTIVATIONS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "gelu": partial(jax.nn.gelu, approximate=True),
    "gelu_exact": partial(jax.nn.gelu, approximate=False),
    "silu": jax.nn.silu,
}
_WHOLE_SEQUENCE = ("batch", "sequence", "embed")


def _parameter(value: jax.Array, axes: LogicalAxes) -> nnx.Param:
    return nnx.Param(value, out_sharding=axes)


def normal(rngs: nnx.Rngs, shape: tuple[int, ...], axes: LogicalAxes, std: float) -> nnx.Param:
    return _parameter(std * jax.random.normal(rngs.params(), shape, jnp.float32), axes)


def zeros(shape: tuple[int, ...], axes: LogicalAxes) -> nnx.Param:
    return _parameter(jnp.zeros(shape, jnp.float32), axes)


def dropout(x: jax.Array, rate: float, keys_B: jax.Array | None) -> jax.Array:
    """`x` [B, T, ...] with a share `rate` of its entries zeroed and the rest scaled up; the identity without keys.

    `x` is laid out like the residual stream. The mask of a token depends on its sequence's key and on its place there,
    not on how the batch is laid out or cut into microbatches, nor on the order in which devices hold a sequence.
    """
    if keys_B is None or rate == 0.0:
        return x
    places_T = jnp.asarray(logical_places(x.shape[1]))
    keys_BT = jax.vmap(jax.vmap(jax.random.fold_in, (None, 0)), (0, None))(keys_B, places_T)
    keep = jax.vmap(jax.vmap(lambda key: jax.random.bernoulli(key, 1.0 - rate, x.shape[2:])))(keys_BT)
    keep = constrain(keep, ("batch", "residual_sequence", *(None,) * (x.ndim - 2)))
    return kept(x, keep, rate)


def kept(x: jax.Array, keep: jax.Array, rate: float) -> jax.Array:
    """`x` where `keep` is true, which it is for all but a share `rate`, scaled up for what is lost."""
    return jnp.where(keep, x / jnp.asarray(1.0 - rate, x.dtype), jnp.zeros((), x.dtype))


class Norm(nnx.Module):
    """RMSNorm (Zhang 2019) or LayerNorm (Ba 2016) over the last dim, computed in float32."""

    def __init__(self, config: TransformerConfig, dim: int, axis: str, *, kind: str = ""):
        self.kind, self.epsilon, self.offset = kind or config.norm, config.norm_epsilon, float(config.norm_unit_offset)
        self.scale = _parameter(jnp.full((dim,), 1.0 - self.offset, jnp.float32), (axis,))
        self.bias = zeros((dim,), (axis,)) if self.kind == "layernorm" else None

    def __call__(self, x: jax.Array) -> jax.Array:
        x32 = x.astype(jnp.float32)
        if self.kind == "layernorm":
            x32 -= x32.mean(-1, keepdims=True)
        x32 *= jax.lax.rsqrt(jnp.square(x32).mean(-1, keepdims=True) + self.epsilon)
        ones = (1,) * (x.ndim - 1)
        y = x32 * (self.offset + self.scale[...].astype(jnp.float32).reshape(*ones, -1))
        if self.bias is not None:
            y += self.bias[...].astype(jnp.float32).reshape(*ones, -1)
        return y.astype(x.dtype)


class Embedding(nnx.Module):
    """A table of token vectors whose rows may be split over devices; rows from `vocab_size` on are padding."""

    def __init__(self, vocab_size: int, padded_vocab_size: int, dim: int, std: float, rngs: nnx.Rngs):
        rows = std * jax.random.normal(rngs.params(), (vocab_size, dim), jnp.float32)
        self.table = _parameter(jnp.pad(rows, ((0, padded_vocab_size - vocab_size), (0, 0))), ("vocab", "embed"))

    def __call__(self, tokens_BT: jax.Array) -> jax.Array:
        return lookup(self.table[...], tokens_BT, "vocab")


def rotary_angles(
    positions_BT: jax.Array, head_dim: int, theta: float, scaling: RopeScaling | None
) -> tuple[jax.Array, jax.Array]:
    """Cosines and sines [B, T, N/2] of position · frequency, float32 (Su 2021; scaling as in Llama 3.1)."""
    frequencies = theta ** (-jnp.arange(0, head_dim, 2, dtype=jnp.float32) / head_dim)
    if scaling is not None:
        waves_in_context = scaling.original_length * frequencies / (2 * math.pi)
        low, high = scaling.low_frequency_factor, scaling.high_frequency_factor
        kept = jnp.clip((waves_in_context - low) / (high - low), 0.0, 1.0)
        frequencies *= kept + (1.0 - kept) / scaling.factor
    angles = positions_BT[..., None].astype(jnp.float32) * frequencies[None, None]
    return jnp.cos(angles), jnp.sin(angles)


def rotate(x_BTKGN: jax.Array, cosines: jax.Array, sines: jax.Array) -> jax.Array:
    """Each head's halves (a, b) turned by the position's angle: (a·cos − b·sin, b·cos + a·sin)."""
    a, b = jnp.split(x_BTKGN.astype(jnp.float32), 2, axis=-1)
    cosines, sines = cosines[:, :, None, None], sines[:, :, None, None]
    return jnp.concatenate([a * cosines - b * sines, b * cosines + a * sines], axis=-1).astype(x_BTKGN.dtype)


class Attention(nnx.Module):
    """Causal self-attention with grouped key/value heads (Ainslie 2023).

    Queries, keys and values are one product, so that their input's gradient needs one reduction. Where there are
    fewer key/value heads than devices that share heads, each is repeated for the devices that share it; it is stored
    once, and its gradient is the sum over them.
    """

    def __init__(self, config: TransformerConfig, *, rngs: nnx.Rngs):
        D, H, K, N = config.embed_dim, config.num_heads, config.kv_heads, config.head_width
        self.config = config
        q_axes, kv_axes = ("embed", "heads", "head_dim"), ("embed", "kv_heads", "head_dim")
        self.query = normal(rngs, (D, H, N), q_axes, config.init_std)
        self.key = normal(rngs, (D, K, N), kv_axes, config.init_std)
        self.value = normal(rngs, (D, K, N), kv_axes, config.init_std)
        self.output = normal(rngs, (H, N, D), ("heads", "head_dim", "embed"), residual_std(config))
        if config.qkv_bias:
            self.query_bias = zeros((H, N), q_axes[1:])
            self.key_bias = zeros((K, N), kv_axes[1:])
            self.value_bias = zeros((K, N), kv_axes[1:])
        self.output_bias = zeros((D,), ("vector",)) if config.attention_bias else None
        if config.qk_norm:
            self.query_norm = Norm(config, N, "head_dim", kind="rmsnorm")
            self.key_norm = Norm(config, N, "head_dim", kind="rmsnorm")

    def __call__(
        self,
        x_BTD: jax.Array,
        rotary: tuple[jax.Array, jax.Array] | None,
        segment_ids_BT: jax.Array | None,
        window: int | None,
    ) -> jax.Array:
        config = self.config
        groups = math.lcm(config.kv_heads, num_shards("attention_heads"))
        names = ("batch", "sequence", "heads", None, "head_dim")
        q, k, v = (constrain(part, names) for part in self._project(x_BTD, groups))
        if config.qk_norm:
            q, k = self.query_norm(q), self.key_norm(k)
        if rotary is not None:
            q, k = rotate(q, *rotary), rotate(k, *rotary)
        q, k, v = (checkpoint_name(part, name) for part, name in ((q, "query"), (k, "key"), (v, "value")))
        execution = current_execution()
        out_BTKGN = attention(
            q, k[:, :, :, 0], v[:, :, :, 0],
            segment_ids_BT=segment_ids_BT,
            window=window,
            softcap=config.attention_softcap or None,
            scale=config.attention_scale or config.head_width**-0.5,
            implementation=execution.attention,
            block=execution.attention_block,
        )  # fmt: skip
        out_BTKGN = constrain(out_BTKGN, names)
        fuse = partial(_grouped_rows, groups=groups)
        kernels = [self.output[...]]
        y = contract("btkgn,kgnd->btd", out_BTKGN, kernels, [("heads", "head_dim", "embed")], fuse, _WHOLE_SEQUENCE)
        y = constrain(y, ("batch", "residual_sequence", "embed"))
        return y if self.output_bias is None else _biased(y, self.output_bias[...])

    def _project(self, x_BTD: jax.Array, groups: int) -> tuple[jax.Array, jax.Array, jax.Array]:
        q_axes, kv_axes = ("embed", "heads", "head_dim"), ("embed", "kv_heads", "head_dim")
        kernels = [self.query[...], self.key[...], self.value[...]]
        fuse = partial(_joined_heads, groups=groups)
        qkv = contract("btd,dkgn->btkgn", x_BTD, kernels, [q_axes, kv_axes, kv_axes], fuse)
        if self.config.qkv_bias:
            biases = (self.query_bias[...][None], self.key_bias[...][None], self.value_bias[...][None])
            qkv = _biased(qkv, fuse(*biases)[0])
        return qkv[:, :, :, :-2], qkv[:, :, :, -2:-1], qkv[:, :, :, -1:]


def _joined_heads(q_DHN: jax.Array, k_DKN: jax.Array, v_DKN: jax.Array, *, groups: int) -> jax.Array:
    """[D, groups, queries of a group + key + value, N]; a key/value head that several groups share is repeated."""
    D, H, N = q_DHN.shape
    repeats = groups // k_DKN.shape[1]
    k, v = (
        jnp.repeat(part, repeats, axis=1)[:, :, None] if repeats > 1 else part[:, :, None] for part in (k_DKN, v_DKN)
    )
    joined = jnp.concatenate([q_DHN.reshape(D, groups, H // groups, N), k, v], axis=2)
    return constrain(joined, ("embed", "heads", None, "head_dim"))


def _grouped_rows(kernel_HND: jax.Array, *, groups: int) -> jax.Array:
    H, N, D = kernel_HND.shape
    return constrain(kernel_HND.reshape(groups, H // groups, N, D), ("heads", None, "head_dim", "embed"))


class FeedForward(nnx.Module):
    """activation(x·up), or activation(x·gate) · (x·up), then a projection back."""

    def __init__(self, config: TransformerConfig, *, rngs: nnx.Rngs):
        D, F = config.embed_dim, config.mlp_dim
        self.config = config
        self.gate = normal(rngs, (D, F), ("embed", "mlp"), config.init_std) if config.gated else None
        self.up = normal(rngs, (D, F), ("embed", "mlp"), config.init_std)
        self.down = normal(rngs, (F, D), ("mlp", "embed"), residual_std(config))
        if config.mlp_bias:
            self.gate_bias = zeros((F,), ("mlp",)) if config.gated else None
            self.up_bias = zeros((F,), ("mlp",))
            self.down_bias = zeros((D,), ("vector",))

    def __call__(self, x_BTD: jax.Array) -> jax.Array:
        biased = self.config.mlp_bias
        inputs = [part for part in (self.gate, self.up) if part is not None]
        h = contract(
            "btd,dcf->btcf", x_BTD, [part[...] for part in inputs], [("embed", "mlp")] * len(inputs), _stacked_columns
        )
        if biased:
            biases = [part[...] for part in (self.gate_bias, self.up_bias) if part is not None]
            h = _biased(h, jnp.stack(biases))
        h = checkpoint_name(constrain(h, ("batch", "sequence", None, "mlp")), "mlp_input")
        h = activated(h, self.config)
        h = checkpoint_name(constrain(h, ("batch", "sequence", "mlp")), "mlp_activation")
        y = contract("btf,fd->btd", h, [self.down[...]], [("mlp", "embed")], result=_WHOLE_SEQUENCE)
        y = constrain(y, ("batch", "residual_sequence", "embed"))
        return _biased(y, self.down_bias[...]) if biased else y


def activated(h: jax.Array, config: TransformerConfig) -> jax.Array:
    """activation(h₀), or activation(h₀) · h₁, of products that lie beside each other in the last dim but one."""
    first = ACTIVATIONS[config.activation](h[..., 0, :])
    return first * h[..., 1, :] if config.gated else first


def _stacked_columns(*kernels_DF: jax.Array) -> jax.Array:
    return constrain(jnp.stack(kernels_DF, axis=1), ("embed", None, "mlp"))


def _biased(x: jax.Array, bias: jax.Array) -> jax.Array:
    """x + bias, added in float32, so that the bias's gradient is a sum in float32."""
    bias32 = bias.astype(jnp.float32).reshape(*(1,) * (x.ndim - bias.ndim), *bias.shape)
    return (x.astype(jnp.float32) + bias32).astype(x.dtype)


def residual_std(config: TransformerConfig) -> float:
    return config.init_std / math.sqrt(2 * config.num_layers)
