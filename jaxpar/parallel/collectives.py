"""The collectives of a compiled program: kind, mesh axes, how often, how many bytes.

This is the instrument with which tests prove what a step communicates and `python -m jaxpar.inspect` shows it. It reads
the optimised program's text, in which everything is explicit that the partitioner added.
"""

import itertools
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from jaxpar.parallel.communication import KINDS, ring_bytes
from jaxpar.parallel.device_groups import device_groups, spanned_axes
from jaxpar.parallel.program import Execution, Instruction, executions

__all__ = ["Collective", "CollectiveRow", "group_by_axis", "parse_collectives"]

Array = tuple[str, tuple[int, ...]]
"""XLA's name of a dtype, and a shape."""


@dataclass(frozen=True)
class Collective:
    """One collective of a program on one device.

    Attributes:
      kind: one of `communication.KINDS`.
      axes: mesh axes over which a group runs, in mesh order; of a collective-permute those along which data moves. They
        begin with `device_groups.IRREGULAR` where the groups are not products of whole axes.
      count: executions in one step (see `program.Execution`).
      operands: dtype and shape of the full arrays, several where the compiler merged collectives: of an all-gather the
        results, of all others the operands.
      payload_bytes: bytes of `operands`, an execution.
      sent_bytes: bytes that a device sends, an execution, on a ring (see `communication.ring_bytes`).
      source: the operation that it came from (`op_name`), empty where the compiler kept none.
      trip_count_known: False where `count` takes a loop of unknown length as one iteration.
      conditional: True where `count` takes a conditional's branch as always taken.
    """

    kind: str
    axes: tuple[str, ...]
    count: int
    operands: tuple[Array, ...]
    payload_bytes: int
    sent_bytes: int
    source: str
    trip_count_known: bool = True
    conditional: bool = False


@dataclass(frozen=True)
class CollectiveRow:
    """All collectives of one kind over the same axes: executions and bytes of one step."""

    kind: str
    axes: tuple[str, ...]
    count: int
    payload_bytes: int
    sent_bytes: int
    trip_count_known: bool
    conditional: bool


def parse_collectives(
    compiled_text: str, mesh_shape: Mapping[str, int], device_order: Sequence[int] | None = None
) -> list[Collective]:
    """The collectives in `compiled.as_text()`, asynchronous pairs once, groups of one device left out.

    Args:
      compiled_text: the program after optimisation.
      mesh_shape: axis sizes in the mesh's order, such as `mesh.shape`.
      device_order: position in the mesh (row-major) of each of the program's partitions; by default partition i is at
        position i, which is what jit makes of a mesh, whatever the order of its devices.

    Raises:
      ValueError: the program is not for this mesh, or communicates in a way that this reader does not count.
    """
    num_devices = math.prod(mesh_shape.values())
    _check_size(compiled_text, num_devices)
    order = list(range(num_devices)) if device_order is None else list(device_order)
    if sorted(order) != list(range(num_devices)):
        raise ValueError(f"device_order={order} must be a permutation of the mesh's {num_devices} positions")
    found = []
    for execution in executions(compiled_text):
        instruction = execution.instruction
        kind = _kind(execution)
        if kind in _UNCOUNTED and "is_host_transfer=true" not in instruction.attributes:
            raise ValueError(f"%{instruction.name} is a {kind}, which is not counted; counted: {', '.join(KINDS)}")
        groups = device_groups(kind, instruction.attributes, num_devices) if kind in KINDS else []
        if groups:
            highest = max(max(group) for group in groups)
            if highest >= num_devices:
                raise ValueError(f"%{instruction.name} names device {highest}, but the mesh has {num_devices} devices")
            axes = spanned_axes(kind, [[order[device] for device in group] for group in groups], mesh_shape)
            found.append(_collective(kind, axes, max(len(group) for group in groups), execution))
    return found


def group_by_axis(collectives: Iterable[Collective]) -> list[CollectiveRow]:
    """One row for each axes and kind, sorted; counts and bytes are those of a whole step."""

    def key(collective: Collective) -> tuple[tuple[str, ...], str]:
        return collective.axes, collective.kind

    rows = []
    for (axes, kind), same in itertools.groupby(sorted(collectives, key=key), key=key):
        members = list(same)
        rows.append(
            CollectiveRow(
                kind=kind,
                axes=axes,
                count=sum(member.count for member in members),
                payload_bytes=sum(member.count * member.payload_bytes for member in members),
                sent_bytes=sum(member.count * member.sent_bytes for member in members),
                trip_count_known=all(member.trip_count_known for member in members),
                conditional=any(member.conditional for member in members),
            )
        )
    return rows


