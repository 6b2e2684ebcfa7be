"""Mistakes that other trainers made, as they were reported in public; each test names one."""

from dataclasses import dataclass
from functools import cache
from typing import Any

import jax
import numpy as np
import pytest
from flax import nnx

from jaxpar.config import parse_config
from jaxpar.plan import Plan, make_plan
from jaxpar.state import init_state
from jaxpar.step import Step
from jaxpar.verify import synthetic_batch

VOCAB, B, T = 13, 8, 8
ONE = {"data": 1}
ALL = {"data": 1, "fsdp": 2, "tensor": 4, "sequence_parallel": True}
BETA1 = 0.9

# Norms with biases, fewer key/value heads than tensor devices, a vocabulary that does not divide, capped logits.
MODEL = {
    "name": "transformer", "num_layers": 2, "embed_dim": 16, "num_heads": 4, "num_kv_heads": 2, "head_dim": 4,
    "mlp_dim": 16, "vocab_multiple": 1, "norm": "layernorm", "post_norms": True, "positions": "learned",
    "qkv_bias": True, "logit_softcap": 2.0, "dropout": 0.5, "init_std": 0.3,
}  # fmt: skip


def _plan(layout: dict, **model: Any) -> Plan:
    table = {
        "model": MODEL | model,
        "data": {"sequence_length": T},
        "train": {"num_steps": 4, "batch_size": B, "max_grad_norm": float("inf")},
        "optimizer": {"name": "adamw", "learning_rate": 0.05, "beta1": BETA1},
        "schedule": {"name": "constant", "warmup_steps": 2},
        "parallel": layout,
    }
    config = parse_config(table)
    num_devices = np.prod([size for size in layout.values() if size is not True])
    return make_plan(config, jax.devices()[:num_devices], VOCAB)


def _by_path(plan: Plan, tree: Any) -> dict[str, Any]:
    return {parameter.path: leaf for parameter, leaf in zip(plan.parameters, jax.tree.leaves(tree), strict=True)}


def _is_constant_at_first(path: str) -> bool:
    return path.endswith(("bias", "scale"))


@dataclass(frozen=True)
class Run:
    """Metrics of each step, the first step's gradients (whole, on the host), the last parameters (on the devices)."""

    metrics: list[dict[str, float]]
    gradients: dict[str, np.ndarray]
    params: dict[str, jax.Array]


