"""The bytes of a run's state, part by part, on a device and on its host: from shapes and places alone."""

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax

from jaxpar.optim import Optimizer, state_axes
from jaxpar.parallel.rules import Resolved, resolve_where_it_divides
from jaxpar.plan import Plan
from jaxpar.state import abstract_state, local_bytes

__all__ = ["OptimizerArray", "Part", "abstract_gradients", "optimizer_arrays", "state_parts"]

_PARTS_OF_ROLES = {"master": "master weights", "average": "moving average"}


@dataclass(frozen=True)
class Part:
    """One part of the state.

    `formats` are its dtypes. `device_bytes` are in a device's memory and `host_bytes` in its host's for this device;
    `total_bytes` are those of the whole arrays, each counted once.
    """

    name: str
    formats: tuple[str, ...]
    elements: int
    device_bytes: int
    host_bytes: int
    total_bytes: int


@dataclass(frozen=True)
class OptimizerArray:
    """One array of the optimizer's state: a parameter's path, the array's role, and how it lies."""

    path: str
    role: str
    shape: tuple[int, ...]
    local_bytes: int
    layout: Resolved


def state_parts(plan: Plan, optimizer: Optimizer) -> list[Part]:
    """Parameters, gradients, optimizer state, and what else the run keeps; all but gradients live from step to step."""
    state = abstract_state(plan, optimizer)
    parts: dict[str, list[Any]] = defaultdict(list)
    parts["parameters"] = jax.tree.leaves(state.params)
    parts["gradients"] = jax.tree.leaves(abstract_gradients(plan))
    for arrays in _by_parameter(plan, state.optimizer["arrays"]).values():
        for role, array in arrays.items():
            parts[_PARTS_OF_ROLES.get(role, "optimizer")].append(array)
    parts["counters"] = jax.tree.leaves((state.step, state.optimizer["count"], state.guard))
    return [_part(name, arrays) for name, arrays in parts.items()]


def abstract_gradients(plan: Plan) -> Any:
    """The gradients as shapes with shardings, as the backward pass leaves them.

    Sums over several microbatches, of accumulation or of a pipeline, are float32; others have their parameter's format.
    """

    in_float32 = plan.config.train.microbatches > 1 or plan.pipeline is not None

    def gradient(parameter: jax.ShapeDtypeStruct, place: jax.sharding.NamedSharding) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(parameter.shape, "float32" if in_float32 else parameter.dtype, sharding=place)

    return jax.tree.map(gradient, plan.abstract_params, plan.shardings(plan.rules.gradients))


def optimizer_arrays(plan: Plan, optimizer: Optimizer) -> list[OptimizerArray]:
    """Every array that the optimizer keeps for a parameter."""
    state = abstract_state(plan, optimizer).optimizer
    axes = _by_parameter(plan, state_axes(state, plan.abstract_params, plan.axes)["arrays"])
    found = []
    for path, arrays in _by_parameter(plan, state["arrays"]).items():
        for role, array in arrays.items():
            table, sizes = plan.rules.optimizer, plan.mesh.shape
            layout = resolve_where_it_divides(f"{path} {role}", array.shape, axes[path][role], table, sizes)
            local_bytes = math.prod(layout.local_shape) * array.dtype.itemsize
            found.append(OptimizerArray(path, role, tuple(array.shape), local_bytes, layout))
    return found


def _by_parameter(plan: Plan, tree: Any) -> dict[str, Any]:
    """Path → what a pytree that begins like the parameters has in each one's place."""
    places: list[Any] = []
    jax.tree.map(lambda _, place: places.append(place), plan.abstract_params, tree)
    return {parameter.path: place for parameter, place in zip(plan.parameters, places, strict=True)}


def _part(name: str, arrays: Sequence[jax.ShapeDtypeStruct]) -> Part:
    return Part(
        name,
        formats=tuple(dict.fromkeys(array.dtype.name for array in arrays)),
        elements=sum(array.size for array in arrays),
        device_bytes=local_bytes(arrays, on_host=False),
        host_bytes=local_bytes(arrays, on_host=True),
        total_bytes=sum(array.size * array.dtype.itemsize for array in arrays),
    )
