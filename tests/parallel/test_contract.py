"""Weights meeting activations: values and gradients in every form, and what the backward pass keeps."""

import dataclasses
import itertools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpar.parallel.constrain import Execution, constrain
from jaxpar.parallel.contract import contract
from jaxpar.parallel.layers import scan_layers

B, T, D, F = 4, 8, 16, 8
FORMS = [
    {"float32_products": float32, "transposed_weight_gradients": transposed}
    for float32, transposed in itertools.product((False, True), repeat=2)
]


def _stacked(*kernels: jax.Array) -> jax.Array:
    return jnp.stack(kernels, axis=1)


def _plain(kernel: jax.Array) -> jax.Array:
    return kernel


CASES = [
    ("btf,fd->btd", (B, T, F), [(F, D)], [("mlp", "embed")], _plain),
    ("btd,dcf->btcf", (B, T, D), [(D, F), (D, F)], [("embed", "mlp")] * 2, _stacked),
    ("btkgn,kgnd->btd", (B, T, 2, 3, 4), [(2, 3, 4, D)], [("heads", None, "head_dim", "embed")], _plain),
]


def _random(seed: int, *shapes: tuple[int, ...]) -> list[np.ndarray]:
    random = np.random.default_rng(seed)
    return [random.normal(size=shape).astype(np.float32) for shape in shapes]


@pytest.mark.parametrize(("equation", "x_shape", "shapes", "axes", "fuse"), CASES, ids=[case[0] for case in CASES])
def test_value_and_gradients_are_the_einsums_in_every_form(
    equation: str, x_shape: tuple, shapes: list, axes: list, fuse
) -> None:
    x, *kernels = _random(0, x_shape, *shapes)
    joined = np.stack(kernels, axis=1) if fuse is _stacked else kernels[0]
    terms, result = equation.split("->")
    x_term, kernel_term = terms.split(",")
    y = np.einsum(equation, x.astype(np.float64), joined)
    (dy,) = _random(1, y.shape)
    dx = np.einsum(f"{result},{kernel_term}->{x_term}", dy, joined)
    dkernel = np.einsum(f"{x_term},{result}->{kernel_term}", x, dy)
    dkernels = list(np.moveaxis(dkernel, 1, 0)) if fuse is _stacked else [dkernel]

    def run(x: jax.Array, kernels: Sequence[jax.Array], dy: jax.Array) -> tuple:
        value, pullback = jax.vjp(lambda x, kernels: contract(equation, x, kernels, axes, fuse), x, kernels)
        return value, *pullback(dy)

    for form in FORMS:
        with Execution(**form).active():
            found = jax.jit(lambda *arguments: run(*arguments))(x, kernels, dy)
        for got, want in zip(jax.tree.leaves(found), (y, dx, *dkernels), strict=True):
            np.testing.assert_allclose(got, want, rtol=0, atol=1e-5, err_msg=str(form))


def test_bfloat16_operands_are_summed_in_float32_and_rounded_once() -> None:
    ones, (kernel,) = jnp.ones((1, 1, 4096), jnp.bfloat16), _random(0, (4096, 4))
    kernel = jnp.asarray(kernel, jnp.bfloat16)
    exact = np.asarray(kernel, np.float64).sum(0).astype(np.float32)
    for form in FORMS:
        with Execution(**form).active():
            y = jax.jit(lambda x, w: contract("btd,df->btf", x, [w], [("embed", "mlp")]))(ones, kernel)
        assert y.dtype == jnp.bfloat16
        np.testing.assert_allclose(np.asarray(y[0, 0], np.float32), exact, rtol=2**-8)


def test_a_weight_gradient_lives_where_the_weight_is_stored(execution_on) -> None:
    x, kernel = _random(0, (B, T, D), (D, F))

    def loss(kernel: jax.Array, x: jax.Array) -> jax.Array:
        x = constrain(x, ("batch", "sequence", "embed"))
        return jnp.square(contract("btd,df->btf", x, [kernel], [("embed", "mlp")])).sum()

    plain = 2 * np.einsum("btd,btf->df", x, x @ kernel)
    for form in FORMS:
        execution = dataclasses.replace(execution_on(fsdp=2, tensor=2), **form)
        with execution.active():
            gradient = jax.jit(lambda *arguments: jax.grad(loss)(*arguments))(kernel, x)
        assert gradient.sharding.shard_shape((D, F)) == (D // 2, F // 2)
        np.testing.assert_allclose(gradient, plain, rtol=0, atol=1e-5 * np.abs(plain).max())


def test_gathered_weights_are_not_kept_for_the_backward_pass(execution_on) -> None:
    layers, width, wide = 6, 32, 64
    axes = [("embed", "mlp")], [("mlp", "embed")]
    stacked = tuple(jax.ShapeDtypeStruct((layers, *shape), jnp.float32) for shape in ((width, wide), (wide, width)))
    x = jax.ShapeDtypeStruct((8, 2, width), jnp.float32)

    def ours(layer, x, extras, index, slot):  # type: ignore[no-untyped-def]
        h = jnp.tanh(contract("btd,df->btf", x, [layer[0]], axes[0]))
        return contract("btf,fd->btd", h, [layer[1]], axes[1])

    def plain(layer, x, extras, index, slot):  # type: ignore[no-untyped-def]
        h = jnp.tanh(jnp.einsum("btd,df->btf", x, constrain(layer[0], *axes[0])))
        return jnp.einsum("btf,fd->btd", h, constrain(layer[1], *axes[1]))

    def temporary_bytes(body) -> int:  # type: ignore[no-untyped-def]
        def loss(stacked, x):  # type: ignore[no-untyped-def]
            x = constrain(x, ("batch", "sequence", "embed"))
            return jnp.square(scan_layers(body, x, stacked, None, num_layers=layers)).sum()

        specs = [jax.sharding.PartitionSpec(None, *entries) for entries in (("fsdp", None), (None, "fsdp"))]
        stored = tuple(jax.NamedSharding(execution.mesh, spec) for spec in specs)
        with execution.active():
            gradient = jax.jit(jax.grad(loss), in_shardings=(stored, None), out_shardings=stored)
            return gradient.lower(stacked, x).compile().memory_analysis().temp_size_in_bytes

    execution = execution_on(fsdp=8)
    gathered = 4 * layers * 2 * width * wide
    assert temporary_bytes(plain) > gathered
    assert temporary_bytes(ours) < gathered
