"""The model's configuration: what is refused, and what its zeros stand for."""

import pytest
from pydantic import ValidationError

from jaxpar.metrics import transformer_flops_per_token
from jaxpar.models import RopeScaling, TransformerConfig
from jaxpar.models.experts_config import ExpertsConfig


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (
            {"num_heads": 6, "embed_dim": 48, "num_kv_heads": 4},
            "num_kv_heads=4 must divide num_heads=6; legal values: 1, 2, 3, 6",
        ),
        (
            {"num_heads": 6, "embed_dim": 64},
            "embed_dim=64 must divide by num_heads=6 unless head_dim is set; nearest legal values: 60, 66",
        ),
        ({"num_heads": 8, "embed_dim": 40}, "head_dim=5 must be even for rotary positions"),
        ({"head_dim": 7}, "head_dim=7 must be even for rotary positions"),
        ({"num_layers": 5, "windows": (8, 0)}, "windows has 2 entries, which must divide num_layers=5"),
        ({"windows": ()}, "at least 1 item"),
        ({"dropout": 1.0}, "less than 1"),
        ({"activation": "relu"}, "'gelu', 'gelu_exact' or 'silu'"),
        (
            {"rope_scaling": {"factor": 8.0, "low_frequency_factor": 4.0}},
            "high_frequency_factor=4.0 must exceed low_frequency_factor=4.0",
        ),
        ({"num_layrs": 2}, "num_layrs"),
        (
            {"num_layers": 5, "experts": {"num_experts": 4, "every": 2}},
            "experts.every=2 must divide num_layers=5; nearest legal values of num_layers: 4, 6",
        ),
        ({"mlp_bias": True, "experts": {"num_experts": 4}}, "mlp_bias=true: experts have no biases; set mlp_bias=f"),
        (
            {"experts": {"num_experts": 4, "router": {"name": "top_k", "experts_per_token": 5}}},
            "router.experts_per_token=5 exceeds num_experts=4; legal values: 1 to 4",
        ),
        (
            {"experts": {"num_experts": 6, "router": {"name": "sigmoid", "num_nodes": 4, "experts_per_token": 2}}},
            "router.num_nodes=4 must divide num_experts=6; legal values: 1, 2, 3, 6",
        ),
        (
            {"experts": {"num_experts": 8, "router": {"name": "sigmoid", "num_nodes": 4, "experts_per_token": 4}}},
            "router.nodes_per_token=1 of num_nodes=4 have 2 of num_experts=8; a token needs 4, and there are 4 nodes",
        ),
        (
            {"experts": {"num_experts": 8, "router": {"name": "hierarchical", "experts_per_branch": 3}}},
            "router.experts_per_branch=3 exceeds 2; legal values: 1 to 2",
        ),
    ],
)  # fmt: skip
def test_what_cannot_be_a_model_is_refused(values: dict, message: str) -> None:
    with pytest.raises(ValidationError) as error:
        TransformerConfig.model_validate(values)
    assert message in str(error.value)


def test_an_odd_head_width_is_fine_without_rotary_positions() -> None:
    assert TransformerConfig(num_heads=8, embed_dim=40, positions="learned").head_width == 5


def test_zeros_stand_for_what_follows_from_other_keys() -> None:
    plain = TransformerConfig(num_heads=4, embed_dim=64)
    assert (plain.kv_heads, plain.head_width) == (4, 16)
    given = TransformerConfig(num_heads=4, embed_dim=64, num_kv_heads=1, head_dim=32)
    assert (given.kv_heads, given.head_width) == (1, 32)


def test_dims_repeat_the_windows_over_the_depth() -> None:
    config = TransformerConfig(num_layers=4, windows=(8, 0), num_heads=4, num_kv_heads=2, embed_dim=32, head_dim=6)
    dims = config.dims(1000)
    assert dims["windows"] == [8, None, 8, None]
    assert (dims["num_kv_heads"], dims["head_dim"], dims["vocab_size"]) == (2, 6, 1000)


def test_a_scaled_down_model_keeps_parts_and_pattern_and_divides() -> None:
    rope = RopeScaling(factor=8.0)
    big = TransformerConfig(
        num_layers=28, windows=(4096, 4096, 0, 7), num_heads=28, num_kv_heads=4, embed_dim=3584, mlp_dim=18944,
        qk_norm=True, max_positions=8192, rope_scaling=rope, vocab_size=151_936,
    )  # fmt: skip
    small = TransformerConfig.model_validate(big.scaled_down(tensor=7, fsdp=3).model_dump())
    assert (small.num_layers, small.windows) == (8, (8, 8, 0, 7))
    assert (small.num_heads, small.kv_heads, small.qk_norm, small.rope_scaling) == (28, 4, True, rope)
    assert small.embed_dim % 3 == small.mlp_dim % 7 == 0
    assert small.embed_dim * small.mlp_dim * small.num_layers < 1e6
    assert (small.vocab_size, small.max_positions) == (0, 0)


def test_experts_that_a_token_does_not_go_through_are_no_flops() -> None:
    """3 of 6 layers have experts: of 8, two and a shared one for each token, and the router."""
    dense = TransformerConfig(num_layers=6, embed_dim=64, mlp_dim=128)
    experts = {"num_experts": 8, "every": 2, "mlp_dim": 32, "num_shared": 1}
    mixed = dense.model_copy(update={"experts": ExpertsConfig.model_validate(experts)})
    found, plain = (
        transformer_flops_per_token(**config.dims(100), sequence_length=16).feed_forward for config in (mixed, dense)
    )
    assert plain == 6 * 3 * 2 * 64 * 128
    assert found == 3 * 3 * 2 * 64 * 128 + 3 * 3 * 2 * 64 * (3 * 32) + 3 * 2 * 64 * 8


def test_a_capacity_is_rounded_up_and_no_more_than_there_are_tokens() -> None:
    experts = ExpertsConfig(num_experts=8, capacity_factor=1.25)
    assert experts.capacity(100) == 32  # 1.25 · 2 · 100 / 8 = 31.25
    assert experts.capacity(2) == 1
    assert ExpertsConfig(num_experts=2, capacity_factor=4.0).capacity(10) == 10
