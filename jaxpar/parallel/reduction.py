"""Gradients summed once a step: each device that shares the batch computes them on its own part, and one reduction at
the end joins them, however many microbatches there were.

Without this, the automatic partitioner sums a gradient over devices as soon as it is computed, in every microbatch.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from jaxpar.parallel.constrain import current_execution
from jaxpar.parallel.manual import device_by_device, reduced, spec_of
from jaxpar.parallel.rules import LogicalAxes, Table, is_vector

__all__ = ["on_own_batch", "summed_over_devices"]


def on_own_batch(function: Callable, axes: tuple[str, ...]) -> Callable:
    """`function(whole, batch)` run on each device's part of the batch along the mesh axes `axes`.

    The results are stacked in a new first dim, split over `axes`: a sum over it is the result for the whole batch, and
    has not been taken yet. The other mesh axes stay with the automatic partitioner.

    Args:
      function: takes a pytree that every device has whole, and one of arrays whose first dim is the batch.
    """

    def local(whole: Any, batch: Any) -> Any:
        return jax.tree.map(lambda x: x[None], function(whole, batch))

    split = PartitionSpec(axes)
    return jax.shard_map(
        local, in_specs=(PartitionSpec(), split), out_specs=split, axis_names=set(axes), check_vma=False
    )


@dataclass(frozen=True)
class _Part:
    """How one gradient is summed: over all devices, after which those along `scatter` each keep their part of `dim`."""

    scatter: tuple[str, ...]
    dim: int


def summed_over_devices(
    stacked: Mapping[str, jax.Array],
    axes: tuple[str, ...],
    names: Mapping[str, LogicalAxes],
    result: Table,
    *,
    dtype: str,
    bucket_bytes: int,
) -> dict[str, jax.Array]:
    """The sum over the first dim of each gradient, which `on_own_batch` stacked over the mesh axes `axes`, in float32.

    Args:
      stacked: path → gradient [devices along `axes`, ...].
      names: path → logical axes of the gradient.
      result: the table that lays out the sums; where it splits a dim over some of `axes`, the sum is a reduce-scatter.
      dtype: format in which matrices are summed; vectors are summed in float32.
      bucket_bytes: gradients are sent together up to this size (ZeRO-R's constant-size buffers, Rajbhandari 2020,
        section 5.2); one that is larger is sent alone.
    """
    execution = current_execution()
    own = execution.gradients
    whole = {path: gradient.shape[1:] for path, gradient in stacked.items()}
    parts = {path: _part(names[path], own, result, axes) for path in stacked}
    in_specs, out_specs = (
        {path: spec_of(execution, path, whole[path], names[path], table) for path in stacked} for table in (own, result)
    )
    formats = {path: "float32" if is_vector(path, names[path]) else dtype for path in stacked}

    def local(stacked: dict[str, jax.Array]) -> dict[str, jax.Array]:
        gradients = {path: gradient[0].astype(formats[path]) for path, gradient in stacked.items()}
        return _summed(gradients, parts, axes, bucket_bytes)

    return device_by_device(
        execution,
        local,
        in_specs=({path: PartitionSpec(axes, *spec) for path, spec in in_specs.items()},),
        out_specs=out_specs,
    )(dict(stacked))


def _part(names: LogicalAxes, own: Table, result: Table, axes: tuple[str, ...]) -> _Part:
    sizes = current_execution().mesh.shape  # type: ignore[union-attr]
    for dim, name in enumerate(names):
        added = [a for a in (() if name is None else result[name]) if a in axes and a not in own[name or ""]]
        if scatter := tuple(axis for axis in added if sizes[axis] > 1):
            return _Part(scatter, dim)
    return _Part((), 0)


def _summed(
    gradients: Mapping[str, jax.Array], parts: Mapping[str, _Part], axes: tuple[str, ...], bucket_bytes: int
) -> dict[str, jax.Array]:
    """This device's sums, bucket by bucket."""
    sizes = current_execution().mesh.shape  # type: ignore[union-attr]
    sums = {}
    for scatter, bucket in _buckets(gradients, parts, bucket_bytes):
        if len(bucket) == 1:
            (path,) = bucket
            sums[path] = reduced(gradients[path], axes, scatter, dim=parts[path].dim).astype(jnp.float32)
            continue
        num_parts = math.prod(sizes[axis] for axis in scatter)
        rows = [_in_rows(gradients[path], parts[path].dim, num_parts) for path in bucket]
        joined = reduced(jnp.concatenate(rows, axis=1), axes, scatter, dim=0)
        start = 0
        for path, row in zip(bucket, rows, strict=True):
            columns = joined[:, start : start + row.shape[1]]
            sums[path] = _from_rows(columns, gradients[path].shape, parts[path].dim, num_parts).astype(jnp.float32)
            start += row.shape[1]
    return {path: sums[path] for path in gradients}


def _buckets(
    gradients: Mapping[str, jax.Array], parts: Mapping[str, _Part], bucket_bytes: int
) -> list[tuple[tuple[str, ...], list[str]]]:
    """Paths that are sent together, last layers' parameters first, and the axes over which they are scattered."""
    filled: dict[tuple, list[str]] = {}
    done = []
    for path in reversed(list(gradients)):
        kind = (parts[path].scatter, gradients[path].dtype)
        bucket = filled.setdefault(kind, [])
        if bucket and sum(gradients[p].nbytes for p in (*bucket, path)) > bucket_bytes:
            done.append((kind[0], bucket))
            bucket = filled[kind] = []
        bucket.append(path)
    return done + [(kind[0], bucket) for kind, bucket in filled.items()]


def _in_rows(gradient: jax.Array, dim: int, num_parts: int) -> jax.Array:
    """[num_parts, rest]: one row for each part of `dim`."""
    size = gradient.shape[dim] // num_parts
    split = gradient.reshape(*gradient.shape[:dim], num_parts, size, *gradient.shape[dim + 1 :])
    return jnp.moveaxis(split, dim, 0).reshape(num_parts, -1)


def _from_rows(rows: jax.Array, shape: Sequence[int], dim: int, num_parts: int) -> jax.Array:
    """The gradient, or the one part of it that `rows` [1, rest] has, with its dims back in their places."""
    shape = (*shape[:dim], shape[dim] // num_parts, *shape[dim + 1 :])
    assert rows.shape[0] == 1, rows.shape
    return rows.reshape(shape)
