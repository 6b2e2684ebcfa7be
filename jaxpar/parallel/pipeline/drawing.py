"""A schedule as a drawing: a row a rank, a column a tick, in text or as a picture."""

import colorsys
from collections.abc import Iterator

from jaxpar.parallel.pipeline.makespan import idle_share, in_flight
from jaxpar.parallel.pipeline.picture import Picture, Rectangle, Text
from jaxpar.parallel.pipeline.schedule import Geometry, Kind, PipelineSchedule, Task, chunk_letters

__all__ = ["draw", "draw_text"]

_HUES = {Kind.FORWARD: (236, 204), Kind.BACKWARD: (160, 108), Kind.WEIGHT: (8, 40)}
"""Degrees on the colour wheel, of the first chunk and the last one."""
_LIGHTNESS = (0.36, 0.66)
"""Of the first microbatch and the last one."""
_SATURATION = 0.62
_NAMES = {Kind.FORWARD: "forward", Kind.BACKWARD: "backward", Kind.WEIGHT: "weight gradient"}
_INK, _GREY, _IDLE = "#1f2933", "#616e7c", "#eef0f3"

_MARGIN = 24.0
_LABEL_WIDTH = 148.0
_PEAK_WIDTH = 104.0
_TABLE_WIDTH = 1180.0
_CELL_WIDTHS = (7.0, 30.0)
_ROW_HEIGHT, _GAP = 30.0, 2.0
_HEAD_HEIGHT = 92.0
_NARROWEST_WITH_NUMBER = 15.0


def draw_text(schedule: PipelineSchedule) -> str:
    """The table with a line above that sums it up, and each rank's peak behind its row."""
    peaks = in_flight(schedule).chunks
    width = len(str(len(peaks) - 1))
    rows = zip(schedule.lines(), peaks, strict=True)
    lines = [f"rank {rank:{width}}  {line}   {peak} in flight" for rank, (line, peak) in enumerate(rows)]
    return "\n".join([schedule.name, *_summary(schedule), "", *lines, ""])


def draw(schedule: PipelineSchedule, notes: str = "") -> Picture:
    """A picture of the table: kinds and chunks by hue, microbatches by shade; `notes` is one more line of text."""
    geometry = schedule.geometry
    cell_width = min(max(_TABLE_WIDTH / schedule.num_ticks, _CELL_WIDTHS[0]), _CELL_WIDTHS[1])
    table_width = cell_width * schedule.num_ticks
    table_end = _HEAD_HEIGHT + (_ROW_HEIGHT + _GAP) * geometry.num_ranks
    shapes = [
        *_heading(schedule, notes),
        *_ticks(schedule, cell_width),
        *_ranks(schedule, _MARGIN + _LABEL_WIDTH + table_width),
        *_cells(schedule, cell_width),
        *_legend(geometry, table_end + 26.0),
    ]
    width = 2 * _MARGIN + _LABEL_WIDTH + max(table_width, 420.0) + _PEAK_WIDTH
    return Picture(width, table_end + 26.0 + 24.0 * len(geometry.kinds) + 8.0, schedule.name, tuple(shapes))


def _summary(schedule: PipelineSchedule) -> list[str]:
    """Two lines: what the schedule is for, and its numbers."""
    geometry = schedule.geometry
    numbers = [
        _count(geometry.num_ranks, "rank"),
        _count(geometry.num_microbatches, "microbatch"),
        f"{geometry.num_chunks} chunks on each rank ({geometry.placement})" if geometry.num_chunks > 1 else "",
        "split backward" if geometry.split else "",
        "results usable 2 ticks later" if geometry.hop > 1 else "",
        "aligned" if schedule.aligned else "",
    ]
    found = in_flight(schedule)
    peak = f"{_count(max(found.chunks), 'chunk' if geometry.num_chunks > 1 else 'microbatch')} in flight at most"
    if geometry.num_chunks > 1:
        peak += f" ({max(found.stages):.4g} whole stages)"
    return [
        ", ".join(filter(None, numbers)),
        f"{_count(schedule.num_ticks, 'tick')}, {100 * idle_share(schedule):.1f} % of all cells idle, {peak}",
    ]


def _count(number: int, noun: str) -> str:
    plural = f"{noun}es" if noun.endswith("ch") else f"{noun}s"
    return f"{number} {noun if number == 1 else plural}"


def _heading(schedule: PipelineSchedule, notes: str) -> Iterator[Text]:
    yield Text(_MARGIN, 22.0, schedule.name, 17.0, _INK, bold=True)
    what, numbers = _summary(schedule)
    yield Text(_MARGIN, 43.0, what, 12.0, _GREY)
    yield Text(_MARGIN, 60.0, f"{numbers}; {notes}" if notes else numbers, 12.0, _GREY)


