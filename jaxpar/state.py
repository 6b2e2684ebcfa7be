"""The state of training and its initialisation, sharded from the start."""

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding

from jaxpar.config.schema import Config
from jaxpar.optim import Optimizer, make_optimizer, make_schedule, state_axes
from jaxpar.parallel.rules import LogicalAxes, resolve_where_it_divides
from jaxpar.plan import Plan
from jaxpar.precision import Guard, GuardRules

__all__ = ["TrainState", "abstract_state", "guard_rules", "init_state", "optimizer_of", "state_shardings"]


@partial(jax.tree_util.register_dataclass, data_fields=("step", "params", "optimizer", "guard", "ema"), meta_fields=())
@dataclass(frozen=True)
class TrainState:
    """All that a step changes.

    `step` counts the steps made (int32), skipped ones too; then come parameters, the optimizer's state, the guard
    where steps that are not finite are skipped, and the parameters' moving average (float32) where one is kept.
    """

    step: Any
    params: Any
    optimizer: Any
    guard: Guard | None = None
    ema: Any = None

    @property
    def num_updates(self) -> Any:
        """Steps that changed the parameters."""
        return self.step if self.guard is None else self.step - self.guard.skipped

    def evaluated(self, config: Config) -> Any:
        """The parameters that `evaluation.parameters` names."""
        return self.ema if config.evaluation.parameters == "ema" else self.params


def optimizer_of(plan: Plan) -> Optimizer:
    """The run's optimizer."""
    config = plan.config
    schedule = make_schedule(config.schedule, config.optimizer.learning_rate, config.train.num_steps)
    return make_optimizer(
        config.optimizer,
        schedule,
        plan.axes,
        seed=config.run.seed,
        master_weights=config.precision.master_weights,
        rounding=config.precision.rounding,
    )


def guard_rules(config: Config) -> GuardRules | None:
    """What happens at steps that are not finite; None where they end the run."""
    precision = config.precision
    if isinstance(precision.loss_scale, float):
        return GuardRules(precision.loss_scale, precision.loss_scale, precision.loss_scale)
    if precision.loss_scale == "dynamic" or precision.compute == "float16":
        return GuardRules(
            precision.scale_initial, precision.scale_min, precision.scale_max, precision.scale_growth_steps
        )
    return GuardRules(None) if config.train.on_nonfinite == "skip" else None


def abstract_state(plan: Plan, optimizer: Optimizer) -> TrainState:
    """The state as shapes, each with its sharding."""
    shapes = jax.eval_shape(partial(_make_state, plan, optimizer))
    return jax.tree.map(
        lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
        shapes,
        _shardings(plan, shapes),
    )


def state_shardings(plan: Plan, optimizer: Optimizer) -> TrainState:
    """The state's shardings: the optimizer's table places its state and the moving average."""
    return _shardings(plan, jax.eval_shape(partial(_make_state, plan, optimizer)))


def init_state(plan: Plan, optimizer: Optimizer) -> TrainState:
    """The initial state, each device computing only what it holds; the values do not depend on the mesh."""
    shardings = state_shardings(plan, optimizer)
    return jax.jit(partial(_make_state, plan, optimizer), out_shardings=shardings)()


def _shardings(plan: Plan, shapes: TrainState) -> TrainState:
    def place(leaf: jax.ShapeDtypeStruct, axes: LogicalAxes) -> NamedSharding:
        spec = resolve_where_it_divides("optimizer", leaf.shape, axes, plan.rules.optimizer, plan.mesh.shape).spec
        return NamedSharding(plan.mesh, spec)

    axes = state_axes(shapes.optimizer, plan.abstract_params, plan.axes)
    return TrainState(
        step=plan.replicated,
        params=plan.param_shardings,
        optimizer=jax.tree.map(place, shapes.optimizer, axes),
        guard=jax.tree.map(lambda _: plan.replicated, shapes.guard),
        ema=None if shapes.ema is None else plan.shardings(plan.rules.optimizer),
    )


def _make_state(plan: Plan, optimizer: Optimizer) -> TrainState:
    params = plan.make_params()
    rules = guard_rules(plan.config)
    return TrainState(
        step=jnp.zeros((), jnp.int32),
        params=params,
        optimizer=optimizer.init(params),
        guard=None if rules is None else rules.start(),
        ema=jax.tree.map(lambda p: p.astype(jnp.float32), params) if plan.config.train.ema_decay else None,
    )
