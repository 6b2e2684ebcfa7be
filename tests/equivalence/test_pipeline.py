"""Every pipeline schedule computes what one device computes: loss, every gradient, five steps; uneven stages too."""

import itertools
from functools import cache
from typing import Any

import jax
import numpy as np
import pytest

from jaxpar.parallel.pipeline.catalogue import SCHEDULES

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
    for step, (got, want) in enumerate(zip(found.metrics, expected.metrics, strict=True)):
        for metric in ("loss", "grad_norm", "objective"):
            np.testing.assert_allclose(got[metric], want[metric], rtol=tolerance, err_msg=f"{metric} of step {step}")
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