def _ticks(schedule: PipelineSchedule, cell_width: float) -> Iterator[Text]:
    every = next(step for step in (1, 2, 5, 10, 20, 50, 100) if step * cell_width >= 22.0 or step == 100)
    for tick in range(0, schedule.num_ticks, every):
        x = _MARGIN + _LABEL_WIDTH + cell_width * (tick + 0.5)
        yield Text(x, _HEAD_HEIGHT - 9.0, str(tick), 10.0, _GREY, "middle")


def _ranks(schedule: PipelineSchedule, table_end: float) -> Iterator[Text]:
    geometry = schedule.geometry
    yield Text(table_end + 18.0, _HEAD_HEIGHT - 9.0, "peak in flight", 10.0, _GREY)
    for rank, peak in enumerate(in_flight(schedule).chunks):
        stages = [str(geometry.stage(rank, chunk)) for chunk in range(geometry.num_chunks)]
        shown = stages if len(stages) < 4 else [*stages[:2], "…"]
        y = _row(rank) + _ROW_HEIGHT / 2
        yield Text(_MARGIN, y, f"rank {rank}", 12.0, _INK, bold=True)
        yield Text(_MARGIN + 56.0, y, f"stage{'s' * (len(stages) > 1)} {', '.join(shown)}", 10.5, _GREY)
        yield Text(table_end + 18.0, y, str(peak), 12.0, _INK)


def _cells(schedule: PipelineSchedule, cell_width: float) -> Iterator[Rectangle | Text]:
    geometry = schedule.geometry
    gap = _GAP if cell_width >= _NARROWEST_WITH_NUMBER else 1.0
    for tick, row in enumerate(schedule.table):
        x = _MARGIN + _LABEL_WIDTH + cell_width * tick
        for rank, task in enumerate(row):
            if task is None:
                yield Rectangle(x, _row(rank), cell_width - gap, _ROW_HEIGHT, _IDLE)
                continue
            place = f"stage {geometry.stage(rank, task.chunk)}, tick {tick}"
            title = f"{_NAMES[task.kind]}, microbatch {task.microbatch}, {place}"
            yield Rectangle(x, _row(rank), cell_width - gap, _ROW_HEIGHT, _color(geometry, task), title)
            if cell_width >= _NARROWEST_WITH_NUMBER:
                size = min(12.0, cell_width / (0.75 * max(2, len(str(task.microbatch))) + 0.2))
                middle = (x + (cell_width - gap) / 2, _row(rank) + _ROW_HEIGHT / 2)
                yield Text(*middle, str(task.microbatch), size, _ink(geometry, task), "middle")


def _legend(geometry: Geometry, start: float) -> Iterator[Rectangle | Text]:
    """A row a kind: for each chunk the shades of the first microbatch to the last."""
    num_shades = min(geometry.num_microbatches, 8)
    for number, kind in enumerate(geometry.kinds):
        x, y = _MARGIN, start + 24.0 * number
        yield Text(x, y + 8.0, f"{kind.letter}  {_NAMES[kind]}", 12.0, _INK)
        x += _LABEL_WIDTH
        for chunk in range(geometry.num_chunks):
            for shade in range(num_shades):
                microbatch = round(shade * (geometry.num_microbatches - 1) / max(num_shades - 1, 1))
                yield Rectangle(x + 12.0 * shade, y, 12.0, 16.0, _color(geometry, Task(kind, microbatch, chunk)))
            x += 12.0 * num_shades + 8.0
            of_chunk = f"chunk {chunk_letters(chunk)}" if geometry.num_chunks > 1 else "microbatches, first to last"
            yield Text(x, y + 8.0, of_chunk, 11.0, _GREY)
            x += 70.0


def _row(rank: int) -> float:
    return _HEAD_HEIGHT + (_ROW_HEIGHT + _GAP) * rank


def _color(geometry: Geometry, task: Task) -> str:
    hue = _between(_HUES[task.kind], task.chunk, geometry.num_chunks) / 360
    lightness = _between(_LIGHTNESS, task.microbatch, geometry.num_microbatches)
    red, green, blue = (round(255 * part) for part in colorsys.hls_to_rgb(hue, lightness, _SATURATION))
    return f"#{red:02x}{green:02x}{blue:02x}"


def _ink(geometry: Geometry, task: Task) -> str:
    """Black or white, whichever stands out from the task's colour (relative luminance of the W3C's WCAG 2)."""
    color = _color(geometry, task)
    parts = [int(color[start : start + 2], 16) / 255 for start in (1, 3, 5)]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    luminance = 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
    return "#ffffff" if (luminance + 0.05) ** 2 < 1.05 * 0.05 else "#000000"


def _between(ends: tuple[float, float], number: int, count: int) -> float:
    """The value of one of `count` steps from the first end to the second."""
    return ends[0] + (ends[1] - ends[0]) * number / max(count - 1, 1)
