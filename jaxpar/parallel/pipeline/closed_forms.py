"""What the papers say of their schedules: ticks, idle time and activations as formulas.

p is the number of ranks, m of microbatches, V of chunks on each rank; F, B and W are the times of a rank's whole share
of the layers for one microbatch. All hold for hop 1.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

__all__ = ["CLOSED_FORMS", "ClosedForm", "closed_form"]


@dataclass(frozen=True)
class ClosedForm:
    """A schedule in numbers, where every task takes one tick.

    ticks: the table's length.
    idle_share: of its cells.
    in_flight: activations of whole stages on the rank that keeps most.
    bubble: factors of F, B and W in the idle time between a rank's first and its last task, on the rank that waits
      longest.
    """

    ticks: int
    idle_share: float
    in_flight: float
    bubble: tuple[float, float, float]

    def bubble_time(self, forward: float, backward: float, weight: float) -> float:
        """The idle time for these times of a whole stage.

        >>> closed_form("1f1b", 4, 8).bubble_time(1.0, 1.0, 1.0)
        9.0
        """
        return sum(factor * time for factor, time in zip(self.bubble, (forward, backward, weight), strict=True))


def closed_form(name: str, num_ranks: int, num_microbatches: int, num_chunks: int = 1) -> ClosedForm:
    """The numbers of a schedule of `catalogue.SCHEDULES`, for ranks, microbatches and chunks for which it can be built.

    | schedule | ticks | in flight | bubble | source |
    |---|---|---|---|---|
    | naive | 2pm | 1 | m(p−1)(F+B+W) | |
    | gpipe | 2(m+p−1) | m | (p−1)(F+B+W) | Huang 2019 |
    | 1f1b | 2(m+p−1) | min(m, p) | (p−1)(F+B+W) | Narayanan 2021, section 2.2 |
    | 1f1b_aligned | 2(m+p−1) | min(m, 2p−1) | (p−1)(F+B+W) | derived from interleaved with V = 1 |
    | interleaved, also aligned | 2(mV+p−1) | p + (p−1)/V, at most m | (p−1)(F+B+W)/V | Narayanan 2021, section 2.2 |
    | zb_h1 | 3m+p−1 | p | (p−1)(F+B−W) | Qi 2023, table 2 |
    | zb_h2 | 3m+p−1 | 2p−1 | (p−1)(F+B−2W) | Qi 2023, table 2 |
    | zb_v | 6m+p−1, at least 4(m+p)−2 | p | 0 if F = B = W and 2m ≥ 3p−1 | Qi 2024; the second is derived |

    ZB-H2 and ZB-V keep no rank waiting once it has begun, but the last one begins p − 1 ticks after the first. Their
    tables are no shorter than ZB-H1's, unless the next step begins on a rank that is done.
    """
    return CLOSED_FORMS[name](num_ranks, num_microbatches, num_chunks)


def _unsplit(ticks: int, busy_ticks: int, in_flight: float, bubble: float) -> ClosedForm:
    return ClosedForm(ticks, 1.0 - busy_ticks / ticks, in_flight, (bubble, bubble, bubble))


def _naive(p: int, m: int, num_chunks: int) -> ClosedForm:
    return _unsplit(2 * p * m, 2 * m, 1, m * (p - 1))


def _gpipe(p: int, m: int, num_chunks: int) -> ClosedForm:
    return _unsplit(2 * (m + p - 1), 2 * m, m, p - 1)


def _one_forward_one_backward(p: int, m: int, num_chunks: int) -> ClosedForm:
    return _unsplit(2 * (m + p - 1), 2 * m, min(m, p), p - 1)


def _interleaved(p: int, m: int, num_chunks: int) -> ClosedForm:
    ticks = 2 * (m * num_chunks + p - 1)
    return _unsplit(ticks, 2 * m * num_chunks, min(m, p + (p - 1) / num_chunks), (p - 1) / num_chunks)


def _zero_bubble(p: int, m: int, num_chunks: int) -> ClosedForm:
    ticks = 3 * m + p - 1
    return ClosedForm(ticks, 1.0 - 3 * m / ticks, p, (p - 1, p - 1, 1 - p))


def _zero_bubble_deep(p: int, m: int, num_chunks: int) -> ClosedForm:
    ticks = 3 * m + p - 1
    return ClosedForm(ticks, 1.0 - 3 * m / ticks, 2 * p - 1, (p - 1, p - 1, 2 - 2 * p))


def _vee(p: int, m: int, num_chunks: int) -> ClosedForm:
    ticks = max(6 * m + p - 1, 4 * (m + p) - 2)
    return ClosedForm(ticks, 1.0 - 6 * m / ticks, p, (0.0, 0.0, 0.0))


CLOSED_FORMS: Mapping[str, Callable[[int, int, int], ClosedForm]] = MappingProxyType(
    {
        "naive": _naive,
        "gpipe": _gpipe,
        "1f1b": _one_forward_one_backward,
        "1f1b_aligned": _interleaved,
        "interleaved": _interleaved,
        "interleaved_aligned": _interleaved,
        "zb_h1": _zero_bubble,
        "zb_h2": _zero_bubble_deep,
        "zb_v": _vee,
    }
)
