"""Attention over devices that share a sequence is the formula's, in values and gradients, by every method."""

import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpar.parallel.attention import attention
from jaxpar.parallel.constrain import Execution
from jaxpar.parallel.mesh import AXES, BATCH_AXES, make_mesh
from jaxpar.parallel.sequence_order import column_of, logical_places, reordered, zigzag_chunks

METHODS = ("ring", "all_gather", "ulysses")
B, K, G, N = 2, 8, 2, 4


def execution_of(method, context=8, tensor=1):
    mesh = make_mesh(dict.fromkeys(AXES, 1) | {"context": context, "tensor": tensor}, jax.devices()[: context * tensor])
    heads = ("tensor", "context") if method == "ulysses" else ("tensor",)
    table = {
        "batch": BATCH_AXES, "sequence": ("context",), "heads": ("tensor",), "attention_heads": heads, "head_dim": (),
    }  # fmt: skip
    return Execution(mesh=mesh, activations=table, context_method=method)


def operands_of(num_tokens, seed=0, dtype=jnp.float32):
    random = np.random.default_rng(seed)
    q, k, v, dout = ((B, num_tokens, K, *rest) for rest in ((G, N), (N,), (N,), (G, N)))
    return tuple(jnp.asarray(random.standard_normal(shape), dtype) for shape in (q, k, v, dout))


