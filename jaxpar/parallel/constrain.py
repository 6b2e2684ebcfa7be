"""How a model is executed while it is traced, and `constrain`, which lays out an activation by the names of its dims.

Models name dims; they know no mesh. `make_plan` builds an `Execution`, the step activates it while it traces, and the
functions of this package that models call (`constrain`, `contract`, `scan_layers`, attention) read it. Without an
active execution they are the plain mathematics on one device.
"""

import contextlib
import math
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import jax
from jax.sharding import Mesh

from jaxpar.parallel.rules import LogicalAxes, Table, resolve

__all__ = [
    "Execution",
    "automatic",
    "constrain",
    "constrain_gradient",
    "constrain_stored",
    "current_execution",
    "manual_batch_axes",
    "num_shards",
    "record_call",
    "recorded_calls",
    "reduction_format",
]


@dataclass(frozen=True, eq=False)
class Execution:
    """What the functions that models call need to know of the plan.

    `params`, `activations` and `gradients` are tables of the plan's. `remat` wraps the body of one layer (the identity
    keeps every activation). `reduction` is the format in which weights' gradients are summed over devices.
    `float32_products` asks for matrix products of 16-bit operands in float32 before they are rounded;
    `transposed_weight_gradients` writes weight gradients on transposed operands: on some backends either decides the
    speed by factors, on none the mathematics. `products` is the format of the operands of `contract`: "compute" (as
    they come), "float8", or "emulated_float8" (rounded to float8, multiplied as they come). `context_method` is how
    attention works where devices share a sequence. `split_backward` keeps the gradients of layers' weights apart from
    those of their inputs.
    """

    mesh: Mesh | None = None
    params: Table = field(default_factory=dict)
    activations: Table = field(default_factory=dict)
    gradients: Table = field(default_factory=dict)
    remat: Callable[[Callable], Callable] = lambda body: body
    unroll_layers: bool = False
    attention: str = "reference"
    attention_block: int = 512
    context_method: str = "ring"
    reduction: str = "float32"
    float32_products: bool = False
    transposed_weight_gradients: bool = False
    products: str = "compute"
    split_backward: bool = False

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        """Make this the execution of everything traced inside."""
        token = _current.set(self)
        try:
            with contextlib.nullcontext() if self.mesh is None else jax.set_mesh(self.mesh):
                yield
        finally:
            _current.reset(token)


_current: ContextVar[Execution] = ContextVar("execution", default=Execution())  # noqa: B039 (frozen)


def current_execution() -> Execution:
    """The execution that is active; outside of any, one device and no mesh."""
    return _current.get()


_calls: ContextVar[dict[str, Any] | None] = ContextVar("calls", default=None)


@contextlib.contextmanager
def recorded_calls() -> Iterator[dict[str, Any]]:
    """The names of the functions, among those that follow the plan, that a model calls when it is traced inside, and
    what each says of itself (its last call, if there are several)."""
    calls: dict[str, Any] = {}
    token = _calls.set(calls)
    try:
        yield calls
    finally:
        _calls.reset(token)


def record_call(name: str, detail: Any = None) -> None:
    """Says that a function which follows the plan is traced."""
    calls = _calls.get()
    if calls is not None:
        calls[name] = detail


def num_shards(axis: str) -> int:
    """How many parts the activations' dim `axis` is split into; 1 without an active plan."""
    execution = current_execution()
    if execution.mesh is None:
        return 1
    return math.prod(execution.mesh.shape[mesh_axis] for mesh_axis in automatic(execution.activations)[axis])


def automatic(table: Table) -> Table:
    """`table` without the mesh axes that are manual in the current shard_map: there, arrays are local already."""
    manual = set(jax.sharding.get_abstract_mesh().manual_axes)
    if not manual:
        return table
    return {name: tuple(axis for axis in mesh_axes if axis not in manual) for name, mesh_axes in table.items()}


def manual_batch_axes() -> tuple[str, ...]:
    """The mesh axes that share the batch and are manual in the current shard_map, where each device sees its part."""
    execution = current_execution()
    if execution.mesh is None:
        return ()
    manual = jax.sharding.get_abstract_mesh().manual_axes
    return tuple(axis for axis in execution.activations["batch"] if axis in manual)


def reduction_format() -> str:
    """The format in which a weight's gradient is summed over the devices that share the batch or its sequences; where
    none do (or where their sum is taken later), float32."""
    return current_execution().reduction if num_shards("batch") * num_shards("sequence") > 1 else "float32"


def constrain(x: jax.Array, axes: LogicalAxes) -> jax.Array:
    """`x` laid out as the active plan's activation table says for `axes`; the identity when no plan is active.

    Mesh axes that are manual in the current shard_map are dropped.

    >>> import jax.numpy as jnp
    >>> constrain(jnp.ones((4, 8)), ("batch", "embed")).shape
    (4, 8)
    """
    return _constrain_by(x, axes, current_execution().activations)


def constrain_gradient(x: jax.Array, axes: LogicalAxes) -> jax.Array:
    """The gradient `x` of a parameter with these axes, laid out as the active plan keeps it."""
    return _constrain_by(x, axes, current_execution().gradients)


def constrain_stored(x: jax.Array, axes: LogicalAxes) -> jax.Array:
    """`x`, made element by element of a parameter with these axes, laid out as the active plan keeps the parameter.

    For weights in another format than they are stored in: where they are gathered next, the partitioner would otherwise
    gather the stored weights, which are larger, and convert the whole on every device.
    """
    return _constrain_by(x, axes, current_execution().params)


def _constrain_by(x: jax.Array, axes: LogicalAxes, table: Table) -> jax.Array:
    mesh = current_execution().mesh
    if mesh is None:
        return x
    return jax.lax.with_sharding_constraint(x, resolve("activation", x.shape, axes, automatic(table), mesh.shape).spec)
