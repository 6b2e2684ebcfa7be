"""The implementations of attention agree with the formula and with each other, in values and in gradients."""

import math
import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractDevice, AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxpar.parallel.attention import BLOCKWISE_MIN_TOKENS, attention, choose
from jaxpar.parallel.attention.pallas_gpu import pallas_gpu_attention
from jaxpar.parallel.attention.splash import splash_attention

B, N = 2, 4
SEGMENTS = np.asarray([[1] * 9 + [2] * 17 + [3] * 4 + [0] * 7, [5] * 36 + [0]], np.int32)
T = SEGMENTS.shape[1]


def _operands(K=2, G=2, num_tokens=T, dtype=jnp.float32, seed=0, batch=B):
    random = np.random.default_rng(seed)
    shapes = {"q": (batch, num_tokens, K, G, N), "k": (batch, num_tokens, K, N), "v": (batch, num_tokens, K, N)}
    return tuple(jnp.asarray(random.standard_normal(shape), dtype) for shape in (*shapes.values(), shapes["q"]))


def _run(implementation, *, segments=None, window=None, softcap=None, scale=0.7, block=8):
    ids = None if segments is None else jnp.asarray(segments)
    return partial(
        attention,
        segment_ids_BT=ids,
        window=window,
        softcap=softcap,
        scale=scale,
        implementation=implementation,
        block=block,
    )


def _value_and_gradients(run, operands):
    """(out, dq, dk, dv) for a random cotangent of out."""

    @jax.jit
    def both(q, k, v, dout):
        out, pullback = jax.vjp(run, q, k, v)
        return out, *pullback(dout.astype(out.dtype))

    return both(*operands)


def _assert_agree(actual, expected, tolerance=2e-6):
    for name, a, e in zip(("out", "dq", "dk", "dv"), actual, expected, strict=True):
        a, e = np.asarray(a, np.float32), np.asarray(e, np.float32)
        np.testing.assert_allclose(a, e, rtol=0, atol=tolerance * max(1.0, np.abs(e).max()), err_msg=name)


def _by_loops(q, k, v, segments, window, softcap, scale):
    """The definition, one query at a time, in float64."""
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    out = np.zeros_like(q)
    for b, t, h, g in np.ndindex(q.shape[:4]):
        keys = [
            s
            for s in range(t + 1)
            if (window is None or s > t - window) and (segments is None or segments[b, s] == segments[b, t])
        ]
        scores = scale * k[b, keys, h] @ q[b, t, h, g]
        if softcap is not None:
            scores = softcap * np.tanh(scores / softcap)
        weights = np.exp(scores - scores.max())
        out[b, t, h, g] = weights @ v[b, keys, h] / weights.sum()
    return out


FORMS = {
    "multi-head": {"K": 3, "G": 1},
    "multi-query": {"K": 1, "G": 3, "softcap": 0.5},
    "grouped": {"segments": SEGMENTS},
    "window of itself": {"window": 1, "segments": SEGMENTS},
    "window within a block": {"window": 5},
    "window over blocks": {"window": 19, "softcap": 1.5, "segments": SEGMENTS},
}


def _form(name):
    form = dict(FORMS[name])
    return {key: form.pop(key) for key in ("K", "G") if key in form}, form


@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize("implementation", ["reference", "blockwise"])
def test_values_are_the_definition(implementation, name):
    heads, form = _form(name)
    q, k, v, _ = _operands(**heads)
    out = jax.jit(_run(implementation, **form))(q, k, v)
    full = {"segments": None, "window": None, "softcap": None} | form
    np.testing.assert_allclose(out, _by_loops(q, k, v, scale=0.7, **full), atol=2e-6)


@pytest.mark.parametrize("name", FORMS)
def test_blockwise_gradients_are_the_references(name):
    heads, form = _form(name)
    operands = _operands(**heads)
    expected = _value_and_gradients(_run("reference", **form), operands)
    _assert_agree(_value_and_gradients(_run("blockwise", **form), operands), expected)


@pytest.mark.parametrize(("num_tokens", "block"), [(1, 8), (7, 512), (16, 8), (17, 8), (19, 1)])
def test_any_length_and_any_block(num_tokens, block):
    operands = _operands(num_tokens=num_tokens)
    form = {"segments": SEGMENTS[:, :num_tokens]}
    expected = _value_and_gradients(_run("reference", **form), operands)
    _assert_agree(_value_and_gradients(_run("blockwise", block=block, **form), operands), expected)


