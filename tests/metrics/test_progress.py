"""What a user sees: the bar on a (false) terminal, and plain lines elsewhere."""

import io
import re

import pytest
from rich.console import Console

from jaxpar.metrics import CONVENTION, make_progress

FIGURES = {"loss": 3.21456, "tokens_per_second": 12_345.6, "mfu": 0.4123, "step_seconds": 0.5, "grad_norm": 1.0}
SHOWN = "loss 3.2146  12.3k tokens/s  MFU 41.2%  ETA 0:01:30"
SHOW_CURSOR, HIDE_CURSOR = "\x1b[?25h", "\x1b[?25l"


def _console(terminal, width=100):
    return Console(file=io.StringIO(), force_terminal=terminal, width=width, _environ={"TERM": "xterm-256color"})


def _plain(console):
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", console.file.getvalue())


def test_bar_shows_step_loss_speed_labelled_utilisation_and_time_left():
    console = _console(terminal=True)
    with make_progress("auto", num_steps=200, start_step=10, console=console) as progress:
        assert re.search(r" 10/200 .* compiling", _plain(console))
        progress.update(20, FIGURES)
    last = _plain(console).rstrip().splitlines()[-1]
    assert re.fullmatch(rf" 20/200 [━╸╺ ]+ {re.escape(SHOWN)}", last)
    assert len(last) <= 100
    assert "41.2" in last
    assert "\x1b[" in console.file.getvalue()


def test_bar_keeps_its_figures_and_shows_the_new_step():
    console = _console(terminal=True)
    with make_progress("bar", num_steps=200, console=console) as progress:
        progress.update(20, FIGURES)
        progress.update(21, {"loss": 3.0})
    assert "21/200" in _plain(console).rstrip().splitlines()[-1]
    assert "loss 3.0000  12.3k tokens/s  MFU 41.2%  ETA 0:01:30" in _plain(console).rstrip().splitlines()[-1]


def test_evaluation_is_a_line_above_the_bar():
    console = _console(terminal=True)
    with make_progress("bar", num_steps=200, console=console) as progress:
        progress.update(20, {"eval/loss": 2.5, "eval/bits_per_byte": 1.25})
        progress.update(21, {"loss": 1.0})
    lines = [line.strip() for line in _plain(console).splitlines()]
    assert "step  20/200  eval/loss 2.5000  eval/bits_per_byte 1.2500" in lines


def test_bar_fits_a_terminal_of_80_columns():
    console = _console(terminal=True, width=80)
    with make_progress("bar", num_steps=200_000, console=console) as progress:
        progress.update(199_000, {**FIGURES, "tokens_per_second": 1_234_567.0})
    last = _plain(console).rstrip().splitlines()[-1]
    assert len(last) <= 80
    assert last.endswith("loss 3.2146  1.23M tokens/s  MFU 41.2%  ETA 0:08:20")


def test_the_count_of_steps_is_whole_on_a_narrow_terminal():
    console = _console(terminal=True, width=60)
    with make_progress("bar", num_steps=200_000, console=console) as progress:
        progress.update(199_000, {**FIGURES, "tokens_per_second": 1_234_567.0})
    last = _plain(console).rstrip().splitlines()[-1]
    assert len(last) <= 60
    assert last.startswith("199000/200000 ")
    assert "loss 3.2146" in last


def test_interruption_leaves_the_terminal_clean():
    console = _console(terminal=True)
    progress = make_progress("bar", num_steps=200, console=console)

    def train():
        with progress:
            progress.update(1, FIGURES)
            assert console.file.getvalue().rfind(HIDE_CURSOR) > console.file.getvalue().rfind(SHOW_CURSOR)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train()
    written = console.file.getvalue()
    assert written.rfind(SHOW_CURSOR) > written.rfind(HIDE_CURSOR)
    assert _plain(console).endswith("\n")
    progress.close()
    assert console.file.getvalue() == written


@pytest.mark.parametrize("kind", ["auto", "lines"])
def test_lines_are_single_and_plain_however_narrow_the_output(kind):
    console = _console(terminal=False, width=20)
    with make_progress(kind, num_steps=200, console=console) as progress:
        progress.message("attention: blockwise [cpu] :smile:")
        progress.update(5, {"loss": 4.0})
        progress.update(20, {key: FIGURES[key] for key in FIGURES if key != "mfu"})
        progress.update(20, {"eval/loss": 2.5, "eval/bits_per_byte": 1.25})
    assert console.file.getvalue().splitlines() == [
        "attention: blockwise [cpu] :smile:",
        "step   5/200  loss 4.0000",
        "step  20/200  loss 3.2146  12.3k tokens/s  ETA 0:01:30",
        "step  20/200  eval/loss 2.5000  eval/bits_per_byte 1.2500",
    ]


@pytest.mark.parametrize("terminal", [True, False])
def test_convention_is_shown_once_with_the_first_utilisation(terminal):
    console = _console(terminal, width=1000)
    with make_progress("auto", num_steps=200, console=console) as progress:
        progress.update(1, {"loss": 4.0})
        assert CONVENTION not in _plain(console)
        progress.update(2, FIGURES)
        progress.update(3, FIGURES)
    assert _plain(console).count(CONVENTION) == 1


def test_message_appears_above_the_bar_as_it_is():
    console = _console(terminal=True)
    with make_progress("bar", num_steps=2, console=console) as progress:
        progress.message("[pipeline] saved :smile:")
    assert "[pipeline] saved :smile:" in [line.strip() for line in _plain(console).splitlines()]


@pytest.mark.parametrize(("warns", "shown"), [(True, "WARNING: step 4 is not saved\n"), (False, "")])
def test_off_is_silent_but_for_what_tells_of_lost_work(warns, shown):
    console = _console(terminal=False)
    with make_progress("off", num_steps=200, console=console, warns=warns) as progress:
        progress.message("text")
        progress.message("WARNING: step 4 is not saved")
        progress.update(20, FIGURES)
    assert console.file.getvalue() == shown


def test_a_loss_that_is_not_finite_is_shown():
    console = _console(terminal=False)
    make_progress("lines", num_steps=2, console=console).update(1, {"loss": float("nan")})
    assert console.file.getvalue() == "step 1/2  loss nan\n"


def test_bar_without_a_terminal_and_unknown_kinds_are_refused():
    with pytest.raises(ValueError, match=r'logging.progress="bar" needs a terminal; use "lines", or "auto"'):
        make_progress("bar", num_steps=2, console=_console(terminal=False))
    with pytest.raises(ValueError, match=r'logging.progress="bars" is unknown; legal values: auto, bar, lines, off'):
        make_progress("bars", num_steps=2, console=_console(terminal=True))


def test_auto_prints_lines_on_a_terminal_that_cannot_redraw():
    dumb = Console(file=io.StringIO(), force_terminal=True, _environ={"TERM": "dumb"})
    with make_progress("auto", num_steps=2, console=dumb) as progress:
        progress.update(1, {"loss": 1.0})
    assert dumb.file.getvalue() == "step 1/2  loss 1.0000\n"
    with pytest.raises(ValueError, match="needs a terminal"):
        make_progress("bar", num_steps=2, console=dumb)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.1234, "0.12"),
        (9.996, "10.0"),
        (99.96, "100"),
        (950, "950"),
        (999.6, "1.00k"),
        (1_234_567, "1.23M"),
        (5e9, "5.00G"),
    ],
)
def test_speed_has_three_digits(value, text):
    console = _console(terminal=False)
    make_progress("lines", num_steps=2, console=console).update(1, {"tokens_per_second": value})
    assert console.file.getvalue() == f"step 1/2  {text} tokens/s\n"
