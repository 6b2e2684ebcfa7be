"""Parameters kept in bfloat16 alone: small updates that rounding to nearest loses, through the real step."""

from functools import cache

import jax
import numpy as np
import pytest

from jaxpar.config import parse_config
from jaxpar.plan import make_plan
from jaxpar.state import init_state
from jaxpar.step import Step
from jaxpar.verify import synthetic_batch

FORMATS = {
    "float32": {},
    "nearest": {"parameters": "bfloat16"},
    "stochastic": {"parameters": "bfloat16", "rounding": "stochastic"},
    "master weights": {"parameters": "bfloat16", "master_weights": True},
}


@cache
def _losses(formats: str, layout: tuple = ()) -> list[float]:
    """A hundred small steps on one batch."""
    table = {
        "model": {
            "name": "transformer", "num_layers": 2, "embed_dim": 16, "num_heads": 4, "mlp_dim": 32, "init_std": 0.3,
            "vocab_multiple": 2,
        },
        "data": {"sequence_length": 16},
        "train": {"num_steps": 100, "batch_size": 8},
        "precision": FORMATS[formats],
        "optimizer": {"name": "sgd", "momentum": 0.0, "learning_rate": 0.003, "weight_decay": 0.0},
        "schedule": {"name": "constant"},
        "parallel": dict(layout) or {"data": 1},
    }  # fmt: skip
    plan = make_plan(parse_config(table), jax.devices()[: 8 if layout else 1], 40)
    step, losses = Step(plan), []
    rows = synthetic_batch(plan)
    with plan.execution.active():
        state = init_state(plan, step.optimizer)
        batch = {name: jax.device_put(array, plan.batch_sharding) for name, array in rows.items()}
        for _ in range(plan.config.train.num_steps):
            state, metrics = step.train(state, batch)
            losses.append(float(metrics["loss"]))
    return losses


@pytest.mark.parametrize(
    ("formats", "least", "most"), [("nearest", 0.0, 0.4), ("stochastic", 0.9, 1.1), ("master weights", 0.9, 1.1)]
)
def test_small_steps_count(formats: str, least: float, most: float) -> None:
    """As shares of what float32 parameters gain."""
    gains = {name: _losses(name)[0] - _losses(name)[-1] for name in ("float32", formats)}
    assert gains["float32"] > 0.1
    assert least < gains[formats] / gains["float32"] < most


def test_random_bits_are_the_same_on_every_mesh() -> None:
    layout = {"data": 2, "fsdp": 2, "tensor": 2, "sequence_parallel": True}
    np.testing.assert_allclose(_losses("stochastic", tuple(layout.items())), _losses("stochastic"), rtol=2e-3)
