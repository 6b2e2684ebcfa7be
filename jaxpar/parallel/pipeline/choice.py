"""Which schedule is the fastest that fits, and what speaks against each of the others."""

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from jaxpar.parallel.pipeline.catalogue import SCHEDULES, build_schedule
from jaxpar.parallel.pipeline.makespan import Costs, ideal_time, in_flight, makespan
from jaxpar.parallel.pipeline.routing import route
from jaxpar.parallel.pipeline.schedule import PipelineSchedule
from jaxpar.parallel.pipeline.tick_loops import has_branches

__all__ = ["Candidate", "Choice", "Measured", "SlotSizes", "choose_schedule", "measure"]

_DIGITS = 9
"""Makespans that differ by less than 1e-9 of the ideal time are a tie."""


class SlotSizes(NamedTuple):
    """What a slot of a schedule with split backward keeps, in activations, which are what a backward that is whole
    needs of its forward."""

    forward: float = 1.0
    """From a forward to its input's gradient."""
    backward: float = 1.0
    """From there to its weights' gradients: also the cotangents within layers, whatever is recomputed."""


_EQUAL = SlotSizes()


@dataclass(frozen=True)
class Measured:
    """A schedule with what counts in the choice.

    makespan: in the unit of the costs.
    slowdown: the makespan over the time that the busiest rank works.
    in_flight: activations of whole stages on the rank that keeps most.
    held: activations of whole stages for which one program for all ranks has room, on every rank: the slots of forwards
      for their backwards, and with a split backward those of backwards for their weight gradients, by `SlotSizes`.
    num_receive_slots: inputs and cotangents for which it has room.
    """

    schedule: PipelineSchedule
    makespan: float
    slowdown: float
    in_flight: float
    held: float
    num_receive_slots: int


@dataclass(frozen=True)
class Candidate:
    """A schedule that was considered; `refused` says why it cannot be taken, and is empty if it can."""

    name: str
    num_chunks: int
    measured: Measured | None
    refused: str = ""


@dataclass(frozen=True)
class Choice:
    """The schedule that was chosen, and all candidates, the chosen one first and then from fast to slow."""

    schedule: PipelineSchedule
    candidates: tuple[Candidate, ...]


def choose_schedule(
    num_ranks: int,
    num_microbatches: int,
    num_chunks_allowed: Collection[int],
    costs: Costs,
    *,
    mode: str = "lockstep",
    max_in_flight: float | None = None,
    slots: SlotSizes = _EQUAL,
    only_aligned: bool = False,
    hop: int = 1,
) -> Choice:
    """The fastest schedule that can be built and fits; of equally fast ones that which keeps least.

    Args:
      num_ranks, num_microbatches, hop: as in `build_schedule`.
      num_chunks_allowed: the numbers of chunks into which a rank's layers can be divided.
      costs: of a rank's whole share of the layers for one microbatch: numbers, or tuples with one for every rank.
      mode: how ranks wait for each other, see `makespan`.
      max_in_flight: the largest `Measured.held`.
      slots: of the schedules with split backward.
      only_aligned: all ranks must run the same kind of task in a tick, and which is known when compiling.

    Raises:
      ValueError: no schedule can be built, or none fits; says which one keeps least.
    """
    candidates = []
    for name, num_chunks in _names(num_chunks_allowed):
        try:
            schedule = build_schedule(name, num_ranks, num_microbatches, num_chunks, hop=hop)
        except ValueError as error:
            candidates.append(Candidate(name, num_chunks, None, str(error)))
            continue
        measured = measure(schedule, costs, mode, slots)
        refused = ""
        if only_aligned and not schedule.aligned:
            refused = "ranks run different kinds of task in one tick"
        elif only_aligned and has_branches(route(schedule)):
            refused = "it alternates too often to be compiled without branches"
        elif max_in_flight is not None and measured.held > max_in_flight:
            refused = f"it keeps {measured.held:.4g} activations, more than max_in_flight={max_in_flight:g}"
        candidates.append(Candidate(name, num_chunks, measured, refused))
    candidates.sort(key=_rank_of)
    if not candidates or candidates[0].refused or candidates[0].measured is None:
        raise ValueError(_nothing_fits(candidates, max_in_flight, num_chunks_allowed))
    return Choice(candidates[0].measured.schedule, tuple(candidates))


def measure(schedule: PipelineSchedule, costs: Costs, mode: str = "lockstep", slots: SlotSizes = _EQUAL) -> Measured:
    """The schedule's numbers; `costs` are of a rank's whole share of the layers, as in `choose_schedule`."""
    of_chunks = costs.of_chunks(schedule.geometry)
    routed = route(schedule)
    forward, backward = slots if schedule.geometry.split else _EQUAL
    held = routed.num_residual_slots * forward + routed.num_weight_slots * backward
    time = makespan(schedule, of_chunks, mode)
    ideal = ideal_time(schedule, of_chunks)
    return Measured(
        schedule,
        makespan=time,
        slowdown=time / ideal if ideal else 1.0,
        in_flight=max(in_flight(schedule).stages),
        held=held / schedule.geometry.num_chunks,
        num_receive_slots=routed.num_receive_slots,
    )


def _names(num_chunks_allowed: Collection[int]) -> Iterator[tuple[str, int]]:
    for num_chunks in sorted(set(num_chunks_allowed)):
        for name, recipe in SCHEDULES.items():
            least, largest = recipe.legal_chunks
            if least <= num_chunks and (largest is None or num_chunks <= largest):
                yield name, num_chunks


def _rank_of(candidate: Candidate) -> tuple[bool, bool, float, float, int, bool]:
    """Sorts candidates: those that can be taken, from fast to slow; an aligned one before another that is its equal."""
    found = candidate.measured
    if found is None:
        return True, True, 0.0, 0.0, 0, True
    time = round(found.slowdown, _DIGITS)
    return bool(candidate.refused), False, time, found.held, found.num_receive_slots, not found.schedule.aligned


def _nothing_fits(
    candidates: Collection[Candidate], max_in_flight: float | None, num_chunks_allowed: Collection[int]
) -> str:
    start = 'pipeline.schedule="auto"'
    if not candidates:
        return f"{start}: no schedule has {' or '.join(map(str, sorted(num_chunks_allowed))) or 'no'} chunks"
    too_large = [candidate for candidate in candidates if candidate.refused.startswith("it keeps")]
    if not too_large:
        reasons = (
            f"{candidate.name} with {candidate.num_chunks} chunks: {candidate.refused}" for candidate in candidates
        )
        return f"{start} finds none; {'; '.join(reasons)}"
    least = min(too_large, key=lambda candidate: candidate.measured.held)  # type: ignore[union-attr]
    assert least.measured is not None
    return (
        f"{start}: every schedule keeps more activations of a stage than max_in_flight={max_in_flight:g}; the least is "
        f'{least.measured.held:.4g}, with pipeline.schedule="{least.name}" and pipeline.chunks={least.num_chunks}'
    )
