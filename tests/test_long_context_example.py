"""The example of a shared sequence trains in a memory in which one device has no room for the whole sequence."""

from functools import cache
from pathlib import Path

import jax
import pytest

from jaxpar.config import load_config
from jaxpar.inspect import compile_step
from jaxpar.parallel.program import memory_table
from jaxpar.plan import Plan, make_plan
from jaxpar.state import init_state
from jaxpar.step import Step
from jaxpar.verify import synthetic_batch

CONFIG = Path(__file__).parents[1] / "configs" / "long_context.toml"
LIMIT_BYTES = 128 * 2**20


def planned(*overrides: str) -> Plan:
    config = load_config(CONFIG, overrides)
    return make_plan(config, jax.devices()[: config.parallel.data * config.parallel.context], 257)


@cache
def step_bytes(*overrides: str) -> int:
    """Of each device: what the compiled step is given and what it needs beside it."""
    memory = memory_table(compile_step(planned(*overrides)))
    return memory["argument_bytes"] + memory["temp_bytes"]


@pytest.mark.parametrize("method", ["ring", "all_gather", "ulysses"])
def test_it_fits_where_the_whole_sequence_does_not(method: str) -> None:
    assert step_bytes(f"parallel.context_method={method}") <= LIMIT_BYTES < step_bytes("parallel.context=1") / 2


def test_it_trains() -> None:
    """With one of its sequences, to be fast."""
    plan = planned("schedule.warmup_steps=0", "parallel.data=1", "train.batch_size=1")
    assert plan.mesh.shape["context"] == 4
    step, losses = Step(plan), []
    with plan.execution.active():
        state = init_state(plan, step.optimizer)
        rows = synthetic_batch(plan)
        batch = {name: jax.device_put(array, plan.batch_sharding) for name, array in rows.items()}
        for _ in range(2):
            state, metrics = step.train(state, batch)
            losses.append(metrics["loss"].item())
    assert losses[1] < losses[0] < 6.0
