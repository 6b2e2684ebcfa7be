"""Schedules that no recipe makes: tables whose ranks take any of the tasks that are ready."""

import random
from collections.abc import Callable

import pytest
from hypothesis import strategies as st

from jaxpar.parallel.pipeline.schedule import Geometry, Kind, PipelineSchedule, Task


@pytest.fixture(scope="session")
def random_schedules() -> st.SearchStrategy[PipelineSchedule]:
    """Legal tables of any geometry, with idle ranks, idle ticks and tasks in any order."""
    geometries = st.builds(
        Geometry,
        num_ranks=st.integers(1, 5),
        num_microbatches=st.integers(1, 5),
        num_chunks=st.integers(1, 3),
        placement=st.sampled_from(["loop", "vee"]),
        split=st.booleans(),
        hop=st.sampled_from([1, 2]),
    )
    return st.builds(_run_anything, geometries, st.integers(0, 2**32), st.sampled_from([0.0, 0.3]))


@pytest.fixture(scope="session")
def change() -> Callable[..., PipelineSchedule]:
    """`change(schedule, {(tick, rank): task or None})`: the same with some cells of another content."""

    def change(schedule: PipelineSchedule, cells: dict[tuple[int, int], Task | None]) -> PipelineSchedule:
        table = [list(row) for row in schedule.table]
        for (tick, rank), task in cells.items():
            table[tick][rank] = task
        return PipelineSchedule(schedule.name, schedule.geometry, tuple(map(tuple, table)))

    return change


def _run_anything(geometry: Geometry, seed: int, idle_share: float) -> PipelineSchedule:
    choose = random.Random(seed)
    left = {
        (kind, microbatch, stage)
        for kind in geometry.kinds
        for microbatch in range(geometry.num_microbatches)
        for stage in range(geometry.num_stages)
    }
    done: dict[tuple[Kind, int, int], int] = {}
    table = []
    while left:
        row: list[Task | None] = [None] * geometry.num_ranks
        for kind, microbatch, stage in sorted(left, key=lambda position: (choose.random(), position)):
            rank, chunk = geometry.locate(stage)
            is_ready = all(
                (needed, microbatch, source) in done
                and done[needed, microbatch, source] + (1 if geometry.rank(source) == rank else geometry.hop)
                <= len(table)
                for needed, source in geometry.needs(kind, stage)
            )
            if row[rank] is None and is_ready and choose.random() >= idle_share:
                row[rank] = Task(kind, microbatch, chunk)
        for rank, task in enumerate(row):
            if task is not None:
                position = (task.kind, task.microbatch, geometry.stage(rank, task.chunk))
                left.remove(position)
                done[position] = len(table)
        table.append(tuple(row))
    return PipelineSchedule("anything", geometry, tuple(table))
