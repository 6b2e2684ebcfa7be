"""Every pipeline schedule computes what one device computes: loss, every gradient, five steps; uneven stages too."""

import itertools
from functools import cache
from typing import Any

import jax
import numpy as np
import pytest

from jaxpar.parallel.pipeline.catalogue import SCHEDULES
from jaxpar.plan import make_plan
from jaxpar.sample import continue_tokens
from jaxpar.state import init_state
from jaxpar.step import Step
from jaxpar.verify import synthetic_batch

VOCAB_SIZE = 250

AXES = ("tensor", "fsdp", "data")
FEATURES: dict[str, dict[str, Any]] = {
    "dropout": {},
    "remat": {"remat": {"policy": "full"}},
    "accumulation": {},
    "float16": {"precision": {"compute": "float16", "loss_scale": 64.0}},
}
"""Dropout is in all of them; accumulation is over 2 parts of a batch that is twice as large."""
ALWAYS = {
    ("naive", "fsdp", "tied", "accumulation"),
    ("gpipe", "tensor", "untied", "remat"),
    ("1f1b", "data", "tied", "dropout"),
    ("1f1b", "tensor", "untied", "float16"),
    ("1f1b_aligned", "fsdp", "untied", "remat"),
    ("1f1b_aligned", "data", "tied", "float16"),
    ("interleaved", "tensor", "tied", "accumulation"),
    ("interleaved_aligned", "data", "untied", "accumulation"),
    ("zb_h1", "fsdp", "tied", "remat"),
    ("zb_h2", "data", "untied", "float16"),
    ("zb_v", "tensor", "untied", "dropout"),
}
"""Every schedule, every axis with every feature but two; `make test-exhaustive` runs the rest."""


def cases() -> list[Any]:
    return [
        pytest.param(*case, id="-".join(case), marks=[] if case in ALWAYS else pytest.mark.exhaustive)
        for case in itertools.product(SCHEDULES, AXES, ("tied", "untied"), FEATURES)
    ]


def assert_same(found: Any, expected: Any, tolerance: float) -> None:
    """Rounding grows from step to step."""
    for step, (got, want) in enumerate(zip(found.metrics, expected.metrics, strict=True)):
        rtol = tolerance * (1 + 0.25 * step)
        for metric in ("loss", "grad_norm", "objective"):
            np.testing.assert_allclose(got[metric], want[metric], rtol=rtol, err_msg=f"{metric} of step {step}")
    for what, arrays, wanted in (
        ("gradient", found.gradients, expected.gradients),
        ("parameter", found.params, expected.params),
    ):
        assert arrays.keys() == wanted.keys()
        for path, want in wanted.items():
            atol = 5 * tolerance * np.abs(want).max() + 1e-6
            np.testing.assert_allclose(arrays[path], want, rtol=0, atol=atol, err_msg=f"{what} {path}")


def train_of(feature: str, **keys: Any) -> dict[str, Any]:
    batch_size = 32 if feature == "accumulation" else 16
    return {"num_steps": 5, "batch_size": batch_size, "max_grad_norm": float("inf")} | keys


@pytest.fixture(scope="module")
def one_device(config_for: Any, run_of: Any) -> Any:
    """The trace of a model without any splitting."""

    @cache
    def run(model: str, feature: str) -> Any:
        precision = FEATURES[feature].get("precision", {})
        return run_of(config_for(model, {}, train=train_of(feature), precision=precision), jax.devices()[:1])

    return lambda model, feature: run(model, "dropout" if feature == "remat" else feature)


@pytest.mark.parametrize(("schedule", "axis", "head", "feature"), cases())
def test_a_schedule_equals_one_device(schedule, axis, head, feature, one_device, layout_run):
    model = f"{head}-6" if SCHEDULES[schedule].legal_chunks[0] == 1 else f"{head}-9"
    train = train_of(feature, microbatches=2 if feature == "accumulation" else 1)
    pipeline = {"schedule": schedule, "microbatches": 8}
    found = layout_run(model, {"pipe": 4, axis: 2}, train=train, pipeline=pipeline, **FEATURES[feature])
    assert_same(found, one_device(model, feature), 2e-2 if feature == "float16" else 2e-5)


OTHERS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "sequence parallelism": ("untied-6", {"tensor": 2, "sequence_parallel": True}, {"schedule": "1f1b"}),
    "layers that differ": ("windowed-8", {"data": 2}, {"schedule": "1f1b_aligned", "layers_per_stage": [2, 2, 2, 2]}),
    "ZeRO 1": ("tied-6", {"fsdp": 2, "zero_stage": 1}, {"schedule": "zb_h1", "layers_per_stage": [1, 3, 1, 1]}),
    "ZeRO 2, overlap": ("tied-6", {"fsdp": 2, "zero_stage": 2}, {"schedule": "1f1b_aligned", "overlap": True}),
}


