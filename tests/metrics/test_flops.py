"""FLOPs by formula: against the published closed form, and against the products of a traced hand-written model."""

import functools

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractMesh, AxisType
from jax.sharding import PartitionSpec as P

from jaxpar.metrics import CONVENTION, count_matmul_flops, transformer_flops_per_token

GPT2_SMALL = {
    "embed_dim": 768,
    "num_layers": 12,
    "num_heads": 12,
    "num_kv_heads": 12,
    "head_dim": 64,
    "mlp_dim": 3072,
    "gated": False,
    "vocab_size": 50257,
    "sequence_length": 1024,
}
TINY_LLAMA = {
    "embed_dim": 8,
    "num_layers": 3,
    "num_heads": 4,
    "num_kv_heads": 2,
    "head_dim": 6,
    "mlp_dim": 20,
    "gated": True,
    "vocab_size": 32,
    "sequence_length": 5,
}


def _weights(shape):
    """Shapes of stacked weights: fused query, key and value; output; gate, up and down."""
    D, L, F = shape["embed_dim"], shape["num_layers"], shape["mlp_dim"]
    N, K, H = shape["num_heads"], shape["num_kv_heads"], shape["head_dim"]
    sizes = {
        "embed": (shape["vocab_size"], D),
        "head": (D, shape["vocab_size"]),
        "qkv": (L, D, (N + 2 * K) * H),
        "out": (L, N * H, D),
        "up": (L, D, (1 + shape["gated"]) * F),
        "down": (L, F, D),
    }
    return {name: jax.ShapeDtypeStruct(size, jnp.float32) for name, size in sizes.items()}