@cache
def _run(name: str) -> Run:
    """Four steps on one batch. Its first sequences, which one device of the mesh gets, have hardly a valid token.

    The learning rate of the first step is 0.
    """
    plan = _plan({"one": ONE, "all": ALL}[name])
    step = Step(plan)
    rows = synthetic_batch(plan)
    rows["loss_mask"][: B // 2] = False
    rows["loss_mask"][0, :2] = True
    metrics, gradients = [], {}
    with plan.execution.active():
        state = init_state(plan, step.optimizer)
        for number in range(4):
            batch = {key: jax.device_put(value, plan.batch_sharding) for key, value in rows.items()}
            state, values = step.train(state, batch)
            metrics.append({key: value.item() for key, value in jax.device_get(values).items()})
            if number == 0:
                arrays = state.optimizer["arrays"]
                first = jax.tree.map(lambda _, kept: kept["first"], state.params, arrays)
                moments = _by_path(plan, jax.device_get(first))
                gradients = {path: moment / (1 - BETA1) for path, moment in moments.items()}
    return Run(metrics, gradients, _by_path(plan, state.params))


def test_the_loss_is_summed_over_valid_tokens_not_averaged_over_devices() -> None:
    one, split = _run("one").metrics[0], _run("all").metrics[0]
    assert split["tokens"] == one["tokens"] < B * T / 2
    assert split["loss"] == pytest.approx(one["loss"], rel=1e-5)
    assert split["loss"] == pytest.approx(np.log(VOCAB), rel=0.3)  # neither + log(t), nor without the target's term


def test_gradients_of_norms_and_biases_are_summed_over_tensor_devices_under_sequence_parallelism() -> None:
    one, split = _run("one").gradients, _run("all").gradients
    largest = max(np.abs(gradient).max() for gradient in one.values())
    for path in filter(_is_constant_at_first, one):
        np.testing.assert_allclose(split[path], one[path], rtol=0, atol=1e-5 * largest, err_msg=path)
    assert np.abs(one["blocks/mlp_norm/scale"]).max() > 1e-3 * largest


def test_the_global_norm_counts_each_parameter_once() -> None:
    for name in ("one", "all"):
        squares = sum(np.square(gradient, dtype=np.float64).sum() for gradient in _run(name).gradients.values())
        assert _run(name).metrics[0]["grad_norm"] == pytest.approx(np.sqrt(squares), rel=1e-5)


def test_replicas_stay_identical_and_padding_stays_zero_after_several_steps() -> None:
    params, start = _run("all").params, _run("all").gradients
    for path, array in params.items():
        pieces: dict[str, np.ndarray] = {}
        for shard in array.addressable_shards:
            piece = np.asarray(shard.data)
            np.testing.assert_array_equal(pieces.setdefault(str(shard.index), piece), piece, err_msg=path)
    assert len(params["blocks/attention/key"].sharding.device_set) == 8
    assert (
        len({str(shard.index) for shard in params["blocks/attention/key"].addressable_shards}) == 2
    )  # fsdp, not tensor
    table = np.asarray(params["embedding/table"])
    assert table.shape == (16, 16)
    assert not table[VOCAB:].any()
    assert not start["embedding/table"][VOCAB:].any()


def test_dropout_differs_between_steps() -> None:
    losses = [metrics["loss"] for metrics in _run("all").metrics]
    assert _run("all").metrics[0]["learning_rate"] == 0.0
    assert abs(losses[1] - losses[0]) > 1e-3  # same parameters and batch, other masks
    assert losses[1] == pytest.approx(_run("one").metrics[1]["loss"], rel=1e-5)


@cache
def _initial(layout: tuple) -> dict[str, jax.Array]:
    plan = _plan(dict(layout))
    with plan.execution.active():
        return _by_path(plan, jax.jit(plan.make_params, out_shardings=plan.param_shardings)())


@pytest.mark.parametrize("layout", [{"fsdp": 8, "data": 1}, ALL], ids=str)
def test_initial_values_depend_on_no_mesh_and_differ_between_shards(layout: dict) -> None:
    one, split = _initial(tuple(ONE.items())), _initial(tuple(layout.items()))
    for path, array in split.items():
        real = (slice(VOCAB),) if path == "embedding/table" else ()
        np.testing.assert_array_max_ulp(np.asarray(array)[real], np.asarray(one[path])[real], 1)
        if not _is_constant_at_first(path):
            pieces = {str(shard.index): np.asarray(shard.data) for shard in array.addressable_shards}
            distinct = {piece.tobytes() for piece in pieces.values()}
            assert len(distinct) == len(pieces), f"{path}: shards are copies of each other"


def _dropout_masks(layout: dict, seed: int) -> np.ndarray:
    """Booleans [5, B, T, D]: which entries survive after the embedding, and after both halves of two layers.

    Every place adds a power of two to the residual stream: embeddings are 1, and a post-norm that ignores its input
    (scale 0) gives its bias.
    """
    plan = _plan(layout, positions="rotary", embed_dim=16)
    params = jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), plan.abstract_params)
    params["embedding"]["table"] += 1
    params["blocks"]["attention_post_norm"]["bias"] += np.array([[2], [8]], np.float32)
    params["blocks"]["mlp_post_norm"]["bias"] += np.array([[4], [16]], np.float32)
    rows = synthetic_batch(plan)
    inputs = {name: rows[name] for name in ("tokens", "positions", "segment_ids")}

    @jax.jit
    def stream(params: Any, inputs: Any, keys_B: jax.Array) -> jax.Array:
        model = nnx.merge(plan.structure, params)
        model.final_norm = lambda x_BTD: x_BTD
        return model(inputs, dropout_keys=keys_B).hidden_BTD

    with plan.execution.active():
        # Survivors of a dropout by half are doubled.
        total = np.asarray(stream(params, inputs, jax.random.split(jax.random.key(seed), B))) / 2
    masks = total.astype(np.int32)[None] >> np.arange(5)[:, None, None, None] & 1
    np.testing.assert_array_equal((masks << np.arange(5)[:, None, None, None]).sum(0), total)
    return masks.astype(bool)


def test_dropout_masks_are_the_same_on_every_mesh_and_differ_everywhere_else() -> None:
    masks = _dropout_masks(ONE, seed=0)
    np.testing.assert_array_equal(
        masks, _dropout_masks({"data": 2, "fsdp": 2, "tensor": 2, "sequence_parallel": True}, seed=0)
    )
    others = _dropout_masks(ONE, seed=1)
    blocks = [block for mask in (*masks, *others) for half in np.split(mask, 2) for block in np.split(half, 2, axis=1)]
    for number, block in enumerate(blocks):
        assert block.mean() == pytest.approx(0.5, abs=0.12)
        for other in blocks[:number]:
            assert (block == other).mean() == pytest.approx(0.5, abs=0.15), (
                "a site, step or shard repeats another's mask"
            )
