"""Where every value of a schedule waits: which slot is written and read in each tick, and by whom.

Three pools hold what is in flight on a rank: what was received (inputs of forwards, cotangents of backwards), what
forwards leave for their backwards, and, with a split backward, what backwards leave for their weight gradients. Slots
are colours of intervals: each pool is as small as the largest number of values that wait at once, on the rank where
most do, since in one program for all ranks (SPMD) every rank has a pool of that size.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from jaxpar.parallel.pipeline.schedule import Kind, PipelineSchedule, Position

__all__ = ["PER_RANK", "PER_TICK", "RoutedSchedule", "route"]

PER_RANK = (
    "kind",
    "microbatch",
    "chunk",
    "stage",
    "is_first",
    "is_last",
    "input_slot",
    "cotangent_slot",
    "residual_slot",
    "weight_slot",
    "from_previous",
    "from_next",
    "own_slot",
)
PER_TICK = ("any_from_previous", "any_from_next")


@dataclass(frozen=True, eq=False)
class RoutedSchedule:
    """A schedule as arrays that a program scans over, a row a tick.

    A rank's tick has this order: read slots, compute, write slots. A task's result is the payload: of a forward the
    input of the next stage, but on the last stage, which ends in the loss, the loss's cotangent of its output; of a
    backward the cotangent of the stage before. With hop 1 the payload of a tick travels at its end and is written in
    the same row; with hop 2 it travels during the next tick and is written in the next row. `own_slot` is written in
    the payload's own row in both cases.

    int32 [num_ticks, num_ranks]:
      kind: `Kind`; 0 where the rank is idle, and then so are microbatch, chunk, stage, is_first and is_last.
      microbatch, chunk, stage: of the task.
      is_first, is_last: 1 if the task is on the first stage, or the last.
      input_slot: receive slot from which a forward reads its input; the dummy on stage 0.
      cotangent_slot: receive slot from which a backward reads its cotangent.
      residual_slot: a forward writes it and its backward reads it; 0 elsewhere, to be left as it is.
      weight_slot: a backward writes it and its weight gradient reads it (split only); 0 elsewhere, likewise.
      from_previous, from_next: receive slot for what arrives from rank − 1 and rank + 1 (modulo the number of ranks).
      own_slot: receive slot for the rank's own payload, if its consumer is on the same rank.

    A receive slot that is not used is the dummy, number `num_receive_slots`: the pool has one slot more than that. On
    two ranks, where one neighbour is both, everything arrives from the previous one.

    bool [num_ticks]:
      any_from_previous, any_from_next: whether any rank receives from there in this tick.
    """

    schedule: PipelineSchedule
    kind: NDArray[np.int32]
    microbatch: NDArray[np.int32]
    chunk: NDArray[np.int32]
    stage: NDArray[np.int32]
    is_first: NDArray[np.int32]
    is_last: NDArray[np.int32]
    input_slot: NDArray[np.int32]
    cotangent_slot: NDArray[np.int32]
    residual_slot: NDArray[np.int32]
    weight_slot: NDArray[np.int32]
    from_previous: NDArray[np.int32]
    from_next: NDArray[np.int32]
    own_slot: NDArray[np.int32]
    any_from_previous: NDArray[np.bool_]
    any_from_next: NDArray[np.bool_]
    num_receive_slots: int
    num_residual_slots: int
    num_weight_slots: int

    @property
    def arrays(self) -> dict[str, np.ndarray]:
        """The arrays by name, `PER_RANK` and `PER_TICK`."""
        return {name: getattr(self, name) for name in (*PER_RANK, *PER_TICK)}


class _Value(NamedTuple):
    """What waits in a slot on a rank: written at the end of tick `written`, last read in tick `read`."""

    rank: int
    written: int
    read: int
    reader: Position


def route(schedule: PipelineSchedule) -> RoutedSchedule:
    """The arrays of a schedule that `validate` accepts."""
    receive, num_receive_slots = _color(_received(schedule))
    kinds = schedule.geometry.kinds
    residual, num_residual_slots = _color(_kept(schedule, Kind.FORWARD, Kind.BACKWARD) if len(kinds) > 1 else ())
    weight, num_weight_slots = _color(_kept(schedule, Kind.BACKWARD, Kind.WEIGHT) if len(kinds) > 2 else ())
    shape = (schedule.num_ticks, schedule.geometry.num_ranks)
    arrays: dict[str, Any] = {name: np.zeros(shape, np.int32) for name in PER_RANK}
    for name in ("input_slot", "cotangent_slot", "from_previous", "from_next", "own_slot"):
        arrays[name][:] = num_receive_slots
    _fill_tasks(schedule, arrays, receive, residual, weight)
    _fill_transfers(schedule, arrays, receive)
    for name in ("from_previous", "from_next"):
        arrays[f"any_{name}"] = (arrays[name] < num_receive_slots).any(axis=1)
    for array in arrays.values():
        array.setflags(write=False)
    return RoutedSchedule(
        schedule=schedule,
        **arrays,
        num_receive_slots=num_receive_slots,
        num_residual_slots=num_residual_slots,
        num_weight_slots=num_weight_slots,
    )


def _received(schedule: PipelineSchedule) -> Iterator[_Value]:
    geometry = schedule.geometry
    for _, rank, task in schedule.tasks():
        kind, microbatch, stage = reader = schedule.position(rank, task)
        if kind is Kind.WEIGHT or (kind is Kind.FORWARD and stage == 0):
            continue
        source, sender_stage = geometry.sender(kind, stage)
        written = schedule.ticks[source, microbatch, sender_stage] + geometry.delay(sender_stage, stage) - 1
        yield _Value(rank, written, schedule.ticks[reader], reader)


def _kept(schedule: PipelineSchedule, writer: Kind, reader: Kind) -> Iterator[_Value]:
    """What tasks of one kind leave on their rank for those of another. No two of them run in one tick."""
    for (kind, microbatch, stage), tick in schedule.ticks.items():
        if kind is writer:
            position = (reader, microbatch, stage)
            yield _Value(schedule.geometry.rank(stage), tick, schedule.ticks[position], position)


def _color(values: Iterable[_Value]) -> tuple[Mapping[Position, int], int]:
    """The slot of each value by its reader, and the number of slots that the fullest rank needs.

    Taken in the order in which they are written, values need as many slots as wait at once, and no more. A slot that is
    read in a tick can be written at the end of the same tick.
    """
    slots: dict[Position, int] = {}
    free: dict[int, list[int]] = defaultdict(list)
    taken: dict[int, list[tuple[int, int]]] = defaultdict(list)
    num_slots: dict[int, int] = defaultdict(int)
    for rank, written, read, reader in sorted(values):
        while taken[rank] and taken[rank][0][0] <= written:
            heappush(free[rank], heappop(taken[rank])[1])
        if not free[rank]:
            heappush(free[rank], num_slots[rank])
            num_slots[rank] += 1
        slots[reader] = heappop(free[rank])
        heappush(taken[rank], (read, slots[reader]))
    return slots, max(num_slots.values(), default=0)


def _fill_tasks(
    schedule: PipelineSchedule,
    arrays: Mapping[str, NDArray[np.int32]],
    receive: Mapping[Position, int],
    residual: Mapping[Position, int],
    weight: Mapping[Position, int],
) -> None:
    last_stage = schedule.geometry.num_stages - 1
    for tick, rank, task in schedule.tasks():
        kind, microbatch, stage = position = schedule.position(rank, task)
        values = {"kind": kind, "microbatch": microbatch, "chunk": task.chunk, "stage": stage}
        values |= {"is_first": stage == 0, "is_last": stage == last_stage}
        if position in receive:
            values["input_slot" if kind is Kind.FORWARD else "cotangent_slot"] = receive[position]
        if kind is not Kind.WEIGHT and residual:
            values["residual_slot"] = residual[Kind.BACKWARD, microbatch, stage]
        if kind is not Kind.FORWARD and weight:
            values["weight_slot"] = weight[Kind.WEIGHT, microbatch, stage]
        for name, value in values.items():
            arrays[name][tick, rank] = value


def _fill_transfers(
    schedule: PipelineSchedule, arrays: Mapping[str, NDArray[np.int32]], receive: Mapping[Position, int]
) -> None:
    geometry = schedule.geometry
    for (kind, microbatch, stage), slot in receive.items():
        source, sender_stage = geometry.sender(kind, stage)
        sent = schedule.ticks[source, microbatch, sender_stage]
        sender, receiver = geometry.rank(sender_stage), geometry.rank(stage)
        if sender == receiver:
            arrays["own_slot"][sent, sender] = slot
            continue
        name = "from_previous" if receiver == (sender + 1) % geometry.num_ranks else "from_next"
        arrays[name][sent + geometry.hop - 1, receiver] = slot
