"""The example of a pipeline is the quickstart in another layout: the same losses, whatever the schedule."""

from functools import cache
from pathlib import Path

import jax
import pytest

from jaxpar.config import Config, load_config
from jaxpar.plan import make_plan
from jaxpar.state import init_state
from jaxpar.step import Step
from jaxpar.verify import synthetic_batch

CONFIGS = Path(__file__).parents[1] / "configs"
SHORT = ("data.sequence_length=16", "schedule.warmup_steps=0")
NUM_STEPS = 4


@cache
def losses(example: str, *overrides: str) -> list[float]:
    """Of the first steps, on sequences that are shorter."""
    config = load_config(CONFIGS / example, [*SHORT, *overrides])
    plan = make_plan(config, jax.devices(), 257)
    step = Step(plan)
    found = []
    with plan.execution.active():
        state = init_state(plan, step.optimizer)
        for number in range(NUM_STEPS):
            rows = synthetic_batch(plan, seed=number)
            state, metrics = step.train(
                state, {name: jax.device_put(a, plan.batch_sharding) for name, a in rows.items()}
            )
            found.append(metrics["loss"].item())
    return found


def test_the_examples_differ_in_their_layout_alone() -> None:
    def rest(config: Config) -> Config:
        return config.model_copy(update=dict.fromkeys(("run", "parallel", "pipeline")))

    pipeline, quickstart = (load_config(CONFIGS / name) for name in ("pipeline.toml", "quickstart.toml"))
    assert rest(pipeline) == rest(quickstart)
    layout = pipeline.parallel
    assert (layout.pipe, layout.tensor, pipeline.pipeline.schedule) == (4, 2, "1f1b")


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved", "zb_h1", "zb_v"])
def test_the_losses_are_those_of_the_quickstart(schedule: str) -> None:
    expected = losses("quickstart.toml")
    assert losses("pipeline.toml", f"pipeline.schedule={schedule}") == pytest.approx(expected, rel=2e-5)
    assert len({round(loss, 2) for loss in expected}) > 1
