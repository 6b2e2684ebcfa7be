"""Into which loops over ticks a table is compiled, and what is known in them when compiling."""

from collections.abc import Sequence
from typing import NamedTuple

from jaxpar.parallel.pipeline.routing import RoutedSchedule
from jaxpar.parallel.pipeline.schedule import Kind

__all__ = ["KnownTick", "has_branches", "loops", "num_transfers"]

_MOST_LOOPS = 8
"""A table that takes more is one loop that chooses at each tick, so that compiling takes as long for any table."""


class KnownTick(NamedTuple):
    """What is known of a tick when compiling: the kind of all tasks, and from where something arrives."""

    kind: Kind
    from_previous: bool
    from_next: bool


def loops(routed: RoutedSchedule) -> list[tuple[slice, Sequence[KnownTick | None]]]:
    """Ranges of ticks, and what is known of the group of ticks that each repeats.

    Nothing is known where each rank has its own kind of task. How many loops there are does not depend on the number of
    microbatches: one of forwards, one that alternates, one of backwards.
    """
    runs = _runs([Kind(kind) for kind in routed.kind.max(axis=1)]) if routed.schedule.aligned else []
    if not 0 < len(runs) <= _MOST_LOOPS:
        return [(slice(0, routed.schedule.num_ticks), [None])]
    return [(ticks, [_known(routed, ticks, kinds, place) for place in range(len(kinds))]) for ticks, kinds in runs]


def has_branches(routed: RoutedSchedule) -> bool:
    """Whether tasks stand in branches, because their kind is not known when compiling: a collective-permute must not
    stand there."""
    return any(known is None for _, group in loops(routed) for known in group)


def num_transfers(routed: RoutedSchedule) -> int:
    """How often in a step every rank sends to a neighbour, whether something is due or not."""
    transfers = 0
    for ticks, group in loops(routed):
        for place, known in enumerate(group):
            rows = slice(ticks.start + place, ticks.stop, len(group))
            for name in ("from_previous", "from_next"):
                sends = getattr(routed, f"any_{name}")[rows]
                if known is None:
                    transfers += len(sends) if routed.schedule.geometry.hop == 2 else int(sends.sum())
                else:
                    transfers += len(sends) * getattr(known, name)
    return transfers


def _known(routed: RoutedSchedule, ticks: slice, kinds: Sequence[Kind], place: int) -> KnownTick:
    rows = slice(ticks.start + place, ticks.stop, len(kinds))
    return KnownTick(kinds[place], bool(routed.any_from_previous[rows].any()), bool(routed.any_from_next[rows].any()))


def _runs(kinds: Sequence[Kind]) -> list[tuple[slice, tuple[Kind, ...]]]:
    """Ranges of ticks that repeat one kind, or two in turn.

    >>> F, B = Kind.FORWARD, Kind.BACKWARD
    >>> [(ticks.stop - ticks.start, len(kinds)) for ticks, kinds in _runs([F, F, F, B, F, B, F, B, B])]
    [(2, 1), (6, 2), (1, 1)]
    """
    runs, start = [], 0
    while start < len(kinds):
        pattern = tuple(kinds[start : start + 2])
        alternates = len(set(pattern)) == 2
        pattern = pattern if alternates else pattern[:1]
        end = start + len(pattern)
        while tuple(kinds[end : end + len(pattern)]) == pattern:
            end += len(pattern)
        if not alternates and end < len(kinds) and end - start > 1 and kinds[end + 1 : end + 2] == [kinds[start]]:
            end -= 1  # the last one begins what alternates
        runs.append((slice(start, end), pattern))
        start = end
    return runs
