"""`python -m jaxpar.plot_pipeline --schedule NAME --stages P --microbatches M [options]`: draws a pipeline schedule.

NAME is a value of pipeline.schedule, `auto` for the fastest that fits, or a file with a table of one's own. Without
--output the table is printed. --compare prints all schedules side by side. Needs neither a configuration nor devices.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from jaxpar.exit_status import USER_ERROR
from jaxpar.parallel.pipeline.catalogue import SCHEDULES, build_schedule
from jaxpar.parallel.pipeline.choice import Candidate, Measured, choose_schedule, measure
from jaxpar.parallel.pipeline.drawing import draw, draw_text
from jaxpar.parallel.pipeline.makespan import MODES, Costs, idle_share
from jaxpar.parallel.pipeline.picture import save_png, svg_text
from jaxpar.parallel.pipeline.schedule import HOPS, PipelineSchedule
from jaxpar.parallel.pipeline.table_file import dump_table, read_table

__all__ = ["main"]

_SUFFIXES = (".svg", ".png", ".txt")
_AUTO = "auto"
_KEPT = (
    "In activations of a rank's whole share for a microbatch: in flight is the peak of the rank with the most, kept is "
    "what one program for all ranks has slots for; a run weighs those of a split backward by their bytes."
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line; returns the exit status."""
    given = _parser().parse_args(arguments)
    console = Console(width=None if sys.stdout.isatty() else 160, highlight=False)
    try:
        if given.output and given.output.suffix not in _SUFFIXES:
            raise ValueError(f"--output={given.output} must end in {', '.join(_SUFFIXES)}")
        if given.compare:
            console.print(_comparison(given))
            return 0
        schedule = _schedule(given, console)
        measured = measure(schedule, given.costs, given.mode)
        notes = (
            f"{measured.slowdown:.3f} of the ideal time in {given.mode} with costs "
            f"{given.costs.forward:g}, {given.costs.backward:g}, {given.costs.weight:g}"
        )
        if given.output is None:
            console.print(draw_text(schedule) + f"\n{notes}", soft_wrap=True, markup=False)
        else:
            _write(schedule, notes, given.output)
            console.print(f"{given.output}: {schedule.name}, {schedule.num_ticks} ticks, {notes}", soft_wrap=True)
    except OSError as error:
        print(f"{error.filename}: {error.strerror}", file=sys.stderr)
        return USER_ERROR
    except ValueError as error:
        print(error, file=sys.stderr)
        return USER_ERROR
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m jaxpar.plot_pipeline",
        description=__doc__,
        epilog="Exit status: 0, or 2 for a mistake in the command or in the file.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    names = ", ".join(SCHEDULES)
    parser.add_argument("--schedule", metavar="NAME|FILE", default=_AUTO, help=f"{names}, {_AUTO} (default), or a file")
    parser.add_argument("--stages", type=int, metavar="P", help="ranks of the pipeline (parallel.pipe)")
    parser.add_argument("--microbatches", type=int, metavar="M", help="pipeline.microbatches")
    parser.add_argument("--chunks", type=int, metavar="V", help="stages on each rank (pipeline.chunks; default 1)")
    parser.add_argument("--hop", type=int, choices=HOPS, help="ticks until a neighbour can use a result (default 1)")
    parser.add_argument(
        "--costs", type=_costs, default=Costs(), metavar="F,B,W",
        help="times of a rank's forward, input gradient and weight gradient for a microbatch (default 1,1,1)",
    )  # fmt: skip
    parser.add_argument("--mode", choices=MODES, default=MODES[0], help=f"how ranks wait (default {MODES[0]})")
    parser.add_argument(
        "--max-in-flight", type=float, metavar="N", help=f"for {_AUTO}: activations of a stage for which there is room"
    )
    parser.add_argument("--compare", action="store_true", help="print all schedules for P, M and V")
    parser.add_argument("--output", type=Path, metavar="FILE", help="a picture (.svg, .png) or a table (.txt)")
    return parser


def _costs(text: str) -> Costs:
    try:
        forward, backward, weight = map(float, text.split(","))
        return Costs(forward, backward, weight)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} must be three numbers of 0 or more, as 1,1,1") from error


