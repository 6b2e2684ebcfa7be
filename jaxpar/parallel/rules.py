"""Sharding rules: tables from logical axes to mesh axes, and the resolver that applies them to an array.

A table is data. ZeRO and FSDP are differences between the tables of one `ShardingRules`: parameters, activations
(which is also how a weight looks while it is used), optimizer state and gradients each have one.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from jax.sharding import PartitionSpec

from jaxpar.multiples import nearest_multiples

__all__ = [
    "LogicalAxes",
    "Resolved",
    "ShardingRules",
    "Table",
    "is_stacked",
    "is_vector",
    "keeps_format",
    "of_one_layer",
    "of_one_matrix",
    "resolve",
    "resolve_where_it_divides",
]

LogicalAxes = tuple[str | None, ...]
Table = Mapping[str, tuple[str, ...]]


def is_stacked(axes: LogicalAxes) -> bool:
    """Whether a parameter has a layer for each entry of its first dim."""
    return bool(axes) and axes[0] == "layers"


def of_one_layer(axes: LogicalAxes) -> LogicalAxes:
    """The logical axes of one layer's part of a parameter."""
    return tuple(axes[1:] if is_stacked(axes) else axes)


def of_one_matrix(axes: LogicalAxes) -> LogicalAxes:
    """The logical axes of what an optimizer sees as one tensor: of one layer, and of one of its experts.

    >>> of_one_matrix(("layers", "experts", "embed", "mlp")), of_one_matrix(("vocab", "embed"))
    (('embed', 'mlp'), ('vocab', 'embed'))
    """
    rest = of_one_layer(axes)
    return tuple(rest[1:] if rest and rest[0] == "experts" else rest)


def is_vector(path: str, axes: LogicalAxes) -> bool:
    """Whether a parameter is a vector in each layer: it has one dim, or is a bias, whose dims are those of the vector
    that it is added to. All others are matrices.

    >>> is_vector("attention/query_bias", ("layers", "heads", "head_dim")), is_vector("mlp/up", ("embed", "mlp"))
    (True, False)
    """
    return len(of_one_layer(axes)) < 2 or path.rsplit("/", 1)[-1].endswith("bias")


def keeps_format(path: str, axes: LogicalAxes) -> bool:
    """Whether a parameter is used in the format that it is stored in, whatever activations are computed in: vectors,
    and what is multiplied for a router's decisions."""
    return is_vector(path, axes) or "router" in axes


@dataclass(frozen=True)
class ShardingRules:
    """One table a kind of array: logical axis → mesh axes (an empty tuple replicates)."""

    params: Table
    activations: Table
    optimizer: Table
    gradients: Table


@dataclass(frozen=True)
class Resolved:
    """How one array is laid out, and why; `undivided` names the dims that stay whole although a rule splits them."""

    spec: PartitionSpec
    local_shape: tuple[int, ...]
    reason: str
    undivided: tuple[str, ...] = ()


def resolve(
    path: str, shape: Sequence[int], axes: LogicalAxes, table: Table, mesh_shape: Mapping[str, int]
) -> Resolved:
    """The layout of the array `path` of `shape`, whose dims carry the logical names `axes`.

    Raises:
      ValueError: names and dims differ in number, a name is not in the table, a mesh axis is used twice, or a dim
      does not
        divide; the message names the path, and the nearest legal sizes.

    >>> resolve("mlp/up", (64, 256), ("embed", "mlp"), {"embed": (), "mlp": ("tensor",)}, {"tensor": 4}).local_shape
    (64, 64)
    """
    if len(axes) != len(shape):
        raise ValueError(f"{path}: {len(axes)} logical axes {axes} for {len(shape)} dims {tuple(shape)}")
    entries: list[tuple[str, ...]] = []
    owners: dict[str, str] = {}
    for size, name in zip(shape, axes, strict=True):
        named = _lookup(path, name, table)
        for axis in named:
            if axis in owners:
                raise ValueError(
                    f"{path}: mesh axis {axis!r} is used twice, by logical axes {owners[axis]!r} and {name!r} of {axes}"
                )
            owners[axis] = str(name)
        mesh_axes = tuple(axis for axis in named if mesh_shape[axis] > 1)
        num_shards = math.prod(mesh_shape[axis] for axis in mesh_axes)
        if size % num_shards:
            raise ValueError(
                f"{path}: dim {name!r} of size {size} does not divide over {' × '.join(mesh_axes)} = {num_shards}; "
                f"nearest legal sizes: {nearest_multiples(size, num_shards)}"
            )
        entries.append(mesh_axes)
    local_shape = tuple(
        size // math.prod(mesh_shape[axis] for axis in mesh_axes)
        for size, mesh_axes in zip(shape, entries, strict=True)
    )
    return Resolved(_spec(entries), local_shape, _reason(axes, entries, table))


def resolve_where_it_divides(
    path: str, shape: Sequence[int], axes: LogicalAxes, table: Table, mesh_shape: Mapping[str, int]
) -> Resolved:
    """Like `resolve`, but a dim that does not divide stays whole: for small arrays that no rule was made for.

    >>> small = resolve_where_it_divides("scales", (6,), ("mlp",), {"mlp": ("tensor",)}, {"tensor": 4})
    >>> small.local_shape, small.reason
    ((6,), 'mlp whole: 6 does not divide over tensor = 4')
    """
    fits: list[str | None] = []
    undivided, reasons = [], []
    for size, name in zip(shape, axes, strict=True):
        mesh_axes = [axis for axis in _lookup(path, name, table) if mesh_shape[axis] > 1]
        num_shards = math.prod(mesh_shape[axis] for axis in mesh_axes)
        divides = size % num_shards == 0
        fits.append(name if divides else None)
        if not divides:
            undivided.append(str(name))
            reasons.append(f"{name} whole: {size} does not divide over {' × '.join(mesh_axes)} = {num_shards}")
    resolved = resolve(path, shape, tuple(fits), table, mesh_shape)
    if not undivided:
        return resolved
    split = [resolved.reason] if any(resolved.spec) else []
    return replace(resolved, reason="; ".join(split + reasons), undivided=tuple(undivided))


def _lookup(path: str, name: str | None, table: Table) -> tuple[str, ...]:
    if name is None:
        return ()
    if name not in table:
        raise ValueError(f"{path}: unknown logical axis {name!r}; the rules know {', '.join(sorted(table))}")
    return table[name]


def _spec(entries: Sequence[tuple[str, ...]]) -> PartitionSpec:
    compact = [None if not axes else axes[0] if len(axes) == 1 else axes for axes in entries]
    while compact and compact[-1] is None:
        compact.pop()
    return PartitionSpec(*compact)


def _reason(axes: LogicalAxes, entries: Sequence[tuple[str, ...]], table: Table) -> str:
    split = [f"{name} → {'+'.join(mesh_axes)}" for name, mesh_axes in zip(axes, entries, strict=True) if mesh_axes]
    if split:
        return ", ".join(split)
    wanted = {axis for name in axes if name is not None for axis in table[name]}
    if wanted:
        return f"replicated: {', '.join(sorted(wanted))} of size 1"
    return "replicated: no rule splits " + (", ".join(str(name) for name in axes if name) or "a scalar")