@pytest.mark.parametrize("implementation", ["reference", "blockwise"])
def test_a_query_depends_on_what_it_sees_and_on_nothing_else(implementation):
    q, k, v, _ = _operands(K=1, G=1)
    run = _run(implementation, segments=SEGMENTS, window=9)
    jacobian = jax.jit(jax.jacrev(lambda v: run(q, k, v)[:, :, 0, 0, 0]))(v)  # [B, T, B, S, 1, N]
    depends = np.abs(np.asarray(jacobian)).max(axis=(-1, -2)) > 0
    t, s = np.arange(T)[:, None], np.arange(T)[None, :]
    expected = np.zeros_like(depends)
    for b in range(B):
        expected[b, :, b] = (t >= s) & (t - s < 9) & (SEGMENTS[b][:, None] == SEGMENTS[b][None, :])
    np.testing.assert_array_equal(depends, expected)


@pytest.mark.parametrize("implementation", ["reference", "blockwise"])
def test_padding_and_huge_scores_stay_finite(implementation):
    q, k, v, dout = _operands()
    segments = np.zeros_like(SEGMENTS)
    segments[0] = SEGMENTS[0]
    results = _value_and_gradients(_run(implementation, segments=segments), (1e4 * q, 1e4 * k, v, dout))
    assert all(np.isfinite(result).all() for result in results)


@pytest.mark.parametrize("implementation", ["reference", "blockwise"])
def test_bfloat16_is_rounded_float32(implementation):
    form = {"segments": SEGMENTS, "softcap": 2.0}
    operands = _operands(dtype=jnp.bfloat16)
    exact = _value_and_gradients(_run("reference", **form), tuple(x.astype(jnp.float32) for x in operands))
    rounded = _value_and_gradients(_run(implementation, **form), operands)
    assert {x.dtype for x in rounded} == {jnp.dtype(jnp.bfloat16)}
    _assert_agree(rounded, exact, tolerance=1e-2)


def test_every_blockwise_product_is_summed_in_float32():
    operands = _operands(dtype=jnp.bfloat16)
    program = str(jax.make_jaxpr(partial(_value_and_gradients, _run("blockwise")))(operands))
    assert program.count("dot_general[") == 7
    assert program.count("preferred_element_type=float32") == 7


@pytest.mark.parametrize(("window", "num_tiles"), [(None, 36), (64, 36), (1, 8), (9, 15), (10, 21)])
def test_tiles_that_nothing_sees_are_skipped(window, num_tiles):
    operands = _operands(num_tokens=64)
    program = str(jax.make_jaxpr(partial(_value_and_gradients, _run("blockwise", window=window)))(operands))
    assert re.findall(r"bool\[\] = lt \w+ ([1-9]\d*):i32", program) == [str(num_tiles)] * 2  # forward, backward


def test_blockwise_memory_is_linear_in_the_sequence():
    def temporary_bytes(implementation, num_tokens):
        operands = _operands(K=1, G=1, num_tokens=num_tokens, batch=1)
        run = _run(implementation, block=32)
        grad = jax.grad(lambda q, k, v: run(q, k, v).sum(), argnums=(0, 1, 2))
        return jax.jit(grad).lower(*operands[:3]).compile().memory_analysis().temp_size_in_bytes

    assert temporary_bytes("blockwise", 1024) < 2.5 * temporary_bytes("blockwise", 512)
    assert temporary_bytes("reference", 1024) > 3.5 * temporary_bytes("reference", 512)


def _mesh(shape, names):
    return jax.make_mesh(shape, names, axis_types=(AxisType.Auto,) * len(names))


