"""A decoder-only Transformer: embed, a stack of identical blocks, head. Shapes as in `jaxpar.models.layers`."""

import math
from typing import Any, TypedDict

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from jaxpar.models.config import TransformerConfig
from jaxpar.models.experts import ExpertFeedForward, ExpertSums
from jaxpar.models.layers import Attention, Embedding, FeedForward, Norm, dropout, rotary_angles
from jaxpar.parallel.auxiliary import LayerSums
from jaxpar.parallel.constrain import constrain
from jaxpar.parallel.embedding import lookup
from jaxpar.parallel.layers import Alternating, scan_layers
from jaxpar.parallel.loss import FactoredLogits

__all__ = ["Inputs", "Transformer"]


class Inputs(TypedDict):
    """What a model reads: int32 [B, T] each. Attention stays within equal segment ids; None means one segment a
    sequence."""

    tokens: jax.Array
    positions: jax.Array
    segment_ids: jax.Array | None


class Block(nnx.Module):
    """x + attention(norm(x)), then x + feed-forward(norm(x)), or experts in place of the latter."""

    def __init__(self, config: TransformerConfig, has_experts: bool, *, rngs: nnx.Rngs):
        self.config = config
        self.attention_norm = Norm(config, config.embed_dim, "norm")
        self.attention = Attention(config, rngs=rngs)
        self.mlp_norm = Norm(config, config.embed_dim, "norm")
        self.mlp = ExpertFeedForward(config, rngs=rngs) if has_experts else FeedForward(config, rngs=rngs)
        self.attention_post_norm = Norm(config, config.embed_dim, "norm") if config.post_norms else None
        self.mlp_post_norm = Norm(config, config.embed_dim, "norm") if config.post_norms else None

    def __call__(
        self,
        x_BTD: jax.Array,
        rotary: tuple[jax.Array, jax.Array] | None,
        segment_ids_BT: jax.Array | None,
        window: int | None,
        dropout_keys_B: jax.Array | None,
    ) -> tuple[jax.Array, ExpertSums | None]:
        keys = _two(dropout_keys_B)
        x_BTD = checkpoint_name(x_BTD, "layer_input")
        h = checkpoint_name(constrain(self.attention_norm(x_BTD), ("batch", "sequence", "embed")), "attention_norm")
        h = self.attention(h, rotary, segment_ids_BT, window)
        x_BTD = self._add(x_BTD, h, self.attention_post_norm, keys[0])
        h = checkpoint_name(constrain(self.mlp_norm(x_BTD), ("batch", "sequence", "embed")), "mlp_norm")
        if not isinstance(self.mlp, ExpertFeedForward):
            return self._add(x_BTD, self.mlp(h), self.mlp_post_norm, keys[1]), None
        valid_BT = jnp.ones(h.shape[:2], bool) if segment_ids_BT is None else segment_ids_BT != 0
        outer, inner = _two(keys[1])
        h, sums = self.mlp(h, valid_BT, inner)
        return self._add(x_BTD, h, self.mlp_post_norm, outer), sums

    def _add(self, x_BTD: jax.Array, h_BTD: jax.Array, post_norm: Norm | None, keys_B: jax.Array | None) -> jax.Array:
        h_BTD = h_BTD if post_norm is None else post_norm(h_BTD)
        return constrain(x_BTD + dropout(h_BTD, self.config.dropout, keys_B), ("batch", "residual_sequence", "embed"))


