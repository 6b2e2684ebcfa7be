"""What a schedule costs: how long it takes, how long ranks are idle, and how much is in flight."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from jaxpar.parallel.pipeline.schedule import Geometry, Kind, PipelineSchedule, Position

__all__ = ["MODES", "Costs", "InFlight", "ideal_time", "idle_share", "in_flight", "makespan"]

MODES = ("lockstep", "ring", "asynchronous")
"""How ranks wait: in every tick for all others, in every tick for their neighbours, only for what a task needs."""

_Cost = float | tuple[float, ...]


@dataclass(frozen=True)
class Costs:
    """The time of a chunk's forward, of its backward down to the input's gradient, and of its weights' gradients.

    Each is one number, or a tuple with one for every stage (uneven stages), in any unit. Without a split backward, a
    backward takes `backward` + `weight`.

    Raises:
      ValueError: a cost is negative.
    """

    forward: _Cost = 1.0
    backward: _Cost = 1.0
    weight: _Cost = 1.0

    def __post_init__(self) -> None:
        for name in ("forward", "backward", "weight"):
            cost = getattr(self, name)
            for value in cost if isinstance(cost, tuple) else (cost,):
                if not value >= 0.0:
                    raise ValueError(f"{name}={cost}: a cost must be 0 or more")

    def of(self, geometry: Geometry, kind: Kind, stage: int) -> float:
        """The time of a task.

        Raises:
          ValueError: costs are given for another number of stages.
        """
        if kind is Kind.FORWARD:
            return _entry(self.forward, "forward", geometry, stage)
        weight = _entry(self.weight, "weight", geometry, stage)
        if kind is Kind.WEIGHT:
            return weight
        backward = _entry(self.backward, "backward", geometry, stage)
        return backward if geometry.split else backward + weight

    def of_chunks(self, geometry: Geometry) -> "Costs":
        """The costs of chunks, if these are of a rank's whole share: numbers, or tuples with one for every rank."""
        return Costs(*(_divided(cost, geometry) for cost in (self.forward, self.backward, self.weight)))


class InFlight(NamedTuple):
    """The largest number of activations that a rank keeps at once, for each rank."""

    chunks: tuple[int, ...]
    """In activations of one chunk for one microbatch."""
    stages: tuple[float, ...]
    """In activations of all of the rank's chunks for one microbatch."""


def makespan(schedule: PipelineSchedule, costs: Costs, mode: str = "lockstep") -> float:
    """The time from the first task to the end of the last one.

    In "lockstep" a tick takes as long as its slowest task, and an empty one no time. In "ring" a rank starts a tick
    when it and both neighbours have ended the one before. In "asynchronous" it starts a task when it has ended its last
    one and what the task needs is done, as in a runtime where every rank has a program of its own. Transfers take no
    time.

    Raises:
      ValueError: the mode is unknown, or costs are given for another number of stages.
    """
    if mode not in MODES:
        raise ValueError(f"mode={mode!r} must be one of {', '.join(map(repr, MODES))}")
    num_ranks = schedule.geometry.num_ranks
    ends = [0.0] * num_ranks
    done: dict[Position, float] = {}
    for row in schedule.table:
        starts = _starts(ends, mode)
        ends = list(starts)
        for rank, task in enumerate(row):
            if task is None:
                continue
            kind, microbatch, stage = position = schedule.position(rank, task)
            start = starts[rank]
            if mode == "asynchronous":
                needed = schedule.geometry.needs(kind, stage)
                start = max(start, *(done[source, microbatch, at] for source, at in needed), 0.0)
            ends[rank] = done[position] = start + costs.of(schedule.geometry, kind, stage)
    return max(ends)


def ideal_time(schedule: PipelineSchedule, costs: Costs) -> float:
    """The time that the busiest rank works: no order of its tasks takes less."""
    return max(_busy_times(schedule, costs))


def idle_share(schedule: PipelineSchedule, costs: Costs | None = None, mode: str = "lockstep") -> float:
    """The share of all ranks' time in which they run no task; without costs, of all cells of the table."""
    num_ranks = schedule.geometry.num_ranks
    if costs is None:
        return 1.0 - schedule.geometry.num_tasks / (num_ranks * schedule.num_ticks)
    total = num_ranks * makespan(schedule, costs, mode)
    return 1.0 - sum(_busy_times(schedule, costs)) / total if total else 0.0


def in_flight(schedule: PipelineSchedule) -> InFlight:
    """The peak of each rank's activations, from a forward to its backward, or its weight gradient if split."""
    peaks = [0] * schedule.geometry.num_ranks
    for _, rank, _, count in schedule.counts_in_flight():
        peaks[rank] = max(peaks[rank], count)
    return InFlight(tuple(peaks), tuple(peak / schedule.geometry.num_chunks for peak in peaks))


def _starts(ends: Sequence[float], mode: str) -> list[float]:
    """When each rank can start the next tick, given when it ended the last one."""
    if mode == "lockstep":
        return [max(ends)] * len(ends)
    if mode == "ring":
        return [max(ends[rank - 1], end, ends[(rank + 1) % len(ends)]) for rank, end in enumerate(ends)]
    return list(ends)


def _busy_times(schedule: PipelineSchedule, costs: Costs) -> list[float]:
    geometry = schedule.geometry
    times = [0.0] * geometry.num_ranks
    for stage in range(geometry.num_stages):
        once = sum(costs.of(geometry, kind, stage) for kind in geometry.kinds)
        times[geometry.rank(stage)] += geometry.num_microbatches * once
    return times


def _entry(cost: _Cost, name: str, geometry: Geometry, stage: int) -> float:
    if not isinstance(cost, tuple):
        return cost
    if len(cost) != geometry.num_stages:
        raise ValueError(f"{len(cost)} costs are given for {name}, but there are {geometry.num_stages} stages")
    return cost[stage]


def _divided(cost: _Cost, geometry: Geometry) -> _Cost:
    if not isinstance(cost, tuple):
        return cost / geometry.num_chunks
    if len(cost) != geometry.num_ranks:
        raise ValueError(f"{len(cost)} costs are given, but there are {geometry.num_ranks} ranks")
    return tuple(cost[geometry.rank(stage)] / geometry.num_chunks for stage in range(geometry.num_stages))
