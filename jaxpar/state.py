"""The state of training and its initialisation, sharded from the start."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from jaxpar.config.schema import Config
from jaxpar.extent import Extent
from jaxpar.optim import AT_ONCE, MapUpdates, Optimizer, make_optimizer, make_schedule, role_axes, state_axes
from jaxpar.optim.quantization import num_blocks
from jaxpar.parallel.dispatch import one_at_a_time
from jaxpar.parallel.offload import (
    groups_through_device,
    is_on_host,
    layers_through_device,
    update_layers_on_host,
    update_on_host,
)
from jaxpar.parallel.rules import LogicalAxes, is_stacked, resolve_where_it_divides
from jaxpar.plan import Plan
from jaxpar.precision import Guard, GuardRules

__all__ = [
    "TrainState",
    "abstract_state",
    "guard_rules",
    "init_state",
    "local_bytes",
    "optimizer_of",
    "state_extents",
    "state_shardings",
]


@partial(jax.tree_util.register_dataclass, data_fields=("step", "params", "optimizer", "guard"), meta_fields=())
@dataclass(frozen=True)
class TrainState:
    """All that a step changes.

    `step` counts the steps made (int32), skipped ones too; then come parameters, the optimizer's state (with the
    parameters' moving average, where one is kept), and the guard where steps that are not finite are skipped.
    """

    step: Any
    params: Any
    optimizer: Any
    guard: Guard | None = None

    def parts(self) -> dict[str, Any]:
        """The fields that there are, by name."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: value for name, value in values.items() if value is not None}

    def by_path(self) -> dict[str, Any]:
        """The arrays by path: "step", "params/...", "optimizer/arrays/.../first", "guard/scale"."""
        return {_path(keys): leaf for keys, leaf in jax.tree_util.tree_leaves_with_path(self.parts())}

    def with_arrays(self, arrays: Mapping[str, Any]) -> "TrainState":
        """The state with other arrays, given by path."""
        return TrainState(**jax.tree_util.tree_map_with_path(lambda keys, _: arrays[_path(keys)], self.parts()))

    @property
    def num_updates(self) -> Any:
        """Steps that changed the parameters."""
        return self.step if self.guard is None else self.step - self.guard.skipped

    @property
    def ema(self) -> Any:
        """The parameters' moving average, float32; for `train.ema_decay` > 0."""
        return jax.tree.map(lambda _, arrays: arrays["average"], self.params, self.optimizer["arrays"])

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
        average_decay=config.train.ema_decay,
        map_updates=_map_updates(plan),
        balance_rates={p.path: p.balance_rate for p in plan.parameters if p.balance_rate},
        rows=None if plan.pipeline is None else plan.pipeline.rows_as_laid_out,
    )


def guard_rules(config: Config) -> GuardRules | None:
    """What happens at steps that are not finite; None where they end the run."""
    precision = config.precision
    if isinstance(precision.loss_scale, float):
        return GuardRules(precision.loss_scale, precision.loss_scale, precision.loss_scale)
    if precision.scaling == "dynamic":
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
    return one_at_a_time(jax.jit(partial(_make_state, plan, optimizer), out_shardings=shardings), plan.mesh)()


def state_extents(plan: Plan, state: TrainState) -> dict[str, Extent]:
    """Path → what the array is in every layout, and the rows of its layers in the plan's."""

    def extent(keys: tuple, array: Any, axes: LogicalAxes) -> Extent:
        is_scales = jax.tree_util.keystr(keys[-1:], simple=True).endswith("_scales")
        shape = list(array.shape)
        for dim, axis in enumerate(axes):
            # Of scales there is one for each block along the last dim.
            block_size = getattr(plan.config.optimizer, "block_size", 1) if is_scales and dim + 1 == array.ndim else 1
            if axis == "vocab" and shape[dim] == num_blocks(plan.padded_vocab_size, block_size):
                shape[dim] = num_blocks(plan.vocab_size, block_size)
        if plan.pipeline is None or not is_stacked(axes):
            return Extent(tuple(shape))
        rows = plan.pipeline.rows_as_laid_out(shape[0])
        return Extent((max(rows) + 1, *shape[1:]), rows)

    axes = {
        "params": plan.as_params(plan.axes),
        "optimizer": state_axes(state.optimizer, plan.abstract_params, plan.axes),
    }
    parts = {name: part for name, part in state.parts().items() if name in axes}
    extents = jax.tree_util.tree_map_with_path(extent, parts, axes)
    found = {_path(keys): leaf for keys, leaf in jax.tree_util.tree_leaves_with_path(extents)}
    return {path: found.get(path, Extent(array.shape)) for path, array in state.by_path().items()}


