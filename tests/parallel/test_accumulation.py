"""Microbatches: which sequences each has, and what is summed in which format."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpar.parallel.accumulation import accumulated, microbatches

NAMES = {"w": ("mlp",)}


def _by_path(grads: Any) -> dict[str, jax.Array]:
    return grads


def test_one_microbatch_is_the_function_itself() -> None:
    assert accumulated(_by_path, 1, _by_path, NAMES) is _by_path


@pytest.mark.parametrize("layout", [{}, {"data": 2, "fsdp": 2, "tensor": 2}], ids=["one device", "mesh"])
def test_every_sequence_is_in_one_microbatch_and_stays_on_its_device(layout: dict, execution_on: Any) -> None:
    """Four devices share twelve sequences: each has three, and gives one to each microbatch."""
    execution = execution_on(**layout)
    rows = np.arange(12)
    with execution.active():
        batch = {"tokens": np.broadcast_to(rows[:, None], (12, 4)), "keys": rows}
        parts = jax.device_get(jax.jit(lambda batch: microbatches(batch, 3))(batch))
    num_devices = 4 if layout else 1
    own = rows.reshape(num_devices, 3, -1)
    for name, part in parts.items():
        assert part.shape[:2] == (3, 4), name
        values = part.reshape(3, 4, -1)[:, :, 0]
        for number in range(3):
            np.testing.assert_array_equal(values[number], own[:, number].ravel())


def test_gradients_are_summed_in_float32_whatever_their_format() -> None:
    """1 + 1023 · 2⁻¹⁰ is 1 in bfloat16, where 1 + 2⁻¹⁰ is rounded to 1 each time."""
    values = np.full(1024, 2.0**-10, np.float32)
    values[0] = 1.0

    def gradients(params: Any, batch: Any, keys: Any, weight: jax.Array) -> tuple[dict, dict]:
        grads = {"w": jnp.full(3, weight * batch.sum()).astype(jnp.bfloat16)}
        return grads, {"loss": batch.sum().astype(jnp.bfloat16), "count": jnp.float32(batch.size)}

    summed = jax.jit(accumulated(gradients, 1024, _by_path, NAMES))
    grads, sums = summed({}, jnp.asarray(values), None, jnp.float32(4.0))
    assert {leaf.dtype.name for leaf in jax.tree.leaves((grads, sums))} == {"float32"}
    np.testing.assert_array_equal(grads["w"], np.full(3, 4 * (1 + 1023 / 1024), np.float32))
    assert (sums["loss"], sums["count"]) == (1 + 1023 / 1024, 1024)


def test_microbatches_are_one_loop_and_not_copies_of_the_program() -> None:
    def gradients(params: Any, batch: jax.Array, keys: Any, weight: jax.Array) -> tuple[dict, dict]:
        return {"w": jnp.tanh(batch) * weight}, {}

    def primitives(number: int) -> list[str]:
        function = accumulated(gradients, number, _by_path, NAMES)
        jaxpr = jax.make_jaxpr(function)({}, jnp.ones(8), None, 1.0)
        (scan,) = [equation for equation in jaxpr.eqns if equation.primitive.name == "scan"]
        assert scan.params["length"] == number
        return [equation.primitive.name for equation in scan.params["jaxpr"].eqns]

    assert primitives(4) == primitives(2)
    assert primitives(4).count("tanh") == 1
