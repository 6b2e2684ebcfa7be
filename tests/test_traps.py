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
from jaxpar.state import guard_rules, init_state
from jaxpar.step import Step, dropout_keys, make_gradients
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


def _plan(layout: dict, sections: dict | None = None, **model: Any) -> Plan:
    table: dict = {
        "model": MODEL | model,
        "data": {"sequence_length": T},
        "train": {"num_steps": 4, "batch_size": B, "max_grad_norm": float("inf")},
        "optimizer": {"name": "adamw", "learning_rate": 0.05, "beta1": BETA1},
        "schedule": {"name": "constant", "warmup_steps": 2},
        "parallel": layout,
    }
    table |= {name: table.get(name, {}) | section for name, section in (sections or {}).items()}
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


SHARED = {"data": 2, "fsdp": 2, "tensor": 2, "sequence_parallel": True}
SIMPLE = {"norm": "rmsnorm", "post_norms": False, "qkv_bias": False, "logit_softcap": 0.0, "vocab_multiple": 2}
AUXILIARY = {"z_loss": 0.05, "label_smoothing": 0.3}
# Valid tokens of each sequence: of the four microbatches of one device the third has none.
NUM_VALID = (8, 8, 1, 0, 0, 0, 2, 5)
DEEP = (("num_layers", 4),)
STAGES = {"pipe": 2, "data": 1}


@dataclass(frozen=True)
class Gradients:
    """Gradients by path, and metrics, as the step clips them."""

    by_path: dict[str, np.ndarray]
    metrics: dict[str, float]

    @property
    def norm(self) -> float:
        return np.sqrt(sum(np.square(gradient, dtype=np.float64).sum() for gradient in self.by_path.values()))


@cache
def _gradients(layout: tuple = (), rows: tuple = tuple(range(B)), **options: Any) -> Gradients:
    """At the initial parameters, of the sequences `rows` of one batch, whose masks are very different.

    Options: `microbatches`, `stage`, `max_norm`, `precision`, `pipeline`, `model`, `num_valid`, and those of the loss.
    """
    precision = dict(options.pop("precision", ()))
    train = {"batch_size": len(rows), "microbatches": options.pop("microbatches", 1)}
    train["max_grad_norm"] = options.pop("max_norm", float("inf"))
    parallel = dict(layout or ONE.items()) | {"zero_stage": options.pop("stage", 3)}
    pipeline, model = dict(options.pop("pipeline", ())), SIMPLE | dict(options.pop("model", ()))
    batch = synthetic_batch(_plan(ONE))
    batch["loss_mask"] = np.arange(T) < np.array(options.pop("num_valid", NUM_VALID))[:, None]
    sections = {"train": train, "precision": precision, "parallel": parallel, "pipeline": pipeline, "loss": options}
    plan = _plan(dict(layout) or ONE, sections, **model)
    rules = guard_rules(plan.config)
    scale = None if rules is None else rules.start().scale
    keys_B = dropout_keys(_plan(ONE), 0)[np.array(rows)]
    with plan.execution.active():
        params = jax.jit(plan.make_params, out_shardings=plan.param_shardings)()
        on_device = {name: jax.device_put(array[list(rows)], plan.batch_sharding) for name, array in batch.items()}
        grads, metrics = jax.jit(make_gradients(plan))(params, on_device, keys_B, scale)
    return Gradients(
        plan.in_layer_order(plan.by_path(jax.device_get(grads))),
        {name: value.item() for name, value in jax.device_get(metrics).items()},
    )


def _assert_close(found: Gradients, expected: Gradients, relative: float = 1e-4) -> None:
    for metric, want in expected.metrics.items():
        assert found.metrics[metric] == pytest.approx(want, rel=relative), metric
    floor = 1e-3 * max(np.abs(gradient).max() for gradient in expected.by_path.values())
    for path, want in expected.by_path.items():
        tolerance = relative * max(np.abs(want).max(), floor)
        np.testing.assert_allclose(found.by_path[path], want, rtol=0, atol=tolerance, err_msg=path)


@pytest.mark.parametrize("auxiliary", [{}, AUXILIARY], ids=["plain", "z-loss and smoothing"])
@pytest.mark.parametrize(
    ("layout", "options"),
    [
        ({}, {"microbatches": 4}),
        (SHARED, {"microbatches": 2, "stage": 1}),
        (SHARED, {"microbatches": 2, "stage": 3}),
        (STAGES, {"pipeline": (("schedule", "1f1b"), ("microbatches", 4))}),
        (STAGES, {"pipeline": (("schedule", "1f1b"), ("microbatches", 4)), "microbatches": 2}),
    ],
    ids=[
        "4 microbatches",
        "2 on a mesh, reduced once",
        "2 on a mesh, reduced in each",
        "4 through stages",
        "4 through stages, twice",
    ],
)
def test_microbatches_with_unequal_masks_have_the_gradient_of_the_whole_batch(
    layout: dict, options: dict, auxiliary: dict
) -> None:
    """With dropout, whose masks belong to sequences. The z-loss and the smoothing are divided once, as the rest is."""
    _assert_close(_gradients(tuple(layout.items()), **options, **auxiliary), _gradients(**auxiliary))


