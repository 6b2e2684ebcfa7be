"""What a pipeline schedule is: a table that says which task each rank runs in each tick.

A model of `num_stages` stages runs on `num_ranks` ranks; a rank has `num_chunks` stages, its chunks. In each tick a
rank runs one task on one of its chunks and one microbatch, or none.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import cached_property

__all__ = [
    "HOPS",
    "PLACEMENTS",
    "Geometry",
    "Kind",
    "PipelineSchedule",
    "Position",
    "Table",
    "TableError",
    "Task",
    "chunk_letters",
    "chunk_number",
]

PLACEMENTS = ("loop", "vee")
HOPS = (1, 2)


class Kind(IntEnum):
    """What a rank does in a tick; without a split backward, BACKWARD computes the weights' gradients too."""

    IDLE = 0
    FORWARD = 1
    BACKWARD = 2
    WEIGHT = 3

    @property
    def letter(self) -> str:
        """`.`, `F`, `B` or `W`."""
        return ".FBW"[self]


Position = tuple[Kind, int, int]
"""A task in the model's terms: kind, microbatch, stage."""


@dataclass(frozen=True)
class Task:
    """One rank's work in one tick; `chunk` counts the stages of the rank."""

    kind: Kind
    microbatch: int
    chunk: int = 0

    def label(self, *, with_chunk: bool = True) -> str:
        """Kind, microbatch and chunk in short.

        >>> Task(Kind.BACKWARD, 3, 1).label(), Task(Kind.FORWARD, 12).label(with_chunk=False)
        ('B3b', 'F12')
        """
        return f"{self.kind.letter}{self.microbatch}{chunk_letters(self.chunk) if with_chunk else ''}"


Table = tuple[tuple[Task | None, ...], ...]
"""[tick][rank] → what runs."""


class TableError(ValueError):
    """Something wrong in a table: in which tick, on which rank, with which task (None where it is missing)."""

    def __init__(self, problem: str, tick: int | None, rank: int | None, task: str) -> None:
        place = [f"tick {tick}"] * (tick is not None) + [f"rank {rank}"] * (rank is not None) + [task]
        super().__init__(f"{', '.join(place)}: {problem}")
        self.problem = problem
        self.task = task
        self.tick = tick
        self.rank = rank


