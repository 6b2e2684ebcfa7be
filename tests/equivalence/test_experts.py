"""Layers of experts on every layout compute what one device computes: loss, every gradient, loads, dropped tokens."""

from functools import cache
from typing import Any

import jax
import numpy as np
import pytest

from jaxpar.config import Config
from jaxpar.inspect import compile_step
from jaxpar.models import TransformerConfig
from jaxpar.models.experts_config import (
    ExpertChoice,
    ExpertsConfig,
    GShardTop2,
    Hierarchical,
    NoisyTopK,
    SigmoidTopK,
    SwitchTop1,
    TopK,
)
from jaxpar.parallel.collectives import parse_collectives
from jaxpar.plan import Plan, make_plan
from jaxpar.state import init_state
from jaxpar.step import Step
from jaxpar.traffic import expected_traffic
from jaxpar.verify import synthetic_batch

VOCAB_SIZE, NUM_STEPS, BETA1 = 100, 3, 0.9
MODEL = TransformerConfig(
    num_layers=4, embed_dim=16, num_heads=2, mlp_dim=16, tied=True, init_std=0.3, dropout=0.1, vocab_multiple=2
)
ROUTERS: dict[str, dict[str, Any]] = {
    "top_k": {"router": TopK(balance_coefficient=1.0, z_coefficient=0.1), "num_shared": 1},
    "switch": {"router": SwitchTop1(balance_coefficient=1.0, jitter=0.2), "every": 2, "dropout": 0.3},
    "gshard": {"router": GShardTop2(balance_coefficient=1.0), "every": 2, "group_tokens": 8},
    "noisy_top_k": {"router": NoisyTopK(), "every": 2},
    "sigmoid": {
        "router": SigmoidTopK(
            experts_per_token=2, num_nodes=2, nodes_per_token=1, bias_rate=0.1, balance_coefficient=0.1
        )
    },
    "expert_choice": {"router": ExpertChoice(), "every": 2},
    "hierarchical": {"router": Hierarchical(num_branches=2, branches_per_token=1, experts_per_branch=1), "every": 2},
}
LAYOUTS: dict[str, tuple[dict[str, int], dict[str, dict[str, Any]]]] = {
    "expert 4, data 2": ({"expert": 4, "data": 2}, {}),
    "expert 2, fsdp 2, tensor 2": ({"expert": 2, "fsdp": 2, "tensor": 2}, {"train": {"microbatches": 2}}),
    "pipe 2, expert 2, tensor 2": (
        {"pipe": 2, "expert": 2, "tensor": 2},
        {"pipeline": {"schedule": "1f1b", "microbatches": 4}},
    ),
    "pipe 2 split, expert 2, data 2": (
        {"pipe": 2, "expert": 2, "data": 2},
        {"pipeline": {"schedule": "zb_h1", "microbatches": 4}, "remat": {"policy": "full"}},
    ),
}
CASES = [
    ("top_k", "expert 4, data 2"),
    ("top_k", "pipe 2, expert 2, tensor 2"),
    ("switch", "expert 2, fsdp 2, tensor 2"),
    ("gshard", "expert 4, data 2"),
    ("gshard", "pipe 2 split, expert 2, data 2"),
    ("noisy_top_k", "expert 2, fsdp 2, tensor 2"),
    ("sigmoid", "pipe 2, expert 2, tensor 2"),
    ("sigmoid", "expert 2, fsdp 2, tensor 2"),
    ("expert_choice", "expert 4, data 2"),
    ("hierarchical", "expert 2, fsdp 2, tensor 2"),
]


def plan_of(
    router: str, layout: dict[str, int], num_devices: int, dropout: float | None = None, **sections: Any
) -> Plan:
    own = ROUTERS[router] if dropout is None else ROUTERS[router] | {"dropout": dropout}
    model = MODEL.model_copy(update={"experts": ExpertsConfig(num_experts=4, **own)})
    train = {"num_steps": NUM_STEPS, "batch_size": 16, "max_grad_norm": float("inf")}
    config = Config.model_validate(
        {
            "model": model,
            "data": {"sequence_length": 16},
            "optimizer": {"name": "adamw", "learning_rate": 1e-2, "beta1": BETA1, "epsilon": 1e-3},
            "schedule": {"name": "constant"},
            "parallel": {"data": 1} | layout,
            "kernels": {"attention": "reference"},
        }
        | sections
        | {"train": train | sections.get("train", {})}
    )
    return make_plan(config, jax.devices()[:num_devices], VOCAB_SIZE)