def _schedule(given: argparse.Namespace, console: Console) -> PipelineSchedule:
    name = given.schedule
    chunks, hop = (1 if number is None else number for number in (given.chunks, given.hop))
    if name != _AUTO and name not in SCHEDULES and (Path(name).suffix or Path(name).exists()):
        return _own_table(given)
    _check_size(given)
    if name != _AUTO:
        return build_schedule(name, given.stages, given.microbatches, chunks, hop=hop)
    choice = choose_schedule(
        given.stages, given.microbatches, range(1, chunks + 1), given.costs,
        mode=given.mode, max_in_flight=given.max_in_flight, hop=hop,
    )  # fmt: skip
    console.print(_candidate_table(choice.candidates, f"Candidates in {given.mode}, the fastest that fits first"))
    return choice.schedule


def _own_table(given: argparse.Namespace) -> PipelineSchedule:
    for option in ("stages", "microbatches", "chunks", "hop"):
        if getattr(given, option) is not None:
            raise ValueError(f"--{option} goes with a schedule by name, but {given.schedule} is a file, which says it")
    if not Path(given.schedule).is_file():
        names = ", ".join((_AUTO, *SCHEDULES))
        raise ValueError(f"{given.schedule} is no file; --schedule is a file with a table, or one of {names}")
    return read_table(given.schedule)


def _check_size(given: argparse.Namespace) -> None:
    for option in ("stages", "microbatches"):
        if getattr(given, option) is None:
            raise ValueError(f"--{option} is missing; write --stages P --microbatches M")
    for option in ("stages", "microbatches", "chunks"):
        value = getattr(given, option)
        if value is not None and value < 1:
            raise ValueError(f"--{option}={value} must be 1 or more")


def _write(schedule: PipelineSchedule, notes: str, path: Path) -> None:
    if path.suffix == ".png":
        save_png(draw(schedule, notes), path)
    else:
        text = svg_text(draw(schedule, notes)) if path.suffix == ".svg" else dump_table(schedule)
        path.write_text(text, encoding="utf-8")


def _candidate_table(candidates: Sequence[Candidate], title: str) -> Table:
    table = _table(title, ("schedule", "chunks", "ticks", "time / ideal", "in flight", "kept", "not taken because"))
    for candidate in candidates:
        found = candidate.measured
        numbers = [""] * 4
        if found is not None:
            numbers = [str(found.schedule.num_ticks), f"{found.slowdown:.3f}", *_activations(found)]
        table.add_row(candidate.name, str(candidate.num_chunks), *numbers, candidate.refused)
    table.caption, table.caption_justify = _KEPT, "left"
    return table


def _comparison(given: argparse.Namespace) -> Table:
    """All schedules, each with V chunks or the number nearest to V that it can have."""
    _check_size(given)
    title = f"{given.stages} stages, {given.microbatches} microbatches: time / ideal time by how ranks wait"
    table = _table(
        title, ("schedule", "chunks", "ticks", "idle cells", *MODES, "in flight", "kept", "cannot be built because")
    )
    for name, recipe in SCHEDULES.items():
        least, largest = recipe.legal_chunks
        chunks = max(least, min(given.chunks or least, largest or sys.maxsize))
        try:
            schedule = build_schedule(name, given.stages, given.microbatches, chunks, hop=given.hop or 1)
        except ValueError as error:
            table.add_row(name, str(chunks), *[""] * 7, str(error))
            continue
        found = [measure(schedule, given.costs, mode) for mode in MODES]
        slowdowns = [f"{measured.slowdown:.3f}" for measured in found]
        idle = f"{100 * idle_share(schedule):.1f} %"
        table.add_row(name, str(chunks), str(schedule.num_ticks), idle, *slowdowns, *_activations(found[0]), "")
    table.caption, table.caption_justify = _KEPT, "left"
    return table


def _activations(found: Measured) -> tuple[str, str]:
    return f"{found.in_flight:.4g}", f"{found.held:.4g}"


def _table(title: str, columns: Sequence[str]) -> Table:
    table = Table(title=title, title_justify="left", min_width=len(title))
    for number, column in enumerate(columns):
        table.add_column(column, justify="left" if number in (0, len(columns) - 1) else "right")
    return table


if __name__ == "__main__":
    sys.exit(main())
