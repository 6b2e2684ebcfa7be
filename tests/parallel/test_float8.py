"""Float8 products against NumPy: what is rounded to what, with which scale, on one device and split over eight."""

import dataclasses
import itertools
import re
from collections import Counter
from collections.abc import Callable

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from jaxpar.parallel.constrain import Execution, constrain
from jaxpar.parallel.contract import contract
from jaxpar.parallel.float8 import FORWARD, GRADIENT, read

B, T, D, F = 4, 8, 16, 8
MODES = ["float8", "emulated_float8"]
EQUATION, AXES = "btd,dcf->btcf", [("embed", "mlp")] * 2


def _stacked(*kernels: jax.Array) -> jax.Array:
    return jnp.stack(kernels, axis=1)


def _random(seed: int, *shapes: tuple[int, ...]) -> list[np.ndarray]:
    random = np.random.default_rng(seed)
    return [random.normal(size=shape).astype(np.float32) for shape in shapes]


def _rounded(x: np.ndarray, float8: type) -> np.ndarray:
    """x as float8 with one scale can hold it, float64: divided, rounded, multiplied back."""
    scale = np.float32(np.abs(x).max()) / np.float32(ml_dtypes.finfo(float8).max)
    return (x.astype(np.float32) / scale).astype(float8).astype(np.float64) * scale


def _expected(x: np.ndarray, kernels: list[np.ndarray], dy: np.ndarray) -> tuple[np.ndarray, ...]:
    """The product, the gradient of x, and those of the kernels."""
    x, dy = _rounded(x, ml_dtypes.float8_e4m3fn), _rounded(dy, ml_dtypes.float8_e5m2)
    kernel = _rounded(np.stack(kernels, axis=1), ml_dtypes.float8_e4m3fn)
    dkernel = np.einsum("btd,btcf->cdf", x, dy)
    return np.einsum(EQUATION, x, kernel), np.einsum("btcf,dcf->btd", dy, kernel), *dkernel


def _run(execution: Execution, *arguments: object) -> list[jax.Array]:
    """The same of `contract`."""

    def product(x: jax.Array, kernels: list[jax.Array]) -> jax.Array:
        x = constrain(x, ("batch", "sequence", "embed"))
        return contract(EQUATION, x, kernels, AXES, _stacked)

    def run(x: jax.Array, kernels: list[jax.Array], dy: jax.Array) -> tuple:
        y, pullback = jax.vjp(product, x, kernels)
        return y, *pullback(dy)

    with execution.active():
        return jax.tree.leaves(jax.jit(run)(*arguments))


def _assert_close(found: list[jax.Array], expected: tuple[np.ndarray, ...], relative: float) -> None:
    for got, want in zip(found, expected, strict=True):
        np.testing.assert_allclose(np.asarray(got, np.float64), want, rtol=0, atol=relative * np.abs(want).max())


@pytest.mark.parametrize("products", MODES)
def test_value_and_gradients_are_those_of_rounded_operands(products: str) -> None:
    """A common scale for the kernels, of which the second is larger; in every form in which products are written."""
    x, small, large, dy = _random(0, (B, T, D), (D, F), (D, F), (B, T, 2, F))
    kernels = [small, 8 * large]
    expected = _expected(x, kernels, dy)
    for float32, transposed in itertools.product((False, True), repeat=2):
        forms = {"float32_products": float32, "transposed_weight_gradients": transposed}
        _assert_close(_run(Execution(products=products, **forms), x, kernels, dy), expected, 1e-6)
    for got, want in zip(_run(Execution(), x, kernels, dy), expected, strict=True):
        assert np.abs(got - want).max() > 1e-2 * np.abs(want).max()


@pytest.mark.parametrize("products", MODES)
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_results_have_the_compute_format_and_its_rounding_only(products: str, dtype: jnp.dtype) -> None:
    """Long sums of large values: unscaled they exceed float16's range, and a float8 sum would lose most of them."""
    x, *kernels, dy = (np.abs(array) + 1 for array in _random(0, (B, T, 512), (512, F), (512, F), (B, T, 2, F)))
    arguments = jax.tree.map(lambda array: jnp.asarray(array, dtype), (x, kernels, dy))
    expected = _expected(*jax.tree.map(lambda array: np.asarray(array, np.float32), arguments))
    found = _run(Execution(products=products), *arguments)
    assert {array.dtype for array in found} == {jnp.dtype(dtype)}
    _assert_close(found, expected, 2.0 ** -(jnp.finfo(dtype).nmant + 1) * 2)