def local_bytes(tree: Any, *, on_host: bool) -> int:
    """Bytes of arrays, or of shapes with shardings, that each device has in its own memory, or in its host's."""
    return sum(
        math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize
        for leaf in jax.tree.leaves(tree)
        if is_on_host(leaf.sharding) == on_host
    )


def _path(keys: tuple) -> str:
    return jax.tree_util.keystr(keys, simple=True, separator="/")


def _shardings(plan: Plan, shapes: TrainState) -> TrainState:
    def place(leaf: jax.ShapeDtypeStruct, axes: LogicalAxes) -> NamedSharding:
        on_host = plan.config.offload.optimizer_state == "host" and leaf.ndim > 0
        return plan.sharding(_spec(plan, leaf.shape, axes), on_host=on_host)

    axes = state_axes(shapes.optimizer, plan.abstract_params, plan.axes)
    return TrainState(
        step=plan.replicated,
        params=plan.param_shardings,
        optimizer=jax.tree.map(place, shapes.optimizer, axes),
        guard=jax.tree.map(lambda _: plan.replicated, shapes.guard),
    )


def _spec(plan: Plan, shape: tuple[int, ...], axes: LogicalAxes) -> PartitionSpec:
    """Of an array of the optimizer's state."""
    return resolve_where_it_divides("optimizer", shape, axes, plan.rules.optimizer, plan.mesh.shape).spec


def _map_updates(plan: Plan) -> MapUpdates:
    """How updates reach arrays that are in the host's memory."""
    offload = plan.config.offload
    if offload.optimizer_state == "none" and offload.parameters == "none":
        return AT_ONCE
    if offload.update_on_host:
        return MapUpdates(layers=update_layers_on_host, others=update_on_host)

    def specs(params: dict[str, jax.Array], arrays: dict[str, dict[str, jax.Array]]) -> Any:
        of_arrays = {
            path: {role: _spec(plan, a.shape, role_axes(role, path, plan.axes[path])) for role, a in roles.items()}
            for path, roles in arrays.items()
        }
        return {path: plan.param_spec(path) for path in params}, of_arrays

    def layers(
        update: Any, shared: Any, indices: jax.Array, gradients: Any, arrays: Any, params: Any
    ) -> tuple[Any, Any]:
        def one(layer: jax.Array, gradients: Any, owned: tuple[Any, Any]) -> tuple[Any, Any]:
            return update(shared, layer, gradients, owned[1], owned[0])

        return layers_through_device(one, len(indices), gradients, (params, arrays), specs(params, arrays))

    def others(update: Any, shared: Any, gradients: Any, arrays: Any, params: Any) -> tuple[Any, Any]:
        def one(path: str, gradient: Any, owned: tuple[Any, Any]) -> tuple[Any, Any]:
            params, arrays = update(shared, None, {path: gradient}, {path: owned[1]}, {path: owned[0]})
            return params[path], arrays[path]

        owned = {path: (params[path], arrays[path]) for path in params}
        changed = groups_through_device(one, gradients, owned)
        return {path: new[0] for path, new in changed.items()}, {path: new[1] for path, new in changed.items()}

    return MapUpdates(layers, others)


def _make_state(plan: Plan, optimizer: Optimizer) -> TrainState:
    params = plan.make_params()
    rules = guard_rules(plan.config)
    return TrainState(
        step=jnp.zeros((), jnp.int32),
        params=params,
        optimizer=optimizer.init(params),
        guard=None if rules is None else rules.start(),
    )
