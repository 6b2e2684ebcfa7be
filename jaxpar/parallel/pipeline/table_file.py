"""A schedule of one's own as a text file: a line of cells for each rank.

    # 1F1B on two ranks; everything after # is a comment.
    name = mine
    placement = loop    # or vee
    split = false       # true if weight gradients (W) are tasks of their own
    hop = 1             # or 2

    0: F0 F1 .  B0 .  B1
    1: .  F0 B0 F1 B1 .

A cell is F, B or W, the microbatch, and the chunk as a letter, which can be left out for chunk a; `.` is an idle tick.
A line that is shorter than another ends idle. Keys that are left out have the values above, the name the file's.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path

from jaxpar.parallel.pipeline.schedule import (
    HOPS,
    PLACEMENTS,
    Geometry,
    Kind,
    PipelineSchedule,
    TableError,
    Task,
    chunk_number,
)
from jaxpar.parallel.pipeline.validate import validate

__all__ = ["dump_table", "parse_table", "read_table", "write_table"]

_KINDS: Mapping[str, Kind] = {kind.letter: kind for kind in (Kind.FORWARD, Kind.BACKWARD, Kind.WEIGHT)}
_CELL = re.compile(r"([FBW])([0-9]+)([a-z]*)")
_LEGAL: Mapping[str, tuple[str, ...] | None] = {
    "name": None,
    "placement": PLACEMENTS,
    "split": ("true", "false"),
    "hop": tuple(map(str, HOPS)),
}


@dataclass
class _Content:
    """What a file says: header, and for each rank its cells with the number of their line."""

    header: dict[str, str] = field(default_factory=dict)
    rows: list[list[Task | None]] = field(default_factory=list)
    line_numbers: list[int] = field(default_factory=list)


def read_table(path: Path | str) -> PipelineSchedule:
    """The schedule in a file, validated.

    Raises:
      ValueError: names the file, the line and the cell.
    """
    path = Path(path)
    return parse_table(path.read_text(encoding="utf-8"), str(path), default_name=path.stem)


def write_table(schedule: PipelineSchedule, path: Path | str) -> None:
    """Writes a file from which `read_table` has the same schedule."""
    Path(path).write_text(dump_table(schedule), encoding="utf-8")


def dump_table(schedule: PipelineSchedule) -> str:
    """The text of a table file."""
    geometry = schedule.geometry
    header = [
        f"name = {schedule.name}",
        f"placement = {geometry.placement}",
        f"split = {str(geometry.split).lower()}",
        f"hop = {geometry.hop}",
    ]
    width = len(str(geometry.num_ranks - 1))
    rows = [f"{rank:{width}}: {line}" for rank, line in enumerate(schedule.lines())]
    return "\n".join([*header, "", *rows, ""])


def parse_table(text: str, source: str, *, default_name: str = "table") -> PipelineSchedule:
    """The schedule in a text, validated; `source` names the text in errors.

    Raises:
      ValueError: names the source, the line and the cell.
    """
    content = _Content()
    for number, line in enumerate(text.splitlines(), start=1):
        line = line.partition("#")[0].strip()
        if line:
            _read_line(content, line, number, f"{source}, line {number}")
    schedule = _build(content, source, default_name)
    try:
        validate(schedule)
    except TableError as error:
        rank = error.rank
        assert rank is not None, "all rows have the same length"
        cell = "" if error.tick is None else f", cell {error.tick + 1}"
        place = f"{source}, line {content.line_numbers[rank]}{cell}"
        raise ValueError(f"{place}: {error.task} (rank {rank}): {error.problem}") from error
    return schedule


def _read_line(content: _Content, line: str, number: int, place: str) -> None:
    rank, colon, cells = line.partition(":")
    if colon and rank.strip().isdigit():
        if int(rank) != len(content.rows):
            raise ValueError(f"{place}: this line is rank {int(rank)}, but rank {len(content.rows)} comes next")
        content.rows.append([_parse_cell(cell, f"{place}, cell {n}") for n, cell in enumerate(cells.split(), start=1)])
        content.line_numbers.append(number)
        return
    key, equals, value = (part.strip() for part in line.partition("="))
    if not equals:
        raise ValueError(f"{place}: {line!r} is neither `KEY = VALUE` nor `RANK: CELLS`")
    if key not in _LEGAL:
        near = get_close_matches(key, _LEGAL, n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise ValueError(f"{place}: unknown key {key}; legal keys: {', '.join(_LEGAL)}{hint}")
    if key in content.header:
        raise ValueError(f"{place}: {key} is set twice")
    legal = _LEGAL[key]
    if legal is not None and value not in legal:
        raise ValueError(f"{place}: {key} = {value} must be {' or '.join(legal)}")
    content.header[key] = value


def _parse_cell(cell: str, place: str) -> Task | None:
    if cell == ".":
        return None
    found = _CELL.fullmatch(cell)
    if found is None:
        raise ValueError(f"{place}: {cell!r} is no task; write F0, B12 or W3b (kind, microbatch, chunk), or . for idle")
    kind, microbatch, chunk = found.groups()
    return Task(_KINDS[kind], int(microbatch), chunk_number(chunk) if chunk else 0)


def _build(content: _Content, source: str, default_name: str) -> PipelineSchedule:
    tasks = [task for row in content.rows for task in row if task is not None]
    if not tasks:
        raise ValueError(f"{source}: there are no tasks; write a line for each rank, as 0: F0 B0")
    geometry = Geometry(
        num_ranks=len(content.rows),
        num_microbatches=max(task.microbatch for task in tasks) + 1,
        num_chunks=max(task.chunk for task in tasks) + 1,
        placement=content.header.get("placement", "loop"),
        split=content.header.get("split") == "true",
        hop=int(content.header.get("hop", "1")),
    )
    num_ticks = max(map(len, content.rows))
    for row in content.rows:
        row += [None] * (num_ticks - len(row))
    table = tuple(zip(*content.rows, strict=True))
    return PipelineSchedule(content.header.get("name", default_name), geometry, table)
