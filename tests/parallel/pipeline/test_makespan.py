"""How long schedules take when ranks wait for all, for neighbours, or for what they need; what is in flight."""

import math

import pytest

from jaxpar.parallel.pipeline.catalogue import build_schedule
from jaxpar.parallel.pipeline.makespan import MODES, Costs, ideal_time, idle_share, in_flight, makespan
from jaxpar.parallel.pipeline.schedule import Geometry, Kind, PipelineSchedule, Task

F, B, W = Kind.FORWARD, Kind.BACKWARD, Kind.WEIGHT
EQUAL = Costs()
"""The backward in whole takes twice as long as the forward."""
SMALL = build_schedule("1f1b", 2, 2)
"""F0 F1  . B0  . B1
    . F0 B0 F1 B1  ."""


@pytest.mark.parametrize(
    ("name", "num_chunks", "costs", "slowdowns"),
    [
        ("gpipe", 1, EQUAL, (1.375, 1.375, 1.375)),
        ("1f1b", 1, EQUAL, (1.667, 1.667, 1.375)),
        ("1f1b_aligned", 1, EQUAL, (1.375, 1.375, 1.375)),
        ("interleaved", 2, EQUAL, (1.417, 1.417, 1.188)),
        ("interleaved_aligned", 2, EQUAL, (1.188, 1.188, 1.188)),
        ("zb_h1", 1, EQUAL, (1.125, 1.125, 1.125)),
        ("zb_h1", 1, Costs(1.0, 2.0, 1.0), (1.531, 1.406, 1.188)),
        ("zb_v", 2, EQUAL, (1.062, 1.062, 1.062)),
    ],
)
def test_eight_microbatches_on_four_ranks_against_the_ideal(
    name: str, num_chunks: int, costs: Costs, slowdowns: tuple[float, ...]
) -> None:
    schedule = build_schedule(name, 4, 8, num_chunks)
    ideal = ideal_time(schedule, costs)
    assert ideal == 8 * num_chunks * (costs.forward + costs.backward + costs.weight)
    found = [makespan(schedule, costs, mode) / ideal for mode in MODES]
    assert found == pytest.approx(slowdowns, abs=6e-4)
    assert idle_share(schedule, costs) == pytest.approx(1.0 - 1.0 / found[0])


def test_the_three_modes_on_two_ranks_by_hand() -> None:
    costs = Costs(1.0, 2.0, 1.0)
    # Ticks of 1, 1, 3, 3, 3, 3.
    assert makespan(SMALL, costs, "lockstep") == 14.0
    # Two ranks are each other's neighbours.
    assert makespan(SMALL, costs, "ring") == 14.0
    # Rank 1: F0 1-2, B0 2-5, F1 5-6, B1 6-9; rank 0 has B1 then.
    assert makespan(SMALL, costs, "asynchronous") == 12.0
    assert idle_share(SMALL, costs, "asynchronous") == pytest.approx(1.0 - 2 * 8 / (2 * 12))
    assert idle_share(SMALL) == pytest.approx(4 / 12)


def test_in_the_ring_only_neighbours_wait() -> None:
    row = (Task(F, 0), None, None, None, None)
    slow_then_quick = PipelineSchedule("", Geometry(5, 2), (row, (None, None, Task(F, 1), None, None)))
    costs = Costs((5.0, 1.0, 1.0, 1.0, 1.0))
    assert makespan(slow_then_quick, costs, "ring") == 5.0
    assert makespan(slow_then_quick, costs, "lockstep") == 6.0
    near = PipelineSchedule("", Geometry(5, 2), (row, (None, None, None, None, Task(F, 1))))
    assert makespan(near, costs, "ring") == 6.0


def test_uneven_stages_have_costs_of_their_own() -> None:
    # Stage 1 takes twice as long; ticks of 1, 2, 4, 2, 4, 2.
    costs = Costs((1.0, 2.0), (1.0, 2.0), (1.0, 2.0))
    assert makespan(SMALL, costs) == 15.0
    assert ideal_time(SMALL, costs) == 12.0
    assert idle_share(SMALL, costs) == pytest.approx(1.0 - (6 + 12) / 30)


def test_a_ranks_costs_are_divided_over_its_chunks() -> None:
    vee = build_schedule("zb_v", 2, 2, 2).geometry
    chunks = Costs((4.0, 8.0), 6.0, (2.0, 4.0)).of_chunks(vee)
    assert chunks == Costs((2.0, 4.0, 4.0, 2.0), 3.0, (1.0, 2.0, 2.0, 1.0))
    assert chunks.of(vee, B, 1) == 3.0
    whole = build_schedule("interleaved", 2, 2, 2).geometry
    assert chunks.of(whole, B, 1) == 5.0
    assert chunks.of(whole, F, 2) == 4.0


def test_empty_ticks_take_no_time() -> None:
    one, two = (build_schedule("1f1b_aligned", 4, 8, hop=hop) for hop in (1, 2))
    assert two.num_ticks > one.num_ticks
    for mode in MODES:
        assert makespan(two, EQUAL, mode) == makespan(one, EQUAL, mode)


def test_what_is_in_flight_by_rank() -> None:
    assert in_flight(build_schedule("1f1b", 4, 8)).chunks == (4, 3, 2, 1)
    assert in_flight(build_schedule("1f1b_aligned", 4, 8)).chunks == (7, 5, 3, 1)
    assert in_flight(build_schedule("gpipe", 4, 8)).chunks == (8, 8, 8, 8)
    # With a split backward an activation is kept for the weight gradient.
    assert in_flight(build_schedule("zb_h1", 4, 8)).chunks == (4, 4, 4, 4)
    assert in_flight(build_schedule("zb_v", 4, 8, 2)) == ((8, 8, 8, 8), (4.0, 4.0, 4.0, 4.0))
    assert in_flight(build_schedule("interleaved", 4, 8, 2)).stages == (5.5, 4.5, 3.5, 2.5)


def test_impossible_costs_and_modes_are_refused() -> None:
    with pytest.raises(ValueError, match="mode='parallel' must be one of 'lockstep', 'ring', 'asynchronous'"):
        makespan(SMALL, EQUAL, "parallel")
    with pytest.raises(ValueError, match=r"backward=-1.0: a cost must be 0 or more"):
        Costs(1.0, -1.0)
    with pytest.raises(ValueError, match=r"forward=\(1.0, nan\): a cost must be 0 or more"):
        Costs((1.0, math.nan))
    with pytest.raises(ValueError, match="3 costs are given for weight, but there are 2 stages"):
        makespan(SMALL, Costs(1.0, 1.0, (1.0, 1.0, 1.0)))
    with pytest.raises(ValueError, match="3 costs are given, but there are 2 ranks"):
        Costs((1.0, 1.0, 1.0)).of_chunks(SMALL.geometry)
