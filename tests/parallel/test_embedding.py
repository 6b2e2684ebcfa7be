"""Lookups in split tables against indexing, with gradients."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpar.parallel.embedding import lookup

B, T, D, ROWS = 8, 8, 8, 16

MESHES = [
    {"data": 8},
    {"tensor": 8},
    {"tensor": 4, "fsdp": 2, "sequence_parallel": True},
    {"data": 2, "fsdp": 2, "tensor": 2},
    {"data": 2, "fsdp": 2, "tensor": 2, "sequence_parallel": True},
]


def _value_and_gradient(rows: str, dtype: str = "float32"):  # type: ignore[no-untyped-def]
    random = np.random.default_rng(0)
    table = random.normal(size=(ROWS, D)).astype(dtype)
    indices = random.integers(0, ROWS // 2, (B, T)).astype(np.int32)  # repeated, and half of the rows never used
    indices[0] = ROWS - 1
    weights = random.normal(size=(B, T, D)).astype(dtype)

    def run(table: jax.Array, indices: jax.Array, weights: jax.Array) -> tuple[jax.Array, jax.Array]:
        x, pullback = jax.vjp(lambda table: lookup(table, indices, rows), table)
        return x, pullback(weights)[0]

    found = jax.jit(run)(table, indices, weights)
    gradient = np.zeros((ROWS, D))
    np.add.at(gradient, indices, weights.astype(np.float64))
    return found, (table[indices], gradient)


@pytest.mark.parametrize("rows", ["vocab", "positions"])
@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_a_split_table_gives_the_rows_and_each_rows_summed_gradient(execution_on, mesh: dict, rows: str) -> None:
    execution = execution_on(**mesh)
    with execution.active():
        (x, gradient), (expected_x, expected_gradient) = _value_and_gradient(rows)
    np.testing.assert_array_equal(x, expected_x)
    np.testing.assert_allclose(gradient, expected_gradient, rtol=1e-6, atol=1e-6)
    length = T // mesh["tensor"] if mesh.get("sequence_parallel") else T
    assert x.sharding.shard_shape(x.shape) == (B // (mesh.get("data", 1) * mesh.get("fsdp", 1)), length, D)
    split_rows = mesh.get("tensor", 1) if rows == "vocab" else 1
    assert gradient.sharding.shard_shape(gradient.shape) == (ROWS // split_rows, D // mesh.get("fsdp", 1))


@pytest.mark.parametrize("mesh", [{}, {"data": 2, "tensor": 4}], ids=str)
def test_bfloat16_gradients_are_summed_in_float32_and_rounded_once(execution_on, mesh: dict) -> None:
    with execution_on(**mesh).active():
        (x, gradient), (expected_x, expected_gradient) = _value_and_gradient("vocab", "bfloat16")
    assert x.dtype == gradient.dtype == jnp.bfloat16
    np.testing.assert_array_equal(x, expected_x)
    np.testing.assert_array_equal(gradient, expected_gradient.astype(np.float32).astype(jnp.bfloat16))


def test_without_a_plan_it_is_indexing() -> None:
    (x, gradient), (expected_x, expected_gradient) = _value_and_gradient("vocab")
    np.testing.assert_array_equal(x, expected_x)
    np.testing.assert_allclose(gradient, expected_gradient, rtol=1e-6, atol=1e-6)
