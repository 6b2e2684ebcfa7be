"""Runs a routed schedule on labels in place of arrays: a proof that every value is where it is read."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from jaxpar.parallel.pipeline.routing import RoutedSchedule
from jaxpar.parallel.pipeline.schedule import Geometry, Kind, Position, TableError, Task

__all__ = ["replay"]


@dataclass(frozen=True)
class _Payload:
    """A result: the task that made it, where and when, and the task that is to read it, which is its label."""

    tick: int
    rank: int
    task: Task
    reader: Position


def replay(routed: RoutedSchedule) -> None:
    """Runs the arrays tick by tick, as an executor does, and knows nothing of how slots were allocated.

    Raises:
      TableError: a ValueError with tick, rank and task: a task reads a slot that holds another value or none, a value
        is overwritten before it is read, a result arrives nowhere, or something is received that nobody sent.
    """
    geometry = routed.schedule.geometry
    receive = _Pool("receive", geometry.num_ranks, routed.num_receive_slots)
    residual = _Pool("residual", geometry.num_ranks, routed.num_residual_slots)
    weight = _Pool("weight", geometry.num_ranks, routed.num_weight_slots)
    pending: Sequence[_Payload | None] = [None] * geometry.num_ranks
    for tick in range(len(routed.kind)):
        payloads = [_run_task(routed, tick, rank, receive, residual, weight) for rank in range(geometry.num_ranks)]
        _deliver(routed, tick, pending if geometry.hop > 1 else payloads, payloads, receive)
        pending = payloads
    if geometry.hop > 1:
        for payload in pending:
            if payload is not None:
                raise _lost(payload)
    for pool in (receive, residual, weight):
        pool.check_empty()


class _Pool:
    """The slots of one kind on every rank, each with the label of a value that is still to be read, or None."""

    def __init__(self, name: str, num_ranks: int, num_slots: int) -> None:
        self._name = name
        self._labels: list[list[Position | None]] = [[None] * num_slots for _ in range(num_ranks)]

    def write(self, tick: int, rank: int, slot: int, label: Position, task: str) -> None:
        self._check_slot(tick, rank, slot, task)
        before = self._labels[rank][slot]
        if before is not None:
            problem = f"overwrites {self._name} slot {slot}, which {_show(before)} has not read yet"
            raise TableError(problem, tick, rank, task)
        self._labels[rank][slot] = label

    def read(self, tick: int, rank: int, slot: int, label: Position, task: str) -> None:
        self._check_slot(tick, rank, slot, task)
        found = self._labels[rank][slot]
        if found != label:
            holds = "nothing" if found is None else f"what {_show(found)} is to read"
            raise TableError(f"reads {self._name} slot {slot}, which holds {holds}", tick, rank, task)
        self._labels[rank][slot] = None

    def check_empty(self) -> None:
        for rank, labels in enumerate(self._labels):
            for label in labels:
                if label is not None:
                    raise TableError(
                        f"a {self._name} slot holds what it has not read at the end", None, rank, _show(label)
                    )

    def _check_slot(self, tick: int, rank: int, slot: int, task: str) -> None:
        if not 0 <= slot < len(self._labels[rank]):
            raise TableError(f"there is no {self._name} slot {slot}", tick, rank, task)


def _run_task(
    routed: RoutedSchedule, tick: int, rank: int, receive: _Pool, residual: _Pool, weight: _Pool
) -> _Payload | None:
    """What the rank reads and keeps in this tick; returns its result if another task reads that."""
    geometry = routed.schedule.geometry
    row = {name: int(array[tick, rank]) for name, array in routed.arrays.items() if array.ndim == 2}
    kind, microbatch, stage = Kind(row["kind"]), row["microbatch"], row["stage"]
    planned = routed.schedule.table[tick][rank]
    task = None if kind is Kind.IDLE else Task(kind, microbatch, row["chunk"])
    label = "idle" if task is None else task.label()
    if task != planned:
        raise TableError(f"the schedule has {'idle' if planned is None else planned.label()} here", tick, rank, label)
    if task is None:
        return None
    expected = (geometry.stage(rank, task.chunk), stage == 0, stage == geometry.num_stages - 1)
    if (stage, row["is_first"], row["is_last"]) != expected:
        raise TableError("stage, is_first or is_last do not fit the rank and the chunk", tick, rank, label)
    here = (tick, rank)
    if kind is Kind.FORWARD:
        if stage:
            receive.read(*here, row["input_slot"], (kind, microbatch, stage), label)
        residual.write(*here, row["residual_slot"], (Kind.BACKWARD, microbatch, stage), label)
    elif kind is Kind.BACKWARD:
        receive.read(*here, row["cotangent_slot"], (kind, microbatch, stage), label)
        residual.read(*here, row["residual_slot"], (kind, microbatch, stage), label)
        if geometry.split:
            weight.write(*here, row["weight_slot"], (Kind.WEIGHT, microbatch, stage), label)
    else:
        weight.read(*here, row["weight_slot"], (kind, microbatch, stage), label)
    reader = _reader_of_result(geometry, kind, microbatch, stage)
    return None if reader is None else _Payload(tick, rank, task, reader)


def _reader_of_result(geometry: Geometry, kind: Kind, microbatch: int, stage: int) -> Position | None:
    if kind is Kind.FORWARD:
        is_last = stage == geometry.num_stages - 1
        return (Kind.BACKWARD, microbatch, stage) if is_last else (Kind.FORWARD, microbatch, stage + 1)
    return (Kind.BACKWARD, microbatch, stage - 1) if kind is Kind.BACKWARD and stage else None


def _deliver(
    routed: RoutedSchedule,
    tick: int,
    moving: Sequence[_Payload | None],
    payloads: Sequence[_Payload | None],
    receive: _Pool,
) -> None:
    """Writes what arrives in this tick; every result must arrive once, where its reader is."""
    geometry = routed.schedule.geometry
    delivered = set()
    for rank, slot, payload in _arrivals(routed, tick, moving, payloads):
        if payload is None:
            raise TableError(f"receive slot {slot} gets something that nobody sent", tick, rank, "receive")
        if geometry.rank(payload.reader[2]) != rank:
            raise TableError(f"receives a result for {_show(payload.reader)}", tick, rank, payload.task.label())
        if payload in delivered:
            raise TableError("its result is received twice", payload.tick, payload.rank, payload.task.label())
        delivered.add(payload)
        receive.write(tick, rank, slot, payload.reader, f"result of {payload.task.label()}")
    for payload in (*moving, *payloads):
        if payload is None or payload in delivered:
            continue
        stays = geometry.rank(payload.reader[2]) == payload.rank
        if payload.tick == tick if stays else payload in moving:
            raise _lost(payload)


def _arrivals(
    routed: RoutedSchedule, tick: int, moving: Sequence[_Payload | None], payloads: Sequence[_Payload | None]
) -> Iterator[tuple[int, int, _Payload | None]]:
    """What is written to receive slots at the end of a tick: rank, slot, result."""
    num_ranks = len(payloads)
    for name, offset in (("from_previous", -1), ("from_next", 1)):
        slots = getattr(routed, name)[tick]
        is_used = slots != routed.num_receive_slots
        if bool(getattr(routed, f"any_{name}")[tick]) != is_used.any():
            raise TableError(f"any_{name} does not say whether a rank receives", tick, None, "receive")
        for rank in is_used.nonzero()[0].tolist():
            payload = moving[(rank + offset) % num_ranks]
            stays = payload is not None and routed.schedule.geometry.rank(payload.reader[2]) == payload.rank
            yield rank, int(slots[rank]), None if stays else payload
    for rank, payload in enumerate(payloads):
        slot = int(routed.own_slot[tick, rank])
        if slot != routed.num_receive_slots:
            yield rank, slot, payload


def _lost(payload: _Payload) -> TableError:
    return TableError(
        f"its result never arrives at {_show(payload.reader)}", payload.tick, payload.rank, payload.task.label()
    )


def _show(position: Position) -> str:
    kind, microbatch, stage = position
    return f"{kind.letter}{microbatch} of stage {stage}"
