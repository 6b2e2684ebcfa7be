"""Bytes a device holds in each ZeRO stage, against Rajbhandari 2020, figure 1: parameters, gradients, optimizer state.

The paper's gradients have 2 bytes an element. Ours have 4 where there are several microbatches, whose sum is float32;
they are counted here with the 4.
"""

import math
import re
from collections import Counter
from typing import Any

import jax
import pytest

from jaxpar.config import parse_config
from jaxpar.config.optimizers import SM3, Adafactor, AdamW8bit
from jaxpar.inspect import compile_step
from jaxpar.memory import abstract_gradients
from jaxpar.optim import state_bytes
from jaxpar.optim.build import RULES
from jaxpar.parallel.program import memory_table
from jaxpar.plan import Plan, make_plan
from jaxpar.state import abstract_state, local_bytes
from jaxpar.step import Step

N = 8
STAGES = (0, 1, 2, 3)
FORMATS = {
    "float32": ({}, 4, 8),
    # The master copy and two moments.
    "mixed": ({"parameters": "bfloat16", "compute": "bfloat16", "master_weights": True}, 2, 12),
}
# Wide enough that matrices are what counts; the others are listed below.
MODEL = {
    "name": "transformer", "num_layers": 2, "embed_dim": 256, "num_heads": 4, "mlp_dim": 512, "gated": False,
    "qkv_bias": True, "tied": False,
}  # fmt: skip
TOO_SMALL = {
    "blocks/attention/key_bias", "blocks/attention/query_bias", "blocks/attention/value_bias",
    "blocks/attention_norm/scale", "blocks/mlp_norm/scale", "final_norm/scale",
}  # fmt: skip


def model_state(stage: int, parameters: int, gradients: int, optimizer: float, num_devices: int) -> list[float]:
    """Bytes a parameter and device, from those of a whole replica: stage 1 splits the third, 2 the second, 3 the
    first."""
    splits = (stage >= 3, stage >= 2, stage >= 1)
    return [
        size / num_devices if split else size
        for size, split in zip((parameters, gradients, optimizer), splits, strict=True)
    ]


def test_the_formula_is_the_papers() -> None:
    """Its worked example: 7.5 billion parameters on 64 devices."""
    gigabytes = [7.5 * sum(model_state(stage, 2, 2, 12, 64)) for stage in STAGES]
    assert gigabytes == pytest.approx([120, 31.4, 16.6, 1.88], rel=3e-3)


def plan_for(stage: int, formats: str = "float32", optimizer: str = "adamw") -> Plan:
    table = {
        "model": MODEL,
        "data": {"sequence_length": 16},
        "train": {"batch_size": 2 * N, "microbatches": 2},
        "parallel": {"fsdp": N, "zero_stage": stage},
        "precision": FORMATS[formats][0],
        "optimizer": {"name": optimizer},
    }
    return make_plan(parse_config(table), jax.devices(), 500)


def bytes_of(leaves: Any) -> int:
    """On each device."""
    return local_bytes(leaves, on_host=False)


def is_whole(leaf: Any) -> bool:
    return leaf.sharding.shard_shape(leaf.shape) == leaf.shape


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("formats", FORMATS)
def test_bytes_of_parameters_gradients_and_adams_state(stage: int, formats: str) -> None:
    """To 2%, and what is too small to split is known by name and held whole."""
    plan = plan_for(stage, formats)
    state = abstract_state(plan, Step(plan).optimizer)
    _, parameter_bytes, state_bytes_each = FORMATS[formats]
    expected = model_state(stage, parameter_bytes, 4, state_bytes_each, N)
    trees = (state.params, abstract_gradients(plan), state.optimizer["arrays"])
    num_parameters = sum(parameter.size for parameter in plan.parameters)
    small = sum(parameter.size for parameter in plan.parameters if parameter.path in TOO_SMALL)
    assert small < 0.01 * num_parameters
    for tree, each, splits in zip(trees, expected, (stage >= 3, stage >= 2, stage >= 1), strict=True):
        by_path = dict(zip((p.path for p in plan.parameters), _per_parameter(tree), strict=True))
        whole = {path for path, leaves in by_path.items() if any(map(is_whole, leaves))}
        assert whole == (TOO_SMALL if splits else by_path.keys())
        found = bytes_of([leaf for leaves in by_path.values() for leaf in leaves])
        allowance = bytes_of([leaf for path in TOO_SMALL for leaf in by_path[path]])
        assert each * num_parameters * 0.98 <= found <= each * num_parameters * 1.02 + allowance
    replicated = {p.path for p in plan.parameters if p.layout.reason.startswith("replicated")}
    assert replicated == (TOO_SMALL if stage == 3 else {p.path for p in plan.parameters}), "as inspect lists them"


