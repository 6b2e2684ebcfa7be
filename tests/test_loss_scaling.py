"""Steps that are not finite: what they change, how the loss scale follows, and what other formats know of it.

Overflows are injected where they arise: in the loss of one sequence, or in the gradient of one parameter.
"""

import dataclasses
from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpar import step as step_module
from jaxpar.config import parse_config
from jaxpar.optim import make_schedule
from jaxpar.plan import Plan, make_plan
from jaxpar.precision import Guard, GuardRules, next_guard
from jaxpar.state import TrainState, init_state
from jaxpar.step import Step
from jaxpar.verify import synthetic_batch

VOCAB, B, T = 30, 8, 8
ONE = {"data": 1}
SHARED = {"data": 2, "fsdp": 2, "tensor": 2, "sequence_parallel": True, "zero_stage": 2}
DECAY = 0.5
SCALES = {"scale_initial": 1024.0, "scale_growth_steps": 3, "scale_min": 256.0, "scale_max": 2048.0}
STEEP = "final_norm/scale"
# An overflow at the first step, one in the loss, several in a row down to the smallest scale, and up to the largest.
EVENTS = [
    "gradient", "", "", "", "loss", "gradient", "gradient", "gradient", *[""] * 13, "gradient", "",
]  # fmt: skip


def _plan(layout: dict, *, microbatches: int = 1, precision: dict | None = None, **train: Any) -> Plan:
    config = parse_config(
        {
            "model": {
                "name": "transformer", "num_layers": 2, "embed_dim": 16, "num_heads": 4, "mlp_dim": 16, "gated": False,
                "vocab_multiple": 2, "init_std": 0.3,
            },
            "data": {"sequence_length": T},
            "train": {"num_steps": 30, "batch_size": B, "ema_decay": DECAY, "microbatches": microbatches} | train,
            "precision": {"compute": "float16"} | SCALES if precision is None else precision,
            "optimizer": {"name": "adamw", "learning_rate": 0.01},
            "schedule": {"name": "linear", "warmup_steps": 3},
            "parallel": layout,
        }
    )  # fmt: skip
    num_devices = int(np.prod([layout.get(axis, 1) for axis in ("data", "fsdp", "tensor")]))
    return make_plan(config, jax.devices()[:num_devices], VOCAB)


def _injecting(original: Callable) -> Callable:
    """`token_loss` that overflows where a sequence's segment ids are −1 (the loss) or −2 (the gradient of `STEEP`)."""

    def token_loss(plan: Plan, settings: Any) -> Callable:
        loss = original(plan, settings)

        def injected(params: Any, batch: Any, keys_B: Any) -> tuple:
            sums, experts = loss(params, batch, keys_B)
            infinite = jnp.where((batch["segment_ids"] == -1).any(), jnp.inf, 0.0)
            scale = params["final_norm"]["scale"]
            slope = jnp.where((batch["segment_ids"] == -2).any(), 3e38, 0.0)
            # Of value 0, and of an infinite gradient.
            steep = slope * (slope * (scale - jax.lax.stop_gradient(scale)).sum())
            return sums._replace(loss=sums.loss + infinite + steep), experts

        return injected

    return token_loss


class Record(NamedTuple):
    """A step: what was injected, its metrics, and the states before and after it, on the host."""

    event: str
    metrics: dict[str, float]
    before: TrainState
    after: TrainState


def _run(plan: Plan, events: list[str]) -> list[Record]:
    """A step for each event. Finite ones take batches 0, 1, ..., whatever is between them; the overflow is in the last
    sequence alone."""
    with mock.patch.object(step_module, "token_loss", _injecting(step_module.token_loss)):
        step = Step(plan)
        records = []
        with plan.execution.active():
            state = init_state(plan, step.optimizer)
            for number, event in enumerate(events):
                rows = synthetic_batch(plan, seed=sum(not before for before in events[:number]))
                if event:
                    rows["segment_ids"][-1] = {"loss": -1, "gradient": -2}[event]
                batch = {name: jax.device_put(array, plan.batch_sharding) for name, array in rows.items()}
                before = jax.device_get(state)
                state, metrics = step.train(state, batch)
                values = {name: value.item() for name, value in jax.device_get(metrics).items()}
                records.append(Record(event, values, before, jax.device_get(state)))
    return records


