"""What a run shows while it trains: a bar on a terminal, plain lines elsewhere."""

import abc
import datetime
import math
from collections.abc import Mapping
from types import TracebackType
from typing import Any, Literal, Protocol, Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn
from rich.progress import Progress as RichProgress
from rich.table import Column

from jaxpar.metrics.flops import CONVENTION
from jaxpar.metrics.writers import Value

__all__ = ["Progress", "ProgressKind", "make_progress"]

ProgressKind = Literal["auto", "bar", "lines", "off"]


class Progress(Protocol):
    """A display of a run. A context manager: leaving it, by Ctrl-C too, leaves the terminal as it was."""

    def update(self, step: int, values: Mapping[str, Any]) -> None:
        """Shows that `step` is done, with its metrics under their keys in `metrics.jsonl`."""
        ...

    def message(self, text: str) -> None:
        """Prints a line of text, above the bar if there is one."""
        ...

    def close(self) -> None:
        """Ends the display; a second call does nothing."""
        ...

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None: ...


def make_progress(
    kind: ProgressKind,
    *,
    num_steps: int,
    start_step: int = 0,
    console: Console | None = None,
    warns: bool = True,
) -> Progress:
    """The display of a run that goes from `start_step` to `num_steps`.

    "auto" is a bar if `console` (default: standard output) is a terminal that can redraw, and lines otherwise.
    With the first MFU figure its convention is printed. "off" still shows messages that begin with WARNING, which tell
    of lost work, unless `warns` is false.

    Raises:
        ValueError: `kind` is "bar" and there is no such terminal, or `kind` is unknown.
    """
    console = console or Console()
    can_redraw = console.is_terminal and not console.is_dumb_terminal
    match kind:
        case "off":
            return _Silence(console, warns)
        case "lines":
            return _Lines(num_steps, console)
        case "bar" if not can_redraw:
            raise ValueError('logging.progress="bar" needs a terminal; use "lines", or "auto" for what fits the output')
        case "auto" | "bar":
            return _Bar(num_steps, start_step, console) if can_redraw else _Lines(num_steps, console)
        case _:
            raise ValueError(f'logging.progress="{kind}" is unknown; legal values: auto, bar, lines, off')


class _Display(abc.ABC):
    """What the displays share: entering, leaving, and the MFU's convention."""

    _convention_shown = False

    @abc.abstractmethod
    def message(self, text: str) -> None: ...

    def close(self) -> None:  # noqa: B027 (only the bar has something to end)
        pass

    def _explain_mfu(self, values: Mapping[str, Any]) -> None:
        if "mfu" in values and not self._convention_shown:
            self._convention_shown = True
            self.message(CONVENTION)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


class _Silence(_Display):
    def __init__(self, console: Console, warns: bool) -> None:
        self._console = console
        self._warns = warns

    def update(self, step: int, values: Mapping[str, Any]) -> None:
        pass

    def message(self, text: str) -> None:
        if self._warns and text.startswith("WARNING"):
            _print(self._console, text)


class _Lines(_Display):
    def __init__(self, num_steps: int, console: Console) -> None:
        self._num_steps = num_steps
        self._console = console

    def update(self, step: int, values: Mapping[str, Any]) -> None:
        self._explain_mfu(values)
        self.message(_line(step, self._num_steps, values))

    def message(self, text: str) -> None:
        _print(self._console, text)


class _Bar(_Display):
    def __init__(self, num_steps: int, start_step: int, console: Console) -> None:
        self._num_steps = num_steps
        self._shown: dict[str, Value] = {}
        self._bar = RichProgress(
            # The figures give way on a narrow terminal, the count of steps does not.
            MofNCompleteColumn(table_column=Column(no_wrap=True, min_width=2 * len(str(num_steps)) + 1)),
            BarColumn(bar_width=None),
            TextColumn("{task.fields[figures]}", markup=False),
            console=console,
            refresh_per_second=4,
            expand=True,
        )
        self._task = self._bar.add_task("train", total=num_steps, completed=start_step, figures="compiling")
        self._bar.start()

    def update(self, step: int, values: Mapping[str, Any]) -> None:
        self._explain_mfu(values)
        if any(key.startswith("eval/") for key in values):
            self.message(_line(step, self._num_steps, values))
        self._shown |= values
        self._bar.update(self._task, completed=step, figures="  ".join(_figures(step, self._num_steps, self._shown)))

    def message(self, text: str) -> None:
        _print(self._bar.console, text)

    def close(self) -> None:
        self._bar.stop()


def _print(console: Console, text: str) -> None:
    console.print(text, markup=False, highlight=False, emoji=False, soft_wrap=True)


def _line(step: int, num_steps: int, values: Mapping[str, Any]) -> str:
    evaluation = [f"{key} {value:.4f}" for key, value in values.items() if key.startswith("eval/")]
    return "  ".join(
        [f"step {step:>{len(str(num_steps))}}/{num_steps}", *_figures(step, num_steps, values), *evaluation]
    )


def _figures(step: int, num_steps: int, values: Mapping[str, Any]) -> list[str]:
    """The figures that there are: loss, tokens/s, MFU, and the time that is left at the latest speed."""
    figures = []
    if "loss" in values:
        figures.append(f"loss {values['loss']:.4f}")
    if "experts/load" in values:
        figures.append(f"dropped {values['experts/dropped_share']:.1%}")
        figures.append(f"fullest expert {1 + values['experts/max_violation']:.2f} × mean")
    if "tokens_per_second" in values:
        figures.append(f"{_short(values['tokens_per_second'])} tokens/s")
    if "mfu" in values:
        figures.append(f"MFU {values['mfu']:.1%}")
    if "step_seconds" in values:
        left = datetime.timedelta(seconds=math.ceil(max(num_steps - step, 0) * values["step_seconds"]))
        figures.append(f"ETA {left}")
    return figures


def _short(value: float) -> str:
    """Three digits: 950, 12.3k, 1.23M."""
    for power, unit in ((9, "G"), (6, "M"), (3, "k")):
        if value >= 10**power * 0.9995:
            return f"{_three_digits(value / 10**power)}{unit}"
    return _three_digits(value)


def _three_digits(value: float) -> str:
    return f"{value:.0f}" if value >= 99.95 else f"{value:.1f}" if value >= 9.995 else f"{value:.2f}"
