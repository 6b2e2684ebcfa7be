"""The order in which each rank runs its tasks, for the schedules of the literature.

Every function takes a geometry and returns for each rank its tasks, first to last. r is the rank, p the number of
ranks, m of microbatches, V of chunks a rank; F, B and W are the kinds of task.
"""

from collections.abc import Iterator, Sequence
from itertools import islice

from jaxpar.parallel.pipeline.placing import Orders
from jaxpar.parallel.pipeline.schedule import Geometry, Kind, Task

__all__ = [
    "all_forward_first",
    "interleaved",
    "one_at_a_time",
    "one_forward_one_backward",
    "vee",
    "zero_bubble",
    "zero_bubble_deep",
]


def one_at_a_time(geometry: Geometry) -> Orders:
    """Each microbatch goes forward and back before the next one starts: F0 B0 F1 B1 ..."""
    forwards, backwards, _ = _in_turn(geometry)
    return [_steady(forwards, backwards, warmup=1)] * geometry.num_ranks


def all_forward_first(geometry: Geometry) -> Orders:
    """GPipe (Huang et al. 2019): all forwards, then all backwards."""
    forwards, backwards, _ = _in_turn(geometry)
    return [[*forwards, *backwards]] * geometry.num_ranks


def one_forward_one_backward(geometry: Geometry) -> Orders:
    """1F1B (Narayanan et al. 2019, PipeDream-Flush 2021): p − r forwards, then a backward and a forward in turn.

    A result of hop 2 takes twice as long to the last rank and back: 2(p − r) − 1 forwards then keep the rank busy.
    """
    forwards, backwards, _ = _in_turn(geometry)
    last = geometry.num_ranks - 1
    return [_steady(forwards, backwards, warmup=geometry.hop * (last - rank) + 1) for rank in range(geometry.num_ranks)]


def interleaved(geometry: Geometry) -> Orders:
    """Interleaved 1F1B (Narayanan et al. 2021, PTD-P, section 2.2): p microbatches through each chunk, then p more.

    2(p − r − 1) + (V − 1)p + 1 forwards come first. With V = 1 they are 2(p − r) − 1: the number with which 1F1B loses
    no time where forwards and backwards have ticks of their own.
    """
    p, num_chunks = geometry.num_ranks, geometry.num_chunks
    groups = [
        range(start, min(start + p, geometry.num_microbatches)) for start in range(0, geometry.num_microbatches, p)
    ]
    visits = [(microbatch, chunk) for group in groups for chunk in range(num_chunks) for microbatch in group]
    forwards = [Task(Kind.FORWARD, microbatch, chunk) for microbatch, chunk in visits]
    backwards = [Task(Kind.BACKWARD, microbatch, num_chunks - 1 - chunk) for microbatch, chunk in visits]
    return [_steady(forwards, backwards, warmup=2 * (p - rank - 1) + (num_chunks - 1) * p + 1) for rank in range(p)]


def zero_bubble(geometry: Geometry) -> Orders:
    """ZB-H1 (Qi et al. 2023, section 2.1): 1F1B, of which rank r puts off r weight gradients to fill its end.

    Activations of p microbatches at most wait for their weight gradients, on every rank.
    """
    p = geometry.num_ranks
    return [_steady(*_in_turn(geometry), warmup=p - rank, put_off=rank) for rank in range(p)]


def zero_bubble_deep(geometry: Geometry) -> Orders:
    """ZB-H2 (Qi et al. 2023, section 2.2): 2(p − r) − 1 forwards first and 2r weight gradients put off.

    No rank is idle between its first and its last task if F = B = W; 2p − 1 microbatches are in flight.
    """
    p = geometry.num_ranks
    return [_steady(*_in_turn(geometry), warmup=2 * (p - rank) - 1, put_off=2 * rank) for rank in range(p)]


def vee(geometry: Geometry) -> Orders:
    """ZB-V (Qi et al. 2024, "Pipeline Parallelism with Controllable Memory"): chunk 1 runs back, no bubble.

    2(p − r) − 1 forwards of chunk 0 first, and then never more than 2p chunks in flight: as much as p whole stages.
    """
    return [list(_vee_tasks(geometry, rank)) for rank in range(geometry.num_ranks)]


def _vee_tasks(geometry: Geometry, rank: int) -> Iterator[Task]:
    """The tasks of one rank. The pattern fits 2p − 1 microbatches or more; of fewer, it has those that there are."""
    p, num_microbatches = geometry.num_ranks, geometry.num_microbatches
    num_planned = max(num_microbatches, 2 * p - 1)
    stream = {(kind, chunk): iter(range(num_planned)) for kind in geometry.kinds for chunk in (0, 1)}
    first, second = ([(kind, chunk) for kind in geometry.kinds] for chunk in (0, 1))
    pattern = [
        *first[:1] * (2 * (p - rank) - 1),
        *[*second[:1], *first[:1]] * rank,
        *second * (p - rank),
        *[*first, *second] * (num_planned - p),
        *[first[1], second[1]] * rank,
        *first[1:] * (p - rank),
        *[second[2]] * num_planned,
        *[first[2]] * num_planned,
    ]
    for kind, chunk in pattern:
        microbatch = next(stream[kind, chunk], num_planned)
        if microbatch < num_microbatches:
            yield Task(kind, microbatch, chunk)


def _in_turn(geometry: Geometry) -> tuple[list[Task], list[Task], list[Task]]:
    """The forwards, backwards and weight gradients of chunk 0, by microbatch."""
    forwards, backwards, weights = (
        [Task(kind, microbatch) for microbatch in range(geometry.num_microbatches)]
        for kind in (Kind.FORWARD, Kind.BACKWARD, Kind.WEIGHT)
    )
    return forwards, backwards, weights


def _steady(
    forwards: Sequence[Task], backwards: Sequence[Task], weights: Sequence[Task] = (), *, warmup: int, put_off: int = 0
) -> list[Task]:
    """`warmup` forwards, then a backward, a weight gradient and a forward in turn until each is done.

    The first `put_off` backwards are not followed by a weight gradient; as many come last.
    """
    order = list(forwards[:warmup])
    later_forwards, later_weights = iter(forwards[warmup:]), iter(weights)
    for number, backward in enumerate(backwards):
        order.append(backward)
        if number >= put_off:
            order += islice(later_weights, 1)
        order += islice(later_forwards, 1)
    return [*order, *later_weights]
