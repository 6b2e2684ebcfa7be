"""The parts of a decoder-only Transformer as configuration."""

import math
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from jaxpar.models.experts_config import ExpertsConfig
from jaxpar.multiples import nearest_multiples

if TYPE_CHECKING:
    from flax import nnx

__all__ = ["RopeScaling", "TransformerConfig"]

Positive = Annotated[int, Field(gt=0)]


class RopeScaling(BaseModel):
    """Stretches rotary frequencies for longer contexts, as Llama 3.1 does: long waves by `factor`, short ones not at
    all."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, use_attribute_docstrings=True)

    factor: Annotated[float, Field(ge=1)]
    """How much longer the long waves become."""
    low_frequency_factor: Annotated[float, Field(gt=0)] = 1.0
    """Waves longer than original_length / this are stretched in full."""
    high_frequency_factor: Annotated[float, Field(gt=0)] = 4.0
    """Waves shorter than original_length / this are left alone."""
    original_length: Positive = 8192
    """Context length before stretching, tokens."""

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if self.high_frequency_factor <= self.low_frequency_factor:
            raise ValueError(
                f"high_frequency_factor={self.high_frequency_factor} must exceed "
                f"low_frequency_factor={self.low_frequency_factor}"
            )
        return self


class TransformerConfig(BaseModel):
    """A decoder-only Transformer, part by part."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, use_attribute_docstrings=True)

    name: str = "transformer"
    """The preset these values start from."""
    vocab_size: Annotated[int, Field(ge=0)] = 0
    """Entries of the vocabulary; 0 takes the tokenizer's."""
    vocab_multiple: Positive = 128
    """The vocabulary is padded to a multiple of this; the padding is masked and never leaves the model."""
    num_layers: Positive = 4
    """Layers."""
    embed_dim: Positive = 256
    """Width of the residual stream."""
    num_heads: Positive = 4
    """Query heads."""
    num_kv_heads: Annotated[int, Field(ge=0)] = 0
    """Key and value heads: as many as queries (multi-head, also 0), fewer (grouped) or 1 (multi-query)."""
    head_dim: Annotated[int, Field(ge=0)] = 0
    """Width of a head; 0 is embed_dim / num_heads."""
    mlp_dim: Positive = 1024
    """Width of the feed-forward layer."""
    activation: Literal["gelu", "gelu_exact", "silu"] = "silu"
    """Nonlinearity of the feed-forward layer; "gelu" is the tanh approximation."""
    gated: bool = True
    """Multiply the activation with a second projection: SwiGLU with "silu", GeGLU with "gelu" (Shazeer 2020)."""
    norm: Literal["rmsnorm", "layernorm"] = "rmsnorm"
    """Normalisation before attention and feed-forward, and before the head."""
    norm_epsilon: Annotated[float, Field(gt=0)] = 1e-5
    """Added to the variance."""
    norm_unit_offset: bool = False
    """Norms scale by 1 + weight (Gemma)."""
    post_norms: bool = False
    """Also normalise what attention and feed-forward add to the residual stream (Gemma 2)."""
    qk_norm: bool = False
    """RMSNorm on each query and key head (Qwen 3)."""
    positions: Literal["rotary", "learned"] = "rotary"
    """How positions enter."""
    max_positions: Annotated[int, Field(ge=0)] = 0
    """Rows of the learned position table; 0 is data.sequence_length."""
    rope_theta: Annotated[float, Field(gt=0)] = 10_000.0
    """Base of the rotary wavelengths."""
    rope_scaling: RopeScaling | None = None
    """Stretching of rotary frequencies; absent for none."""
    qkv_bias: bool = False
    """Biases on queries, keys and values."""
    attention_bias: bool = False
    """Bias on the attention's output projection."""
    mlp_bias: bool = False
    """Biases in the feed-forward layer."""
    tied: bool = True
    """The output projection is the embedding table."""
    embed_scale: bool = False
    """Multiply embeddings by the root of embed_dim (Gemma)."""
    attention_scale: Annotated[float, Field(ge=0)] = 0.0
    """Factor on attention scores; 0 is 1 / sqrt(head_dim)."""
    attention_softcap: Annotated[float, Field(ge=0)] = 0.0
    """Attention scores become cap·tanh(score / cap); 0 leaves them."""
    logit_softcap: Annotated[float, Field(ge=0)] = 0.0
    """Output logits become cap·tanh(logit / cap); 0 leaves them."""
    windows: tuple[Annotated[int, Field(ge=0)], ...] = Field(default=(0,), min_length=1, strict=False)
    """Attention windows in tokens of consecutive layers, repeated over the depth; 0 sees everything before."""
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Share of embeddings, attention outputs and feed-forward outputs set to zero while training."""
    experts: ExpertsConfig | None = None
    """Mixture of experts; absent for none."""
    init_std: Annotated[float, Field(gt=0)] = 0.02
    """Standard deviation of initial weights; those that add to the residual stream are divided by
    sqrt(2·num_layers)."""

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.num_heads % self.kv_heads:
            legal = ", ".join(str(n) for n in range(1, self.num_heads + 1) if self.num_heads % n == 0)
            raise ValueError(
                f"num_kv_heads={self.kv_heads} must divide num_heads={self.num_heads}; legal values: {legal}"
            )
        if not self.head_dim and self.embed_dim % self.num_heads:
            raise ValueError(
                f"embed_dim={self.embed_dim} must divide by num_heads={self.num_heads} unless head_dim is set; "
                f"nearest legal values: {nearest_multiples(self.embed_dim, self.num_heads)}"
            )
        if self.positions == "rotary" and self.head_width % 2:
            raise ValueError(f"head_dim={self.head_width} must be even for rotary positions")
        if self.num_layers % len(self.windows):
            raise ValueError(f"windows has {len(self.windows)} entries, which must divide num_layers={self.num_layers}")
        if self.experts is not None and self.num_layers % self.experts.every:
            raise ValueError(
                f"experts.every={self.experts.every} must divide num_layers={self.num_layers}; nearest legal values of "
                f"num_layers: {nearest_multiples(self.num_layers, self.experts.every)}"
            )
        if self.experts is not None and self.mlp_bias:
            raise ValueError("mlp_bias=true: experts have no biases; set mlp_bias=false")
        return self

    @property
    def kv_heads(self) -> int:
        """Key and value heads, resolved."""
        return self.num_kv_heads or self.num_heads

    @property
    def head_width(self) -> int:
        """Width of a head, resolved."""
        return self.head_dim or self.embed_dim // self.num_heads

    def make(self, *, vocab_size: int, padded_vocab_size: int, sequence_length: int, rngs: "nnx.Rngs") -> "nnx.Module":
        """The model with initial weights.

        Raises:
          ValueError: the sequence is longer than the learned position table.
        """
        from jaxpar.models.transformer import Transformer

        return Transformer(
            self, vocab_size=vocab_size, padded_vocab_size=padded_vocab_size, sequence_length=sequence_length, rngs=rngs
        )

    def scaled_down(self, *, tensor: int, fsdp: int, stages: int = 1) -> "TransformerConfig":
        """A small model with the same parts, heads and pattern of layers, whose dims divide by `tensor` and `fsdp`,
        with a turn of the pattern more than `stages`."""
        experts = None if self.experts is None else self.experts.scaled_down(16 * tensor)
        return self.model_copy(
            update={
                "vocab_size": 0,
                "num_layers": (stages + 1) * math.lcm(len(self.windows), 1 if experts is None else experts.every),
                "embed_dim": 16 * fsdp,
                "head_dim": 16,
                "mlp_dim": 16 * tensor,
                "max_positions": 0,
                "windows": tuple(min(window, 8) for window in self.windows),
                "init_std": 0.2,
                "experts": experts,
            }
        )

    def dims(self, vocab_size: int) -> dict[str, Any]:
        """The sizes that decide the number of floating-point operations, under the names of
        `metrics.transformer_flops_per_token`."""
        return {
            "embed_dim": self.embed_dim,
            "num_layers": self.num_layers,
            "num_heads": self.num_heads,
            "num_kv_heads": self.kv_heads,
            "head_dim": self.head_width,
            "mlp_dim": self.mlp_dim,
            "gated": self.gated,
            "vocab_size": vocab_size,
            "windows": [self.windows[layer % len(self.windows)] or None for layer in range(self.num_layers)],
            **({} if self.experts is None else self._expert_dims(self.experts)),
        }

    def _expert_dims(self, experts: ExpertsConfig) -> dict[str, int]:
        width = experts.mlp_dim or self.mlp_dim
        return {
            "expert_layers": self.num_layers // experts.every,
            "expert_dim": width * (experts.choices + experts.num_shared),
            "num_experts": experts.num_experts,
        }
