"""The schedules by name: what each asks of the numbers of ranks, microbatches and chunks."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from difflib import get_close_matches
from types import MappingProxyType

from jaxpar.multiples import nearest_multiples
from jaxpar.parallel.pipeline import orders
from jaxpar.parallel.pipeline.placing import Orders, place
from jaxpar.parallel.pipeline.schedule import HOPS, Geometry, Kind, PipelineSchedule

__all__ = ["SCHEDULES", "Recipe", "build_schedule", "forward_schedule"]


@dataclass(frozen=True)
class Recipe:
    """How a schedule is made, and what it needs.

    `legal_chunks` are the least and the largest number of chunks (None: any). `min_microbatches` is a function of the
    number of ranks, with the reason in `why_so_many`; `in_rounds` asks for a multiple of the number of ranks.
    `aligned` and `split` say whether all ranks run the same kind in a tick, and whether weight gradients are tasks of
    their own.
    """

    orders: Callable[[Geometry], Orders]
    legal_chunks: tuple[int, int | None] = (1, 1)
    placement: str = "loop"
    split: bool = False
    aligned: bool = False
    in_rounds: bool = False
    min_microbatches: Callable[[int], int] = lambda num_ranks: 1
    why_so_many: str = ""


_FILLED = "with fewer, no weight gradients are left that fill the idle ticks"

SCHEDULES: Mapping[str, Recipe] = MappingProxyType(
    {
        "naive": Recipe(orders.one_at_a_time, aligned=True),
        "gpipe": Recipe(orders.all_forward_first, aligned=True),
        "1f1b": Recipe(orders.one_forward_one_backward),
        "1f1b_aligned": Recipe(orders.interleaved, aligned=True),
        "interleaved": Recipe(orders.interleaved, (2, None), in_rounds=True),
        "interleaved_aligned": Recipe(orders.interleaved, (2, None), aligned=True, in_rounds=True),
        "zb_h1": Recipe(orders.zero_bubble, split=True, min_microbatches=lambda p: p, why_so_many=_FILLED),
        "zb_h2": Recipe(orders.zero_bubble_deep, split=True, min_microbatches=lambda p: 2 * p - 1, why_so_many=_FILLED),
        "zb_v": Recipe(orders.vee, (2, 2), "vee", split=True, min_microbatches=lambda p: p, why_so_many=_FILLED),
    }
)
"""Name → how it is made; the names are the values of `pipeline.schedule`."""


def build_schedule(
    name: str, num_ranks: int, num_microbatches: int, num_chunks: int = 1, *, hop: int = 1
) -> PipelineSchedule:
    """The schedule of that name.

    Args:
      name: one of `SCHEDULES` (`pipeline.schedule`).
      num_ranks: `parallel.pipe`.
      num_microbatches: `pipeline.microbatches`.
      num_chunks: stages on each rank, `pipeline.chunks`.
      hop: ticks after which a neighbour can use a result; 2 lets the transfer run beside the next tick's computation.

    Raises:
      ValueError: the name is unknown, or the schedule cannot be made for these numbers.

    >>> print(build_schedule("1f1b", 2, 3))
    F0 F1  . B0 F2 B1  . B2
     . F0 B0 F1 B1 F2 B2  .
    """
    if name not in SCHEDULES:
        near = get_close_matches(name, SCHEDULES, n=1)
        hint = f'; did you mean "{near[0]}"?' if near else ""
        raise ValueError(f'pipeline.schedule="{name}" is unknown; legal values: {_quoted()}{hint}')
    for key, value in (
        ("parallel.pipe", num_ranks),
        ("pipeline.microbatches", num_microbatches),
        ("pipeline.chunks", num_chunks),
    ):
        if value < 1:
            raise ValueError(f"{key}={value} must be 1 or more")
    if hop not in HOPS:
        raise ValueError(f"hop={hop} must be {' or '.join(map(str, HOPS))}")
    recipe = SCHEDULES[name]
    _check_chunks(name, recipe, num_chunks)
    _check_microbatches(name, recipe, num_ranks, num_microbatches)
    geometry = Geometry(num_ranks, num_microbatches, num_chunks, recipe.placement, recipe.split, hop)
    return PipelineSchedule(name, geometry, place(geometry, recipe.orders(geometry), aligned=recipe.aligned))


def forward_schedule(geometry: Geometry, num_microbatches: int) -> PipelineSchedule:
    """Forwards alone, for the stages of `geometry`, in as few ticks as there can be.

    >>> print(forward_schedule(Geometry(2, 8, 2), 2))
    F0a F1a F0b F1b   .
      . F0a F1a F0b F1b
    """
    alone = replace(geometry, num_microbatches=num_microbatches, split=False, forward_only=True)
    forwards = [[task for task in order if task.kind is Kind.FORWARD] for order in orders.interleaved(alone)]
    return PipelineSchedule("forward", alone, place(alone, forwards))


def _check_chunks(name: str, recipe: Recipe, num_chunks: int) -> None:
    least, largest = recipe.legal_chunks
    if num_chunks >= least and (largest is None or num_chunks <= largest):
        return
    legal = f"{least} or more" if largest is None else str(least)
    others = [
        f'"{other}"'
        for other, (low, high) in ((other, SCHEDULES[other].legal_chunks) for other in SCHEDULES)
        if low <= num_chunks and (high is None or num_chunks <= high)
    ]
    raise ValueError(
        f'pipeline.chunks={num_chunks} does not go with pipeline.schedule="{name}"; legal values: {legal}; '
        f"schedules for {num_chunks} {'chunk' if num_chunks == 1 else 'chunks'}: {', '.join(others)}"
    )


def _check_microbatches(name: str, recipe: Recipe, num_ranks: int, num_microbatches: int) -> None:
    least = recipe.min_microbatches(num_ranks)
    if num_microbatches < least:
        raise ValueError(
            f'pipeline.microbatches={num_microbatches} is too few for pipeline.schedule="{name}" with parallel.pipe='
            f"{num_ranks}: {recipe.why_so_many}; legal values: {least} or more"
        )
    if recipe.in_rounds and num_microbatches % num_ranks:
        raise ValueError(
            f"pipeline.microbatches={num_microbatches} must be a multiple of parallel.pipe={num_ranks} for "
            f'pipeline.schedule="{name}", which sends the microbatches around in groups of one for each rank; nearest '
            f"legal values: {nearest_multiples(num_microbatches, num_ranks)}"
        )


def _quoted() -> str:
    return ", ".join(f'"{name}"' for name in SCHEDULES)
