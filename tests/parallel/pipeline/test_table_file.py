"""A table as a file: what is written is read, and a mistake is named with file, line and cell."""

import re
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxpar.parallel.pipeline.catalogue import build_schedule
from jaxpar.parallel.pipeline.schedule import Geometry
from jaxpar.parallel.pipeline.table_file import dump_table, parse_table, read_table, write_table

HEAD = "placement = loop\nsplit = false\n"
GOOD = """
# Two ranks.
split = true   # W is a task of its own

0: F0 .  .  B0  W0
1: .  F0 B0 W0a
"""


@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_what_is_written_is_read(data: st.DataObject, random_schedules: st.SearchStrategy) -> None:
    schedule = data.draw(random_schedules)
    assert parse_table(dump_table(schedule), "text") == schedule


def test_a_schedule_has_the_same_table_in_a_file(tmp_path: Path) -> None:
    schedule = build_schedule("zb_v", 4, 8, 2, hop=2)
    write_table(schedule, tmp_path / "vee.txt")
    assert read_table(tmp_path / "vee.txt") == schedule
    lines = (tmp_path / "vee.txt").read_text().splitlines()
    assert lines[:6] == ["name = zb_v", "placement = vee", "split = true", "hop = 2", "", f"0: {schedule.lines()[0]}"]


def test_a_file_of_ones_own(tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text(GOOD)
    schedule = read_table(tmp_path / "mine.txt")
    assert schedule.name == "mine"
    assert schedule.geometry == Geometry(2, 1, 1, "loop", split=True, hop=1)
    assert str(schedule) == "F0  .  . B0 W0\n . F0 B0 W0  ."


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "t.txt: there are no tasks; write a line for each rank, as 0: F0 B0"),
        ("plaecment = vee", "t.txt, line 1: unknown key plaecment; legal keys: name, placement, split, hop; did you "
         "mean placement?"),
        ("placement = ring", "t.txt, line 1: placement = ring must be loop or vee"),
        ("split = yes", "t.txt, line 1: split = yes must be true or false"),
        ("\nhop = 3", "t.txt, line 2: hop = 3 must be 1 or 2"),
        ("hop = 1\nhop = 2", "t.txt, line 2: hop is set twice"),
        ("F0 B0", "t.txt, line 1: 'F0 B0' is neither `KEY = VALUE` nor `RANK: CELLS`"),
        ("1: F0 B0", "t.txt, line 1: this line is rank 1, but rank 0 comes next"),
        (f"{HEAD}0: F0 X0", "t.txt, line 3, cell 2: 'X0' is no task; write F0, B12 or W3b (kind, microbatch, chunk), "
         "or . for idle"),
        (f"{HEAD}0: F0 B0\n\n1: B0 F0", "t.txt, line 5, cell 1: B0a (rank 1): needs F0a, which runs in tick 1 on rank "
         "1: tick 2 at the earliest"),
        (f"{HEAD}0: F0 . .  B0\n1: .  F0 B0 F0", "t.txt, line 4, cell 4: F0a (rank 1): it ran already in tick 1"),
        (f"{HEAD}0: F0 .\n1: . F0 B0", "t.txt, line 3: B0a (rank 0): it never runs"),
        (f"{HEAD}0: F0 B0 W0", "t.txt, line 3, cell 3: W0a (rank 0): this schedule has the kinds F, B; W needs "
         "split = true"),
    ],
)  # fmt: skip
def test_a_mistake_is_named_with_its_place(text: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        parse_table(text, "t.txt")
