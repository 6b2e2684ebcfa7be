"""Finds the process that hangs, from the signs of life that the loop of each process gives.

No thread of its own gives them: a process whose loop stands still is silent. Where one stands still, soon all do, for
they wait for each other's devices; the one that hangs is the one that is behind.
"""

from collections.abc import Sequence

__all__ = ["Heartbeats"]

_LONGEST_TICK_SECONDS = 2.0


class Heartbeats:
    """Counts signs of life. `tick` must be called every second or so, with the seconds of a steady clock.

    A machine that was suspended, or a process that was stopped and goes on, has silent hours behind it in which nobody
    could have called `tick`: they do not count.

    >>> heartbeats = Heartbeats(count=2, timeout_seconds=3, start_seconds=100)
    >>> for second in range(5):
    ...     heartbeats.tick(second)
    ...     heartbeats.beat(0)
    ...     if second < 2:
    ...         heartbeats.beat(1)
    ...     print(heartbeats.silent())
    ()
    ()
    ()
    ()
    (1,)
    """

    def __init__(self, *, count: int, timeout_seconds: float, start_seconds: float):
        self._timeout_seconds, self._start_seconds = timeout_seconds, start_seconds
        self._beats = [0] * count
        self._heard_at = [0.0] * count
        self._watched: set[int] = set()
        self._starting = set(range(count))
        self._clock = 0.0
        self._ticked_at: float | None = None

    def beat(self, process: int) -> None:
        """Notes a sign of life; the process is watched from its first one on."""
        self._beats[process] += 1
        self._heard_at[process] = self._clock
        self._watched.add(process)
        self._starting.discard(process)

    def rest(self, process: int) -> None:
        """The process has left its loop: it is watched no more until it beats again."""
        self._watched.discard(process)
        self._starting.discard(process)

    def tick(self, now_seconds: float) -> None:
        """Lets time pass."""
        if self._ticked_at is not None:
            self._clock += min(now_seconds - self._ticked_at, _LONGEST_TICK_SECONDS)
        self._ticked_at = now_seconds

    def silent(self) -> Sequence[int]:
        """The watched processes that are behind the others and silent for too long; all, if none is behind."""
        if not self._watched:
            return ()
        fewest = min(self._beats[process] for process in self._watched)
        behind = sorted(process for process in self._watched if self._beats[process] == fewest)
        silent_seconds = min(self._clock - self._heard_at[process] for process in behind)
        return tuple(behind) if silent_seconds >= self._timeout_seconds else ()

    def late(self) -> Sequence[int]:
        """The processes that have given no sign of life at all, though their start should be over."""
        return tuple(sorted(self._starting)) if self._clock >= self._start_seconds else ()
