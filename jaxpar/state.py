"""The state of training and its initialisation, sharded from the start."""

import math
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding

from jaxpar.optim import Optimizer, state_axes
from jaxpar.parallel.rules import LogicalAxes, resolve
from jaxpar.plan import Plan

__all__ = ["TrainState", "abstract_state", "init_state", "state_shardings"]


@partial(jax.tree_util.register_dataclass, data_fields=("step", "params", "optimizer"), meta_fields=())
@dataclass(frozen=True)
class TrainState:
    """All that a step changes: the number of updates made (int32), parameters, and the optimizer's state."""

    step: Any
    params: Any
    optimizer: Any


def abstract_state(plan: Plan, optimizer: Optimizer) -> TrainState:
    """The state as shapes, each with its sharding."""
    shapes = jax.eval_shape(partial(_make_state, plan, optimizer))
    return jax.tree.map(
        lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
        shapes,
        state_shardings(plan, optimizer),
    )


def state_shardings(plan: Plan, optimizer: Optimizer) -> TrainState:
    """The state's shardings; the optimizer's by its own table, where a dim that does not divide is whole everywhere."""

    def place(leaf: jax.ShapeDtypeStruct, axes: LogicalAxes) -> NamedSharding:
        axes = tuple(name if _divides(plan, size, name) else None for size, name in zip(leaf.shape, axes, strict=True))
        layout = resolve("optimizer state", leaf.shape, axes, plan.rules.optimizer, plan.mesh.shape)
        return NamedSharding(plan.mesh, layout.spec)

    abstract = jax.eval_shape(optimizer.init, plan.abstract_params)
    optimizer_state = jax.tree.map(place, abstract, state_axes(abstract, plan.abstract_params, plan.axes))
    return TrainState(step=plan.replicated, params=plan.param_shardings, optimizer=optimizer_state)


def init_state(plan: Plan, optimizer: Optimizer) -> TrainState:
    """The initial state, each device computing only what it holds; the values do not depend on the mesh."""
    shardings = state_shardings(plan, optimizer)
    return jax.jit(partial(_make_state, plan, optimizer), out_shardings=shardings)()


def _make_state(plan: Plan, optimizer: Optimizer) -> TrainState:
    params = plan.make_params()
    return TrainState(step=jnp.zeros((), jnp.int32), params=params, optimizer=optimizer.init(params))


def _divides(plan: Plan, size: int, axis: str | None) -> bool:
    mesh_axes = plan.rules.optimizer[axis] if axis else ()
    return size % math.prod(plan.mesh.shape[mesh_axis] for mesh_axis in mesh_axes) == 0