def _layer(shape, x_TD, weights):
    T, N, K, H = shape["sequence_length"], shape["num_heads"], shape["num_kv_heads"], shape["head_dim"]
    q, k, v = jnp.split(x_TD @ weights["qkv"], [N * H, (N + K) * H], axis=1)
    scores = jnp.einsum("tkgh,skh->kgts", q.reshape(T, K, N // K, H), k.reshape(T, K, H))
    attended = jnp.einsum("kgts,skh->tkgh", jax.nn.softmax(scores), v.reshape(T, K, H))
    x_TD = x_TD + attended.reshape(T, N * H) @ weights["out"]
    up = x_TD @ weights["up"]
    if shape["gated"]:
        gate, up = jnp.split(up, 2, axis=1)
        up = jax.nn.silu(gate) * up
    return x_TD + up @ weights["down"]


def _loss(shape, weights, tokens, remat=False):
    layer = functools.partial(_layer, shape)
    layer = jax.checkpoint(layer) if remat else layer
    stacked = {name: weights[name] for name in ("qkv", "out", "up", "down")}
    x_TD, _ = jax.lax.scan(lambda x, w: (layer(x, w), None), weights["embed"][tokens], stacked)
    return jnp.mean(jax.nn.logsumexp(x_TD @ weights["head"], axis=1))


@pytest.fixture(scope="module")
def tokens():
    return jax.ShapeDtypeStruct((TINY_LLAMA["sequence_length"],), jnp.int32)


@pytest.mark.parametrize("batch", [1, 16])
def test_gpt_agrees_with_the_closed_form_of_narayanan(batch):
    h, L, s, v = 768, 12, 1024, 50257
    closed_form = 72 * batch * L * s * h**2 * (1 + s / (6 * h) + v / (12 * h * L))
    assert batch * s * transformer_flops_per_token(**GPT2_SMALL).training == pytest.approx(closed_form, rel=1e-12)


@pytest.mark.parametrize("gated", [True, False])
def test_formula_equals_the_products_of_a_traced_model(tokens, gated):
    shape = TINY_LLAMA | {"gated": gated}
    per_token = transformer_flops_per_token(**shape)
    loss = functools.partial(_loss, shape)
    forward = count_matmul_flops(jax.make_jaxpr(loss)(_weights(shape), tokens))
    training = count_matmul_flops(jax.make_jaxpr(jax.value_and_grad(loss))(_weights(shape), tokens))
    assert forward == per_token.forward * shape["sequence_length"]
    assert training == per_token.training * shape["sequence_length"]


def test_recomputation_is_executed_but_not_in_the_formula(tokens):
    per_token = transformer_flops_per_token(**TINY_LLAMA)
    gradients = jax.value_and_grad(functools.partial(_loss, TINY_LLAMA, remat=True))
    executed = count_matmul_flops(jax.make_jaxpr(gradients)(_weights(TINY_LLAMA), tokens))
    # Everything in the layers is done again but the last product of each, whose value no gradient needs.
    not_repeated = 2 * TINY_LLAMA["num_layers"] * TINY_LLAMA["embed_dim"] * TINY_LLAMA["mlp_dim"]
    layers_again = per_token.forward - per_token.head - not_repeated
    assert executed == (per_token.training + layers_again) * TINY_LLAMA["sequence_length"]


def test_gated_feed_forward_has_three_matrices_and_gqa_smaller_keys_and_values():
    plain = transformer_flops_per_token(**GPT2_SMALL)
    assert plain.feed_forward == 12 * 2 * 2 * 768 * 3072
    assert transformer_flops_per_token(**GPT2_SMALL | {"gated": True}).feed_forward == 12 * 3 * 2 * 768 * 3072
    grouped = transformer_flops_per_token(**GPT2_SMALL | {"num_kv_heads": 3})
    assert plain.attention_projections - grouped.attention_projections == 12 * 2 * 2 * 768 * (12 - 3) * 64
    assert grouped.attention_scores == plain.attention_scores == 12 * 4 * 1024 * 768


def test_window_counts_at_its_width_and_never_above_the_sequence():
    windows = [256, None] * 5 + [4096, 1]
    scores = transformer_flops_per_token(**GPT2_SMALL, windows=windows).attention_scores
    assert scores == 4 * 768 * (5 * 256 + 5 * 1024 + 1024 + 1)


def test_wrong_windows_are_refused():
    with pytest.raises(ValueError, match="windows has 2 entries; it must have one for each of the 12 layers"):
        transformer_flops_per_token(**GPT2_SMALL, windows=[None, 4])
    with pytest.raises(ValueError, match="windows has the entry 0; a window must be at least 1"):
        transformer_flops_per_token(**GPT2_SMALL, windows=[0] * 12)


def test_convention_says_how_causal_attention_and_recomputation_count():
    assert "neither halved for causality" in CONVENTION
    assert "recomputation not at all" in CONVENTION


SQUARE = jax.ShapeDtypeStruct((4, 4), jnp.float32)
PRODUCT = 2 * 4**3


def _count(function, *arguments):
    return count_matmul_flops(jax.make_jaxpr(function)(*(arguments or (SQUARE,))))


def test_count_of_batched_products():
    left, right = (jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((7, 2, 3), (7, 3, 5)))
    assert _count(jnp.matmul, left, right) == 2 * 7 * 2 * 3 * 5


def test_count_looks_into_calls():
    @jax.custom_vjp
    def custom(x):
        return x @ x

    custom.defvjp(lambda x: (x @ x, x), lambda x, g: (g @ x,))
    assert _count(lambda x: jax.jit(custom)(x)) == PRODUCT
    assert _count(jax.checkpoint(lambda x: x @ x)) == PRODUCT
    assert _count(jax.grad(lambda x: custom(x).sum())) == 2 * PRODUCT


def test_count_of_control_flow():
    assert _count(
        lambda x: jax.lax.fori_loop(0, 3, lambda _, y: jax.lax.fori_loop(0, 5, lambda _, z: z @ z, y), x)
    ) == (15 * PRODUCT)
    assert _count(lambda x: jax.lax.cond(x[0, 0] > 0, lambda y: y @ y, lambda y: y @ y @ y, x)) == 2 * PRODUCT
    assert _count(lambda x: jax.lax.while_loop(lambda y: y[0, 0] < 9, lambda y: y + 1, x) @ x) == PRODUCT
    with pytest.raises(ValueError, match="cannot count matrix products in a while loop of unknown length"):
        _count(lambda x: jax.lax.while_loop(lambda y: y[0, 0] < 9, lambda y: y @ y, x))


def test_count_of_a_shard_map_is_over_its_manual_shards():
    mesh = AbstractMesh((2, 4), ("data", "tensor"), axis_types=(AxisType.Auto,) * 2)
    weight = jax.ShapeDtypeStruct((4, 6), jnp.float32)

    def split(x, w):
        return jax.shard_map(
            lambda x, w: jax.lax.psum(x @ w, "tensor"),
            mesh=mesh,
            in_specs=(P("data", "tensor"), P("tensor", None)),
            out_specs=P("data", None),
        )(x, w)

    assert _count(split, SQUARE, weight) == 2 * 4 * 4 * 6


@pytest.mark.parametrize("rows", [(1, 3), (4, 0)])
def test_count_of_ragged_products_is_over_rows_not_experts(rows):
    experts = jax.ShapeDtypeStruct((2, 4, 6), jnp.float32)
    assert _count(lambda x, w: jax.lax.ragged_dot(x, w, jnp.array(rows)), SQUARE, experts) == 2 * 4 * 4 * 6


def test_what_cannot_be_looked_into_is_refused():
    image, kernel = (jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((1, 2, 8), (3, 2, 3)))
    with pytest.raises(ValueError, match="cannot count the FLOPs of 'conv_general_dilated'"):
        _count(lambda x, w: jax.lax.conv(x, w, (1,), "SAME"), image, kernel)
