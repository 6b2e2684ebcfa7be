"""Number formats: what the loss sees, what is computed in which format, and what gradients come back as."""

import dataclasses
from collections import Counter
from collections.abc import Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from jaxpar.config import parse_config
from jaxpar.parallel.loss import LossSettings
from jaxpar.plan import Plan, make_plan
from jaxpar.precision import in_compute_dtype
from jaxpar.step import abstract_batch, dropout_keys, make_gradients, token_loss


def test_matrices_are_cast_vectors_of_layers_are_not_and_gradients_come_back_in_float32() -> None:
    vectors = {"vector", "layers/vector"}
    seen = {}

    def loss(params: dict, scale: float) -> jax.Array:
        seen.update(jax.tree.map(lambda a: a.dtype.name, params))
        return scale * sum(a.astype(jnp.float32).sum() for a in jax.tree.leaves(params))

    fine = 1.0 + 2**-10  # bfloat16 rounds it to 1
    params = {"matrix": jnp.full((2, 3), fine), "vector": jnp.full(3, fine)}
    params["layers"] = {"matrix": jnp.full((5, 2, 3), fine), "vector": jnp.full((5, 3), fine)}
    value, gradients = jax.value_and_grad(in_compute_dtype(loss, "bfloat16", vectors))(params, 2.0)
    formats = {"matrix": "bfloat16", "vector": "float32"}
    assert seen == formats | {"layers": formats}
    assert value == 2.0 * (36 + 18 * fine)
    assert {leaf.dtype.name for leaf in jax.tree.leaves(gradients)} == {"float32"}
    in_compute_dtype(loss, "float32", vectors)(params, 2.0)
    assert set(jax.tree.leaves(seen)) == {"float32"}


def _plan(compute: str) -> Plan:
    table = {"model": {"name": "llama_tiny", "logit_softcap": 5.0, "qk_norm": True}, "precision": {"compute": compute}}
    table |= {"data": {"sequence_length": 8}, "train": {"batch_size": 2}, "kernels": {"attention": "reference"}}
    return make_plan(parse_config(table), jax.devices()[:1], 20)


def _equations(jaxpr: Any) -> Iterator[Any]:
    for equation in jaxpr.eqns:
        yield equation
        for value in jax.tree.leaves(list(equation.params.values()), is_leaf=lambda v: hasattr(v, "eqns")):
            if hasattr(value, "eqns"):
                yield from _equations(value)


@pytest.mark.parametrize("compute", ["float32", "bfloat16"])
def test_products_are_in_the_compute_format_and_norms_softmax_and_loss_in_float32(compute: str) -> None:
    plan = _plan(compute)
    loss = in_compute_dtype(token_loss(plan, LossSettings()), compute, plan.uncast)
    keys = dropout_keys(plan, 0)
    with plan.execution.active():
        jaxpr = jax.make_jaxpr(loss)(plan.abstract_params, abstract_batch(plan), keys)
        gradients = partial(make_gradients(plan), scale=None)
        grads, metrics = jax.eval_shape(gradients, plan.abstract_params, abstract_batch(plan), keys)
    formats: dict[str, set] = {}
    for equation in _equations(jaxpr):
        formats.setdefault(equation.primitive.name, set()).update(v.aval.dtype.name for v in equation.invars)
    assert formats["dot_general"] == {compute}
    for primitive in ("rsqrt", "exp", "log", "tanh", "cos"):
        assert formats[primitive] == {"float32"}, primitive
    assert {leaf.dtype.name for leaf in jax.tree.leaves((grads, metrics["loss"], metrics["grad_norm"]))} == {"float32"}


def test_biases_stay_in_float32_and_their_gradients_are_summed_in_it() -> None:
    """Also those of queries, keys and values, which have two dims."""
    table = {"model": {"name": "gpt2_tiny", "qkv_bias": True}, "precision": {"compute": "bfloat16"}}
    table |= {"data": {"sequence_length": 8}, "train": {"batch_size": 2}, "kernels": {"attention": "reference"}}
    plan = make_plan(parse_config(table), jax.devices()[:1], 20)
    assert sum(path.endswith("bias") for path in plan.uncast) == 9
    with plan.execution.active():
        arguments = (plan.abstract_params, abstract_batch(plan), dropout_keys(plan, 0), None)
        equations = list(_equations(jax.make_jaxpr(make_gradients(plan))(*arguments)))
    # Sums over batch and sequence. Those over heads or width are part of a product.
    sums = [e for e in equations if e.primitive.name == "reduce_sum" and {0, 1} <= set(e.params["axes"])]
    assert len(sums) >= 9
    assert {e.invars[0].aval.dtype.name for e in sums} <= {"float32", "int32"}


@pytest.mark.parametrize("compute", ["float32", "bfloat16"])
def test_only_products_with_layers_weights_are_float8_and_gradients_are_e5m2(compute: str) -> None:
    """Four in a layer and twice as many in its backward pass; attention's and the head's stay as they are."""
    plan = _plan(compute)

    def products(operands: str) -> Counter:
        execution = dataclasses.replace(plan.execution, products=operands, float32_products=False)
        with execution.active():
            arguments = (plan.abstract_params, abstract_batch(plan), dropout_keys(plan, 0), None)
            equations = _equations(jax.make_jaxpr(make_gradients(plan))(*arguments))
        return Counter(
            (tuple(sorted(v.aval.dtype.name for v in equation.invars)), equation.outvars[0].aval.dtype.name)
            for equation in equations
            if equation.primitive.name == "dot_general"
        )

    plain, rounded = products("compute"), products("float8")
    forward, backward = ("float8_e4m3fn", "float8_e4m3fn"), ("float8_e4m3fn", "float8_e5m2")
    # Activations and their gradients are results in the compute format, weights' gradients in float32.
    assert rounded - plain == Counter([(forward, compute), (backward, compute), (backward, "float32")] * 4)
    assert plain - rounded == Counter([((compute, compute), compute)] * 8 + [((compute, compute), "float32")] * 4)
