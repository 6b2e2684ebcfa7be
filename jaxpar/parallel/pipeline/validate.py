"""Proves that a schedule can run: from its table alone, and by a run of its routed arrays on labels."""

from jaxpar.parallel.pipeline.replay import replay
from jaxpar.parallel.pipeline.routing import route
from jaxpar.parallel.pipeline.schedule import PipelineSchedule, Position, TableError, Task

__all__ = ["validate"]


def validate(schedule: PipelineSchedule, *, max_in_flight: int | None = None) -> None:
    """Checks a schedule, and the arrays into which it is routed.

    Every task of every microbatch and stage runs once; after what it needs, with the time that a transfer takes;
    results go to a neighbour in the ring of ranks or stay; and `replay` finds every value where it is read.

    Args:
      max_in_flight: the largest number of forwards on a rank whose last use (backward; weight gradient if split) is
        still to come, in chunks; None for any number.

    Raises:
      TableError: a ValueError that names tick, rank and task.
    """
    _check_cells(schedule)
    _check_complete(schedule)
    _check_needs(schedule)
    if max_in_flight is not None:
        _check_in_flight(schedule, max_in_flight)
    replay(route(schedule))


def _check_cells(schedule: PipelineSchedule) -> None:
    geometry = schedule.geometry
    for tick, row in enumerate(schedule.table):
        if len(row) != geometry.num_ranks:
            raise TableError(f"{len(row)} cells for {geometry.num_ranks} ranks", tick, None, "the tick")
    for tick, rank, task in schedule.tasks():
        if task.kind not in geometry.kinds:
            legal = ", ".join(kind.letter for kind in geometry.kinds)
            why = "" if geometry.split else "; W needs split = true"
            raise TableError(f"this schedule has the kinds {legal}{why}", tick, rank, task.label())
        if not 0 <= task.microbatch < geometry.num_microbatches:
            limit = geometry.num_microbatches - 1
            raise TableError(f"microbatches are numbered from 0 to {limit}", tick, rank, task.label())
        if not 0 <= task.chunk < geometry.num_chunks:
            last = Task(task.kind, 0, geometry.num_chunks - 1).label()[2:]
            raise TableError(f"chunks of a rank are lettered from a to {last}", tick, rank, task.label())


def _check_complete(schedule: PipelineSchedule) -> None:
    geometry = schedule.geometry
    seen: dict[Position, int] = {}
    for tick, rank, task in schedule.tasks():
        position = schedule.position(rank, task)
        if position in seen:
            raise TableError(f"it ran already in tick {seen[position]}", tick, rank, task.label())
        seen[position] = tick
    for microbatch in range(geometry.num_microbatches):
        for stage in range(geometry.num_stages):
            for kind in geometry.kinds:
                if (kind, microbatch, stage) not in seen:
                    rank, chunk = geometry.locate(stage)
                    raise TableError("it never runs", None, rank, Task(kind, microbatch, chunk).label())


def _check_needs(schedule: PipelineSchedule) -> None:
    geometry = schedule.geometry
    for tick, rank, task in schedule.tasks():
        kind, microbatch, stage = schedule.position(rank, task)
        for needed, source in geometry.needs(kind, stage):
            done, (sender, chunk) = schedule.ticks[needed, microbatch, source], geometry.locate(source)
            if (sender - rank) % geometry.num_ranks not in (0, 1, geometry.num_ranks - 1):
                raise TableError(f"rank {sender}, whose result it needs, is no neighbour", tick, rank, task.label())
            if done + geometry.delay(source, stage) > tick:
                what = Task(needed, microbatch, chunk).label()
                when = f"which runs in tick {done} on rank {sender}"
                earliest = done + geometry.delay(source, stage)
                raise TableError(f"needs {what}, {when}: tick {earliest} at the earliest", tick, rank, task.label())


def _check_in_flight(schedule: PipelineSchedule, max_in_flight: int) -> None:
    for tick, rank, task, count in schedule.counts_in_flight():
        if count > max_in_flight:
            problem = f"{count} chunks are in flight, which is more than max_in_flight={max_in_flight}"
            raise TableError(problem, tick, rank, task.label())