@pytest.mark.parametrize("implementation", ["reference", "blockwise"])
def test_batch_and_heads_split_over_devices_without_communication(implementation):
    """Inside scanned, rematerialised layers, as models use it."""
    operands = _operands(batch=4, num_tokens=20)
    segments = jnp.asarray(np.repeat(SEGMENTS[:, :20], 2, axis=0))
    form = {"window": 13, "softcap": 2.0, "scale": 0.7, "implementation": implementation, "block": 8}

    def layers(q, k, v, segment_ids):
        @jax.checkpoint
        def layer(q, _):
            return q + attention(q, k, v, segment_ids_BT=segment_ids, **form), None

        return jax.lax.scan(layer, q, None, length=2)[0]

    def both(q, k, v, dout, segment_ids):
        out, pullback = jax.vjp(lambda q, k, v: layers(q, k, v, segment_ids), q, k, v)
        return out, *pullback(dout)

    mesh = _mesh((4, 2), ("data", "tensor"))
    split = NamedSharding(mesh, P("data", None, "tensor"))
    shardings = (split,) * 4 + (NamedSharding(mesh, P("data")),)
    compiled = jax.jit(both, in_shardings=shardings, out_shardings=split).lower(*operands, segments).compile()
    communication = r"all-reduce|all-gather|all-to-all|collective-permute|reduce-scatter"
    assert not re.findall(communication, compiled.as_text())
    placed = [jax.device_put(x, sharding) for x, sharding in zip((*operands, segments), shardings, strict=True)]
    _assert_agree(compiled(*placed), jax.jit(both)(*operands, segments))


def test_blockwise_runs_where_a_mesh_axis_is_manual():
    mesh = _mesh((2,), ("pipe",))
    operands = _operands()
    run = _run("blockwise", window=11)

    def both(q, k, v, dout):
        out, pullback = jax.vjp(run, q, k, v)
        return out, *pullback(dout)

    split = jax.jit(jax.shard_map(both, mesh=mesh, in_specs=P("pipe"), out_specs=P("pipe")))
    _assert_agree(split(*operands), _value_and_gradients(run, operands))


@pytest.mark.parametrize(
    ("policy", "num_loops"),
    [
        (jax.checkpoint_policies.nothing_saveable, 3),
        (jax.checkpoint_policies.save_only_these_names("attention_output", "attention_logsumexp"), 2),
    ],
)
def test_remat_policies_can_keep_what_the_backward_pass_needs(policy, num_loops):
    run = jax.checkpoint(_run("blockwise"), policy=policy)
    program = str(jax.make_jaxpr(jax.grad(lambda q, k, v: run(q, k, v).sum()))(*_operands()[:3]))
    assert program.count("while[") == num_loops


def test_cudnn_is_asked_for_what_the_reference_computes(monkeypatch):
    """The call that goes to cuDNN, answered by the XLA implementation of the same interface."""
    calls = []
    public = jax.nn.dot_product_attention

    def answered_by_xla(*args, **kwargs):
        calls.append(kwargs["implementation"])
        return public(*args, **(kwargs | {"implementation": "xla"}))

    monkeypatch.setattr(jax.nn, "dot_product_attention", answered_by_xla)
    operands = _operands()
    for window in (None, 6):
        expected = _value_and_gradients(_run("reference", window=window), operands)
        _assert_agree(_value_and_gradients(_run("cudnn", window=window), operands), expected)
    assert set(calls) == {"cudnn"}


@pytest.mark.parametrize("name", ["grouped", "window over blocks"])
def test_splash_agrees_with_the_reference_when_interpreted(name):
    """On two devices, each with its part of the batch."""
    _, form = _form(name)
    operands = _operands()
    expected = _value_and_gradients(_run("reference", **form), operands)
    mesh = _mesh((2,), ("data",))
    kernel = partial(
        splash_attention,
        window=form.get("window"),
        softcap=form.get("softcap"),
        scale=0.7,
        block=8,
        shard=lambda f: jax.shard_map(f, mesh=mesh, in_specs=P("data"), out_specs=P("data"), check_vma=False),
        interpret=True,
    )
    actual = _value_and_gradients(lambda q, k, v: kernel(q, k, v, jnp.asarray(form["segments"])), operands)
    _assert_agree(actual, expected)


def test_splash_lowers_for_a_tpu():
    q, k, v, _ = _operands(num_tokens=256, dtype=jnp.bfloat16)
    run = _run("splash", segments=np.ones((B, 256), np.int32), window=100, softcap=50.0, block=256)
    grad = jax.jit(jax.grad(lambda q, k, v: run(q, k, v).astype(jnp.float32).sum(), argnums=(0, 1, 2)))
    text = grad.trace(q, k, v).lower(lowering_platforms=("tpu",)).as_text()
    assert text.count("tpu_custom_call") == 3  # forward, dq, dk and dv


