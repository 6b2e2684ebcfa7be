"""The collectives of the compiled step are those of the formulas, by mesh axes, kind and bytes; scalars aside."""

import itertools
import re
from collections import Counter
from functools import cache

import jax
import pytest

from jaxpar.config import Config
from jaxpar.inspect import compile_step
from jaxpar.parallel.collectives import Collective, parse_collectives
from jaxpar.plan import Plan, make_plan
from jaxpar.state import abstract_state
from jaxpar.step import Step, abstract_batch
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
HYBRIDS = {
    "llama": {"data": 2, "fsdp": 4},
    "gpt2": {"data": 2, "fsdp": 2, "tensor": 2, "sequence_parallel": True},
}
STAGES = (0, 1, 2, 3)


@cache
def compiled(config: Config) -> tuple[Plan, str]:
    plan = make_plan(config, jax.devices(), VOCAB_SIZE)
    return plan, compile_step(plan).as_text()


def compiled_traffic(plan: Plan, text: str) -> tuple[Counter, list[Collective]]:
    collectives = parse_collectives(text, plan.mesh.shape)
    measured: Counter = Counter()
    for collective in collectives:
        assert collective.trip_count_known
        measured[collective.axes, collective.kind] += collective.count * collective.payload_bytes
    return measured, collectives


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize("model", ["gpt2", "llama"])
def test_bytes_equal_the_formulas(model, layout, config_for):
    assert_bytes_equal_the_formulas(*compiled(config_for(model, layout)))


SHARED_SEQUENCES = {
    "ring": ("llama", {"context": 8}, {}),
    "ring of two": ("llama", {"data": 4, "context": 2}, {}),
    "ring and tensor": ("llama", {"context": 4, "tensor": 2}, {}),
    "ring and all": ("gpt2", {"fsdp": 2, "context": 2, "tensor": 2, "sequence_parallel": True}, {}),
    "ring, once a step": (
        "gpt2", {"data": 2, "context": 4, "zero_stage": 1}, {"train": {"batch_size": 16, "microbatches": 2}},
    ),
    "ring without segments": (
        "llama", {"context": 8}, {"data": {"sequence_length": 16, "document_boundaries": "ignore"}},
    ),
    "all_gather": ("llama", {"data": 2, "context": 4}, {}),
    "ulysses": ("gpt2", {"context": 8}, {}),
    "ulysses, repeated heads": ("llama", {"data": 2, "context": 4}, {}),
    "ulysses and tensor": ("llama", {"context": 2, "tensor": 2, "data": 2, "sequence_parallel": True}, {}),
}  # fmt: skip


@pytest.mark.parametrize("case", SHARED_SEQUENCES)
def test_bytes_of_shared_sequences_equal_the_formulas(case, config_for):
    model, layout, sections = SHARED_SEQUENCES[case]
    method = re.match(r"\w+", case).group()
    assert_bytes_equal_the_formulas(*compiled(config_for(model, layout | {"context_method": method}, **sections)))


def test_a_ring_in_stages_sends_the_formula_for_each_tick(config_for):
    """Idle ranks of an aligned schedule send as if they had a task: 5 ticks for 4 microbatches."""
    layout, pipeline = {"pipe": 2, "context": 4}, {"schedule": "gpipe", "microbatches": 4}
    plan, text = compiled(config_for("untied-6", layout, train={"batch_size": 16}, pipeline=pipeline))
    key = ("context",), "collective-permute"
    measured, _ = compiled_traffic(plan, text)
    expected = sum(i.traffic.payload_bytes for i in expected_traffic(plan) if (i.axes, i.traffic.kind) == key)
    assert measured[key] * 4 == expected * 5 > 0


@pytest.fixture
def staged(config_for):
    """`staged(model, stage, microbatches, **sections)`: plan and compiled text on the model's hybrid mesh."""

    def make(model: str, stage: int, microbatches: int, **sections: dict) -> tuple[Plan, str]:
        layout = HYBRIDS[model] | {"zero_stage": stage} | sections.pop("parallel", {})
        train = {"num_steps": 3, "batch_size": 16, "microbatches": microbatches}
        return compiled(config_for(model, layout, train=train, **sections))

    return make


