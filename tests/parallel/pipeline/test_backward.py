"""Gradients in pieces are the gradients, and each piece computes its own."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpar.parallel.pipeline.backward import CutVjp, SplitBackward, reads
from jaxpar.parallel.pipeline.layer_loop import layer_loop


def function(weights: Any, x: jax.Array, context: Any) -> tuple[jax.Array, jax.Array]:
    """Two products, one of them recomputed, dropout, and a second output."""
    hidden = jnp.tanh(x @ weights["first"] + weights["bias"][None])
    hidden = jax.checkpoint(lambda h: jnp.sin(h @ weights["second"]) * h)(hidden)
    kept = jax.random.bernoulli(context["key"], 0.8, hidden.shape)
    hidden = jnp.where(kept, hidden, 0.0) * context["factor"]
    return hidden, 0.1 * jnp.square(hidden).sum()


@pytest.fixture
def arguments() -> tuple[Any, jax.Array, Any]:
    keys = jax.random.split(jax.random.key(0), 4)
    weights = {
        "first": jax.random.normal(keys[0], (6, 6)),
        "second": jax.random.normal(keys[1], (6, 6)),
        "bias": jnp.full(6, 0.1),
    }
    return weights, jax.random.normal(keys[2], (3, 6)), {"key": keys[3], "factor": jnp.float32(1.5)}


def wanted(weights: Any, x: jax.Array, context: Any) -> tuple[Any, jax.Array]:
    return jax.grad(lambda w, x: sum(part.sum() for part in function(w, x, context)), (0, 1))(weights, x)


def assert_close(found: Any, expected: Any) -> None:
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5), found, expected)


def cut_in_two(weights: Any, x: jax.Array, context: Any) -> tuple[tuple[Any, jax.Array], list[Any]]:
    cut = CutVjp(function)
    (y, extra), residuals = cut.forward(weights, x, context)
    return cut.backward(weights, context, residuals, (jnp.ones_like(y), jnp.ones_like(extra))), residuals


def cut_in_three(weights: Any, x: jax.Array, context: Any) -> tuple[tuple[Any, jax.Array], list[Any]]:
    cut = CutVjp(function)
    split = SplitBackward(cut.backward)
    (y, extra), residuals = cut.forward(weights, x, context)
    dx, crossing = split.inputs(weights, context, residuals, (jnp.ones_like(y), jnp.ones_like(extra)))
    return (split.weights(weights, context, crossing), dx), crossing


@pytest.mark.parametrize("cut", [cut_in_two, cut_in_three])
def test_the_pieces_give_the_gradients(cut: Any, arguments: tuple) -> None:
    found, between = jax.jit(cut)(*arguments)
    assert_close(found, wanted(*arguments))
    # Weights and keys come again: they are not kept.
    assert all(part.shape in ((3, 6), ()) for part in between), [part.shape for part in between]


def test_each_piece_has_its_products() -> None:
    """Of the backward pass of x · w, the input's gradient is one product and the weight's another."""
    weights, x = jnp.ones((4, 5)), jnp.ones((3, 4))

    def products(piece: Any, *arguments: Any) -> int:
        return str(jax.make_jaxpr(piece)(*arguments)).count("dot_general")

    cut = CutVjp(lambda w, x, _: jnp.tanh(x @ w) @ w.T)
    y, residuals = cut.forward(weights, x, None)
    split = SplitBackward(cut.backward)
    crossing = split.inputs(weights, None, residuals, y)[1]
    assert products(lambda *given: cut.backward(weights, None, *given), residuals, y) == 4
    assert products(lambda *given: split.inputs(weights, None, *given), residuals, y) == 2
    assert products(lambda *given: split.weights(weights, None, *given), crossing) == 2


@pytest.mark.parametrize("split", [False, True])
def test_a_loop_over_layers_is_the_loop(split: bool) -> None:
    """Also of extras, which get no gradient: floats, keys."""
    weights = jax.random.normal(jax.random.key(1), (3, 4, 4))
    x, shift, key = jnp.ones((2, 4)), jnp.linspace(0.0, 1.0, 4), jax.random.key(2)

    def turn(extras: Any, carry: jax.Array, item: Any) -> jax.Array:
        shift, key = extras
        number, weight = item
        noise = jax.random.uniform(jax.random.fold_in(key, number), carry.shape)
        return jnp.tanh(carry @ weight + shift[None] * (1 + number)) + noise

    def plain(weights: jax.Array, x: jax.Array, shift: jax.Array) -> jax.Array:
        for number in range(3):
            x = turn((shift, key), x, (jnp.int32(number), weights[number]))
        return jnp.square(x).sum()

    def looped(weights: jax.Array, x: jax.Array, shift: jax.Array) -> jax.Array:
        return jnp.square(layer_loop(turn, x, jnp.arange(3), weights, (shift, key), split=split, unroll=False)).sum()

    found, expected = (jax.value_and_grad(f, (0, 1))(weights, x, shift) for f in (looped, plain))
    assert_close(found, expected)
    assert_close(looped(weights, x, shift), plain(weights, x, shift))
    assert not jax.grad(looped, 2)(weights, x, shift).any()


@pytest.mark.parametrize("split", [False, True])
def test_what_depends_on_weights_alone_is_not_kept_for_the_backward_pass(split: bool) -> None:
    """A layer's weights rounded, which a loop's own derivative would keep for every layer."""
    weights = jax.random.normal(jax.random.key(1), (3, 4, 5, 4))

    def turn(_: None, carry: jax.Array, item: Any) -> jax.Array:
        return carry + jnp.sin(carry @ item[1].astype(jnp.bfloat16).astype(jnp.float32).reshape(4, 20)).sum()

    def layers(weights: jax.Array, x: jax.Array, _: None) -> jax.Array:
        return layer_loop(turn, x, jnp.arange(3), weights, None, split=split, unroll=False)

    def plain(weights: jax.Array, x: jax.Array, _: None) -> jax.Array:
        return jax.lax.scan(lambda carry, item: (turn(None, carry, item), None), x, (jnp.arange(3), weights))[0]

    sizes = []
    for function in (layers, plain):
        cut = CutVjp(function)
        sizes.append({array.shape for array in jax.eval_shape(cut.forward, weights, jnp.ones((2, 4)), None)[1]})
    assert sizes == [{(3, 2, 4), (3, 2, 20)}, {(3, 2, 4), (3, 2, 20), (3, 4, 20)}]


def test_what_a_function_reads() -> None:
    tree = {"used": jnp.ones(2), "returned": jnp.ones(2), "ignored": jnp.ones(2)}
    found = reads(lambda tree, x: (tree["used"] * x, tree["returned"]), tree, jnp.ones(2))
    assert dict(zip(sorted(tree), found, strict=True)) == {"ignored": False, "returned": True, "used": True}