@pytest.mark.parametrize(("segments", "G", "block"), [(SEGMENTS, 2, 16), (None, 1, 16), (SEGMENTS, 1, 40)])
def test_pallas_agrees_with_the_reference_when_interpreted(segments, G, block):
    """On two devices, each with its part of the batch; tiles of 16, and of 32 in both passes."""
    operands = _operands(G=G)
    expected = _value_and_gradients(_run("reference", segments=segments), operands)
    mesh = _mesh((2,), ("data",))
    kernel = partial(
        pallas_gpu_attention,
        scale=0.7,
        block=block,
        shard=lambda f: jax.shard_map(f, mesh=mesh, in_specs=P("data"), out_specs=P("data"), check_vma=False),
        interpret=True,
    )
    ids = None if segments is None else jnp.asarray(segments)
    _assert_agree(_value_and_gradients(lambda q, k, v: kernel(q, k, v, ids), operands), expected)


def test_pallas_with_a_smaller_tile_backward_agrees_with_the_reference_when_interpreted():
    """The default tiles, 64 forward and 32 backward, over a document boundary in every one of them."""
    operands = _operands(K=1, G=1, num_tokens=100, batch=1)
    segments = np.arange(100)[None] // 27
    expected = _value_and_gradients(_run("reference", segments=segments), operands)
    kernel = partial(pallas_gpu_attention, scale=0.7, block=512, interpret=True)
    actual = _value_and_gradients(lambda q, k, v: kernel(q, k, v, jnp.asarray(segments)), operands)
    _assert_agree(actual, expected)


def test_pallas_in_bfloat16_is_rounded_float32():
    operands = _operands(dtype=jnp.bfloat16)
    exact = tuple(x.astype(jnp.float32) for x in operands)
    expected = _value_and_gradients(_run("reference", segments=SEGMENTS), exact)
    kernel = partial(pallas_gpu_attention, scale=0.7, block=16, interpret=True)
    rounded = _value_and_gradients(lambda q, k, v: kernel(q, k, v, jnp.asarray(SEGMENTS)), operands)
    assert {x.dtype for x in rounded} == {jnp.dtype(jnp.bfloat16)}
    _assert_agree(rounded, expected, tolerance=1.5e-2)


@pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated:DeprecationWarning")
def test_pallas_lowers_for_a_gpu():
    q, k, v, _ = _operands(num_tokens=100, dtype=jnp.bfloat16)
    run = _run("pallas", segments=np.ones((B, 100), np.int32), block=512)
    grad = jax.jit(jax.grad(lambda q, k, v: run(q, k, v).astype(jnp.float32).sum(), argnums=(0, 1, 2)))
    device = AbstractDevice(device_kind="NVIDIA H100 80GB HBM3", num_cores=None, platform="gpu")
    with jax.sharding.use_abstract_mesh(AbstractMesh((), (), abstract_device=device)):
        text = grad.trace(q, k, v).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("__gpu$xla.gpu.triton") == 3  # forward, row sums of the gradient, dq with dk and dv
    assert f"tensor<{B}x128x4x{N}xbf16>" in text  # padded to whole tiles of 64


FORM = {
    "platform": "gpu",
    "sequence_length": 512,
    "head_dim": 128,
    "dtype": jnp.bfloat16,
    "has_segments": False,
    "window": None,
    "softcap": None,
}


@pytest.mark.parametrize(
    ("change", "name", "reason"),
    [
        ({"platform": "cpu", "sequence_length": BLOCKWISE_MIN_TOKENS}, "blockwise", "faster than the reference"),
        ({"platform": "cpu", "sequence_length": BLOCKWISE_MIN_TOKENS - 1}, "reference", "fastest on a CPU below"),
        ({"platform": "tpu", "has_segments": True, "softcap": 50.0}, "splash", "TPU's flash attention"),
        ({"window": 64}, "cudnn", "GPU's flash attention"),
        (
            {"has_segments": True},
            "pallas",
            "flash attention kernel for GPUs; cuDNN cannot run: it cannot keep attention",
        ),
        ({"sequence_length": 511}, "pallas", "cuDNN cannot run: it needs an even data.sequence_length, not 511"),
        (
            {"has_segments": True, "window": 64},
            "blockwise",
            "Pallas cannot run: it has no window, and the model's is 64",
        ),
        ({"softcap": 50.0}, "blockwise", "Pallas cannot run: it has no soft cap on scores, and the model's is 50.0"),
        ({"softcap": 50.0}, "blockwise", "cuDNN cannot run: it has no soft cap on scores, and the model's is 50.0"),
        ({"dtype": jnp.float32}, "blockwise", "Pallas cannot run: it needs precision.compute of 16 bits, not float32"),
        ({"head_dim": 256}, "blockwise", "multiple of 8 and at most 128, not 256"),
        ({"head_dim": 256}, "blockwise", "multiple of 16 and at most 128, not 256"),
    ],
)
def test_auto_takes_the_fastest_that_can_run_and_says_why(change, name, reason):
    chosen, said = choose("auto", **(FORM | change))
    assert chosen == name
    assert reason in said