def _per_parameter(tree: Any) -> list[list[Any]]:
    """The arrays of each parameter, in the order of parameters: one, or its optimizer state's."""
    nodes = jax.tree.leaves(tree, is_leaf=lambda node: isinstance(node, dict) and "first" in node)
    return [jax.tree.leaves(node) for node in nodes]


# Of matrices: statistics of the dim that is not split, and the scales of blocks as wide as a row.
WHOLE_ROLES = {Adafactor: {"rows", "columns"}, SM3: {"rows", "columns"}, AdamW8bit: {"first_scales", "second_scales"}}


@pytest.mark.parametrize("formats", FORMATS)
@pytest.mark.parametrize("kind", RULES, ids=lambda kind: kind.__name__)
def test_bytes_of_every_optimizers_state(kind: type, formats: str) -> None:
    """Those of its property table, over N from stage 1 on but for what is too small to split: the state of small
    parameters, and of others what `WHOLE_ROLES` lists."""
    for stage in STAGES:
        plan = plan_for(stage, formats, kind().name)
        state = abstract_state(plan, Step(plan).optimizer).optimizer
        leaves = {jax.tree_util.keystr(keys[1:], simple=True, separator="/"): leaf
                  for keys, leaf in jax.tree.leaves_with_path(state) if leaf.ndim}  # fmt: skip
        shapes = {parameter.path: parameter.shape for parameter in plan.parameters}
        whole = state_bytes(plan.config.optimizer, shapes, plan.axes, master_weights=formats == "mixed") - 4
        assert sum(leaf.size * leaf.dtype.itemsize for leaf in leaves.values()) == whole
        unsplit = {name: leaf for name, leaf in leaves.items() if is_whole(leaf)}
        held = bytes_of(list(unsplit.values()))
        if stage == 0:
            assert held == whole
            continue
        assert bytes_of(list(leaves.values())) == pytest.approx((whole - held) / N + held, rel=0.02)
        of_matrices = {tuple(name.rsplit("/", 1)) for name in unsplit if name.rsplit("/", 1)[0] not in TOO_SMALL}
        assert {role for _, role in of_matrices} == WHOLE_ROLES.get(kind, set())
        assert all(unsplit["/".join(names)].size * 128 <= math.prod(shapes[names[0]]) for names in of_matrices)


@pytest.mark.parametrize(
    ("stage", "carried"),
    [(0, (4, 0)), (1, (4, 0)), (2, (2, 2)), (3, (0, 4))],
)
def test_the_compiled_step_holds_as_much(stage: int, carried: tuple[int, int], config_for: Any) -> None:
    """What goes in is the state and the batch. The loop over microbatches carries the parameters `gate` and `up` and
    their gradients, each whole or the fourth of it that is a device's."""
    layout = {"data": 2, "fsdp": 4, "zero_stage": stage}
    config = config_for("llama", layout, train={"num_steps": 3, "batch_size": 16, "microbatches": 2})
    plan = make_plan(config, jax.devices(), 250)
    state = abstract_state(plan, Step(plan).optimizer)
    compiled = compile_step(plan)
    batch_bytes = 2 * 16 * (4 * 4 + 1)
    assert memory_table(compiled)["argument_bytes"] == bytes_of(state) + batch_bytes
    # Of the loops that run twice, that over layers inside of it has no table.
    loops = re.findall(r"= \((.*)\) while\(.*\"known_trip_count\":\{\"n\":\"2\"\}", compiled.as_text())
    (arrays,) = [Counter(re.findall(r"f32\[[\d,]+\]", loop)) for loop in loops if "f32[256," in loop]
    assert (arrays["f32[2,32,64]"], arrays["f32[2,8,64]"]) == carried