def test_the_mean_of_microbatches_means_would_be_another_gradient() -> None:
    parts = [_gradients(rows=(first, first + 1)) for first in (0, 2, 6)]
    whole = _gradients()
    wrong = np.mean([part.by_path["embedding/table"] for part in parts], axis=0)
    tokens = [part.metrics["tokens"] for part in parts]
    right = np.average([part.by_path["embedding/table"] for part in parts], axis=0, weights=tokens)
    assert tokens == [16, 1, 7]
    distance = np.linalg.norm(whole.by_path["embedding/table"])
    assert np.linalg.norm(right - whole.by_path["embedding/table"]) < 1e-5 * distance
    assert np.linalg.norm(wrong - whole.by_path["embedding/table"]) > 0.3 * distance


def test_auxiliary_losses_are_large_enough_to_tell() -> None:
    plain, auxiliary = _gradients(), _gradients(**AUXILIARY)
    assert auxiliary.metrics["loss"] == pytest.approx(plain.metrics["loss"], rel=1e-6)
    assert auxiliary.metrics["objective"] > auxiliary.metrics["loss"] + 0.1
    difference = plain.by_path["embedding/table"] - auxiliary.by_path["embedding/table"]
    assert np.linalg.norm(difference) > 0.1 * np.linalg.norm(plain.by_path["embedding/table"])


FLOAT16 = {"compute": "float16"}


@pytest.mark.parametrize("microbatches", [1, 2])
def test_loss_scaling_and_accumulation_through_stages_are_no_moving_average(microbatches: int) -> None:
    """Whatever part of the batch comes last weighs as much as the first, and the scale goes out once."""
    pipeline = (("schedule", "1f1b"), ("microbatches", 4))
    precision = (("compute", "float16"), ("loss_scale", 1024.0))
    found = _gradients(tuple(STAGES.items()), pipeline=pipeline, precision=precision, microbatches=microbatches)
    for path, want in _gradients().by_path.items():
        difference = np.linalg.norm(found.by_path[path] - want)
        assert difference < 0.02 * np.linalg.norm(want) + 1e-4, path


# One device has the first and the last stage, or it has not.
@pytest.mark.parametrize("schedule", ["zb_v", "1f1b"])
def test_a_tied_table_has_the_gradient_of_both_its_uses_once(schedule: str) -> None:
    tied = (*DEEP, ("tied", True))
    found = _gradients(tuple(STAGES.items()), model=tied, pipeline=(("schedule", schedule), ("microbatches", 4)))
    _assert_close(found, _gradients(model=tied))


@pytest.mark.parametrize("schedule", ["interleaved", "interleaved_aligned", "zb_v"])
def test_a_stage_that_a_rank_comes_back_to_keeps_what_it_has_summed(schedule: str) -> None:
    """Gradients of the first microbatch, in which all valid tokens are, and of the last; the loss does not tell."""
    pipeline = (("schedule", schedule), ("microbatches", 4))
    for num_valid in ((8, 8, 0, 0, 0, 0, 0, 0), (0, 0, 0, 0, 0, 0, 8, 8)):
        found = _gradients(tuple(STAGES.items()), pipeline=pipeline, model=DEEP, num_valid=num_valid)
        _assert_close(found, _gradients(model=DEEP, num_valid=num_valid))
        for path, gradient in found.by_path.items():
            assert path.split("/")[0] != "blocks" or all(layer.any() for layer in gradient), path


@pytest.mark.parametrize(("scale", "microbatches"), [(1.0, 4), (1024.0, 4), (1024.0, 1)])
def test_the_norm_is_that_of_the_gradients_that_are_clipped(scale: float, microbatches: int) -> None:
    """After accumulation and after the loss scale is divided out, before clipping; the clipped ones have the largest
    norm that is allowed."""
    exact = _gradients()
    precision = tuple((FLOAT16 | {"loss_scale": scale}).items())
    whole = _gradients(precision=precision, microbatches=microbatches)
    assert whole.metrics["grad_norm"] == pytest.approx(whole.norm, rel=1e-5)
    assert whole.metrics["grad_norm"] == pytest.approx(exact.norm, rel=0.01)
    largest = exact.norm / 4
    clipped = _gradients(precision=precision, microbatches=microbatches, max_norm=largest)
    assert clipped.norm == pytest.approx(largest, rel=1e-5)
    assert clipped.metrics["grad_norm"] == pytest.approx(whole.norm, rel=1e-5)


@pytest.mark.parametrize("on_nonfinite", ["halt", "skip"])
@pytest.mark.parametrize("compute", ["float32", "bfloat16"])
def test_formats_without_loss_scaling_are_not_divided_by_a_scale(compute: str, on_nonfinite: str) -> None:
    plan = _plan(ONE, {"precision": {"compute": compute}, "train": {"on_nonfinite": on_nonfinite}})
    rules = guard_rules(plan.config)
    assert (rules is None) == (on_nonfinite == "halt")
    assert rules is None or rules.start().scale is None
    rounded, exact = _gradients(precision=(("compute", compute),)), _gradients()
    assert "loss_scale" not in rounded.metrics
    assert rounded.norm == pytest.approx(exact.norm, rel=0.02)