@pytest.mark.parametrize("case", OTHERS.values(), ids=OTHERS)
def test_other_layouts_equal_one_device(case, one_device, layout_run):
    model, layout, pipeline = case
    found = layout_run(model, {"pipe": 4} | layout, train=train_of(""), pipeline=pipeline | {"microbatches": 8})
    assert_same(found, one_device(model, "dropout"), 2e-5)


def test_matrices_in_rows_without_a_layer_stay_zero_and_steps_of_layers_are_theirs(config_for, layout_run, run_of):
    """Muon orthogonalises gradients that are zero there; layer-wise decay counts layers, not rows."""
    optimizer = {"name": "muon", "learning_rate": 1e-2, "layer_decay": 0.7, "adam_epsilon": 1e-3}
    pipeline = {"schedule": "interleaved_aligned", "microbatches": 8, "layers_per_stage": [1, 1, 2, 1, 1, 1, 1, 1]}
    sections = {"train": train_of(""), "optimizer": optimizer}
    found = layout_run("untied-9", {"pipe": 4, "data": 2}, pipeline=pipeline, **sections)
    expected = run_of(config_for("untied-9", {}, **sections), jax.devices()[:1])
    assert_same(found, expected, 5e-5)


def test_clipping_and_skipped_steps_are_global(config_for, layout_run, run_of):
    """A scale at which the first steps overflow somewhere: all ranks skip those, and clip the others alike."""
    sections = {
        "train": {"num_steps": 6, "batch_size": 16, "max_grad_norm": 0.05},
        "precision": {"compute": "float16", "scale_initial": 2.0**22, "scale_max": 2.0**22},
    }
    pipeline = {"schedule": "1f1b", "microbatches": 8}
    found = layout_run("tied-6", {"pipe": 4, "tensor": 2}, pipeline=pipeline, **sections)
    # Sums over fewer sequences overflow later.
    sections["train"] = sections["train"] | {"microbatches": 8}
    expected = run_of(config_for("tied-6", {}, **sections), jax.devices()[:1])
    for metric in ("skipped", "loss_scale"):
        assert [step[metric] for step in found.metrics] == [step[metric] for step in expected.metrics]
    assert 0 < found.metrics[-1]["skipped"] < 5
    assert found.metrics[-1]["grad_norm"] > 0.05
    for path, want in expected.params.items():
        np.testing.assert_allclose(
            found.params[path], want, rtol=0, atol=2e-2 * np.abs(want).max() + 1e-5, err_msg=path
        )


def test_evaluation_and_samples_are_those_of_one_device(config_for):
    """Forwards alone; a batch of evaluation may be cut into fewer parts. Of the padded vocabulary the second of two
    devices has 50 words in 200 columns, which are not cut off evenly."""
    found = []
    for layout, pipeline in (({}, {}), ({"pipe": 4, "tensor": 2}, {"schedule": "zb_v", "microbatches": 8})):
        config = config_for("tied-9", layout, train=train_of(""), evaluation={"batch_size": 12}, pipeline=pipeline)
        padded = config.model.model_copy(update={"vocab_multiple": 400})
        config = config.model_copy(update={"model": padded})
        plan = make_plan(config, jax.devices()[: 8 if layout else 1], VOCAB_SIZE)
        step = Step(plan)
        with plan.execution.active():
            params = init_state(plan, step.optimizer).params
            rows = {name: array[:12] for name, array in synthetic_batch(plan).items()}
            batch = {name: jax.device_put(array, plan.batch_sharding) for name, array in rows.items()}
            lengths = jax.device_put(np.arange(plan.padded_vocab_size, dtype=np.int32), plan.replicated)
            sums = jax.device_get(step.evaluate(params, batch, lengths))
        tokens = continue_tokens(
            plan, params, [5, 6, 7], num_tokens=4, temperature=1.0, vocab_size=VOCAB_SIZE, end_of_text=-1
        )
        found.append((sums, tokens))
    (one, one_tokens), (split, split_tokens) = found
    assert one.keys() == split.keys()
    for name, value in one.items():
        np.testing.assert_allclose(split[name], value, rtol=1e-5, err_msg=name)
    assert split_tokens == one_tokens
    assert len(set(one_tokens)) > 1
