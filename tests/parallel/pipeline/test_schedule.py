"""Tables of tasks: where stages lie, what a task needs, how a schedule reads as text."""

from itertools import pairwise

import pytest

from jaxpar.parallel.pipeline.schedule import Geometry, Kind, PipelineSchedule, TableError, Task

F, B, W = Kind.FORWARD, Kind.BACKWARD, Kind.WEIGHT


@pytest.mark.parametrize("placement", ["loop", "vee"])
@pytest.mark.parametrize(("num_ranks", "num_chunks"), [(1, 3), (2, 2), (4, 3)])
def test_a_stage_follows_the_one_before_on_the_same_rank_or_a_neighbour(
    placement: str, num_ranks: int, num_chunks: int
) -> None:
    geometry = Geometry(num_ranks, 1, num_chunks, placement)
    cells = [(rank, chunk) for rank in range(num_ranks) for chunk in range(num_chunks)]
    assert sorted(geometry.stage(*cell) for cell in cells) == list(range(geometry.num_stages))
    assert all(geometry.locate(geometry.stage(*cell)) == cell for cell in cells)
    ranks = [geometry.rank(stage) for stage in range(geometry.num_stages)]
    steps = {(after - before) % num_ranks for before, after in pairwise(ranks)}
    assert steps <= ({1 % num_ranks} if placement == "loop" else {0, 1 % num_ranks, -1 % num_ranks})


def test_a_vee_ends_where_it_begins() -> None:
    geometry = Geometry(4, 1, 3, "vee")
    assert [[geometry.stage(rank, chunk) for chunk in range(3)] for rank in range(4)] == [
        [0, 7, 8],
        [1, 6, 9],
        [2, 5, 10],
        [3, 4, 11],
    ]


def test_a_task_needs_the_stage_before_or_behind_and_a_neighbour_waits_for_the_hop() -> None:
    geometry = Geometry(2, 1, 2, "vee", split=True, hop=2)
    assert geometry.kinds == (F, B, W)
    assert Geometry(2, 1).kinds == (F, B)
    assert geometry.needs(F, 0) == ()
    assert geometry.needs(F, 3) == ((F, 2),)
    assert geometry.needs(B, 3) == ((F, 3),)
    assert geometry.needs(B, 1) == ((F, 1), (B, 2))
    assert geometry.needs(W, 1) == ((B, 1),)
    assert geometry.sender(B, 3) == (F, 3)
    assert geometry.sender(B, 1) == (B, 2)
    assert [geometry.delay(stage, stage + 1) for stage in range(3)] == [2, 1, 2]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_ranks": 0}, "num_ranks=0 must be 1 or more"),
        ({"num_chunks": -1}, "num_chunks=-1 must be 1 or more"),
        ({"placement": "ring"}, "placement='ring' must be one of 'loop', 'vee'"),
        ({"hop": 3}, "hop=3 must be one of 1, 2"),
    ],
)
def test_an_impossible_geometry_is_refused(arguments: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Geometry(**{"num_ranks": 2, "num_microbatches": 2} | arguments)


def test_a_schedule_is_text_by_rank_and_tick() -> None:
    table = ((Task(F, 0), None), (None, Task(F, 0)), (Task(F, 10), Task(B, 0)))
    schedule = PipelineSchedule("part", Geometry(2, 11), table)
    assert str(schedule) == " F0   . F10\n  .  F0  B0"
    chunks = PipelineSchedule("part", Geometry(1, 1, 30), ((Task(F, 0, 0),), (Task(F, 0, 25),), (Task(F, 0, 26),)))
    assert str(chunks) == " F0a  F0z F0aa"
    assert schedule.ticks == {(F, 0, 0): 0, (F, 0, 1): 1, (F, 10, 0): 2, (B, 0, 1): 2}


def test_a_schedule_is_aligned_if_no_tick_has_two_kinds() -> None:
    geometry = Geometry(2, 2)
    assert PipelineSchedule("", geometry, ((Task(F, 0), None), (Task(F, 1), Task(F, 0)), (None, Task(B, 0)))).aligned
    assert not PipelineSchedule("", geometry, ((Task(F, 1), Task(B, 0)),)).aligned


def test_an_error_in_a_table_says_where() -> None:
    assert str(TableError("is wrong", 3, 1, "F0a")) == "tick 3, rank 1, F0a: is wrong"
    assert str(TableError("is missing", None, 1, "F0a")) == "rank 1, F0a: is missing"
    assert issubclass(TableError, ValueError)
