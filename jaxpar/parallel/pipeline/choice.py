"""Which schedule is the fastest that fits, and what speaks against each of the others."""

from collections.abc import Collection, Iterator
from dataclasses import dataclass

from jaxpar.parallel.pipeline.catalogue import SCHEDULES, build_schedule
from jaxpar.parallel.pipeline.makespan import Costs, ideal_time, in_flight, makespan
from jaxpar.parallel.pipeline.routing import route
from jaxpar.parallel.pipeline.schedule import PipelineSchedule

__all__ = ["Candidate", "Choice", "Measured", "choose_schedule", "measure"]

_DIGITS = 9
"""Makespans that differ by less than 1e-9 of the ideal time are a tie."""


@dataclass(frozen=True)
class Measured:
    """A schedule with what counts in the choice.

    makespan: in the unit of the costs.
    slowdown: the makespan over the time that the busiest rank works.
    in_flight: activations of whole stages on the rank that keeps most.
    held: activations of whole stages for which one program for all ranks has room, on every rank: the slots of forwards
      for their backwards, and with a split backward those of backwards for their weight gradients.
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
    max_bytes: float | None = None,
    activation_bytes: float | None = None,
    only_aligned: bool = False,
    allow_split: bool = True,
    hop: int = 1,
) -> Choice:
    """The fastest schedule that can be built and fits; of equally fast ones that which keeps least.

    Args:
      num_ranks, num_microbatches, hop: as in `build_schedule`.
      num_chunks_allowed: the numbers of chunks into which a rank's layers can be divided.
      costs: of a rank's whole share of the layers for one microbatch: numbers, or tuples with one for every rank.
      mode: how ranks wait for each other, see `makespan`.
      max_in_flight: the largest `Measured.held`.
      max_bytes, activation_bytes: instead of `max_in_flight`, the memory for activations and the bytes that a forward
        through all of a rank's chunks keeps for its backward.
      only_aligned: all ranks must run the same kind of task in a tick.
      allow_split: whether the backward can be divided, as the zero-bubble schedules ask.

    Raises:
      ValueError: no schedule can be built, or none fits; says which one keeps least.
    """
    limit, bound = _limit(max_in_flight, max_bytes, activation_bytes)
    candidates = []
    for name, num_chunks in _names(num_chunks_allowed):
        recipe = SCHEDULES[name]
        try:
            schedule = build_schedule(name, num_ranks, num_microbatches, num_chunks, hop=hop)
        except ValueError as error:
            candidates.append(Candidate(name, num_chunks, None, str(error)))
            continue
        measured = measure(schedule, costs, mode)
        refused = ""
        if only_aligned and not schedule.aligned:
            refused = "ranks run different kinds of task in one tick"
        elif recipe.split and not allow_split:
            refused = "it splits the backward"
        elif measured.held > limit:
            refused = f"it keeps {measured.held:g} activations, more than {bound}"
        candidates.append(Candidate(name, num_chunks, measured, refused))
    candidates.sort(key=_rank_of)
    if not candidates or candidates[0].refused or candidates[0].measured is None:
        raise ValueError(_nothing_fits(candidates, bound, num_chunks_allowed))
    return Choice(candidates[0].measured.schedule, tuple(candidates))


def measure(schedule: PipelineSchedule, costs: Costs, mode: str = "lockstep") -> Measured:
    """The schedule's numbers; `costs` are of a rank's whole share of the layers, as in `choose_schedule`."""
    of_chunks = costs.of_chunks(schedule.geometry)
    routed = route(schedule)
    time = makespan(schedule, of_chunks, mode)
    ideal = ideal_time(schedule, of_chunks)
    return Measured(
        schedule,
        makespan=time,
        slowdown=time / ideal if ideal else 1.0,
        in_flight=max(in_flight(schedule).stages),
        held=(routed.num_residual_slots + routed.num_weight_slots) / schedule.geometry.num_chunks,
        num_receive_slots=routed.num_receive_slots,
    )


def _limit(max_in_flight: float | None, max_bytes: float | None, activation_bytes: float | None) -> tuple[float, str]:
    """The largest number of activations, and in which words it was given."""
    if (max_bytes is None) != (activation_bytes is None):
        raise ValueError("max_bytes and activation_bytes go together")
    if max_bytes is None or activation_bytes is None:
        return (float("inf"), "") if max_in_flight is None else (max_in_flight, f"max_in_flight={max_in_flight:g}")
    if max_in_flight is not None:
        raise ValueError("max_in_flight and max_bytes exclude each other")
    if activation_bytes <= 0:
        raise ValueError(f"activation_bytes={activation_bytes:g} must be more than 0")
    limit = max_bytes / activation_bytes
    return limit, f"max_bytes={max_bytes:g} has room for ({limit:.4g} of activation_bytes={activation_bytes:g})"


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


def _nothing_fits(candidates: Collection[Candidate], bound: str, num_chunks_allowed: Collection[int]) -> str:
    built = [candidate for candidate in candidates if candidate.measured is not None]
    start = 'pipeline.schedule="auto"'
    if not candidates:
        return f"{start}: no schedule has {' or '.join(map(str, sorted(num_chunks_allowed))) or 'no'} chunks"
    too_large = [candidate for candidate in built if candidate.refused.startswith("it keeps")]
    if not too_large:
        reasons = (
            f"{candidate.name} with {candidate.num_chunks} chunks: {candidate.refused}" for candidate in candidates
        )
        return f"{start} finds none; {'; '.join(reasons)}"
    least = min(too_large, key=lambda candidate: candidate.measured.held)  # type: ignore[union-attr]
    assert least.measured is not None
    return (
        f"{start}: every schedule keeps more activations of a stage than {bound}; the least is "
        f'{least.measured.held:g}, with pipeline.schedule="{least.name}" and pipeline.chunks={least.num_chunks}'
    )