@pytest.mark.parametrize(("model", "microbatches"), [("llama", 1), ("llama", 2), ("gpt2", 2)])
@pytest.mark.parametrize("stage", STAGES)
def test_bytes_of_every_zero_stage_equal_the_formulas(model, stage, microbatches, staged):
    assert_bytes_equal_the_formulas(*staged(model, stage, microbatches))


def test_emulated_float8_adds_scalars_only(config_for):
    """A tensor's scale is one number, however the tensor is split. XLA:CPU may gather rounded weights in float16."""
    precision = {"products": "float8", "emulate_float8": True}
    plan, text = compiled(config_for("llama", {"fsdp": 4, "tensor": 2}, precision=precision))
    surplus, _ = compiled_traffic(plan, text)
    for item in expected_traffic(plan):
        surplus[item.axes, item.traffic.kind] -= item.traffic.payload_bytes
    assert surplus.pop((("fsdp",), "all-gather")) <= 0
    assert all(0 <= surplus_bytes <= SCALAR_BYTES for surplus_bytes in surplus.values()), surplus


def test_native_float8_halves_the_gathers_of_layers_weights(config_for, monkeypatch):
    """By formula, against bfloat16; XLA:CPU moves float8 as float32."""
    monkeypatch.setattr("jaxpar.execution_choices.has_float8_products", lambda device: True)
    gathered = {}
    for products in ("compute", "float8"):
        precision = {"compute": "bfloat16", "products": products}
        plan = make_plan(config_for("llama", {"fsdp": 8}, precision=precision), jax.devices(), VOCAB_SIZE)
        gathered[products] = payload_bytes_for(plan, "weights gathered")
    elements = sum(parameter.size for parameter in plan.parameters if {"layers", "embed"} <= set(parameter.axes))
    assert gathered["compute"] - gathered["float8"] == 2 * elements


def payload_bytes_for(plan: Plan, purpose: str) -> int:
    return sum(item.traffic.payload_bytes for item in expected_traffic(plan) if item.purpose == purpose)


def assert_bytes_equal_the_formulas(plan: Plan, text: str):
    measured, collectives = compiled_traffic(plan, text)
    surpluses = []
    for expected in variants(plan):
        surpluses.append({key: measured[key] - expected[key] for key in measured.keys() | expected.keys()})
        if all(0 <= surplus <= SCALAR_BYTES for surplus in surpluses[-1].values()):
            return
    pytest.fail(f"measured − formula: {surpluses}; {collectives}")