@pytest.mark.parametrize("products", MODES)
def test_a_split_tensor_has_the_scale_of_the_whole(products: str, execution_on: Callable[..., Execution]) -> None:
    """Every operand's largest entry is on one device, and far larger than what the other devices have."""
    x, *kernels, dy = _random(0, (B, T, D), (D, F), (D, F), (B, T, 2, F))
    x[-1, -1, -1] = kernels[1][-1, -1] = dy[-1, -1, -1, -1] = 50.0
    expected = _expected(x, kernels, dy)
    for mesh in ({"data": 2, "fsdp": 2, "tensor": 2}, {"fsdp": 4, "tensor": 2, "sequence_parallel": True}):
        found = _run(dataclasses.replace(execution_on(**mesh), products=products), x, kernels, dy)
        _assert_close(found, expected, 1e-6)


@pytest.mark.parametrize("products", MODES)
def test_tensors_of_zeros_give_zeros(products: str) -> None:
    x, *kernels, dy = _random(0, (B, T, D), (D, F), (D, F), (B, T, 2, F))
    zeros = [np.zeros_like(kernel) for kernel in kernels]
    for arguments in ((0 * x, kernels, 0 * dy), (x, zeros, 0 * dy)):
        assert all((np.asarray(array) == 0).all() for array in _run(Execution(products=products), *arguments))


@pytest.mark.parametrize("largest", [1e-45, 1e-38, 1e-36, 1e-33, 1e30])
def test_very_small_and_very_large_tensors_stay_finite(largest: float) -> None:
    x = np.array([largest, 0.0, -largest], np.float32)
    for float8 in (FORWARD, GRADIENT):
        with Execution(products="emulated_float8").active():
            operand = jax.jit(read, static_argnums=1)(x, float8)
        assert np.isfinite(operand.values).all()
        assert np.isfinite(operand.scale)
        assert operand.scale > 0
        assert operand.values[1] == 0


@pytest.mark.parametrize("products", MODES)
@pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan])
def test_what_is_not_finite_stays_so(products: str, bad: float) -> None:
    """Nothing is cut to the format's largest number: the whole product shows it."""
    arguments = _random(0, (B, T, D), (D, F), (D, F), (B, T, 2, F))
    x, first, second, dy = range(4)
    for where, seen in ((x, {0, 2, 3}), (second, {0, 1}), (dy, {1, 2, 3})):
        spoilt = [array.copy() for array in arguments]
        spoilt[where].flat[3] = bad
        found = _run(Execution(products=products), spoilt[x], [spoilt[first], spoilt[second]], spoilt[dy])
        for number, array in enumerate(found):
            assert np.isfinite(array).any() == (number not in seen), (where, number)


def test_weights_are_rounded_before_they_are_gathered(execution_on: Callable[..., Execution]) -> None:
    """What is laid out like the stored weights, and then anew, forward and backward, is float8; what was rounded once
    is kept, weights that are used as they are come again."""

    def loss(x: jax.Array, kernels: list[jax.Array]) -> jax.Array:
        return contract(EQUATION, x, kernels, AXES, _stacked).astype(jnp.float32).sum()

    x, *kernels = (jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((B, T, D), (D, F), (D, F)))
    for products, dtype, times in (("compute", "bf16", 2), ("float8", "f8E4M3FN", 1)):
        with dataclasses.replace(execution_on(fsdp=4), products=products).active():
            text = jax.jit(jax.value_and_grad(loss, argnums=(0, 1))).lower(x, kernels).as_text()
        layouts = re.findall(rf"sharding_constraint %\w+ <@mesh, (.*?)> : tensor<{D}x{F}x{dtype}>", text)
        assert Counter(layouts) == {'[{"fsdp"}, {}]': 2 * times, "[{}, {}]": 4}
