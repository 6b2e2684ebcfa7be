"""The whole model: against a float64 numpy model of every part, through gradients, and by its counts."""

import math
from collections.abc import Callable
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxpar.metrics import count_matmul_flops, transformer_flops_per_token
from jaxpar.models import RopeScaling, TransformerConfig
from jaxpar.parallel.constrain import Execution
from jaxpar.parallel.layers import REMAT_POLICIES
from jaxpar.parallel.loss import LossSettings, cross_entropy

B, T, VOCAB, PADDED = 2, 8, 11, 16
SIZES = {"num_layers": 2, "embed_dim": 12, "num_heads": 4, "head_dim": 4, "mlp_dim": 10, "init_std": 0.3}
BIASES = {"qkv_bias": True, "attention_bias": True, "mlp_bias": True}
CONFIGS = {
    "gpt": {"norm": "layernorm", "positions": "learned", "activation": "gelu", "gated": False, **BIASES},
    "llama": {"num_kv_heads": 2, "tied": False, "rope_scaling": RopeScaling(factor=4.0, original_length=16)},
    "qwen": {"num_kv_heads": 1, "qk_norm": True, "activation": "gelu_exact", **BIASES},
    "gemma": {
        "activation": "gelu", "norm_unit_offset": True, "post_norms": True, "embed_scale": True, "num_kv_heads": 2,
        "attention_softcap": 2.0, "logit_softcap": 3.0, "attention_scale": 0.7, "windows": (2, 0),
    },
}  # fmt: skip


def _config(name: str, **changes: Any) -> TransformerConfig:
    return TransformerConfig(**(SIZES | CONFIGS[name] | changes))


@cache
def _model(name: str, **changes: Any) -> tuple[Any, dict]:
    """The model's structure, and random parameters: norms and biases too, so that they matter."""
    config = _config(name, **changes)

    def make() -> nnx.Module:
        return config.make(vocab_size=VOCAB, padded_vocab_size=PADDED, sequence_length=T, rngs=nnx.Rngs(0))

    with nnx.use_eager_sharding(False):
        structure, shapes = nnx.split(nnx.eval_shape(make))
    random = np.random.default_rng(0)

    def value(path: tuple, leaf: jax.ShapeDtypeStruct) -> np.ndarray:
        centre = 1.0 if _name(path).endswith("scale") and not config.norm_unit_offset else 0.0
        return (centre + 0.3 * random.normal(size=leaf.shape)).astype(np.float32)

    return structure, jax.tree_util.tree_map_with_path(value, nnx.to_pure_dict(shapes))


def _name(path: tuple) -> str:
    return jax.tree_util.keystr(path, simple=True, separator="/")


def _inputs(seed: int = 0) -> dict[str, np.ndarray]:
    """Row 0 holds documents of 3 and 5 tokens, row 1 of 6 and 2; positions restart."""
    tokens = np.random.default_rng(seed).integers(0, VOCAB, (B, T)).astype(np.int32)
    segments = np.array([[1] * 3 + [2] * 5, [1] * 6 + [2] * 2], np.int32)
    positions = np.array([[0, 1, 2, 0, 1, 2, 3, 4], [0, 1, 2, 3, 4, 5, 0, 1]], np.int32)
    return {"tokens": tokens, "positions": positions, "segment_ids": segments}


@cache
def _logits(name: str) -> Callable[..., jax.Array]:
    structure, _ = _model(name)
    return jax.jit(lambda params, inputs: nnx.merge(structure, params)(inputs).logits())


