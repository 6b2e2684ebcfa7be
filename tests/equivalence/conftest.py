"""Runs of tiny models whose every split dim divides by 8, for comparison between layouts."""

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import jax
import numpy as np
import pytest

from jaxpar.config import Config
from jaxpar.config.optimizers import AdamW
from jaxpar.models import TransformerConfig
from jaxpar.plan import Plan, make_plan
from jaxpar.state import TrainState, init_state
from jaxpar.step import Step
from jaxpar.verify import synthetic_batch

VOCAB_SIZE = 250
NUM_STEPS = 5
BETA1 = 0.9

# Initial weights large enough that attention is far from uniform; heads, widths and sequence divide by 8.
SIZES = {
    "num_layers": 2,
    "embed_dim": 32,
    "num_heads": 8,
    "head_dim": 4,
    "mlp_dim": 64,
    "init_std": 0.2,
    "dropout": 0.1,
}
SMALL = {
    "embed_dim": 16,
    "num_heads": 2,
    "mlp_dim": 32,
    "init_std": 0.3,
    "dropout": 0.1,
    "gated": False,
    "qkv_bias": True,
    "vocab_multiple": 2,
}
MODELS = {
    "gpt2": TransformerConfig(
        **SIZES, activation="gelu", gated=False, norm="layernorm", positions="learned", qkv_bias=True,
        attention_bias=True, mlp_bias=True, tied=True,
    ),
    "llama": TransformerConfig(**SIZES, num_kv_heads=2, tied=False),
    "gemma": TransformerConfig(
        **SIZES, num_kv_heads=1, windows=(5, 0), attention_softcap=5.0, logit_softcap=3.0, qk_norm=True,
        post_norms=True, norm_unit_offset=True, embed_scale=True, activation="gelu",
    ),
    # For pipelines of 4 ranks, and of 8 stages; some stages have a layer more than others.
    "tied-6": TransformerConfig(**SMALL, num_layers=6, tied=True),
    "untied-6": TransformerConfig(**SMALL, num_layers=6, tied=False),
    "tied-9": TransformerConfig(**SMALL, num_layers=9, tied=True),
    "untied-9": TransformerConfig(**SMALL, num_layers=9, tied=False),
    "windowed-8": TransformerConfig(**SMALL, num_layers=8, windows=(5, 0)),
    # The least that compiles fast, for what does not depend on the model.
    "small": TransformerConfig(
        num_layers=2, embed_dim=16, num_heads=4, head_dim=4, mlp_dim=16, init_std=0.3, gated=False, vocab_multiple=2,
    ),
}  # fmt: skip


@dataclass(frozen=True)
class Trace:
    """What a run computed: metrics of each step, the first step's gradients (of AdamW), and at the end the parameters
    and the optimizer's arrays by role, by path."""

    metrics: list[dict[str, float]]
    gradients: dict[str, np.ndarray]
    params: dict[str, np.ndarray]
    optimizer: dict[str, dict[str, np.ndarray]]


def make_config(model: str, layout: dict, **sections: dict) -> Config:
    return Config.model_validate(
        {
            "model": MODELS[model],
            "data": {"sequence_length": 16},
            "train": {"num_steps": NUM_STEPS, "batch_size": 8, "max_grad_norm": float("inf")},
            # Without clipping, AdamW's first moment after one step is (1 − β1) times the gradient. A large epsilon
            # keeps gradients that are mathematically zero (key biases) from being blown up to full steps.
            "optimizer": {"name": "adamw", "learning_rate": 1e-2, "beta1": BETA1, "epsilon": 1e-3},
            "schedule": {"name": "constant"},
            "loss": {"chunk_tokens": 24, "z_loss": 1e-3, "label_smoothing": 0.1},
            "parallel": {"data": 1} | layout,
        }
        | sections
    )


def states(plan: Plan, step: Step) -> Iterator[tuple[TrainState, dict[str, float]]]:
    """State and metrics after each step, each on a batch of its own. A state is gone when the next one is asked for."""
    with plan.execution.active():
        state = init_state(plan, step.optimizer)
        for number in range(plan.config.train.num_steps):
            rows = synthetic_batch(plan, seed=number)
            batch = {name: jax.device_put(array, plan.batch_sharding) for name, array in rows.items()}
            state, values = step.train(state, batch)
            yield state, {name: value.item() for name, value in jax.device_get(values).items()}


def train(config: Config, devices: list[jax.Device]) -> Trace:
    """The configuration's optimizer steps."""
    plan = make_plan(config, devices, VOCAB_SIZE)
    trace = Trace([], {}, {}, {})
    for state, metrics in states(plan, Step(plan)):
        trace.metrics.append(metrics)
        trace.params.update(plan.in_layer_order(plan.by_path(jax.device_get(state.params))))
        arrays = jax.device_get(state.optimizer["arrays"])
        kept = jax.tree.leaves(arrays, is_leaf=lambda node: isinstance(node, dict) and not _has_dicts(node))
        for path, of_roles in zip(trace.params, kept, strict=True):
            trace.optimizer[path] = {role: plan.in_layer_order({path: array})[path] for role, array in of_roles.items()}
        if len(trace.metrics) == 1 and isinstance(config.optimizer, AdamW):
            trace.gradients.update({path: kept["first"] / (1 - BETA1) for path, kept in trace.optimizer.items()})
    return trace


def _has_dicts(node: dict) -> bool:
    return any(isinstance(value, dict) for value in node.values())


def same_traces(found: Trace, expected: Trace) -> None:
    for step, (got, want) in enumerate(zip(found.metrics, expected.metrics, strict=True)):
        assert got.keys() == want.keys()
        for metric in want:
            np.testing.assert_allclose(got[metric], want[metric], rtol=2e-5, err_msg=f"{metric} of step {step}")
    assert_close("gradient", found.gradients, expected.gradients)
    assert_close("parameter", found.params, expected.params)


def assert_close(what: str, found: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> None:
    """Each array to 1e-4 of its largest entry; the absolute part is for what is zero but for rounding (a key bias)."""
    assert found.keys() == expected.keys()
    for path, want in expected.items():
        tolerance = 1e-4 * np.abs(want).max() + 1e-6
        np.testing.assert_allclose(found[path], want, rtol=0, atol=tolerance, err_msg=f"{what} {path}")


@functools.cache
def one_device(model: str, boundaries: str = "respect", products: str = "compute") -> Trace:
    data = {"sequence_length": 16, "document_boundaries": boundaries}
    precision = {"products": products, "emulate_float8": products == "float8"}
    return train(make_config(model, {}, data=data, precision=precision), jax.devices()[:1])


@pytest.fixture(scope="session")
def reference() -> Callable[..., Trace]:
    """The trace of a model on one device: `reference(model, boundaries="respect", products="compute")`."""
    return one_device


@pytest.fixture(scope="session")
def layout_run() -> Callable[..., Trace]:
    """The trace of a model on 8 devices: `layout_run(model, layout, **sections)`."""
    return lambda model, layout, **sections: train(make_config(model, layout, **sections), jax.devices())


@pytest.fixture(scope="session")
def run_of() -> Callable[..., Trace]:
    """The trace of a configuration: `run_of(config, devices)`."""
    return train


@pytest.fixture(scope="session")
def config_for() -> Callable[..., Config]:
    """The configuration of a model in a layout: `config_for(model, layout, **sections)`."""
    return make_config


@pytest.fixture(scope="session")
def assert_same() -> Callable[[Trace, Trace], None]:
    """Fails unless two traces are the same but for rounding: `assert_same(found, expected)`."""
    return same_traces
