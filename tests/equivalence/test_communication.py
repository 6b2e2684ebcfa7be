"""The collectives of the compiled step are those of the formulas, by mesh axes, kind and bytes; scalars aside."""

from collections import Counter

import jax
import pytest

from jaxpar.inspect import compile_step
from jaxpar.parallel.collectives import parse_collectives
from jaxpar.plan import make_plan
from jaxpar.traffic import expected_traffic

VOCAB_SIZE = 250
SCALAR_BYTES = 400
"""The most that losses, token counts and the parts of the gradient's norm may take."""

LAYOUTS = {
    "data": {"data": 8},
    "fsdp": {"fsdp": 8},
    "tensor": {"data": 4, "tensor": 2},
    "shared-heads": {"tensor": 8},
    "sequence": {"data": 4, "tensor": 2, "sequence_parallel": True},
    "fsdp-sequence": {"fsdp": 4, "tensor": 2, "sequence_parallel": True},
}


def compiled_traffic(plan) -> tuple[Counter, list]:
    collectives = parse_collectives(compile_step(plan).as_text(), plan.mesh.shape)
    measured: Counter = Counter()
    for collective in collectives:
        assert collective.trip_count_known
        measured[collective.axes, collective.kind] += collective.count * collective.payload_bytes
    return measured, collectives


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize("model", ["gpt2", "llama"])
def test_bytes_equal_the_formulas(model, layout, config_for):
    assert_bytes_equal_the_formulas(make_plan(config_for(model, layout), jax.devices(), VOCAB_SIZE))


def test_emulated_float8_adds_scalars_only(config_for):
    """A tensor's scale is one number, however the tensor is split. XLA:CPU may gather rounded weights in float16."""
    precision = {"products": "float8", "emulate_float8": True}
    plan = make_plan(config_for("llama", {"fsdp": 4, "tensor": 2}, precision=precision), jax.devices(), VOCAB_SIZE)
    surplus, _ = compiled_traffic(plan)
    for item in expected_traffic(plan):
        surplus[item.axes, item.traffic.kind] -= item.traffic.payload_bytes
    assert surplus.pop((("fsdp",), "all-gather")) <= 0
    assert all(0 <= surplus_bytes <= SCALAR_BYTES for surplus_bytes in surplus.values()), surplus


def test_native_float8_halves_the_gathers_of_layers_weights(config_for, monkeypatch):
    """By formula, against bfloat16; XLA:CPU moves float8 as float32."""
    monkeypatch.setattr("jaxpar.plan.has_float8_products", lambda device: True)
    gathered = {}
    for products in ("compute", "float8"):
        precision = {"compute": "bfloat16", "products": products}
        plan = make_plan(config_for("llama", {"fsdp": 8}, precision=precision), jax.devices(), VOCAB_SIZE)
        traffic = {item.purpose: item.traffic.payload_bytes for item in expected_traffic(plan)}
        gathered[products] = traffic["weights gathered"]
    elements = sum(parameter.size for parameter in plan.parameters if {"layers", "embed"} <= set(parameter.axes))
    assert gathered["compute"] - gathered["float8"] == 2 * elements


def assert_bytes_equal_the_formulas(plan):
    measured, collectives = compiled_traffic(plan)
    expected: Counter = Counter()
    for item in expected_traffic(plan):
        expected[item.axes, item.traffic.kind] += item.traffic.payload_bytes
    # The compiler may gather a table that is both embedding and output once instead of twice.
    table = 4 * plan.padded_vocab_size * plan.config.model.embed_dim // plan.mesh.shape["tensor"]
    merged = table if plan.config.model.tied and plan.mesh.shape["fsdp"] > 1 else 0
    for key in measured.keys() | expected.keys():
        allowed = {0, -merged} if key == (("fsdp",), "all-gather") else {0}
        surplus = measured[key] - expected[key]
        assert any(0 <= surplus - other <= SCALAR_BYTES for other in allowed), (
            f"{key}: {measured[key]} bytes, formula {expected[key]}: {collectives}"
        )


def test_a_layer_has_megatrons_reductions_and_no_more(config_for):
    """Two all-reduces forward and two backward in each layer, of batch × sequence × embed."""
    config = config_for("llama", {"tensor": 8})
    plan = make_plan(config, jax.devices(), VOCAB_SIZE)
    _, collectives = compiled_traffic(plan)
    full = 4 * config.train.batch_size * config.data.sequence_length * config.model.embed_dim
    in_layers = [c for c in collectives if c.payload_bytes == full and c.count == config.model.num_layers]
    assert [c.kind for c in in_layers] == ["all-reduce"] * 4
    logits = config.train.batch_size * config.data.sequence_length * plan.padded_vocab_size * 4
    assert all(c.payload_bytes < logits for c in collectives)
