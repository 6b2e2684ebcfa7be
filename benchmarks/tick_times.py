"""Tables made for measuring: GPipe in which one tick, where all ranks run the same kind of task, is repeated.

A table is data, and so is what a rank does in a tick. The program with a tick repeated k times more takes k times that
tick longer than the one without, and everything else (embedding, head, sums over ranks, clipping) is in both. The
repeated ticks are of layers alone: no rank embeds or computes the loss in them. What they compute is wrong, and
nobody reads it.
"""

from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any

import numpy as np

from jaxpar.parallel.pipeline.routing import RoutedSchedule, route
from jaxpar.parallel.pipeline.schedule import Geometry, Kind, PipelineSchedule, Task
from jaxpar.pipeline_plan import PipelinePlan
from jaxpar.plan import Plan

__all__ = ["TICKS", "phases", "repeating"]

TICKS = {
    "forward": (Kind.FORWARD, False),
    "backward": (Kind.BACKWARD, False),
    "forward, split": (Kind.FORWARD, True),
    "input's gradient": (Kind.BACKWARD, True),
    "weights' gradients": (Kind.WEIGHT, True),
}
"""What can be timed → its kind of task, and whether the backward is split in that program."""


def repeating(plan: Plan, kind: Kind | None, times: int, *, split: bool) -> Plan:
    """The plan with a table of phases in which a tick of this kind is repeated `times` times more; None: as it is.

    Args:
      plan: of one chunk a rank, with a microbatch for each rank or more.
      split: whether weight gradients are tasks of their own.
    """
    assert plan.pipeline is not None
    given = plan.pipeline.schedule.geometry
    schedule = phases(Geometry(given.num_ranks, given.num_microbatches, split=split))
    routed = route(schedule)
    rows = routed if kind is None else _repeated(routed, kind, times)
    own = {field.name: getattr(plan.pipeline, field.name) for field in fields(plan.pipeline)}
    pipeline = _GivenRows(**own | {"measured": replace(plan.pipeline.measured, schedule=schedule)}, rows=rows)
    return replace(plan, pipeline=pipeline, execution=replace(plan.execution, split_backward=split))


def phases(geometry: Geometry) -> PipelineSchedule:
    """All forwards, then all backwards, then, with a split backward, all weight gradients.

    >>> print(phases(Geometry(2, 2, split=True)))
    F0 F1  .  . B0 B1 W0 W1
     . F0 F1 B0 B1  . W0 W1
    """
    ranks, number = range(geometry.num_ranks), geometry.num_microbatches

    def row(kind: Kind, microbatches: list[int]) -> tuple[Task | None, ...]:
        return tuple(Task(kind, microbatch) if 0 <= microbatch < number else None for microbatch in microbatches)

    steps = range(number + geometry.num_ranks - 1)
    table = [row(Kind.FORWARD, [step - rank for rank in ranks]) for step in steps]
    table += [row(Kind.BACKWARD, [step - (geometry.num_ranks - 1 - rank) for rank in ranks]) for step in steps]
    if geometry.split:
        table += [row(Kind.WEIGHT, [microbatch] * geometry.num_ranks) for microbatch in range(number)]
    return PipelineSchedule("phases", geometry, tuple(table))


@dataclass(frozen=True, eq=False)
class _GivenRows(PipelinePlan):
    """A pipeline that runs `rows`, which need not be what its schedule is routed to."""

    rows: RoutedSchedule

    @cached_property
    def routed(self) -> RoutedSchedule:
        return self.rows


def _repeated(routed: RoutedSchedule, kind: Kind, times: int) -> RoutedSchedule:
    tick = int(np.flatnonzero((routed.kind == kind).all(axis=1))[0])
    arrays: dict[str, Any] = {}
    for name, array in routed.arrays.items():
        copies = np.repeat(array[tick : tick + 1], times, axis=0)
        if name in ("is_first", "is_last"):
            copies = np.zeros_like(copies)
        arrays[name] = np.insert(array, tick + 1, copies, axis=0)
    return replace(routed, **arrays)
