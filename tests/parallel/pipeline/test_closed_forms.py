"""Ticks, idle share, activations and idle time of every table are what its paper says."""

import pytest

from jaxpar.parallel.pipeline.catalogue import SCHEDULES, build_schedule
from jaxpar.parallel.pipeline.closed_forms import CLOSED_FORMS, closed_form
from jaxpar.parallel.pipeline.makespan import Costs, idle_share, in_flight, makespan
from jaxpar.parallel.pipeline.schedule import PipelineSchedule

COSTS = [(1.0, 1.0, 1.0), (1.0, 2.0, 1.0), (2.0, 2.0, 1.0), (1.0, 1.5, 1.0)]


def tables(name: str) -> list[tuple[PipelineSchedule, int, int, int]]:
    """A schedule for many numbers of ranks p, microbatches m and chunks V."""
    recipe = SCHEDULES[name]
    least, largest = recipe.legal_chunks
    found = []
    for p in (1, 2, 3, 4, 8):
        for m in range(recipe.min_microbatches(p), 4 * p + 2):
            for num_chunks in range(least, (largest or 4) + 1):
                if not (recipe.in_rounds and m % p):
                    found.append((build_schedule(name, p, m, num_chunks), p, m, num_chunks))
    return found


@pytest.mark.parametrize("name", list(SCHEDULES))
def test_ticks_idle_share_and_activations(name: str) -> None:
    assert list(CLOSED_FORMS) == list(SCHEDULES)
    for schedule, p, m, num_chunks in tables(name):
        form = closed_form(name, p, m, num_chunks)
        found = (schedule.num_ticks, idle_share(schedule), max(in_flight(schedule).stages))
        assert found == pytest.approx((form.ticks, form.idle_share, form.in_flight)), (p, m, num_chunks)


@pytest.mark.parametrize(
    ("name", "ticks", "in_flight"),
    [
        ("naive", 2 * 4 * 8, 1),
        ("gpipe", 2 * (8 + 3), 8),
        ("1f1b", 2 * (8 + 3), 4),
        ("1f1b_aligned", 2 * (8 + 3), 7),
        ("interleaved", 2 * (2 * 8 + 3), 5.5),
        ("interleaved_aligned", 2 * (2 * 8 + 3), 5.5),
        ("zb_h1", 3 * 8 + 3, 4),
        ("zb_h2", 3 * 8 + 3, 7),
        ("zb_v", 6 * 8 + 3, 4),
    ],
)
def test_the_forms_for_eight_microbatches_on_four_ranks(name: str, ticks: int, in_flight: float) -> None:
    form = closed_form(name, 4, 8, SCHEDULES[name].legal_chunks[0])
    assert (form.ticks, form.in_flight) == (ticks, in_flight)


@pytest.mark.parametrize("costs", COSTS)
@pytest.mark.parametrize(
    ("name", "mode"),
    [
        ("naive", "lockstep"),
        ("gpipe", "lockstep"),
        ("1f1b", "asynchronous"),
        ("1f1b_aligned", "lockstep"),
        ("interleaved", "asynchronous"),
        ("interleaved_aligned", "lockstep"),
        ("zb_h1", "asynchronous"),
    ],
)
def test_the_idle_time_of_the_rank_that_waits_longest(name: str, mode: str, costs: tuple[float, ...]) -> None:
    """It is the makespan's excess over the work: rank 0 runs the first task and the last."""
    for p, m in ((1, 2), (2, 4), (4, 8), (8, 16)):
        num_chunks = SCHEDULES[name].legal_chunks[0]
        schedule = build_schedule(name, p, m, num_chunks)
        time = makespan(schedule, Costs(*costs).of_chunks(schedule.geometry), mode)
        idle = closed_form(name, p, m, num_chunks).bubble_time(*costs)
        assert time == pytest.approx(m * sum(costs) + idle), (p, m)


@pytest.mark.parametrize(("name", "num_chunks"), [("zb_h2", 1), ("zb_v", 2)])
def test_no_rank_waits_between_its_first_task_and_its_last_if_all_kinds_take_equally_long(
    name: str, num_chunks: int
) -> None:
    for p in (1, 2, 3, 4, 8):
        for m in range(2 * p - 1, 4 * p):
            schedule = build_schedule(name, p, m, num_chunks)
            assert closed_form(name, p, m, num_chunks).bubble_time(1.0, 1.0, 1.0) == 0.0
            for rank in range(p):
                busy = [tick for tick, row in enumerate(schedule.table) if row[rank]]
                assert busy == list(range(rank, rank + 3 * m * num_chunks)), (p, m, rank)


def test_a_hop_of_two_ticks_costs_aligned_tables_only_empty_ticks() -> None:
    for p, m, num_chunks in ((2, 4, 2), (4, 8, 2), (4, 8, 3), (8, 16, 2)):
        schedule = build_schedule("interleaved_aligned", p, m, num_chunks, hop=2)
        ticks = closed_form("interleaved_aligned", p, m, num_chunks).ticks
        assert schedule.num_ticks == ticks + 2 * (p * num_chunks - 1)
        assert sum(1 for row in schedule.table if any(row)) <= ticks