LAYOUTS = {"one device": (ONE, 1), "mesh": (SHARED, 2), "mesh, reduced once": (SHARED | {"zero_stage": 1}, 2)}


@cache
def _float16(layout: str) -> tuple[Plan, list[Record]]:
    shape, microbatches = LAYOUTS[layout]
    plan = _plan(shape, microbatches=microbatches)
    return plan, _run(plan, EVENTS)


def _without_guard(state: TrainState) -> TrainState:
    return dataclasses.replace(state, step=0, guard=None)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_an_overflow_changes_nothing_but_the_scale(layout: str) -> None:
    """Parameters, moments, count of updates and moving average stay bit by bit."""
    _, records = _float16(layout)
    for number, record in enumerate(records):
        assert int(record.after.step) == number + 1
        changed = [
            (np.asarray(a) != np.asarray(b)).any()
            for a, b in zip(*map(jax.tree.leaves, map(_without_guard, (record.before, record.after))), strict=True)
        ]
        if record.event:
            assert not any(changed), f"step {number}"
        else:
            assert all(changed[1:]) or record.metrics["learning_rate"] == 0.0, f"step {number}"
    assert sum(not event for event in EVENTS) == int(records[-1].after.optimizer["count"])


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_first_tensor_that_is_not_finite_is_named(layout: str) -> None:
    plan, records = _float16(layout)
    paths = [parameter.path for parameter in plan.parameters]
    place = {"": -1, "loss": len(paths), "gradient": paths.index(STEEP)}
    assert [record.metrics["nonfinite"] for record in records] == [place[event] for event in EVENTS]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_scale_halves_to_its_floor_and_doubles_to_its_cap(layout: str) -> None:
    """The same on every mesh: one device's one microbatch decides for all."""
    _, records = _float16(layout)
    scale, finite, skipped, at_floor = 1024.0, 0, 0, 0
    seen = set()
    for record in records:
        assert record.metrics["loss_scale"] == scale
        if record.event:
            skipped, finite = skipped + 1, 0
            at_floor = at_floor + 1 if scale == 256.0 else 0
            scale = max(scale / 2, 256.0)
        else:
            finite, at_floor = finite + 1, 0
            if finite == 3:
                scale, finite = min(scale * 2, 2048.0), 0
        guard = record.after.guard
        assert (guard.scale, guard.finite, guard.skipped, guard.in_a_row) == (scale, finite, skipped, at_floor)
        assert (record.metrics["skipped"], record.metrics["skipped_in_a_row"]) == (skipped, at_floor)
        assert guard.scale.dtype == np.float32
        seen.add(scale)
    assert seen == {256.0, 512.0, 1024.0, 2048.0}
    assert max(record.metrics["skipped_in_a_row"] for record in records) == 2


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_schedule_stands_still_at_a_skipped_step(layout: str) -> None:
    plan, records = _float16(layout)
    config = plan.config
    schedule = make_schedule(config.schedule, config.optimizer.learning_rate, config.train.num_steps)
    made = 0
    for record in records:
        assert record.metrics["learning_rate"] == pytest.approx(float(schedule(made)), rel=1e-6)
        made += not record.event


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_run_with_overflows_is_the_run_without_them(layout: str) -> None:
    """Scales are powers of two: they change no float16 number but the smallest."""
    _, records = _float16(layout)
    plan = _plan(ONE)
    straight = _run(plan, [event for event in EVENTS if not event])
    finite = [record for record in records if not record.event]
    for one, other in zip(finite, straight, strict=True):
        assert one.metrics["loss"] == pytest.approx(other.metrics["loss"], rel=2e-3)
    assert straight[-1].metrics["loss"] < straight[0].metrics["loss"]
    ends = [plan.by_path(jax.device_get(run[-1].after.params)) for run in (records, straight)]
    for path, want in ends[1].items():
        np.testing.assert_allclose(ends[0][path], want, rtol=0, atol=0.02 * np.abs(want).max(), err_msg=path)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_moving_average_is_that_of_the_updated_parameters(layout: str) -> None:
    _, records = _float16(layout)
    average = [np.asarray(leaf, np.float64) for leaf in jax.tree.leaves(records[0].before.params)]
    for record in records:
        if not record.event:
            new = jax.tree.leaves(record.after.params)
            average = [DECAY * mean + (1 - DECAY) * leaf for mean, leaf in zip(average, new, strict=True)]
        for mean, leaf in zip(average, jax.tree.leaves(record.after.ema), strict=True):
            assert leaf.dtype == np.float32
            np.testing.assert_allclose(leaf, mean, rtol=1e-5, atol=1e-7)