def trace(plan: Plan) -> tuple[list[dict[str, Any]], dict[str, np.ndarray]]:
    """Metrics of the steps, and the parameters after them; some tokens are padding."""
    step, found = Step(plan), []
    with plan.execution.active():
        state = init_state(plan, step.optimizer)
        for number in range(NUM_STEPS):
            rows = synthetic_batch(plan, seed=number)
            rows["segment_ids"][:, -3:] = 0
            rows["loss_mask"][:, -3:] = False
            batch = {name: jax.device_put(array, plan.batch_sharding) for name, array in rows.items()}
            state, metrics = step.train(state, batch)
            found.append(jax.device_get(metrics))
    return found, plan.in_layer_order(plan.by_path(jax.device_get(state.params)))


@cache
def one_device(router: str) -> tuple[list[dict[str, Any]], dict[str, np.ndarray]]:
    return trace(plan_of(router, {}, 1))


@pytest.mark.parametrize(("router", "layout"), CASES)
def test_a_layout_equals_one_device(router: str, layout: str) -> None:
    axes, sections = LAYOUTS[layout]
    metrics, params = trace(plan_of(router, axes, 8, **sections))
    wanted_metrics, wanted = one_device(router)
    for number, (got, want) in enumerate(zip(metrics, wanted_metrics, strict=True)):
        assert got.keys() == want.keys()
        for name, value in want.items():
            # A choice between two experts that is nearly a tie may fall the other way after steps.
            atol = 1e-6 if number == 0 else 0.02
            np.testing.assert_allclose(got[name], value, rtol=2e-5, atol=atol, err_msg=f"{name} of step {number}")
    for path, want in wanted.items():
        np.testing.assert_allclose(params[path], want, rtol=0, atol=2e-3 * np.abs(want).max() + 1e-5, err_msg=path)


def test_groups_that_do_not_divide_a_sequence_are_refused() -> None:
    message = r"^model\.experts\.group_tokens=8 must divide data\.sequence_length=12; nearest legal values: 6, or 0 for"
    with pytest.raises(ValueError, match=message):
        plan_of("gshard", {}, 1, data={"sequence_length": 12})


def test_dropout_within_experts_changes_the_loss() -> None:
    dropped = one_device("switch")[0][0]["loss"]
    without = trace(plan_of("switch", {}, 1, dropout=0.0))[0][0]["loss"]
    assert abs(dropped - without) > 1e-3


@pytest.mark.parametrize("router", ROUTERS)
def test_a_router_learns_and_says_what_it_does(router: str) -> None:
    metrics, params = one_device(router)
    plan = plan_of(router, {}, 1)
    with plan.execution.active():
        first = plan.by_path(jax.device_get(jax.jit(plan.make_params)()))
    routers = [path for path in params if "/router/" in path]
    assert routers
    for path in routers:
        assert np.abs(params[path] - first[path]).max() > 1e-4, path
    for values in metrics:
        load = values["experts/load"]
        np.testing.assert_allclose(load.sum(-1), 1.0, rtol=1e-5)
        assert values["experts/max_violation"] == pytest.approx(load.max() * 4 - 1, rel=1e-4)
        assert 0 <= values["experts/dropped_share"] < 0.8
        assert 0 < values["experts/entropy"] <= np.log(4) + 1e-5
        has_loss = router != "expert_choice"
        assert (values["experts/auxiliary_loss"] > 0) == has_loss
        expected = values["loss"] + values["experts/auxiliary_loss"]
        assert values["objective"] == pytest.approx(expected, rel=1e-5)
    if router == "sigmoid":
        steps = np.abs(params["blocks/mlp/router/balance_bias"]) / 0.1
        np.testing.assert_allclose(steps, steps.round(), atol=1e-4)
        assert set(steps.round().ravel()) <= {1.0, 3.0}, "up or down in each of three steps"


@pytest.mark.parametrize("layout", ["expert 4, data 2", "expert 2, fsdp 2, tensor 2"])
def test_what_travels_is_what_the_formula_says(layout: str) -> None:
    """Groups of 8 tokens, with 5 places in each of 4 experts: to them and back, and the gradients."""
    axes, sections = LAYOUTS[layout]
    plan = plan_of("gshard", axes, 8, **sections)
    text = compile_step(plan).as_text()
    assert text is not None
    found = [c for c in parse_collectives(text, plan.mesh.shape) if c.kind == "all-to-all"]
    (expected,) = (item for item in expected_traffic(plan) if item.traffic.kind == "all-to-all")
    assert {c.axes for c in found} == {expected.axes} == {("expert",)}
    assert sum(c.count for c in found) == expected.traffic.count
    assert sum(c.count * c.payload_bytes for c in found) == expected.traffic.payload_bytes
    # Two layers have experts; sequences of a device in all microbatches, two groups each.
    groups = 16 // (plan.mesh.shape["data"] * plan.mesh.shape["fsdp"] * plan.mesh.shape["expert"]) * 2
    assert expected.traffic.payload_bytes == 2 * 4 * groups * 4 * 5 * 16 * 4
