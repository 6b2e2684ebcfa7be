"""From the order in which each rank runs its tasks to the ticks in which it runs them."""

from collections.abc import Mapping, Sequence

from jaxpar.parallel.pipeline.schedule import Geometry, Kind, Position, Table, Task

__all__ = ["Orders", "place"]

Orders = Sequence[Sequence[Task]]
"""For each rank its tasks, first to last."""


def place(geometry: Geometry, orders: Orders, *, aligned: bool = False) -> Table:
    """Runs every task in the first tick in which its rank is free and what it needs has arrived.

    If `aligned`, the kinds of task have ticks of their own, in turn. With hop 1 a turn in which no rank can run
    anything is left out. With hop 2 it stays as an empty tick, since a result arrives only one tick later.

    Raises:
      ValueError: the ranks wait for each other for ever.
    """
    turns = [(kind,) for kind in geometry.kinds] if aligned else [geometry.kinds]
    ticks: dict[Position, int] = {}
    waiting = [list(reversed(order)) for order in orders]
    table: list[tuple[Task | None, ...]] = []
    num_turns, num_empty = 0, 0
    while any(waiting):
        kinds = turns[num_turns % len(turns)]
        row = tuple(_runnable(geometry, ticks, rank, tasks, len(table), kinds) for rank, tasks in enumerate(waiting))
        for rank, task in enumerate(row):
            if task is not None:
                ticks[task.kind, task.microbatch, geometry.stage(rank, task.chunk)] = len(table)
                waiting[rank].pop()
        num_turns += 1
        num_empty = 0 if any(row) else num_empty + 1
        if num_empty > geometry.hop * len(turns):
            heads = (f"{tasks[-1].label()} on rank {rank}" for rank, tasks in enumerate(waiting) if tasks)
            raise ValueError(f"the ranks wait for each other for ever: {', '.join(heads)}")
        if any(row) or geometry.hop > 1:
            table.append(row)
    return tuple(table)


def _runnable(
    geometry: Geometry,
    ticks: Mapping[Position, int],
    rank: int,
    waiting: Sequence[Task],
    tick: int,
    kinds: Sequence[Kind],
) -> Task | None:
    """The rank's next task, which is the last in `waiting`, if it is of these kinds and can run in this tick."""
    if not waiting or waiting[-1].kind not in kinds:
        return None
    task = waiting[-1]
    stage = geometry.stage(rank, task.chunk)
    for kind, producer in geometry.needs(task.kind, stage):
        done = ticks.get((kind, task.microbatch, producer))
        if done is None or done + geometry.delay(producer, stage) > tick:
            return None
    return task