@pytest.mark.parametrize(
    ("forced", "change"),
    [
        ("reference", {}),
        ("blockwise", {"platform": "tpu"}),
        ("cudnn", {"head_dim": 256}),
        ("pallas", {"has_segments": True, "head_dim": 80, "dtype": jnp.float16}),
        ("splash", {"platform": "tpu"}),
    ],
)
def test_a_forced_implementation_that_can_run_is_taken(forced, change):
    assert choose(forced, **(FORM | change)) == (forced, "set by kernels.attention")


@pytest.mark.parametrize(
    ("forced", "change", "message"),
    [
        (
            "cudnn",
            {"platform": "cpu"},
            'kernels.attention="cudnn" cannot run: it needs an NVIDIA GPU, the backend is cpu',
        ),
        ("cudnn", {"has_segments": True}, 'data.document_boundaries="ignore"'),
        ("cudnn", {"softcap": 30.0}, "no soft cap"),
        ("cudnn", {"dtype": jnp.float32}, "16 bits, not float32"),
        ("cudnn", {"head_dim": 100}, "multiple of 8 and at most 256, not 100"),
        ("cudnn", {"sequence_length": 511}, "even data.sequence_length, not 511"),
        (
            "splash",
            {},
            'kernels.attention="splash" cannot run: it needs a TPU, the backend is gpu; take "auto" or "blockwise"',
        ),
        (
            "pallas",
            {"platform": "tpu"},
            'kernels.attention="pallas" cannot run: it needs a GPU, the backend is tpu; take "auto" or "blockwise"',
        ),
        ("pallas", {"window": 64}, "no window, and the model's is 64 tokens"),
        ("pallas", {"softcap": 30.0}, "no soft cap on scores, and the model's is 30.0"),
        ("pallas", {"dtype": jnp.float32}, "16 bits, not float32"),
        ("pallas", {"head_dim": 72}, "multiple of 16 and at most 128, not 72"),
        ("flash", {}, 'kernels.attention="flash" is unknown; legal values: "auto", .*; did you mean "splash"'),
    ],
)
def test_a_forced_implementation_that_cannot_run_is_an_error(forced, change, message):
    with pytest.raises(ValueError, match=message):
        choose(forced, **(FORM | change))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"window": 0}, "attention's window must be positive, not 0; None is without"),
        ({"softcap": -1.0}, "attention's softcap must be positive, not -1.0"),
        ({"block": 0}, "attention's block must be positive, not 0$"),
        ({"implementation": "auto"}, 'attention implementation "auto" is unknown; legal values: reference, blockwise'),
        ({"implementation": "cudnn", "softcap": 5.0}, '"cudnn" takes neither segment_ids_BT nor softcap'),
        ({"implementation": "cudnn", "segments": SEGMENTS}, '"cudnn" takes neither segment_ids_BT nor softcap'),
        ({"implementation": "pallas", "window": 5}, '"pallas" takes neither window nor softcap'),
        ({"implementation": "pallas", "softcap": 5.0}, '"pallas" takes neither window nor softcap'),
    ],
)
def test_a_call_that_cannot_run_is_an_error(change, message):
    q, k, v, _ = _operands()
    with pytest.raises(ValueError, match=message):
        _run(**({"implementation": "blockwise"} | change))(q, k, v)


def test_splash_pads_to_whole_lanes():
    """A length that 128 does not divide is padded, and its tile divides what it is padded to."""
    q, k, v, _ = _operands(num_tokens=300)
    run = partial(splash_attention, window=None, softcap=None, scale=1.0, block=512)
    lowered = jax.jit(lambda q, k, v: run(q, k, v, None)).trace(q, k, v).lower(lowering_platforms=("tpu",))
    assert f"tensor<{B}x4x{math.ceil(300 / 128) * 128}x{N}xf32>" in lowered.as_text()
