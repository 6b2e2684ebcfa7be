"""N steps with every optimizer in every ZeRO stage on a mesh equal N steps on one device that splits nothing.

With AdamW also for other meshes, and with the gradients of the first step.
"""

import functools

import jax
import numpy as np
import pytest

from jaxpar.config.optimizers import SGD, SM3, Adafactor, AdamW, AdamW8bit, Lion, Muon, OptimizerConfig
from jaxpar.optim.build import RULES

NUM_STEPS = 3
LAYOUT = {"data": 2, "fsdp": 2, "tensor": 2, "sequence_parallel": True}
# Rates at which three steps change the loss; small blocks, and matrices large enough to be factored.
OPTIMIZERS: dict[str, OptimizerConfig] = {
    "adamw": AdamW(learning_rate=1e-2, epsilon=1e-3),
    "adamw-bfloat16-moments": AdamW(learning_rate=1e-2, epsilon=1e-3, moments="bfloat16"),
    "adamw8bit": AdamW8bit(learning_rate=1e-2, epsilon=1e-3, min_size=256, block_size=8),
    "sgd": SGD(learning_rate=0.3),
    "adafactor": Adafactor(learning_rate=0.1, min_dim_size_to_factor=4),
    "sm3": SM3(learning_rate=0.1),
    "lion": Lion(learning_rate=3e-3),
    "muon": Muon(learning_rate=1e-2, adam_epsilon=1e-3),
}
CASES = [(name, stage, 1 + (number + stage) % 2) for number, name in enumerate(OPTIMIZERS) for stage in (0, 1, 2, 3)]


# What is rounded to 8 or 16 bits, or to a sign, can go the other way where layouts sum in another order.
MAY_ROUND_OTHERWISE = ("adamw-bfloat16-moments", "adamw8bit", "lion")


@pytest.fixture(scope="module")
def run(config_for, run_of):
    """`run(optimizer, layout, microbatches)`: its trace; without a layout on one device."""

    @functools.cache
    def cached(name: str, layout: tuple, microbatches: int):
        train = {"num_steps": NUM_STEPS, "batch_size": 8, "microbatches": microbatches}
        optimizer = OPTIMIZERS[name].model_dump()
        config = config_for("small", dict(layout), train=train, optimizer=optimizer, loss={"z_loss": 1e-3})
        return run_of(config, jax.devices()[: 8 if layout else 1])

    return lambda name, layout=None, microbatches=1: cached(name, tuple((layout or {}).items()), microbatches)


def test_there_is_every_optimizer():
    assert {type(config) for config in OPTIMIZERS.values()} == RULES.keys()
    assert {(name, microbatches) for name, _, microbatches in CASES} == {
        (name, m) for name in OPTIMIZERS for m in (1, 2)
    }


@pytest.mark.parametrize(("name", "stage", "microbatches"), CASES)
def test_every_optimizer_in_every_stage_equals_one_device(name, stage, microbatches, run):
    found, expected = run(name, LAYOUT | {"zero_stage": stage}, microbatches), run(name)
    assert_same(found, expected, rounded=name in MAY_ROUND_OTHERWISE)
    losses = [metrics["loss"] for metrics in expected.metrics]
    assert losses[-1] < losses[0] - 0.02, "the steps must be large enough to tell"


@pytest.mark.parametrize("microbatches", [1, 2])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_replicas_of_sharded_groups_equal_one_device(stage, microbatches, config_for, run_of, llama_on_one_device):
    layout = {"data": 2, "fsdp": 4, "zero_stage": stage}
    train = {"num_steps": NUM_STEPS, "batch_size": 16, "microbatches": microbatches}
    assert_same(run_of(config_for("llama", layout, train=train), jax.devices()), llama_on_one_device)


@pytest.fixture(scope="module")
def llama_on_one_device(config_for, run_of):
    config = config_for("llama", {}, train={"num_steps": NUM_STEPS, "batch_size": 16})
    return run_of(config, jax.devices()[:1])


def assert_same(found, expected, *, rounded: bool = False):
    for step, (got, want) in enumerate(zip(found.metrics, expected.metrics, strict=True)):
        assert got.keys() == want.keys()
        for metric in want:
            np.testing.assert_allclose(got[metric], want[metric], rtol=1e-4, err_msg=f"{metric} of step {step}")
    assert_close("parameter", found.params, expected.params, rounded)
    assert found.optimizer.keys() == expected.optimizer.keys()
    for path, arrays in expected.optimizer.items():
        assert_close(path, found.optimizer[path], arrays, rounded)


def assert_close(what: str, found: dict, expected: dict, rounded: bool):
    """Each array to 1e-4 of its largest entry; of rounded ones all but one entry in 500."""
    assert found.keys() == expected.keys()
    for name, want in expected.items():
        want, got = np.asarray(want, np.float64), np.asarray(found[name], np.float64)
        beyond = np.abs(got - want) > 1e-4 * np.abs(want).max() + 1e-6
        assert beyond.sum() <= rounded * np.ceil(want.size / 500), f"{what} {name}: {got[beyond]} for {want[beyond]}"
