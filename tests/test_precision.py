"""Number formats: what the loss sees, what is computed in which format, and what gradients come back as."""

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from jaxpar.config import parse_config
from jaxpar.parallel.loss import LossSettings
from jaxpar.plan import Plan, make_plan
from jaxpar.precision import in_compute_dtype
from jaxpar.step import abstract_batch, make_gradients, token_loss


def test_matrices_are_cast_vectors_are_not_and_gradients_come_back_in_float32() -> None:
    seen = {}

    def loss(params: dict, scale: float) -> jax.Array:
        seen.update(jax.tree.map(lambda a: a.dtype, params))
        return scale * (params["matrix"].astype(jnp.float32).sum() + params["vector"].sum())

    params = {"matrix": jnp.full((2, 3), 1.0 + 2**-10), "vector": jnp.full(3, 1.0 + 2**-10)}
    value, gradients = jax.value_and_grad(in_compute_dtype(loss, "bfloat16"))(params, 2.0)
    assert seen == {"matrix": jnp.bfloat16, "vector": jnp.float32}
    assert value == 2.0 * (6 + 3 * (1.0 + 2**-10))
    assert {name: gradient.dtype for name, gradient in gradients.items()} == dict.fromkeys(params, jnp.float32)
    assert in_compute_dtype(loss, "float32") is loss


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
    loss = in_compute_dtype(token_loss(plan, LossSettings()), compute)
    key = jax.random.key(0)
    with plan.execution.active():
        jaxpr = jax.make_jaxpr(loss)(plan.abstract_params, abstract_batch(plan), key)
        grads, metrics = jax.eval_shape(make_gradients(plan), plan.abstract_params, abstract_batch(plan), key)
    formats: dict[str, set] = {}
    for equation in _equations(jaxpr):
        formats.setdefault(equation.primitive.name, set()).update(v.aval.dtype.name for v in equation.invars)
    assert formats["dot_general"] == {compute}
    for primitive in ("rsqrt", "exp", "log", "tanh", "cos"):
        assert formats[primitive] == {"float32"}, primitive
    assert {leaf.dtype.name for leaf in jax.tree.leaves((grads, metrics["loss"], metrics["grad_norm"]))} == {"float32"}