def variants(plan: Plan) -> list[Counter]:
    """The formulas' bytes by axes and kind, and the same after what XLA is free to do.

    It may gather a table that is both embedding and output once instead of twice. On CPU it may sum a gradient over
    `fsdp`, cut it, and sum the part over `data` or `context`, where the formula sums the whole over both: it does so
    for the one weight that nothing stands between the product and its layout. With sequence parallelism it may take the
    gradients of norms' biases in layers from an array that it has whole.
    """
    shape, local = plan.mesh.shape, 4 // plan.mesh.shape["tensor"]
    base: Counter = Counter()
    for item in expected_traffic(plan):
        base[item.axes, item.traffic.kind] += item.traffic.payload_bytes
    table = local * plan.padded_vocab_size * plan.config.model.embed_dim
    (down,) = (local * p.size for p in plan.parameters if p.path == "blocks/mlp/down")
    merged = Counter({(("fsdp",), "all-gather"): -table})
    moved = Counter(
        {
            (("data", "fsdp"), "all-reduce"): -down,
            (("fsdp",), "all-reduce"): down,
            (("data",), "all-reduce"): down // shape["fsdp"],
        }
    )
    may_merge = plan.config.model.tied and base[("fsdp",), "all-gather"] > 0
    may_move = base[("data", "fsdp"), "all-reduce"] > down and plan.config.parallel.zero_stage >= 2
    biases = 4 * sum(p.size for p in plan.parameters if re.fullmatch(r"blocks/.*norm/bias", p.path))
    biases *= plan.config.train.microbatches
    whole = Counter({(("tensor",), "all-reduce"): -biases})
    if shape["context"] > 1:
        whole = Counter({(("context", "tensor"), "all-reduce"): -biases, (("context",), "all-reduce"): biases})
    cut = Counter({(("context",), "all-reduce"): down // shape["fsdp"] - down})
    may_cut = shape["context"] > 1 and shape["fsdp"] > 1 and plan.config.parallel.zero_stage >= 2
    may_be_whole = biases > 0 and plan.config.parallel.sequence_parallel
    possible = ((merged, may_merge), (moved, may_move), (whole, may_be_whole), (cut, may_cut))
    changes = [change for change, may in possible if may]
    found = []
    for chosen in itertools.product([False, True], repeat=len(changes)):
        variant = Counter(base)
        for change in itertools.compress(changes, chosen):
            variant.update(change)
        found.append(variant)
    return found


def test_a_layer_has_megatrons_reductions_and_no_more(config_for):
    """Two all-reduces forward and two backward in each layer, of batch × sequence × embed."""
    config = config_for("llama", {"tensor": 8})
    plan, text = compiled(config)
    _, collectives = compiled_traffic(plan, text)
    full = 4 * config.train.batch_size * config.data.sequence_length * config.model.embed_dim
    in_layers = [c for c in collectives if c.payload_bytes == full and c.count == config.model.num_layers]
    assert [c.kind for c in in_layers] == ["all-reduce"] * 4
    logits = config.train.batch_size * config.data.sequence_length * plan.padded_vocab_size * 4
    assert all(c.payload_bytes < logits for c in collectives)


def is_over_the_batch(collective: Collective) -> bool:
    return not {"data", "fsdp"}.isdisjoint(collective.axes) and collective.payload_bytes > SCALAR_BYTES


def batch_collectives(plan: Plan, text: str) -> list[Collective]:
    return [each for each in parse_collectives(text, plan.mesh.shape) if is_over_the_batch(each)]


@pytest.mark.parametrize("model", HYBRIDS)
@pytest.mark.parametrize(
    ("stage", "kinds"),
    [(0, [(("data", "fsdp"), "all-reduce")]), (1, [(("fsdp",), "reduce-scatter"), (("data",), "all-reduce")])],
)
def test_stages_0_and_1_reduce_gradients_once_a_step_outside_of_the_loop(model, stage, kinds, staged):
    """What is in the loop over two microbatches runs twice or more. Vectors are reduced with the scalars' kind."""
    plan, text = staged(model, stage, microbatches=2)
    collectives = batch_collectives(plan, text)
    assert {each.count for each in collectives} == {1}
    assert all("while" not in each.source for each in collectives)
    matrices = 4 * sum(p.size for p in plan.parameters if "embed" in p.axes) // plan.mesh.shape["tensor"]
    sums = [each for each in collectives if each.kind != "all-gather" and each.payload_bytes >= matrices // 8]
    assert sorted((each.axes, each.kind) for each in sums) == sorted(kinds)
    assert sum(each.payload_bytes for each in sums if "fsdp" in each.axes) >= matrices


def test_stage_2_scatters_gradients_in_every_microbatch_and_gathers_updated_parameters_once(staged):
    plan, text = staged("llama", 2, microbatches=2)
    collectives = batch_collectives(plan, text)
    gathers = [each for each in collectives if each.kind == "all-gather"]
    assert {(each.axes, each.count) for each in gathers} == {(("fsdp",), 1)}
    shapes = {shape for each in gathers for _, shape in each.operands}
    assert shapes == {p.shape for p in plan.parameters if "embed" in p.axes}, "each parameter whole, all layers"
    tables = [each for each in collectives if each.kind == "reduce-scatter"]
    assert {each.count for each in tables} == {2}


def test_stage_3_gathers_one_layer_at_a_time_forward_and_backward(staged):
    plan, text = staged("llama", 3, microbatches=2)
    gathers = [each for each in batch_collectives(plan, text) if each.kind == "all-gather"]
    assert {each.axes for each in gathers} == {("fsdp",)}
    found = Counter()
    for each in gathers:
        for _, shape in each.operands:
            found[tuple(size for size in shape if size > 1)] += each.count
    wanted = Counter()
    for parameter in plan.parameters:
        if "embed" in parameter.axes:
            in_layers = parameter.axes[0] == "layers"
            # Two layers, forward and backward, in two microbatches; a table once.
            wanted[parameter.shape[1:] if in_layers else parameter.shape] += 2 * 2 * 2 if in_layers else 1
    assert found == wanted


@pytest.mark.parametrize(("stage", "purpose"), [(1, "updated parameters gathered"), (3, "weights gathered")])
def test_16_bit_formats_halve_what_is_sent(stage, purpose, staged):
    """By formula. XLA:CPU sends bfloat16 as float32, so that it sends the bytes of the float32 step."""
    formats = {"parameters": "bfloat16", "compute": "bfloat16", "reduction": "bfloat16", "master_weights": True}
    (exact, _), (plan, text) = staged("llama", stage, 2), staged("llama", stage, 2, precision=formats)
    measured, _ = compiled_traffic(plan, text)
    (expected,) = variants(exact)
    for key in measured.keys() | expected.keys():
        assert 0 <= measured[key] - expected[key] <= SCALAR_BYTES, key
    assert payload_bytes_for(plan, purpose) * 2 == payload_bytes_for(exact, purpose) > 0
    vectors = 4 * sum(p.size for p in plan.parameters if "embed" not in p.axes)
    sums = [payload_bytes_for(each, "gradients, once a step") - vectors for each in (plan, exact)]
    assert sums[0] * 2 == sums[1] > 0


def program_before_xla(plan: Plan) -> str:
    step = Step(plan)
    with plan.execution.active():
        return step.train.lower(abstract_state(plan, step.optimizer), abstract_batch(plan)).as_text()


@pytest.mark.parametrize("reduction", ["float32", "bfloat16"])
@pytest.mark.parametrize(("stage", "microbatches"), [(1, 2), (3, 1)], ids=["once a step", "as computed"])
def test_gradients_of_matrices_are_summed_in_the_format_of_the_reduction(reduction, stage, microbatches, config_for):
    """Vectors and the loss in float32. A sum that the partitioner will add has the format of the product before it."""
    train = {"num_steps": 3, "batch_size": 16, "microbatches": microbatches}
    config = config_for(
        "llama", {"data": 2, "fsdp": 4, "zero_stage": stage}, train=train, precision={"reduction": reduction}
    )
    text = program_before_xla(make_plan(config, jax.devices(), VOCAB_SIZE))
    operation = r'"stablehlo\.(all_reduce|reduce_scatter)".*?\}\) : \(tensor<([\dx]*)x(\w+)>\)'
    sums = Counter(re.findall(operation, text, re.DOTALL))
    products = Counter(re.findall(r"stablehlo\.dot_general .*-> tensor<([\dx]+)x(\w+)>", text))
    short = {"float32": "f32", "bfloat16": "bf16"}[reduction]
    if stage == 1:
        # A bucket of all matrices, scattered over 4 and then summed over 2, and one of the vectors.
        scattered = [("reduce_scatter", "4x8448", short), ("all_reduce", "1x8448", short)]
        assert sums == Counter([*scattered, ("all_reduce", "1x160", "f32")])
    else:
        table, output = [("reduce_scatter", shape, short) for shape in ("256x32", "32x256")]
        rest = [("all_reduce", shape, short) for shape in ("256x8", "8x256")]
        assert sums == Counter([table, output, *rest, ("all_reduce", "2", "f32")])
        for kernel in ("64x32", "32x2x64", "2x4x4x32", "32x2x6x4"):
            assert products[kernel, short] == 1, kernel
            assert products[kernel, "bf16"] + products[kernel, "f32"] == 1, kernel


@pytest.mark.parametrize(("bucket_bytes", "count"), [(0, 12), (20_000, 7), (1 << 25, 1)])
def test_parameters_are_summed_together_up_to_the_size_of_a_bucket(bucket_bytes, count, config_for):
    """Twelve of 128 to 32,768 bytes; with 20,000 output | final norm | table | norm, up | gate | down, norm, value |
    query, output, key."""
    layout = {"data": 2, "fsdp": 4, "zero_stage": 0, "bucket_bytes": bucket_bytes}
    config = config_for("llama", layout, train={"num_steps": 3, "batch_size": 16, "microbatches": 2})
    plan = make_plan(config, jax.devices(), VOCAB_SIZE)
    assert program_before_xla(plan).count('"stablehlo.all_reduce"') == count


def test_buckets_do_not_change_what_is_sent(staged):
    """XLA's own combiner may merge them again."""
    assert_bytes_equal_the_formulas(*staged("llama", 0, 2, parallel={"bucket_bytes": 0}))