_UNCOUNTED = ("collective-broadcast", "ragged-all-to-all", "send", "recv")
_ARRAY = re.compile(r"(\w+)\[([^\]]*)\]")
_BITS = re.compile(r"(?:bf|f|s|u|c)(\d+)")


def _check_size(compiled_text: str, num_devices: int) -> None:
    header = next((line for line in compiled_text.splitlines() if line.startswith("HloModule")), "")
    partitions = re.search(r"\bnum_partitions=(\d+)", header)
    replicas = re.search(r"\breplica_count=(\d+)", header)
    if partitions and int(partitions.group(1)) != num_devices:
        raise ValueError(f"the program is for {partitions.group(1)} devices, but the mesh has {num_devices}")
    if replicas and int(replicas.group(1)) > 1:
        raise ValueError(
            f"the program has {replicas.group(1)} replicas (pmap); only partitioned programs (jit) are counted"
        )


def _kind(execution: Execution) -> str:
    opcode = execution.instruction.opcode.removesuffix("-start")
    # A reduce-scatter in a TPU program is a fusion of this name around an all-reduce and a slice.
    fused = opcode == "all-reduce" and execution.computation.startswith("all-reduce-scatter")
    return "reduce-scatter" if fused else opcode


def _collective(kind: str, axes: tuple[str, ...], group_size: int, execution: Execution) -> Collective:
    operands = _full_arrays(kind, execution.instruction, group_size)
    payload_bytes = sum(_array_bytes(array) for array in operands)
    source = re.search(r'op_name="((?:[^"\\]|\\.)*)"', execution.instruction.attributes)
    return Collective(
        kind=kind,
        axes=axes,
        count=execution.count,
        operands=operands,
        payload_bytes=payload_bytes,
        sent_bytes=ring_bytes(kind, payload_bytes, group_size),
        source=source.group(1) if source else "",
        trip_count_known=execution.trip_count_known,
        conditional=execution.conditional,
    )


def _full_arrays(kind: str, instruction: Instruction, group_size: int) -> tuple[Array, ...]:
    """The arrays that are not split over the group, from the instruction's shape.

    A start's shape is (operands, results, context...). That of an all-reduce-start is the results alone, unless the
    operands come first as a tuple of their own.
    """
    if instruction.opcode.startswith("all-reduce") and not instruction.shape.startswith("(("):
        return _arrays(instruction.shape)
    if instruction.opcode.endswith("-start"):
        operands, results, *_ = _top_level(instruction.shape)
        return _arrays(operands if kind == "reduce-scatter" else results)
    arrays = _arrays(instruction.shape)
    if kind != "reduce-scatter":
        return arrays
    scattered = re.search(r"\bdimensions=\{(\d+)\}", instruction.attributes)
    assert scattered is not None, instruction
    return tuple((dtype, _times(shape, int(scattered.group(1)), group_size)) for dtype, shape in arrays)


def _top_level(shape: str) -> list[str]:
    """The elements of a tuple's shape, each as text; layouts may hold brackets and commas."""
    elements, start, depth = [], 1, 0
    for position, character in enumerate(shape):
        depth += (character in "([{") - (character in ")]}")
        if (character == "," and depth == 1) or (depth == 0 and position == len(shape) - 1):
            elements.append(shape[start:position].strip())
            start = position + 1
    return elements


def _arrays(shape: str) -> tuple[Array, ...]:
    """Dtypes and shapes in a shape's text: `(f32[4,16]{1,0:T(8,128)}, s32[<=8])`, a varying size at its most."""
    return tuple(
        (dtype, tuple(int(size.removeprefix("<=")) for size in dims.split(",") if size))
        for dtype, dims in _ARRAY.findall(shape)
    )


def _times(shape: tuple[int, ...], dim: int, number: int) -> tuple[int, ...]:
    return (*shape[:dim], shape[dim] * number, *shape[dim + 1 :])


def _array_bytes(array: Array) -> int:
    dtype, shape = array
    bits = _BITS.match(dtype)
    if dtype != "pred" and bits is None:
        raise ValueError(f"a collective carries arrays of an unknown dtype: {dtype}{list(shape)}")
    return math.ceil(math.prod(shape) * (int(bits.group(1)) if bits else 8) / 8)
