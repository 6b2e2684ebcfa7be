"""Every table that can run is accepted, and one that cannot is refused with the place of the fault."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxpar.parallel.pipeline.catalogue import build_schedule
from jaxpar.parallel.pipeline.routing import RoutedSchedule, route
from jaxpar.parallel.pipeline.schedule import Geometry, Kind, PipelineSchedule, TableError, Task
from jaxpar.parallel.pipeline.validate import validate

F, B, W = Kind.FORWARD, Kind.BACKWARD, Kind.WEIGHT
Change = Callable[..., PipelineSchedule]


@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_any_order_that_keeps_to_the_dependencies_can_run(
    data: st.DataObject, random_schedules: st.SearchStrategy
) -> None:
    validate(data.draw(random_schedules))


@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_a_table_with_a_fault_cannot(data: st.DataObject, random_schedules: st.SearchStrategy, change: Change) -> None:
    schedule = data.draw(random_schedules)
    tick, rank, task = data.draw(st.sampled_from(list(schedule.tasks())))
    idle = [t for t, row in enumerate(schedule.table) if row[rank] is None]
    cells: dict[tuple[int, int], Task | None] = {(tick, rank): None}
    fault = data.draw(st.sampled_from(["missing", "twice", "another's", "early"]))
    if fault == "twice" and idle:
        cells = {(data.draw(st.sampled_from(idle)), rank): task}
    elif fault == "another's":
        other = data.draw(st.sampled_from(list(schedule.tasks())))[2]
        cells = {(tick, rank): other if other != task else None}
    elif fault == "early" and task.kind is not F:
        # Exchanged with what it needs on its own rank.
        kind = {B: F, W: B}[task.kind]
        before = schedule.ticks[kind, task.microbatch, schedule.geometry.stage(rank, task.chunk)]
        cells = {(tick, rank): schedule.table[before][rank], (before, rank): task}
    with pytest.raises(TableError):
        validate(change(schedule, cells))


@pytest.mark.parametrize("hop", [1, 2])
def test_a_result_is_used_no_earlier_than_it_arrives(hop: int, change: Change) -> None:
    schedule = build_schedule("naive", 3, 1, hop=hop)
    tick = schedule.ticks[F, 0, 1]
    early = change(schedule, {(tick, 1): None, (tick - 1, 1): Task(F, 0)})
    message = f"tick {tick - 1}, rank 1, F0a: needs F0a, which runs in tick 0 on rank 0: tick {tick} at the earliest"
    with pytest.raises(TableError, match=f"^{message}$"):
        validate(early)


@pytest.mark.parametrize(
    ("cells", "message"),
    [
        ({(1, 1): Task(W, 0)}, "tick 1, rank 1, W0a: this schedule has the kinds F, B; W needs split = true"),
        ({(1, 1): Task(Kind.IDLE, 0)}, "tick 1, rank 1, .0a: this schedule has the kinds F, B"),
        ({(1, 1): Task(F, 2)}, "tick 1, rank 1, F2a: microbatches are numbered from 0 to 1"),
        ({(1, 1): Task(F, 0, 1)}, "tick 1, rank 1, F0b: chunks of a rank are lettered from a to a"),
        ({(1, 1): None}, "rank 1, F0a: it never runs"),
        ({(1, 0): Task(F, 0)}, "tick 1, rank 0, F0a: it ran already in tick 0"),
    ],
)  # fmt: skip
def test_a_fault_is_named_with_its_place(cells: dict, message: str, change: Change) -> None:
    schedule = build_schedule("gpipe", 2, 2)
    with pytest.raises(TableError) as error:
        validate(change(schedule, cells))
    assert str(error.value).startswith(message)


def test_the_routed_arrays_are_run_too(monkeypatch: pytest.MonkeyPatch) -> None:
    def misrouted(schedule: PipelineSchedule) -> RoutedSchedule:
        routed = route(schedule)
        return replace(routed, residual_slot=np.zeros_like(routed.residual_slot))

    monkeypatch.setattr("jaxpar.parallel.pipeline.validate.route", misrouted)
    with pytest.raises(TableError, match="tick 1, rank 0, F1a: overwrites residual slot 0"):
        validate(build_schedule("gpipe", 2, 2))


def test_a_tick_has_a_cell_for_each_rank() -> None:
    schedule = PipelineSchedule("", Geometry(2, 1), ((Task(F, 0),),))
    with pytest.raises(TableError, match=r"^tick 0, the tick: 1 cells for 2 ranks$"):
        validate(schedule)


@pytest.mark.parametrize(
    ("name", "in_flight"), [("1f1b", 4), ("1f1b_aligned", 7), ("gpipe", 8), ("zb_h1", 4), ("zb_h2", 7)]
)
def test_no_more_is_in_flight_than_is_allowed(name: str, in_flight: int) -> None:
    schedule = build_schedule(name, 4, 8)
    validate(schedule, max_in_flight=in_flight)
    with pytest.raises(
        TableError, match=f"{in_flight} chunks are in flight, which is more than max_in_flight={in_flight - 1}"
    ):
        validate(schedule, max_in_flight=in_flight - 1)
