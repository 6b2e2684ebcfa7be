"""A stack of layers: loops, patterns and recomputation give the same numbers."""

import re
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from jaxpar.parallel.constrain import Execution
from jaxpar.parallel.layers import REMAT_POLICIES, scan_layers
from jaxpar.parallel.offload import Streamed

NUM_LAYERS, D = 4, 8


def _body(layer, x, extras, index, slot):  # type: ignore[no-untyped-def]
    """A body in which order, index, slot and what all layers share each leave a trace."""
    return jnp.tanh(x @ layer["w"]) * extras + (slot + 1.0) / (index + 2.0) * layer["b"][None]


def _inputs() -> tuple[dict[str, np.ndarray], np.ndarray, np.ndarray]:
    random = np.random.default_rng(0)
    stacked = {"w": random.normal(size=(NUM_LAYERS, D, D)), "b": random.normal(size=(NUM_LAYERS, D))}
    x, extras = random.normal(size=(3, D)), random.normal(size=(3, D))
    return jax.tree.map(np.float32, (stacked, x, extras))


def test_a_stack_on_the_host_is_read_by_scan_layers_alone() -> None:
    stack = Streamed(jnp.ones((NUM_LAYERS, D, D)), None, jnp.float32, PartitionSpec())
    message = (
        r"^a parameter \(4, 8, 8\) is stacked over layers and read outside of scan_layers, but with offload\.parameters"
        r'="host" only scan_layers brings it to the device; set offload\.parameters="none", or give the parameter '
        r'another first logical axis than "layers"'
    )
    with pytest.raises(ValueError, match=message):
        stack[...]
    with pytest.raises(ValueError, match=message):
        jnp.sum(stack)


@cache
def _by_hand(period: int):  # type: ignore[no-untyped-def]
    def loss(stacked, x, extras):  # type: ignore[no-untyped-def]
        for index in range(NUM_LAYERS):
            x = _body(jax.tree.map(lambda a, index=index: a[index], stacked), x, extras, index, index % period)
        return jnp.square(x).sum()

    return jax.jit(jax.value_and_grad(loss, argnums=(0, 1)))(*_inputs())


@pytest.mark.parametrize(
    ("period", "policy", "unroll"),
    [
        (1, "none", False),
        (2, "none", False),
        (4, "none", False),
        (2, "none", True),
        (2, "full", False),
        (2, "dots", False),
    ],
)
def test_loops_and_recomputation_change_nothing(period: int, policy: str, unroll: bool) -> None:
    def loss(stacked, x, extras):  # type: ignore[no-untyped-def]
        return jnp.square(scan_layers(_body, x, stacked, extras, num_layers=NUM_LAYERS, period=period)).sum()

    with Execution(remat=REMAT_POLICIES[policy], unroll_layers=unroll).active():
        found = jax.jit(jax.value_and_grad(loss, argnums=(0, 1)))(*_inputs())
    for got, want in zip(jax.tree.leaves(found), jax.tree.leaves(_by_hand(period)), strict=True):
        np.testing.assert_allclose(got, want, rtol=0, atol=1e-5 * np.abs(want).max())


@pytest.mark.parametrize(("policy", "products", "tanhs"), [("none", 3, 1), ("full", 4, 2), ("dots", 3, 2)])
def test_policies_recompute_what_they_say(policy: str, products: int, tanhs: int) -> None:
    """The layer's product is made once going forward, twice for gradients, and once more where it is not kept."""

    def loss(stacked, x, extras):  # type: ignore[no-untyped-def]
        return scan_layers(_body, x, stacked, extras, num_layers=NUM_LAYERS).sum()

    with Execution(remat=REMAT_POLICIES[policy]).active():
        text = str(jax.make_jaxpr(jax.grad(loss))(*_inputs()))
    assert len(re.findall(r"\bdot_general\[", text)) == products
    assert len(re.findall(r"= tanh\b", text)) == tanhs


def test_weights_are_not_copied_into_the_backward_loop() -> None:
    """The forward loop hands nothing of a weight's shape to the backward one, whatever the pattern's length."""

    def forward(stacked, x, extras):  # type: ignore[no-untyped-def]
        return jax.vjp(lambda w: scan_layers(_body, x, w, extras, num_layers=NUM_LAYERS, period=2), stacked)

    loops = [e for e in jax.make_jaxpr(forward)(*_inputs()).eqns if e.primitive.name == "scan"]
    kept = [variable.aval.shape for variable in loops[0].outvars]
    assert kept
    assert not [shape for shape in kept if shape[-2:] == (D, D)]
