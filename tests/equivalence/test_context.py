"""Devices that share a sequence compute what one device computes, by every method: loss, every gradient, five
steps."""

from collections.abc import Iterable
from typing import Any

import jax
import numpy as np
import pytest

from jaxpar.plan import make_plan
from jaxpar.sample import continue_tokens
from jaxpar.state import init_state
from jaxpar.step import Step
from jaxpar.verify import synthetic_batch

VOCAB_SIZE = 250
EXHAUSTIVE = pytest.mark.exhaustive
METHODS = ("ring", "all_gather", "ulysses")
LAYOUTS = {
    "alone": {"context": 8},
    "data": {"data": 4, "context": 2},
    "tensor": {"context": 4, "tensor": 2},
    "tensor and its sequences": {"context": 2, "tensor": 2, "fsdp": 2, "sequence_parallel": True},
    "fsdp": {"fsdp": 2, "context": 4},
}


ALWAYS = {
    ("ring", "alone"),
    ("ring", "tensor and its sequences"),
    ("all_gather", "tensor"),
    ("all_gather", "fsdp"),
    ("ulysses", "alone"),
    ("ulysses", "data"),
    ("ulysses", "tensor and its sequences"),
    ("ring", "windows, caps, one head"),
    ("all_gather", "windows, caps, one head"),
    ("ulysses", "windows, caps, one head"),
    ("ring", "learned positions"),
    ("ring", "once a step"),
    ("ulysses", "recomputed"),
    ("ring", "unrolled"),
}
"""Every method with every axis or setting that it might break; `make test-exhaustive` runs the rest."""


def cases(names: Iterable[str]) -> list[Any]:
    return [
        pytest.param(method, name, id=f"{method}-{name}", marks=[] if (method, name) in ALWAYS else [EXHAUSTIVE])
        for method in METHODS
        for name in names
    ]


@pytest.mark.parametrize(("method", "name"), cases(LAYOUTS))
def test_a_shared_sequence_equals_one_device(method, name, reference, layout_run, assert_same):
    """Two key/value heads: for "ulysses" each is repeated. Chunks are not whole tiles."""
    kernels = {"attention_block": 3}
    assert_same(layout_run("llama", LAYOUTS[name] | {"context_method": method}, kernels=kernels), reference("llama"))


OTHERS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "learned positions": ("gpt2", {"fsdp": 2, "context": 2, "tensor": 2, "sequence_parallel": True}, {}),
    "windows, caps, one head": ("gemma", {"data": 2, "context": 4}, {"remat": {"policy": "dots"}}),
    "recomputed": ("llama", {"context": 4, "tensor": 2}, {"remat": {"policy": "full"}}),
    "unrolled": ("llama", {"data": 2, "context": 4}, {"kernels": {"unroll_layers": True}}),
    "once a step": (
        "llama",
        {"data": 2, "fsdp": 2, "context": 2, "zero_stage": 1},
        {"train": {"num_steps": 5, "batch_size": 8, "max_grad_norm": float("inf"), "microbatches": 2}},
    ),
}


@pytest.mark.parametrize(("method", "name"), cases(OTHERS))
def test_other_models_and_settings_equal_one_device(method, name, reference, layout_run, assert_same):
    model, layout, sections = OTHERS[name]
    assert_same(layout_run(model, layout | {"context_method": method}, **sections), reference(model))


@pytest.mark.parametrize("method", METHODS)
def test_one_stretch_of_text_equals_one_device(method, reference, layout_run, assert_same):
    data = {"sequence_length": 16, "document_boundaries": "ignore"}
    found = layout_run("gpt2", {"data": 2, "context": 4, "context_method": method}, data=data)
    assert_same(found, reference("gpt2", "ignore"))


PIPELINES: dict[str, tuple[dict[str, Any], str]] = {
    "ring, gpipe": ({"context": 2, "tensor": 2}, "gpipe"),
    "ring, 1f1b_aligned": ({"context": 4}, "1f1b_aligned"),
    "ring, auto": ({"context": 2, "tensor": 2, "sequence_parallel": True}, "auto"),
    "all_gather, zb_h1": ({"context": 2, "tensor": 2}, "zb_h1"),
    "all_gather, 1f1b": ({"context": 2, "tensor": 2, "sequence_parallel": True}, "1f1b"),
    "ulysses, 1f1b": ({"context": 2, "data": 2}, "1f1b"),
    "ulysses, zb_h1": ({"context": 2, "fsdp": 2}, "zb_h1"),
}


@pytest.mark.parametrize("case", PIPELINES)
def test_stages_with_shared_sequences_equal_one_device(case, config_for, run_of, layout_run, assert_same):
    """Of a ring's schedules "auto" takes one without branches; the others may have any."""
    layout, schedule = PIPELINES[case]
    layout = {"pipe": 2, "context_method": case.split(",")[0]} | layout
    train = {"num_steps": 5, "batch_size": 16, "max_grad_norm": float("inf")}
    found = layout_run("untied-6", layout, train=train, pipeline={"schedule": schedule, "microbatches": 4})
    assert_same(found, run_of(config_for("untied-6", {}, train=train), jax.devices()[:1]))


def test_key_value_heads_of_several_devices_stay_one(config_for):
    """Ulysses repeats two heads for eight devices, which would drift apart if each kept its own gradient."""
    plan = make_plan(config_for("llama", {"context": 8, "context_method": "ulysses"}), jax.devices(), VOCAB_SIZE)
    assert any("each of model.num_kv_heads=2 is computed 4 times" in note for note in plan.notes)
    step = Step(plan)
    with plan.execution.active():
        state = init_state(plan, step.optimizer)
        for number in range(3):
            rows = synthetic_batch(plan, seed=number)
            batch = {name: jax.device_put(array, plan.batch_sharding) for name, array in rows.items()}
            state, _ = step.train(state, batch)
    for path in ("blocks/attention/key", "blocks/attention/value"):
        kernel = plan.by_path(state.params)[path]
        assert kernel.shape[2] == 2
        first, *others = (np.asarray(shard.data) for shard in kernel.addressable_shards)
        assert len(others) == 7
        for other in others:
            np.testing.assert_array_equal(other, first)


@pytest.mark.parametrize("layout", [{"context": 4, "tensor": 2}, {"pipe": 2, "context": 4}], ids=["whole", "stages"])
def test_evaluation_and_samples_are_those_of_one_device(layout, config_for):
    found = []
    for split in ({}, layout):
        pipeline = {"schedule": "gpipe", "microbatches": 4} if "pipe" in split else {}
        config = config_for("untied-6", split, pipeline=pipeline)
        plan = make_plan(config, jax.devices()[: 8 if split else 1], VOCAB_SIZE)
        step = Step(plan)
        with plan.execution.active():
            params = init_state(plan, step.optimizer).params
            rows = synthetic_batch(plan)
            batch = {name: jax.device_put(array, plan.batch_sharding) for name, array in rows.items()}
            lengths = jax.device_put(np.arange(plan.padded_vocab_size, dtype=np.int32), plan.replicated)
            sums = jax.device_get(step.evaluate(params, batch, lengths))
        tokens = continue_tokens(
            plan, params, [5, 6, 7], num_tokens=15, temperature=1.0, vocab_size=VOCAB_SIZE, end_of_text=-1
        )
        found.append((sums, tokens))
    (one, one_tokens), (shared, shared_tokens) = found
    assert one.keys() == shared.keys()
    for name, value in one.items():
        np.testing.assert_allclose(shared[name], value, rtol=1e-5, err_msg=name)
    assert shared_tokens == one_tokens
    assert len(set(one_tokens)) > 1
