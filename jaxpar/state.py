"""The state of training and its initialisation, sharded from the start."""

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax

from jaxpar.plan import Plan

__all__ = ["TrainState", "abstract_state", "init_state", "state_shardings"]


@partial(jax.tree_util.register_dataclass, data_fields=("step", "params", "optimizer"), meta_fields=())
@dataclass(frozen=True)
class TrainState:
    """All that a step changes: the number of updates made (int32), parameters, and the optimizer's state."""

    step: Any
    params: Any
    optimizer: Any


def abstract_state(plan: Plan, optimizer: optax.GradientTransformation) -> TrainState:
    """The state as shapes, each with its sharding."""
    shapes = jax.eval_shape(partial(_make_state, plan, optimizer))
    return jax.tree.map(
        lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
        shapes,
        state_shardings(plan, optimizer),
    )


def state_shardings(plan: Plan, optimizer: optax.GradientTransformation) -> TrainState:
    """The state's shardings: the optimizer's table places what mirrors a parameter, the rest is replicated."""
    optimizer_state = optax.tree.map_params(
        optimizer,
        lambda _, sharding: sharding,
        jax.eval_shape(optimizer.init, plan.abstract_params),
        plan.shardings(plan.rules.optimizer),
        transform_non_params=lambda _: plan.replicated,
    )
    return TrainState(step=plan.replicated, params=plan.param_shardings, optimizer=optimizer_state)


def init_state(plan: Plan, optimizer: optax.GradientTransformation) -> TrainState:
    """The initial state, each device computing only what it holds; the values do not depend on the mesh."""
    shardings = state_shardings(plan, optimizer)
    return jax.jit(partial(_make_state, plan, optimizer), out_shardings=shardings)()


def _make_state(plan: Plan, optimizer: optax.GradientTransformation) -> TrainState:
    params = plan.make_params()
    return TrainState(step=jnp.zeros((), jnp.int32), params=params, optimizer=optimizer.init(params))
