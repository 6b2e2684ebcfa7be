"""Orders of tasks are put on the earliest ticks."""

import pytest

from jaxpar.parallel.pipeline.placing import place
from jaxpar.parallel.pipeline.schedule import Geometry, Kind, PipelineSchedule, Task

F, B = Kind.FORWARD, Kind.BACKWARD
ONE_MICROBATCH = [[Task(F, 0), Task(B, 0)]] * 2
TWO_MICROBATCHES = [
    [Task(F, 0), Task(F, 1), Task(B, 0), Task(B, 1)],
    [Task(F, 0), Task(B, 0), Task(F, 1), Task(B, 1)],
]


def lines(geometry: Geometry, orders: list[list[Task]], *, aligned: bool = False) -> list[str]:
    return str(PipelineSchedule("", geometry, place(geometry, orders, aligned=aligned))).split("\n")


def test_a_task_runs_as_soon_as_its_input_has_arrived() -> None:
    assert lines(Geometry(2, 1), ONE_MICROBATCH) == ["F0  .  . B0", " . F0 B0  ."]
    assert lines(Geometry(2, 1, hop=2), ONE_MICROBATCH) == ["F0  .  .  .  . B0", " .  . F0 B0  .  ."]


def test_aligned_ticks_have_one_kind_and_a_turn_of_which_nobody_has_any_is_left_out() -> None:
    assert lines(Geometry(2, 2), TWO_MICROBATCHES) == ["F0 F1  . B0  . B1", " . F0 B0 F1 B1  ."]
    aligned = lines(Geometry(2, 2), TWO_MICROBATCHES, aligned=True)
    assert aligned == ["F0 F1  .  . B0 B1", " . F0 B0 F1 B1  ."]


def test_with_hop_2_an_empty_turn_takes_its_tick() -> None:
    aligned = lines(Geometry(2, 2, hop=2), TWO_MICROBATCHES, aligned=True)
    assert aligned == ["F0  . F1  .  . B0  . B1", " .  . F0 B0 F1 B1  .  ."]


@pytest.mark.parametrize("hop", [1, 2])
@pytest.mark.parametrize("aligned", [False, True])
def test_ranks_that_wait_for_each_other_are_found(hop: int, aligned: bool) -> None:
    orders = [[Task(F, 0), Task(B, 0), Task(F, 1), Task(B, 1)], [Task(F, 1), Task(F, 0), Task(B, 0), Task(B, 1)]]
    with pytest.raises(ValueError, match="the ranks wait for each other for ever: B0a on rank 0, F1a on rank 1"):
        place(Geometry(2, 2, hop=hop), orders, aligned=aligned)
