"""Tokens a second and model FLOPs utilisation (MFU), from moments at which a step was known to be finished."""

from dataclasses import dataclass

__all__ = ["Rates", "Throughput"]


@dataclass(frozen=True)
class Rates:
    """Averages over some steps."""

    tokens_per_second: float
    step_seconds: float
    mfu: float | None
    """Fraction of the peak; None without a FLOPs count or a peak."""
    warning: str | None = None
    """Text to show, at most once a run, when `mfu` is above 1."""

    def values(self) -> dict[str, float]:
        """The figures under their keys in `metrics.jsonl`; no `mfu` where there is none."""
        figures = {"tokens_per_second": self.tokens_per_second, "step_seconds": self.step_seconds}
        return figures if self.mfu is None else figures | {"mfu": self.mfu}


class Throughput:
    """Measures between synchronised steps, so that asynchronous dispatch cannot pass for speed.

    A step is synchronised once a value that it computed has reached the host. The first synchronised step only starts
    the measurement: its time, with the compilation, is never counted. Times are arguments, in seconds of any
    steady clock.

    >>> meter = Throughput(tokens_per_step=100, flops_per_token=10, peak_flops_total=4000)
    >>> meter.synchronised(1, 60.0)  # compiled here
    >>> meter.take() is None
    True
    >>> meter.synchronised(3, 61.0)
    >>> meter.take()
    Rates(tokens_per_second=200.0, step_seconds=0.5, mfu=0.5, warning=None)
    """

    def __init__(
        self, tokens_per_step: int, flops_per_token: float | None = None, peak_flops_total: float | None = None
    ) -> None:
        """`flops_per_token` counts forward and backward; `peak_flops_total` is that of all devices. None: no MFU."""
        self._tokens_per_step = tokens_per_step
        self._flops_per_token = flops_per_token
        self._peak_flops_total = peak_flops_total
        self._taken: tuple[int, float] | None = None
        self._last: tuple[int, float] | None = None
        self._latest_seconds = float("-inf")
        self._paused_at: float | None = None
        self._paused_seconds = 0.0
        self._warned = False

    def synchronised(self, step: int, now_seconds: float) -> None:
        """Notes that `step` was finished at `now_seconds`: a value that it computed has just been fetched.

        Raises:
            ValueError: the meter is paused, `step` is not above the last one, or time ran backwards.
        """
        if self._paused_at is not None:
            raise ValueError(f"step {step} was synchronised while the meter is paused; call resume() first")
        if self._last is not None and step <= self._last[0]:
            raise ValueError(f"step {step} was synchronised after step {self._last[0]}; steps must increase")
        self._advance(now_seconds)
        self._last = (step, now_seconds - self._paused_seconds)
        if self._taken is None:
            self._taken = self._last

    def pause(self, step: int, now_seconds: float) -> None:
        """Excludes what follows (evaluation, a checkpoint) until `resume`; `step` is the last one dispatched.

        Raises:
            ValueError: `step` is not synchronised, so it would finish during the pause and seem to take no time; or
                the meter is paused already, or time ran backwards.
        """
        if self._paused_at is not None:
            raise ValueError("the meter is paused already; call resume() first")
        if self._last is not None and step != self._last[0]:
            raise ValueError(
                f"step {step} is dispatched but step {self._last[0]} is the last one synchronised; fetch a value of "
                f"step {step} and call synchronised({step}, ...) before pause()"
            )
        self._advance(now_seconds)
        self._paused_at = now_seconds

    def resume(self, now_seconds: float) -> None:
        """Counts again.

        Raises:
            ValueError: the meter is not paused, or time ran backwards.
        """
        if self._paused_at is None:
            raise ValueError("the meter is not paused; call pause() first")
        self._advance(now_seconds)
        self._paused_seconds += now_seconds - self._paused_at
        self._paused_at = None

    def take(self) -> Rates | None:
        """Averages since the last `take`; None, and nothing is taken, before a further synchronised step."""
        rates = self._between(self._taken, self._last)
        if rates is not None:
            self._taken = self._last
        return rates

    def _between(self, start: tuple[int, float] | None, end: tuple[int, float] | None) -> Rates | None:
        if start is None or end is None or end[0] == start[0] or end[1] <= start[1]:
            return None
        step_seconds = (end[1] - start[1]) / (end[0] - start[0])
        tokens_per_second = self._tokens_per_step / step_seconds
        if not self._flops_per_token or not self._peak_flops_total:
            return Rates(tokens_per_second, step_seconds, None)
        mfu = tokens_per_second * self._flops_per_token / self._peak_flops_total
        return Rates(tokens_per_second, step_seconds, mfu, self._warning(mfu))

    def _warning(self, mfu: float) -> str | None:
        if mfu <= 1.0 or self._warned:
            return None
        self._warned = True
        peak_tflops = (self._peak_flops_total or 0.0) / 1e12
        return (
            f"MFU is {mfu:.0%}: {mfu * peak_tflops:,.4g} TFLOP/s, above the {peak_tflops:,.4g} TFLOP/s that all "
            "devices together can do. Either that peak is wrong (set hardware.peak_tflops), or steps were timed "
            "without waiting for their results."
        )

    def _advance(self, now_seconds: float) -> None:
        if now_seconds < self._latest_seconds:
            raise ValueError(
                f"time ran backwards, from {self._latest_seconds} s to {now_seconds} s; use a steady clock"
            )
        self._latest_seconds = now_seconds