def segments_of(num_tokens, seed=1):
    """Packed documents of random lengths, and padding."""
    starts = np.random.default_rng(seed).random((B, num_tokens)) < 5 / num_tokens
    ids = np.cumsum(starts, axis=1) + 1
    ids[:, -num_tokens // 8 :] = 0
    return ids.astype(np.int32)


def results(execution, operands, segments, *, implementation="reference", block=2, scale=0.7, **form):
    """(out, dq, dk, dv) in logical order."""

    def both(q, k, v, dout, ids):
        def run(q, k, v):
            return attention(
                q, k, v, segment_ids_BT=ids, scale=scale, implementation=implementation, block=block,
                **{"window": None, "softcap": None} | form,
            )  # fmt: skip

        out, pullback = jax.vjp(run, q, k, v)
        return out, *pullback(dout)

    with execution.active():
        order = logical_places(operands[0].shape[1])
        columns = [x[:, order] for x in operands]
        ids = None if segments is None else jnp.asarray(segments)[:, order]
        found = jax.jit(both)(*columns, ids)
    return [np.asarray(x, np.float32)[:, np.argsort(order)] for x in found]


def assert_agree(actual, expected, tolerance=1e-5):
    for name, a, e in zip(("out", "dq", "dk", "dv"), actual, expected, strict=True):
        np.testing.assert_allclose(a, e, rtol=0, atol=tolerance * max(1.0, np.abs(e).max()), err_msg=name)


FORMS = {
    "all": {},
    "softcap": {"softcap": 0.5},
    "window of itself": {"window": 1},
    "window within a chunk": {"window": 2},
    "window over devices": {"window": 19, "softcap": 1.5},
}


@pytest.mark.parametrize("has_segments", [False, True])
@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
@pytest.mark.parametrize("method", METHODS)
def test_values_and_gradients_are_the_formulas(method, form, has_segments):
    """Chunks of 3 tokens, which tiles of 2 do not fill."""
    operands, segments = operands_of(48), segments_of(48) if has_segments else None
    expected = results(Execution(), operands, segments, **form)
    assert_agree(results(execution_of(method), operands, segments, **form), expected)


@pytest.mark.parametrize("implementation", ["reference", "blockwise"])
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(("context", "tensor"), [(2, 1), (3, 1), (4, 2), (2, 4)])
def test_any_number_of_devices(context, tensor, method, implementation):
    if method == "ulysses" and K % (context * tensor):
        pytest.skip("heads do not divide")
    operands, segments = operands_of(48), segments_of(48)
    expected = results(Execution(), operands, segments)
    found = results(execution_of(method, context, tensor), operands, segments, implementation=implementation, block=5)
    assert_agree(found, expected)


@pytest.mark.parametrize("method", METHODS)
def test_bfloat16_is_rounded_float32(method):
    operands, segments = operands_of(32, dtype=jnp.bfloat16), segments_of(32)
    exact = results(Execution(), tuple(x.astype(jnp.float32) for x in operands), segments)
    assert_agree(results(execution_of(method, 4), operands, segments), exact, tolerance=1.5e-2)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("scale", [0.7, 1e4])
def test_blocks_that_are_masked_as_a_whole_make_no_nan(method, scale):
    """Each chunk is a document of its own, or padding: of no block of another device is any key seen."""
    operands = operands_of(32)
    segments = np.repeat(np.asarray([[1, 2, 3, 4, 5, 6, 0, 0], [0] * 8], np.int32), 4, axis=1)
    expected = results(Execution(), operands, segments, scale=scale)
    found = results(execution_of(method, 4), operands, segments, scale=scale)
    assert all(np.isfinite(x).all() for x in found)
    assert_agree(found, expected, tolerance=1e-5 * max(1.0, scale))


@pytest.mark.parametrize("implementation", ["reference", "blockwise"])
@pytest.mark.parametrize("method", METHODS)
def test_a_query_depends_on_what_it_sees_and_on_nothing_else(method, implementation):
    """Documents end within chunks, at their borders and at devices' borders."""
    num_tokens, window = 16, 7
    segments = np.asarray([[1] * 4 + [2] * 7 + [3] * 5, [1] * 8 + [2] * 6 + [0] * 2], np.int32)
    q, k, v, _ = operands_of(num_tokens)
    execution = execution_of(method, 2)

    def run(v, order):
        out = attention(
            q[:, order], k[:, order], v[:, order], segment_ids_BT=jnp.asarray(segments)[:, order], window=window,
            softcap=None, scale=1.0, implementation=implementation, block=3,
        )  # fmt: skip
        return out[:, np.argsort(order), 0, 0, 0]

    with execution.active():
        jacobian = jax.jit(jax.jacrev(partial(run, order=logical_places(num_tokens))))(v)  # [B, T, B, S, K, N]
    depends = np.abs(np.asarray(jacobian)).max(axis=(-1, -2)) > 0
    t, s = np.arange(num_tokens)[:, None], np.arange(num_tokens)[None, :]
    expected = np.zeros_like(depends)
    for b in range(B):
        expected[b, :, b] = (t >= s) & (t - s < window) & (segments[b][:, None] == segments[b][None, :])
    np.testing.assert_array_equal(depends, expected)


def test_two_chunks_of_each_device_make_causal_work_equal():
    chunks = zigzag_chunks(5).reshape(5, 2)
    assert sorted(chunks.reshape(-1)) == list(range(10))
    assert {int((pair + 1).sum()) for pair in chunks} == {11}


@pytest.mark.parametrize("method", METHODS)
def test_labels_are_shifted_before_the_sequence_is_cut(method):
    """At the end of each device's part too, the label is the next token."""
    tokens = np.arange(33, dtype=np.int32)[None].repeat(B, axis=0)
    batch = {"tokens": jnp.asarray(tokens[:, :-1]), "targets": jnp.asarray(tokens[:, 1:])}
    with execution_of(method).active():
        found = jax.jit(lambda batch: reordered(batch))(batch)  # not jit(reordered): jit keeps what it traced
        places = logical_places(32)
        columns = [int(column_of(place, 32)) for place in range(32)]
    np.testing.assert_array_equal(found["tokens"], np.broadcast_to(places, (B, 32)))
    np.testing.assert_array_equal(found["targets"], found["tokens"] + 1)
    assert (places[columns] == np.arange(32)).all()
    assert (places != np.arange(32)).any() == (method != "ulysses")


def arrays_in(text):
    """Shapes of all arrays of a compiled program."""
    found = re.findall(r"\b(?:f32|s32|pred|bf16|u32)\[([\d,]+)\]", text)
    return {tuple(map(int, shape.split(","))) for shape in found}


@pytest.mark.parametrize("method", METHODS)
def test_no_array_has_two_dims_of_the_sequence(method):
    """Of 512 tokens on 4 devices each has 128; beyond keys and values, arrays grow with that."""

    def shapes(execution, implementation):
        def loss(q, k, v):
            form = {"segment_ids_BT": ids, "window": None, "softcap": None, "scale": 1.0}
            return attention(q, k, v, implementation=implementation, block=32, **form).sum()

        q, k, v, _ = operands_of(512)
        ids = jnp.asarray(segments_of(512))
        with execution.active():
            text = jax.jit(jax.grad(loss, (0, 1, 2))).lower(q, k, v).compile().as_text()
        return arrays_in(text)

    def quadratic(found):
        return [shape for shape in found if sum(size >= 128 for size in shape) > 1]

    assert quadratic(shapes(Execution(), "reference"))
    assert not quadratic(shapes(execution_of(method, 4), "blockwise"))