def _numpy_logits(config: TransformerConfig, params: dict, inputs: dict[str, np.ndarray]) -> np.ndarray:
    """The model as its papers describe it, one sequence, layer and head at a time."""
    p = jax.tree.map(lambda a: np.asarray(a, np.float64), params)
    heads, groups, width = config.num_heads, config.kv_heads, config.head_width
    activate = {
        "silu": lambda z: z / (1 + np.exp(-z)),
        "gelu": lambda z: 0.5 * z * (1 + np.tanh(math.sqrt(2 / math.pi) * (z + 0.044715 * z**3))),
        "gelu_exact": lambda z: 0.5 * z * (1 + np.vectorize(math.erf)(z / math.sqrt(2))),
    }[config.activation]

    def norm(part: dict, x: np.ndarray, kind: str = config.norm) -> np.ndarray:
        x = x - x.mean(-1, keepdims=True) if kind == "layernorm" else x
        x = x / np.sqrt((x**2).mean(-1, keepdims=True) + config.norm_epsilon)
        return x * (part["scale"] + config.norm_unit_offset) + part.get("bias", 0.0)

    def turn(x: np.ndarray, positions: np.ndarray) -> np.ndarray:
        frequencies = config.rope_theta ** (-np.arange(0, width, 2) / width)
        if scaling := config.rope_scaling:
            share = (scaling.original_length * frequencies / (2 * np.pi) - scaling.low_frequency_factor) / (
                scaling.high_frequency_factor - scaling.low_frequency_factor
            )
            frequencies *= np.clip(share, 0, 1) + (1 - np.clip(share, 0, 1)) / scaling.factor
        turned = (x[:, : width // 2] + 1j * x[:, width // 2 :]) * np.exp(1j * positions[:, None] * frequencies)
        return np.concatenate([turned.real, turned.imag], axis=1)

    def head(part: dict, h: np.ndarray, number: int, window: int, row: int) -> np.ndarray:
        group, vectors = number // (heads // groups), []
        for name, index in (("query", number), ("key", group), ("value", group)):
            x = h @ part[name][:, index] + (part[f"{name}_bias"][index] if config.qkv_bias else 0.0)
            if config.qk_norm and name != "value":
                x = norm(part[f"{name}_norm"], x, "rmsnorm")
            if config.positions == "rotary" and name != "value":
                x = turn(x, inputs["positions"][row])
            vectors.append(x)
        q, k, v = vectors
        scores = q @ k.T * (config.attention_scale or width**-0.5)
        if cap := config.attention_softcap:
            scores = cap * np.tanh(scores / cap)
        distance = np.arange(T)[:, None] - np.arange(T)
        segments = inputs["segment_ids"][row]
        seen = (distance >= 0) & (distance < (window or T)) & (segments[:, None] == segments)
        weights = np.where(seen, np.exp(scores), 0.0)
        return (weights / weights.sum(1, keepdims=True)) @ v @ part["output"][number]

    def feed_forward(part: dict, h: np.ndarray) -> np.ndarray:
        bias = {name: part.get(f"{name}_bias", 0.0) for name in ("gate", "up", "down")}
        up = h @ part["up"] + bias["up"]
        inner = activate(h @ part["gate"] + bias["gate"]) * up if config.gated else activate(up)
        return inner @ part["down"] + bias["down"]

    rows = []
    for row in range(B):
        x = p["embedding"]["table"][inputs["tokens"][row]] * (config.embed_dim**0.5 if config.embed_scale else 1.0)
        if config.positions == "learned":
            x = x + p["positions"][inputs["positions"][row]]
        for index in range(config.num_layers):
            layer = jax.tree.map(lambda a, index=index: a[index], p["blocks"])
            h, window = norm(layer["attention_norm"], x), config.windows[index % len(config.windows)]
            h = sum(head(layer["attention"], h, number, window, row) for number in range(heads))
            h = h + layer["attention"].get("output_bias", 0.0)
            x = x + (norm(layer["attention_post_norm"], h) if config.post_norms else h)
            h = feed_forward(layer["mlp"], norm(layer["mlp_norm"], x))
            x = x + (norm(layer["mlp_post_norm"], h) if config.post_norms else h)
        kernel = p["embedding"]["table"].T if config.tied else p["output"]
        z = (norm(p["final_norm"], x) @ kernel)[:, :VOCAB]
        rows.append(config.logit_softcap * np.tanh(z / config.logit_softcap) if config.logit_softcap else z)
    return np.stack(rows)


@pytest.mark.parametrize("name", CONFIGS)
def test_every_part_is_its_formula(name: str) -> None:
    _, params = _model(name)
    expected = _numpy_logits(_config(name), params, _inputs())
    np.testing.assert_allclose(_logits(name)(params, _inputs()), expected, rtol=0, atol=2e-5 * np.abs(expected).max())


@pytest.mark.parametrize("name", ["gpt", "gemma"])
def test_packed_documents_never_see_each_other(name: str) -> None:
    _, params = _model(name)
    inputs, others = _inputs(), _inputs()
    others["tokens"] = np.where(others["segment_ids"] == 1, (others["tokens"] + 3) % VOCAB, others["tokens"])
    before, after = (np.asarray(_logits(name)(params, i)) for i in (inputs, others))
    second = inputs["segment_ids"] == 2
    np.testing.assert_array_equal(before[second], after[second])
    assert (before[~second] != after[~second]).any(-1).all()
    alone = {key: np.roll(value[:1], -3, axis=1).repeat(B, axis=0) for key, value in inputs.items()}
    np.testing.assert_allclose(
        _logits(name)(params, alone)[0, :5], before[0, 3:], rtol=0, atol=1e-5 * np.abs(before).max()
    )


def test_gradients_prove_causality_windows_and_documents() -> None:
    """∂ out[t] / ∂ in[s] is exactly 0 where s is not seen from t, and not 0 where it is, layer by layer."""
    structure, params = _model("gemma")
    inputs = _inputs()
    x_BTD = np.random.default_rng(1).normal(size=(B, T, 12)).astype(np.float32)
    direction = np.random.default_rng(2).normal(size=12).astype(np.float32)

    @jax.jit
    def reach(params: dict) -> jax.Array:
        def out(x_BTD: jax.Array) -> jax.Array:
            return nnx.merge(structure, params).layers(x_BTD, inputs) @ direction

        return (jax.jacrev(out)(jnp.asarray(x_BTD)) != 0).any(-1)

    def only(*layers: int) -> np.ndarray:
        attention = params["blocks"]["attention"]
        keep = np.isin(np.arange(2), layers).astype(np.float32)[:, None, None, None]
        changed = params["blocks"] | {"attention": attention | {"output": attention["output"] * keep}}
        # The post-norm of what a switched-off layer adds is switched off as well.
        changed["attention_post_norm"] = {"scale": (1 + changed["attention_post_norm"]["scale"]) * keep[:, :, 0, 0] - 1}
        return np.asarray(reach(params | {"blocks": changed}))

    distance = np.arange(T)[:, None] - np.arange(T)
    same = inputs["segment_ids"][:, :, None] == inputs["segment_ids"][:, None]
    window = same & (distance >= 0) & (distance < 2)
    causal = same & (distance >= 0)
    for layers, seen in (((0,), window), ((1,), causal), ((0, 1), causal), ((), same & (distance == 0))):
        expected = np.zeros((B, T, B, T), bool)
        for row in range(B):
            expected[row, :, row] = seen[row]
        np.testing.assert_array_equal(only(*layers), expected, err_msg=f"attention in layers {layers}")


DROPPING = {"dropout": 0.3, "logit_softcap": 3.0}


@cache
def _loss_and_gradients(policy: str = "none", unroll: bool = False, tied: bool = False) -> Callable[[dict, int], Any]:
    structure, _ = _model("llama", tied=tied, **DROPPING)
    inputs = _inputs()
    targets, mask = np.roll(inputs["tokens"], -1, axis=1), np.broadcast_to(np.arange(T) % 3 > 0, (B, T))

    def loss(params: dict, keys_B: jax.Array) -> jax.Array:
        prediction = nnx.merge(structure, params)(inputs, dropout_keys=keys_B)
        return cross_entropy(prediction, jnp.asarray(targets), jnp.asarray(mask), LossSettings(chunk_tokens=5)).loss

    derivative = jax.jit(jax.value_and_grad(loss))

    def run(params: dict, seed: int = 3) -> Any:
        with Execution(remat=REMAT_POLICIES[policy], unroll_layers=unroll).active():
            return jax.device_get(derivative(params, jax.random.split(jax.random.key(seed), B)))

    return run


def test_a_tied_table_gets_the_sum_of_both_uses_gradients_and_its_padding_none() -> None:
    _, params = _model("llama", tied=True, **DROPPING)
    tied_loss, tied = _loss_and_gradients(tied=True)(params)
    loss, untied = _loss_and_gradients()(params | {"output": params["embedding"]["table"].T})
    assert tied_loss == pytest.approx(loss, rel=1e-6)
    uses = untied["embedding"]["table"], untied["output"].T
    np.testing.assert_allclose(tied["embedding"]["table"], sum(uses), rtol=0, atol=1e-5 * np.abs(uses[0]).max())
    assert min(np.abs(use).max() for use in uses) > 0.1
    assert not tied["embedding"]["table"][VOCAB:].any()


@pytest.mark.parametrize(("policy", "unroll"), [("full", False), ("dots", True)])
def test_loops_and_recomputation_change_neither_loss_nor_gradients_with_dropout(policy: str, unroll: bool) -> None:
    _, params = _model("llama", **DROPPING)
    expected, found = _loss_and_gradients()(params), _loss_and_gradients(policy, unroll)(params)
    for got, want in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(got, want, rtol=0, atol=2e-5 * np.abs(want).max())
    assert abs(_loss_and_gradients()(params, seed=4)[0] - expected[0]) > 0.01


def _program_lines(num_layers: int, unroll: bool) -> int:
    structure, params = _model("llama", num_layers=num_layers)
    with Execution(unroll_layers=unroll).active():
        gradient = jax.jit(jax.grad(lambda params: nnx.merge(structure, params)(_inputs()).logits().sum()))
        return len(gradient.lower(params).as_text().splitlines())


def test_the_program_does_not_grow_with_depth_unless_unrolled() -> None:
    assert _program_lines(2, unroll=False) == _program_lines(6, unroll=False)
    assert _program_lines(6, unroll=True) > 1.2 * _program_lines(2, unroll=True)


@pytest.mark.parametrize("name", ["gpt", "llama"])
def test_flops_formula_is_what_the_traced_model_executes(name: str) -> None:
    config = _config(name)
    structure, params = _model(name)
    forward = jax.make_jaxpr(lambda params: nnx.merge(structure, params)(_inputs()).logits())(params)
    formula = transformer_flops_per_token(**config.dims(PADDED), sequence_length=T)
    assert formula.training * B * T == 3 * count_matmul_flops(forward)


def test_initial_values_have_their_spread_and_do_not_depend_on_the_vocabularys_padding() -> None:
    config = _config("gpt", tied=False, num_layers=8, embed_dim=64, mlp_dim=256, init_std=0.02)

    def make(padded: int) -> dict:
        model = config.make(vocab_size=VOCAB, padded_vocab_size=padded, sequence_length=T, rngs=nnx.Rngs(0))
        return nnx.to_pure_dict(nnx.state(model))

    with nnx.use_eager_sharding(False):
        exact, padded = jax.device_get(jax.jit(lambda: (make(VOCAB), make(64)))())
    assert not padded["embedding"]["table"][VOCAB:].any()
    assert not padded["output"][:, VOCAB:].any()
    padded["embedding"]["table"], padded["output"] = padded["embedding"]["table"][:VOCAB], padded["output"][:, :VOCAB]
    jax.tree.map(np.testing.assert_array_equal, padded, exact)
    for path, value in jax.tree_util.tree_leaves_with_path(exact):
        name = _name(path)
        if name.endswith(("bias", "scale")):
            assert (value == (0.0 if name.endswith("bias") else 1.0)).all(), name
        else:
            expected = 0.02 / math.sqrt(2 * 8) if name.endswith(("attention/output", "mlp/down")) else 0.02
            assert value.std() == pytest.approx(expected, rel=0.1), name
            assert len(np.unique(value)) > 0.99 * value.size, f"{name}: layers must not be copies"


def test_a_sequence_longer_than_the_position_table_is_refused() -> None:
    config = _config("gpt", max_positions=4)
    with (
        nnx.use_eager_sharding(False),
        pytest.raises(ValueError, match=r"^data.sequence_length=8 exceeds model.max_positions=4"),
    ):
        config.make(vocab_size=VOCAB, padded_vocab_size=PADDED, sequence_length=T, rngs=nnx.Rngs(0))
