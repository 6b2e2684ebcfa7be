"""Presets against the published models: parameter counts, and the keys that counts do not show."""

import math

import jax
import pytest
from flax import nnx

from jaxpar.models import PRESETS, TransformerConfig

PUBLISHED = {
    "gpt2_small": 124_439_808,
    "gpt2_medium": 354_823_168,
    "gpt2_large": 774_030_080,
    "gpt2_xl": 1_557_611_200,
    "llama2_7b": 6_738_415_616,
    "llama2_13b": 13_015_864_320,
    "llama2_70b": 68_976_648_192,
    "llama3_8b": 8_030_261_248,
    "llama3_70b": 70_553_706_496,
    "llama3.1_8b": 8_030_261_248,
    "llama3.1_70b": 70_553_706_496,
    "llama3.1_405b": 405_853_388_800,
    "llama3.2_1b": 1_235_814_400,
    "llama3.2_3b": 3_212_749_824,
    "qwen2_0.5b": 494_032_768,
    "qwen2_1.5b": 1_543_714_304,
    "qwen2_7b": 7_615_616_512,
    "qwen2_72b": 72_706_203_648,
    "qwen3_0.6b": 596_049_920,
    "qwen3_1.7b": 1_720_574_976,
    "qwen3_4b": 4_022_468_096,
    "qwen3_8b": 8_190_735_360,
    "qwen3_14b": 14_768_307_200,
    "qwen3_32b": 32_762_123_264,
    "mistral_7b_v0.1": 7_241_732_096,
    "mistral_7b_v0.3": 7_248_023_552,
    "gemma2_2b": 2_614_341_888,
    "gemma2_9b": 9_241_705_984,
    "gemma2_27b": 27_227_128_320,
}


def _shapes(config: TransformerConfig) -> nnx.State:
    def make() -> nnx.Module:
        sizes = {"vocab_size": config.vocab_size, "padded_vocab_size": config.vocab_size}
        return config.make(**sizes, sequence_length=config.max_positions or 128, rngs=nnx.Rngs(0))

    with nnx.use_eager_sharding(False):
        return nnx.state(nnx.eval_shape(make), nnx.Param)


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameters_are_as_many_as_published(name: str) -> None:
    config = PRESETS[name]()
    assert config.name == name
    assert sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(_shapes(config))) == PUBLISHED[name]


def test_every_preset_is_checked_and_tiny_ones_take_their_sizes_from_the_data() -> None:
    assert set(PRESETS) - set(PUBLISHED) == {"transformer", "gpt2_tiny", "llama_tiny"}
    for name in ("transformer", "gpt2_tiny", "llama_tiny"):
        assert (PRESETS[name]().vocab_size, PRESETS[name]().max_positions) == (0, 0)


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("gpt2_small", {"activation": "gelu", "norm_epsilon": 1e-5, "dropout": 0.1, "tied": True, "vocab_size": 50257}),
        ("llama2_7b", {"rope_theta": 1e4, "norm_epsilon": 1e-5, "activation": "silu", "vocab_size": 32000}),
        ("llama3_8b", {"rope_theta": 5e5, "rope_scaling": None, "vocab_size": 128_256, "tied": False}),
        ("qwen2_7b", {"rope_theta": 1e6, "norm_epsilon": 1e-6, "qkv_bias": True, "attention_bias": False}),
        ("qwen3_0.6b", {"rope_theta": 1e6, "qk_norm": True, "qkv_bias": False, "tied": True, "vocab_size": 151_936}),
        ("mistral_7b_v0.1", {"windows": (4096,), "rope_theta": 1e4}),
        ("mistral_7b_v0.3", {"windows": (0,), "rope_theta": 1e6}),
        ("gemma2_9b", {"windows": (4096, 0), "attention_softcap": 50.0, "logit_softcap": 30.0, "attention_scale": 0.0}),
        ("gemma2_27b", {"attention_scale": 144**-0.5, "norm_unit_offset": True, "embed_scale": True, "tied": True}),
    ],
)  # fmt: skip
def test_keys_that_counts_do_not_show(name: str, values: dict) -> None:
    config = PRESETS[name]()
    assert {key: getattr(config, key) for key in values} == values


@pytest.mark.parametrize(("name", "factor"), [("llama3.1_405b", 8.0), ("llama3.2_1b", 32.0)])
def test_llama_3_1_and_3_2_stretch_rotary_frequencies(name: str, factor: float) -> None:
    scaling = PRESETS[name]().rope_scaling
    assert scaling is not None
    expected = (factor, 1.0, 4.0, 8192)
    assert (
        scaling.factor,
        scaling.low_frequency_factor,
        scaling.high_frequency_factor,
        scaling.original_length,
    ) == expected
