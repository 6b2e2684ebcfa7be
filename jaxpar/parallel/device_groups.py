"""Who communicates with whom in a collective, read from the attributes of a compiled program's instruction."""

import itertools
import math
import re
from collections.abc import Mapping, Sequence

import numpy as np

__all__ = ["IRREGULAR", "device_groups", "spanned_axes"]

IRREGULAR = "irregular"
"""Stands before the axes along which a group's members differ where the groups are not products of whole mesh axes."""

Groups = list[tuple[int, ...]]

_PERMUTE = "collective-permute"
_REPLICA_GROUPS = (
    r"replica_groups=(\{\{.*?\}\}|\{\}"
    r"|\[[\d,]+\]<=\[[\d,]+\](?:T\([\d,]+\))?"
    r"|mesh\[[^\]]*\](?:, device_ids=\([^{]*\))? \{[^}]*\})"
)


def device_groups(kind: str, attributes: str, num_devices: int) -> Groups:
    """The groups of partitions of one collective; of a collective-permute the pairs (source, target).

    Empty where nothing is sent: groups of one, pairs of a device with itself, and collectives without a channel, which
    run over replicas, of which a program made by jit has one. With a channel, groups are partitions, except that
    all-reduce, all-gather and reduce-scatter without `use_global_device_ids` group replicas with all their partitions.

    Raises:
      ValueError: groups in a form that is not known.
    """
    across_partitions = re.search(r"\bchannel_id=\d", attributes) is not None
    if not across_partitions:
        return []
    if kind == _PERMUTE:
        pairs = _explicit(_attribute(attributes, r"source_target_pairs=(\{.*?\}\}|\{\})"))
        return [pair for pair in pairs if pair[0] != pair[1]]
    everyone = [tuple(range(num_devices))]
    if kind == "all-to-all" or "use_global_device_ids=true" in attributes:
        groups = _replica_groups(attributes) or everyone
    else:
        groups = everyone
    return groups if any(len(group) > 1 for group in groups) else []


def spanned_axes(kind: str, positions: Sequence[Sequence[int]], mesh_shape: Mapping[str, int]) -> tuple[str, ...]:
    """The mesh axes over which groups of row-major mesh positions run, in mesh order.

    Groups are regular when each is a product of whole axes, the same ones for all, and together they hold every device.
    Others give `IRREGULAR` and the axes along which members differ. A permute has those along which a pair moves data.

    >>> spanned_axes("all-reduce", [(0, 1), (2, 3)], {"data": 2, "tensor": 2})
    ('tensor',)
    >>> spanned_axes("all-reduce", [(0, 1), (2, 3)], {"tensor": 4})
    ('irregular', 'tensor')
    """
    names, sizes = list(mesh_shape), tuple(mesh_shape.values())
    spanned: set[int] = set()
    for group in positions:
        coordinates = np.array(np.unravel_index(list(group), sizes))
        spanned.update(np.flatnonzero((coordinates != coordinates[:, :1]).any(axis=1)).tolist())
    axes = tuple(names[index] for index in sorted(spanned))
    if kind == _PERMUTE:
        return axes
    size = math.prod(sizes[index] for index in spanned)
    members = sorted(itertools.chain.from_iterable(positions))
    regular = all(len(group) == size for group in positions) and members == list(range(math.prod(sizes)))
    return axes if regular else (IRREGULAR, *axes)


def _attribute(attributes: str, pattern: str) -> str:
    found = re.search(pattern, attributes)
    if found is None:
        raise ValueError(f"a collective's groups are in a form that is not known: {attributes.strip(', ')[:200]}")
    return found.group(1)


def _replica_groups(attributes: str) -> Groups:
    """The value of `replica_groups`, expanded; empty when it is `{}`, which stands for one group of everyone."""
    value = _attribute(attributes, _REPLICA_GROUPS)
    if value.startswith("{"):
        return _explicit(value)
    if value.startswith("["):
        shape, source = value.split("<=")
        return _rows(_iota(source).reshape(_integers(shape)))
    return _rows(_mesh_groups(value))


def _explicit(value: str) -> Groups:
    """`{{0,1},{2,3}}`."""
    return [tuple(_integers(group)) for group in re.findall(r"\{([\d,]+)\}", value)]


def _iota(value: str) -> np.ndarray:
    """`[4,2]T(1,0)`: 0, 1, 2, ... in that shape, transposed."""
    shape, _, permutation = value.partition("T")
    dims = _integers(shape)
    ids = np.arange(math.prod(dims)).reshape(dims)
    return ids.transpose(_integers(permutation)) if permutation else ids


def _mesh_groups(value: str) -> np.ndarray:
    """`mesh['a'=2,'b'=4], device_ids=([4,2]T(1,0)) {'a','b':(1)2}`, one group a row.

    An entry `axis:(m)n` is a part of an axis: that of size n once the axis of size m·n·k is written as [m, n, k].
    """
    mesh, _, chosen_axes = value.rpartition(" {")
    axes, _, device_ids = mesh.partition("]")
    sizes = {name: int(size) for name, size in re.findall(r"([^'\[,=]+)'?=(\d+)", axes)}
    chosen = [
        (name, int(before or 1), int(size or sizes[name]))
        for name, before, size in re.findall(r"([^',:{}]+)'?(?::\((\d+)\)(\d+))?", chosen_axes)
    ]
    parts = [
        (name, *segment)
        for name, axis_size in sizes.items()
        for segment in _segments(axis_size, [(before, size) for axis, before, size in chosen if axis == name])
    ]
    if "=([" in device_ids:
        devices = _iota(device_ids)
    else:
        devices = np.array(_integers(device_ids) or range(math.prod(sizes.values())))
    within = [parts.index(part) for part in chosen]
    across = [index for index in range(len(parts)) if index not in within]
    devices = devices.reshape([size for _, _, size in parts]).transpose(across + within)
    return devices.reshape(-1, math.prod(size for _, _, size in chosen))


def _segments(axis_size: int, parts: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """An axis as a product of (size before it, size) that has each of `parts` as a factor."""
    cuts = sorted({1, axis_size, *itertools.chain.from_iterable((before, before * size) for before, size in parts)})
    return [(before, after // before) for before, after in itertools.pairwise(cuts)] or [(1, 1)]


def _integers(value: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", value)]


def _rows(groups: np.ndarray) -> Groups:
    return [tuple(row) for row in groups.tolist()]