@dataclass(frozen=True)
class Geometry:
    """How stages lie on ranks and how results travel.

    Placement "loop" gives rank r the stages r, p + r, 2p + r, ... of p ranks. In "vee" every second chunk runs back:
    with two chunks, rank r has the stages r and 2p − 1 − r, so that the last stage is where the first one is
    (Qi et al. 2024, "Pipeline Parallelism with Controllable Memory").

    `hop` is the number of ticks after which a neighbour can use a result: with 1 the transfer ends the tick that
    computed it, with 2 it runs beside the computation of the next tick. On the same rank it is always 1. Where nothing
    is differentiated there are forwards alone.
    """

    num_ranks: int
    num_microbatches: int
    num_chunks: int = 1
    placement: str = "loop"
    split: bool = False
    hop: int = 1
    forward_only: bool = False

    def __post_init__(self) -> None:
        for name in ("num_ranks", "num_microbatches", "num_chunks"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be 1 or more")
        for name, legal in (("placement", PLACEMENTS), ("hop", HOPS)):
            if getattr(self, name) not in legal:
                raise ValueError(f"{name}={getattr(self, name)!r} must be one of {', '.join(map(repr, legal))}")

    @property
    def num_stages(self) -> int:
        return self.num_ranks * self.num_chunks

    @property
    def kinds(self) -> tuple[Kind, ...]:
        """The kinds of task that each stage runs once for each microbatch, in the order of their dependencies."""
        return (Kind.FORWARD, Kind.BACKWARD, Kind.WEIGHT)[: 1 if self.forward_only else 3 if self.split else 2]

    @property
    def num_tasks(self) -> int:
        return len(self.kinds) * self.num_microbatches * self.num_stages

    def stage(self, rank: int, chunk: int) -> int:
        """The stage that is a rank's chunk.

        >>> [Geometry(4, 8, 2, "vee").stage(rank, 1) for rank in range(4)]
        [7, 6, 5, 4]
        """
        return chunk * self.num_ranks + (self.num_ranks - 1 - rank if self._runs_back(chunk) else rank)

    def locate(self, stage: int) -> tuple[int, int]:
        """The rank and the chunk of a stage, the inverse of `stage`."""
        chunk, offset = divmod(stage, self.num_ranks)
        return self.num_ranks - 1 - offset if self._runs_back(chunk) else offset, chunk

    def rank(self, stage: int) -> int:
        return self.locate(stage)[0]

    def delay(self, producer: int, consumer: int) -> int:
        """Ticks from a task of stage `producer` to the first in which stage `consumer` can use its result."""
        return 1 if self.rank(producer) == self.rank(consumer) else self.hop

    def needs(self, kind: Kind, stage: int) -> tuple[tuple[Kind, int], ...]:
        """The tasks, as (kind, stage) of the same microbatch, whose results a task uses.

        A forward needs the stage before; a backward its own forward and the cotangent of the stage behind (the last
        stage's comes from its own forward, which ends in the loss); a weight gradient its own backward.
        """
        if kind is Kind.FORWARD:
            return ((Kind.FORWARD, stage - 1),) if stage else ()
        if kind is Kind.BACKWARD:
            behind = ((Kind.BACKWARD, stage + 1),) if stage < self.num_stages - 1 else ()
            return ((Kind.FORWARD, stage), *behind)
        return ((Kind.BACKWARD, stage),)

    def sender(self, kind: Kind, stage: int) -> tuple[Kind, int]:
        """The task, as (kind, stage), whose result a forward or a backward takes from where results are received.

        On the last stage a backward takes what its own forward ended in, the loss's cotangent of the stage's output.
        """
        return self.needs(kind, stage)[-1]

    def _runs_back(self, chunk: int) -> bool:
        return self.placement == "vee" and chunk % 2 == 1


@dataclass(frozen=True)
class PipelineSchedule:
    """A named table [tick][rank] of tasks, None where a rank is idle; `str` draws a line a rank, a column a tick."""

    name: str
    geometry: Geometry
    table: Table

    @property
    def num_ticks(self) -> int:
        return len(self.table)

    @cached_property
    def aligned(self) -> bool:
        """Whether in every tick all ranks that are not idle run the same kind of task."""
        return all(len({task.kind for task in row if task}) <= 1 for row in self.table)

    @cached_property
    def ticks(self) -> Mapping[Position, int]:
        """Task → the tick in which it runs."""
        return {self.position(rank, task): tick for tick, rank, task in self.tasks()}

    def tasks(self) -> Iterator[tuple[int, int, Task]]:
        """All tasks as (tick, rank, task), tick by tick."""
        for tick, row in enumerate(self.table):
            for rank, task in enumerate(row):
                if task is not None:
                    yield tick, rank, task

    def counts_in_flight(self) -> Iterator[tuple[int, int, Task, int]]:
        """For every task, tick by tick, the forwards of its rank whose last use is still to come, once it has run.

        The last use is the backward, or with a split backward the weight gradient. Yields (tick, rank, task, count).
        """
        counts = [0] * self.geometry.num_ranks
        last_use = self.geometry.kinds[-1]
        for tick, rank, task in self.tasks():
            counts[rank] += (task.kind is Kind.FORWARD) - (task.kind is last_use)
            yield tick, rank, task, counts[rank]

    def position(self, rank: int, task: Task) -> Position:
        return task.kind, task.microbatch, self.geometry.stage(rank, task.chunk)

    def lines(self) -> Sequence[str]:
        """A line of cells for each rank, in columns."""
        with_chunk = self.geometry.num_chunks > 1
        columns = [[task.label(with_chunk=with_chunk) if task else "." for task in row] for row in self.table]
        width = max((len(cell) for column in columns for cell in column), default=1)
        ranks = range(self.geometry.num_ranks)
        return [" ".join(column[rank].rjust(width) for column in columns) for rank in ranks]

    def __str__(self) -> str:
        return "\n".join(self.lines())


def chunk_letters(chunk: int) -> str:
    """a, b, ..., z, aa, ab, ... for chunk 0, 1, ...

    >>> chunk_letters(0), chunk_letters(27), chunk_number("ab")
    ('a', 'ab', 27)
    """
    first, last = divmod(chunk, 26)
    return (chunk_letters(first - 1) if first else "") + chr(ord("a") + last)


def chunk_number(letters: str) -> int:
    """The inverse of `chunk_letters`."""
    number = -1
    for letter in letters:
        number = 26 * (number + 1) + ord(letter) - ord("a")
    return number
