"""Computations written device by device: a shard_map over every mesh axis, and the reductions used inside."""

from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import PartitionSpec

from jaxpar.parallel.constrain import Execution, automatic
from jaxpar.parallel.rules import LogicalAxes, Table, resolve

__all__ = ["active_axes", "axis_index", "device_by_device", "reduced", "spec_of"]


def device_by_device(execution: Execution, local: Callable, in_specs: Any, out_specs: Any) -> Callable:
    """`local` run on each device's part of the arguments, with every axis of the mesh manual."""
    assert execution.mesh is not None
    manual = set(jax.sharding.get_abstract_mesh().manual_axes)
    axes = set(execution.mesh.axis_names) - manual
    return jax.shard_map(local, in_specs=in_specs, out_specs=out_specs, axis_names=axes, check_vma=False)


def active_axes(execution: Execution, table: Table, name: str) -> tuple[str, ...]:
    """The mesh axes of size > 1 that `table` gives to the logical axis `name`, less those that are manual already."""
    assert execution.mesh is not None
    return tuple(axis for axis in automatic(table)[name] if execution.mesh.shape[axis] > 1)


def spec_of(execution: Execution, what: str, shape: tuple[int, ...], names: LogicalAxes, table: Table) -> PartitionSpec:
    """The spec of an array by the names of its dims; `what` names it in errors."""
    assert execution.mesh is not None
    return resolve(what, shape, names, automatic(table), execution.mesh.shape).spec


def axis_index(axes: tuple[str, ...]) -> jax.Array | int:
    """The device's place along `axes`; 0 without axes."""
    return jax.lax.axis_index(axes) if axes else 0


def reduced(x: jax.Array, axes: tuple[str, ...], scatter: tuple[str, ...], *, dim: int) -> jax.Array:
    """`x` summed over `axes`; over those that are in `scatter` too, each device keeps its part of `dim`."""
    assert set(scatter) <= set(axes), (axes, scatter)
    for axis in scatter:
        x = jax.lax.psum_scatter(x, axis, scatter_dimension=dim, tiled=True)
    rest = tuple(axis for axis in axes if axis not in scatter)
    return jax.lax.psum(x, rest) if rest else x