class Transformer(nnx.Module):
    """The model that a `TransformerConfig` describes. Calling it gives `FactoredLogits`."""

    def __init__(
        self,
        config: TransformerConfig,
        *,
        vocab_size: int,
        padded_vocab_size: int,
        sequence_length: int,
        rngs: nnx.Rngs,
    ):
        self.config, self.vocab_size = config, vocab_size
        dim, std = config.embed_dim, config.init_std
        self.embedding = Embedding(vocab_size, padded_vocab_size, dim, std, rngs)
        self.positions = _position_table(config, sequence_length, rngs) if config.positions == "learned" else None

        every = 1 if config.experts is None else config.experts.every

        def blocks(has_experts: bool) -> Block:
            @nnx.split_rngs(splits=config.num_layers // every)
            @nnx.vmap(transform_metadata={nnx.PARTITION_NAME: "layers"})
            def make(rngs: nnx.Rngs) -> Block:
                return Block(config, has_experts, rngs=rngs)

            return make(rngs)

        if every == 1:
            self.blocks = blocks(config.experts is not None)
        else:
            self.blocks = nnx.List([blocks(slot == every - 1) for slot in range(every)])
        self.final_norm = Norm(config, dim, "norm")
        self.output = None if config.tied else _output_kernel(config, vocab_size, padded_vocab_size, rngs)

    def __call__(
        self, inputs: Inputs, *, dropout_keys: jax.Array | None = None
    ) -> FactoredLogits | tuple[FactoredLogits, LayerSums]:
        """Predictions for the token after each input token; with a key for each sequence ([B]) as in training."""
        if self.config.experts is None:
            return self.head(self.layers(self.embed(inputs, dropout_keys), inputs, dropout_keys))
        x_BTD, sums = self.layers(self.embed(inputs, dropout_keys), inputs, dropout_keys)
        return self.head(x_BTD), sums

    def embed(self, inputs: Inputs, dropout_keys: jax.Array | None = None) -> jax.Array:
        """Token (and position) vectors [B, T, D]."""
        x_BTD = self.embedding(inputs["tokens"])
        if self.config.embed_scale:
            x_BTD *= jnp.asarray(self.config.embed_dim**0.5, x_BTD.dtype)
        if self.positions is not None:
            x_BTD += lookup(self.positions[...], inputs["positions"], "positions")
        x_BTD = constrain(x_BTD, ("batch", "residual_sequence", "embed"))
        x_BTD = dropout(x_BTD, self.config.dropout, _two(dropout_keys)[0])
        return constrain(x_BTD, ("batch", "residual_sequence", "embed"))

    def layers(self, x_BTD: jax.Array, inputs: Inputs, dropout_keys: jax.Array | None = None) -> Any:
        """The blocks, one after the other: x, or x and what layers of experts add up."""
        config = self.config
        rotary = None
        if config.positions == "rotary":
            rotary = rotary_angles(inputs["positions"], config.head_width, config.rope_theta, config.rope_scaling)
        parts = [nnx.split(blocks) for blocks in (self.blocks if isinstance(self.blocks, nnx.List) else [self.blocks])]

        def body(layer: nnx.State, carry: Any, extras: tuple, index: jax.Array, slot: int) -> Any:
            x_BTD, sums = carry
            rotary, segment_ids, keys = extras
            layer_keys = None if keys is None else jax.vmap(jax.random.fold_in, (0, None))(keys, index)
            block = nnx.merge(parts[slot % len(parts)][0], layer)
            window = config.windows[slot % len(config.windows)] or None
            x_BTD, more = block(x_BTD, rotary, segment_ids, window, layer_keys)
            return x_BTD, sums if more is None else _added(sums, more, index // len(parts))

        extras = (rotary, inputs["segment_ids"], _two(dropout_keys)[1])
        stacks = tuple(stacked for _, stacked in parts)
        period = math.lcm(len(config.windows), len(parts))
        carry = x_BTD, None if config.experts is None else empty_sums(config)
        stacked = stacks[0] if len(stacks) == 1 else Alternating(stacks)
        x_BTD, sums = scan_layers(body, carry, stacked, extras, num_layers=config.num_layers, period=period)
        return x_BTD if sums is None else (x_BTD, sums)

    def head(self, x_BTD: jax.Array) -> FactoredLogits:
        """Final norm, and the output kernel that is not multiplied out."""
        hidden_BTD = constrain(self.final_norm(x_BTD), ("batch", "residual_sequence", "embed"))
        kernel_DV = self.embedding.table[...].T if self.output is None else self.output[...]
        return FactoredLogits(hidden_BTD, kernel_DV, self.vocab_size, self.config.logit_softcap or None)


def empty_sums(config: TransformerConfig) -> LayerSums:
    """Zeros, of L layers with experts."""
    assert config.experts is not None
    layers = config.num_layers // config.experts.every
    zeros = jnp.zeros((layers,), jnp.float32)
    return LayerSums(zeros.sum(), jnp.zeros((layers, config.experts.num_experts), jnp.float32), zeros, zeros)


def _added(sums: LayerSums, more: ExpertSums, layer: jax.Array) -> LayerSums:
    return LayerSums(
        sums.auxiliary_loss + more.loss,
        sums.load_LE.at[layer].add(more.load_E),
        sums.dropped_L.at[layer].add(more.dropped),
        sums.entropy_L.at[layer].add(more.entropy),
    )


def _two(keys_B: jax.Array | None) -> tuple[jax.Array | None, jax.Array | None]:
    """Two keys from each; nothing from nothing."""
    if keys_B is None:
        return None, None
    pairs = jax.vmap(jax.random.split)(keys_B)
    return pairs[:, 0], pairs[:, 1]


def _position_table(config: TransformerConfig, sequence_length: int, rngs: nnx.Rngs) -> nnx.Param:
    rows = config.max_positions or sequence_length
    if sequence_length > rows:
        raise ValueError(
            f"data.sequence_length={sequence_length} exceeds model.max_positions={rows}, the rows of the position table"
        )
    table = config.init_std * jax.random.normal(rngs.params(), (rows, config.embed_dim), jnp.float32)
    return nnx.Param(table, out_sharding=("positions", "embed"))


def _output_kernel(config: TransformerConfig, vocab_size: int, padded_vocab_size: int, rngs: nnx.Rngs) -> nnx.Param:
    columns = config.init_std * jax.random.normal(rngs.params(), (config.embed_dim, vocab_size), jnp.float32)
    return nnx.Param(jnp.pad(columns, ((0, 0), (0, padded_vocab_size - vocab_size))), out_sharding=("embed", "vocab"))
