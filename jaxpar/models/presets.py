"""Published models as small functions that return a `TransformerConfig`; each family states its recipe once.

Sources: GPT-2 (Radford 2019), Llama 2 (Touvron 2023), Llama 3 (Dubey 2024), Qwen2 (Yang 2024), Qwen3 (Yang 2025),
Mistral 7B (Jiang 2023), Gemma 2 (Gemma Team 2024), and the configuration files published with their weights.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

from jaxpar.models.config import RopeScaling, TransformerConfig

__all__ = ["PRESETS"]


def _gpt2(name: str, num_layers: int, embed_dim: int, num_heads: int, **changes: Any) -> TransformerConfig:
    values: dict[str, Any] = {
        "vocab_size": 50257, "max_positions": 1024, "mlp_dim": 4 * embed_dim, "activation": "gelu", "gated": False,
        "norm": "layernorm", "positions": "learned", "qkv_bias": True, "attention_bias": True, "mlp_bias": True,
        "tied": True, "dropout": 0.1,
    }  # fmt: skip
    sizes = {"num_layers": num_layers, "embed_dim": embed_dim, "num_heads": num_heads}
    return TransformerConfig(name=name, **(values | sizes | changes))


def _llama(
    name: str, num_layers: int, embed_dim: int, num_heads: int, num_kv_heads: int, mlp_dim: int, **changes: Any
) -> TransformerConfig:
    """RMSNorm, rotary positions, SwiGLU, no biases; the base from which Qwen and Mistral differ in a few keys."""
    values: dict[str, Any] = {"vocab_size": 32000, "tied": False, "norm_epsilon": 1e-5}
    sizes = {
        "num_layers": num_layers, "embed_dim": embed_dim, "num_heads": num_heads, "num_kv_heads": num_kv_heads,
        "mlp_dim": mlp_dim,
    }  # fmt: skip
    return TransformerConfig(name=name, **(values | sizes | changes))


def _llama3(name: str, *sizes: int, scaling: float | None = None, **changes: Any) -> TransformerConfig:
    rope = {"rope_theta": 500_000.0, "rope_scaling": RopeScaling(factor=scaling) if scaling else None}
    return _llama(name, *sizes, **({"vocab_size": 128_256} | rope | changes))


def _qwen2(name: str, *sizes: int, **changes: Any) -> TransformerConfig:
    values = {"vocab_size": 151_936, "rope_theta": 1e6, "norm_epsilon": 1e-6, "qkv_bias": True}
    return _llama(name, *sizes, **(values | changes))


def _qwen3(name: str, *sizes: int, **changes: Any) -> TransformerConfig:
    values = {"vocab_size": 151_936, "rope_theta": 1e6, "norm_epsilon": 1e-6, "qk_norm": True, "head_dim": 128}
    return _llama(name, *sizes, **(values | changes))


def _gemma2(name: str, *sizes: int, **changes: Any) -> TransformerConfig:
    values = {
        "vocab_size": 256_000, "tied": True, "norm_epsilon": 1e-6, "activation": "gelu", "norm_unit_offset": True,
        "post_norms": True, "embed_scale": True, "attention_softcap": 50.0, "logit_softcap": 30.0, "windows": (4096, 0),
    }  # fmt: skip
    return _llama(name, *sizes, **(values | changes))  # type: ignore[arg-type]


_FAMILIES: tuple[tuple[Callable[..., TransformerConfig], dict[str, tuple]], ...] = (
    (
        _gpt2,
        {
            "gpt2_small": (12, 768, 12),
            "gpt2_medium": (24, 1024, 16),
            "gpt2_large": (36, 1280, 20),
            "gpt2_xl": (48, 1600, 25),
        },
    ),
    (
        _llama,
        {
            "llama2_7b": (32, 4096, 32, 32, 11008),
            "llama2_13b": (40, 5120, 40, 40, 13824),
            "llama2_70b": (80, 8192, 64, 8, 28672),
        },
    ),
    (
        _llama3,
        {
            "llama3_8b": (32, 4096, 32, 8, 14336),
            "llama3_70b": (80, 8192, 64, 8, 28672),
            "llama3.1_8b": (32, 4096, 32, 8, 14336, {"scaling": 8.0}),
            "llama3.1_70b": (80, 8192, 64, 8, 28672, {"scaling": 8.0}),
            "llama3.1_405b": (126, 16384, 128, 8, 53248, {"scaling": 8.0}),
            "llama3.2_1b": (16, 2048, 32, 8, 8192, {"scaling": 32.0, "tied": True}),
            "llama3.2_3b": (28, 3072, 24, 8, 8192, {"scaling": 32.0, "tied": True}),
        },
    ),
    (
        _qwen2,
        {
            "qwen2_0.5b": (24, 896, 14, 2, 4864, {"tied": True}),
            "qwen2_1.5b": (28, 1536, 12, 2, 8960, {"tied": True}),
            "qwen2_7b": (28, 3584, 28, 4, 18944, {"vocab_size": 152_064}),
            "qwen2_72b": (80, 8192, 64, 8, 29568, {"vocab_size": 152_064}),
        },
    ),
    (
        _qwen3,
        {
            "qwen3_0.6b": (28, 1024, 16, 8, 3072, {"tied": True}),
            "qwen3_1.7b": (28, 2048, 16, 8, 6144, {"tied": True}),
            "qwen3_4b": (36, 2560, 32, 8, 9728, {"tied": True}),
            "qwen3_8b": (36, 4096, 32, 8, 12288),
            "qwen3_14b": (40, 5120, 40, 8, 17408),
            "qwen3_32b": (64, 5120, 64, 8, 25600),
        },
    ),
    (
        _llama,
        {
            "mistral_7b_v0.1": (32, 4096, 32, 8, 14336, {"windows": (4096,)}),
            "mistral_7b_v0.3": (32, 4096, 32, 8, 14336, {"vocab_size": 32_768, "rope_theta": 1e6}),
        },
    ),
    (
        _gemma2,
        {
            "gemma2_2b": (26, 2304, 8, 4, 9216, {"head_dim": 256}),
            "gemma2_9b": (42, 3584, 16, 8, 14336, {"head_dim": 256}),
            "gemma2_27b": (46, 4608, 32, 16, 36864, {"head_dim": 128, "attention_scale": 144**-0.5}),
        },
    ),
    (
        _gpt2,
        {"gpt2_tiny": (2, 64, 4, {"vocab_size": 0, "max_positions": 0})},
    ),
    (
        _llama,
        {"llama_tiny": (2, 64, 4, 2, 176, {"vocab_size": 0})},
    ),
)


def _preset(family: Callable[..., TransformerConfig], name: str, values: tuple) -> Callable[[], TransformerConfig]:
    changes = values[-1] if isinstance(values[-1], dict) else {}
    sizes = values[: len(values) - bool(changes)]
    return partial(family, name, *sizes, **changes)


PRESETS: dict[str, Callable[[], TransformerConfig]] = {"transformer": TransformerConfig} | {
    name: _preset(family, name, values) for family, table in _FAMILIES for name, values in table.items()
}
"""`model.name` → a function of no arguments that returns the configuration; other keys of [model] change its fields."""
