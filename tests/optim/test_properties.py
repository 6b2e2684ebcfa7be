"""The table of optimizers against what they keep."""

import math
from typing import Any, get_args

import jax
import jax.numpy as jnp
import pytest

from jaxpar.config.fields import unwrap
from jaxpar.config.optimizers import SGD, SM3, Adafactor, AdamW, AdamW8bit, Lion, Muon, OptimizerConfig
from jaxpar.optim import PROPERTIES, make_optimizer, state_bytes
from jaxpar.optim.build import RULES
from jaxpar.optim.properties import state_arrays

AXES = {
    "blocks/query": ("layers", "embed", "heads", "head_dim"),
    "blocks/query_bias": ("layers", "heads", "head_dim"),
    "embedding/table": ("vocab", "embed"),
    "norm/scale": ("norm",),
}
SHAPES = {"blocks/query": (3, 8, 4, 16), "blocks/query_bias": (3, 4, 16), "embedding/table": (20, 8),
          "norm/scale": (8,)}  # fmt: skip
CONFIGS = [
    AdamW(), AdamW(moments="bfloat16"), AdamW8bit(min_size=64, block_size=6), SGD(), SGD(momentum=0.0),
    Adafactor(min_dim_size_to_factor=8), Adafactor(min_dim_size_to_factor=9, momentum=0.9), SM3(), SM3(momentum=0.0),
    Lion(), Muon(),
]  # fmt: skip


def test_every_optimizer_has_a_row_and_a_rule() -> None:
    classes = set(get_args(unwrap(OptimizerConfig)[0]))
    assert PROPERTIES.keys() == RULES.keys() == classes
    assert {type(config) for config in CONFIGS} == classes


@pytest.mark.parametrize("master_weights", [False, True])
@pytest.mark.parametrize("config", CONFIGS, ids=repr)
def test_the_table_knows_every_array(config: OptimizerConfig, master_weights: bool) -> None:
    dtype = jnp.bfloat16 if master_weights else jnp.float32
    params: dict[str, Any] = {path: jax.ShapeDtypeStruct(shape, dtype) for path, shape in SHAPES.items()}
    optimizer = make_optimizer(config, lambda count: 0.1, AXES, seed=0, master_weights=master_weights)
    state = jax.eval_shape(optimizer.init, params)
    for path, shape in SHAPES.items():
        expected = state_arrays(config, path, AXES[path], shape, master_weights=master_weights)
        found = {role: (leaf.shape, leaf.dtype.itemsize) for role, leaf in state["arrays"][path].items()}
        assert found == {role: (array.shape, array.itemsize) for role, array in expected.items()}
    num_bytes = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(state))
    assert state_bytes(config, SHAPES, AXES, master_weights=master_weights) == num_bytes


@pytest.mark.parametrize("kind", PROPERTIES, ids=lambda kind: kind.__name__)
def test_the_formula_of_a_matrix(kind: type) -> None:
    n, m = 512, 1000
    formula = PROPERTIES[kind].matrix_bytes.replace("·", "*").replace("⌈m/256⌉", "math.ceil(m/256)")
    expected = eval(formula, {"n": n, "m": m, "math": math})
    assert state_bytes(kind(), {"kernel": (n, m)}, {"kernel": ("embed", "mlp")}) == expected + 4


@pytest.mark.parametrize(
    "config", [AdamW(), AdamW8bit(block_size=1), SGD(), Adafactor(), SM3(), Lion(), Muon()], ids=lambda each: each.name
)
def test_steps_of_shuffled_matrices_are_shuffled_steps_unless_matrices_matter(config: OptimizerConfig) -> None:
    """Two steps, since the first of SM3 is the gradient's sign; rows of the gradient have scales of their own."""
    shape = (128, 130)
    order = jax.random.permutation(jax.random.key(1), math.prod(shape))
    gradient = jax.random.normal(jax.random.key(0), shape) * jnp.logspace(-2, 2, 128)[:, None]
    optimizer = make_optimizer(config, lambda count: 0.1, {"kernel": ("embed", "mlp")}, seed=0)
    apply, ends = jax.jit(optimizer.apply), []
    for each in (gradient, gradient.reshape(-1)[order].reshape(shape)):
        params = {"kernel": jnp.ones(shape)}
        state = optimizer.init(params)
        for _ in range(2):
            params, state = apply({"kernel": each}, state, params)
        ends.append(params["kernel"].reshape(-1))
    difference = float(jnp.abs(ends[0][order] - ends[1]).mean())
    assert difference > 1e-3 if PROPERTIES[type(config)].uses_matrices else difference < 1e-6