def test_a_scale_that_is_too_large_comes_down_by_itself_and_no_format_overflows_it() -> None:
    """2²⁴ is beyond float16's largest number, 65504; float16 gradients overflow until it has halved often enough."""
    precision = {"compute": "float16", "scale_initial": 2.0**24, "scale_growth_steps": 4}
    records = _run(_plan(ONE, precision=precision), [""] * 24)
    scales = [record.metrics["loss_scale"] for record in records]
    skipped = [record.metrics["nonfinite"] >= 0 for record in records]
    assert scales[0] == 2.0**24
    assert skipped[0]
    first = skipped.index(False)
    assert scales[first] > 65504
    assert scales[: first + 1] == [2.0 ** (24 - number) for number in range(first + 1)]
    assert sum(skipped[first:]) <= 4, "it grows again, and comes down again"
    assert records[-1].metrics["loss"] < records[0].metrics["loss"]


def test_the_scale_neither_grows_to_infinity_nor_stays_at_nothing() -> None:
    rules = GuardRules(initial=2.0**120, smallest=2.0**-10, largest=2.0**127, growth_steps=1)
    guard = rules.start()
    update = jax.jit(lambda guard, finite: next_guard(guard, finite, rules))
    for _ in range(20):
        guard = update(guard, True)
    assert guard.scale == 2.0**127
    for _ in range(200):
        guard = update(guard, False)
    assert (guard.scale, guard.skipped) == (2.0**-10, 200)
    assert update(guard, True).scale == 2.0**-9


def test_a_fixed_scale_stays() -> None:
    records = _run(_plan(ONE, precision={"compute": "float16", "loss_scale": 512.0}), ["", "gradient", "loss", ""])
    assert [record.metrics["loss_scale"] for record in records] == [512.0] * 4
    assert [record.metrics["skipped_in_a_row"] for record in records] == [0, 1, 2, 0]


@pytest.mark.parametrize("compute", ["float32", "bfloat16"])
def test_without_scaling_a_step_is_skipped_where_that_is_asked_for(compute: str) -> None:
    plan = _plan(SHARED, microbatches=2, precision={"compute": compute}, on_nonfinite="skip")
    records = _run(plan, ["", "gradient", "loss", ""])
    for record in records:
        assert record.after.guard == Guard(record.after.guard.skipped, record.after.guard.in_a_row)
        assert "loss_scale" not in record.metrics
        if record.event:
            before, after = (jax.tree.leaves(_without_guard(state)) for state in (record.before, record.after))
            for a, b in zip(before, after, strict=True):
                np.testing.assert_array_equal(a, b)
    assert [record.metrics["skipped"] for record in records] == [0, 1, 2, 2]
    assert [record.metrics["skipped_in_a_row"] for record in records] == [0, 1, 2, 0]


@pytest.mark.parametrize("compute", ["float32", "bfloat16"])
def test_a_run_that_halts_has_no_guard(compute: str) -> None:
    record, failed = _run(_plan(ONE, precision={"compute": compute}), ["", "gradient"])
    assert record.after.guard is None
    assert record.metrics.keys() == {"loss", "objective", "tokens", "grad_norm", "nonfinite", "learning_rate"}
    assert failed.metrics["nonfinite"] >= 0
    assert not all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(failed.after.params))
