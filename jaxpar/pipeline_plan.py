"""The part of a plan that says how microbatches pass through pipeline stages: schedule, layers of each stage."""

import contextlib
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property, lru_cache
from pathlib import Path

from jaxpar.config.schema import Config
from jaxpar.parallel.mesh import BATCH_AXES
from jaxpar.parallel.pipeline.catalogue import SCHEDULES, build_schedule, forward_schedule
from jaxpar.parallel.pipeline.choice import Choice, Measured, SlotSizes, choose_schedule, measure
from jaxpar.parallel.pipeline.makespan import Costs
from jaxpar.parallel.pipeline.partition import Partition, Work, balanced_layers, make_partition
from jaxpar.parallel.pipeline.routing import RoutedSchedule, route
from jaxpar.parallel.pipeline.schedule import PipelineSchedule
from jaxpar.parallel.pipeline.table_file import read_table
from jaxpar.parallel.pipeline.tick_loops import has_branches

__all__ = ["PipelinePlan", "check_schedule_name", "is_path", "plan_pipeline"]

_MICROBATCHES_PER_STAGE = 4
_MOST_CHUNKS = 4
_NOTHING_TO_OVERLAP = ("naive", "gpipe")
_COSTS = ("forward", "input's gradient", "weights' gradients")
_RECOMPUTED = {"none": 0.0, "dots": 0.2, "full": 1.0}
"""What a backward pass computes again, in forward passes: all, or what lies between matrix products."""


@dataclass(frozen=True, eq=False)
class PipelinePlan:
    """How a batch passes through the stages.

    `num_layers` are the model's; `partition` says where they are. `notes` are the decisions that a user should know of.
    """

    measured: Measured
    partition: Partition
    num_layers: int
    num_batch_shards: int
    notes: tuple[str, ...]

    @property
    def schedule(self) -> PipelineSchedule:
        """Which task runs when."""
        return self.measured.schedule

    def rows_of_stack(self, depth: int) -> tuple[int, ...]:
        """The entry of a stack of `depth` layers that each of its rows has, or EMPTY; layers may be in several stacks,
        in turn."""
        return self._reduced(self.num_layers // depth)

    def rows_as_laid_out(self, num_rows: int) -> tuple[int, ...]:
        """The same, from how many rows the stack has."""
        return self._reduced(len(self.partition.rows) // num_rows)

    def _reduced(self, every: int) -> tuple[int, ...]:
        return tuple(row // every for row in self.partition.rows[::every])

    @property
    def num_microbatches(self) -> int:
        """Parts of what is between two optimizer steps, or between two sums with gradient accumulation."""
        return self.schedule.geometry.num_microbatches

    @cached_property
    def routed(self) -> RoutedSchedule:
        """The schedule as the executor reads it."""
        return route(self.schedule)

    def forward(self, num_microbatches: int) -> RoutedSchedule:
        """A schedule without gradients for the same stages."""
        return _forward(self.schedule, num_microbatches)

    def num_forward_microbatches(self, num_sequences: int) -> int:
        """Into how many parts a batch without gradients is cut."""
        return math.gcd(num_sequences // self.num_batch_shards, self.num_microbatches)


def plan_pipeline(
    config: Config,
    sizes: Mapping[str, int],
    num_layers: int,
    period: int,
    work: Work,
    slot_sizes: Callable[[], SlotSizes],
) -> PipelinePlan:
    """The pipeline of `config` over `sizes["pipe"]` ranks.

    Args:
      num_layers: of the model, in turns of `period` layers that differ.
      work: what embedding and head cost, in layers.
      slot_sizes: asked where a backward may be split.

    Raises:
      ValueError: it is impossible; the message names the keys, the values and the legal ones.
    """
    sized = cache(slot_sizes)
    found, why = _schedule(config, sizes, num_layers, period, work, sized)
    schedule = found.schedule
    counts = _layers_per_stage(config, schedule.geometry.num_stages, num_layers, period, work)
    return PipelinePlan(
        measured=found,
        partition=make_partition(schedule.geometry, counts),
        num_layers=num_layers,
        num_batch_shards=_num_shards(sizes),
        notes=tuple(_notes(config, sizes, found, why, counts, sized)),
    )


def check_schedule_name(config: Config) -> None:
    """Raises ValueError for a schedule that no number of ranks has, also where there is one rank."""
    name = config.pipeline.schedule
    if name != "auto" and name not in SCHEDULES and not is_path(name):
        build_schedule(name, 1, 1)


def _num_microbatches(config: Config, sizes: Mapping[str, int]) -> int:
    wanted = config.pipeline.microbatches
    if not wanted:
        return max(number for number in _divisors(config, sizes) if number <= _MICROBATCHES_PER_STAGE * sizes["pipe"])
    _check_microbatches(config, sizes, wanted, "pipeline.microbatches")
    return wanted


def _divisors(config: Config, sizes: Mapping[str, int]) -> list[int]:
    """Numbers of parts into which each group of devices can cut its sequences."""
    sequences = config.train.batch_size // (_num_shards(sizes) * config.train.microbatches)
    return [number for number in range(1, sequences + 1) if sequences % number == 0]


def _check_microbatches(config: Config, sizes: Mapping[str, int], number: int, key: str) -> None:
    divisors = _divisors(config, sizes)
    if number not in divisors:
        raise ValueError(
            f"{key}={number} must divide the {divisors[-1]} sequences that train.batch_size={config.train.batch_size} "
            f"gives each group of devices ({_shares(config, sizes)}); legal values: {', '.join(map(str, divisors))}"
        )


def _shares(config: Config, sizes: Mapping[str, int]) -> str:
    shares = [f"parallel.{axis}={sizes[axis]}" for axis in BATCH_AXES if sizes[axis] > 1]
    shares += [f"train.microbatches={config.train.microbatches}"] * (config.train.microbatches > 1)
    return " × ".join(shares) or "all of them"


def _num_shards(sizes: Mapping[str, int]) -> int:
    return math.prod(sizes[axis] for axis in BATCH_AXES)


def _check_num_stages(config: Config, pipe: int, chunks: int, num_layers: int, period: int) -> None:
    turns = num_layers // period
    if turns >= pipe * chunks:
        return
    unit = "layers" if period == 1 else f"turns of {period} layers, in which model.windows repeats"
    legal = [f"parallel.pipe={size}" for size in range(2, pipe) if size * chunks <= turns][-1:]
    legal += [f"pipeline.chunks={number}" for number in range(1, chunks) if pipe * number <= turns][-1:]
    raise ValueError(
        f"parallel.pipe={pipe} × pipeline.chunks={chunks} = {pipe * chunks} stages, but the model has {turns} {unit}, "
        f"and each stage needs one; nearest legal values: {' or '.join(legal) or 'parallel.pipe=1'}"
    )


def _layers_per_stage(config: Config, stages: int, num_layers: int, period: int, work: Work) -> tuple[int, ...]:
    given = config.pipeline.layers_per_stage
    if not given:
        return balanced_layers(num_layers, stages, work, period=period)
    suggestion = list(balanced_layers(num_layers, stages, work, period=period))
    if len(given) != stages or sum(given) != num_layers:
        raise ValueError(
            f"pipeline.layers_per_stage={list(given)} has {len(given)} stages and {sum(given)} layers; there are "
            f"{stages} stages and {num_layers} layers, for example {suggestion}"
        )
    if any(count % period for count in given):
        raise ValueError(
            f"pipeline.layers_per_stage={list(given)} must be multiples of {period}, the turn in which model.windows "
            f"repeats, for example {suggestion}"
        )
    return given


def _schedule(
    config: Config,
    sizes: Mapping[str, int],
    num_layers: int,
    period: int,
    work: Work,
    slot_sizes: Callable[[], SlotSizes],
) -> tuple[Measured, str]:
    """The schedule with its predicted numbers, and why it is this one."""
    keys, pipe = config.pipeline, sizes["pipe"]
    hop, bound = (2 if keys.overlap else 1), keys.max_in_flight or None
    costs = _costs(config, pipe, num_layers, period, work)

    def measured(schedule: PipelineSchedule) -> Measured:
        slots = slot_sizes() if schedule.geometry.split else SlotSizes()
        return measure(schedule, costs, slots=slots)

    if is_path(keys.schedule):
        found, why = measured(_own_table(config, sizes)), f"from {keys.schedule}"
    elif keys.schedule == "auto":
        # Layers that are given say how many stages there are.
        given = keys.chunks or len(keys.layers_per_stage) // pipe
        allowed = _chunks_to_try(given, pipe, num_layers // period)
        _check_num_stages(config, pipe, min(allowed), num_layers, period)
        number, slots = _num_microbatches(config, sizes), slot_sizes()
        aligned = _permutes_in_layers(config, sizes)
        choice = choose_schedule(
            pipe, number, allowed, costs, max_in_flight=bound, slots=slots, only_aligned=aligned, hop=hop
        )
        best = choice.candidates[0].measured
        assert best is not None
        found, why = best, _reason(choice)
    else:
        if keys.overlap and keys.schedule in _NOTHING_TO_OVERLAP:
            raise ValueError(
                f"pipeline.overlap=true sends while the next tick computes, which with pipeline.schedule="
                f'"{keys.schedule}" waits for what is sent; set pipeline.overlap=false, or another schedule'
            )
        chunks = keys.chunks or (SCHEDULES[keys.schedule].legal_chunks[0] if keys.schedule in SCHEDULES else 1)
        _check_num_stages(config, pipe, chunks, num_layers, period)
        schedule = build_schedule(keys.schedule, pipe, _num_microbatches(config, sizes), chunks, hop=hop)
        found, why = measured(schedule), ""
    _check_num_stages(config, pipe, found.schedule.geometry.num_chunks, num_layers, period)
    if _permutes_in_layers(config, sizes):
        _check_branches(config, sizes, found.schedule)
    if bound is not None and found.held > bound:
        raise ValueError(
            f"pipeline.max_in_flight={bound:g}: pipeline.schedule={keys.schedule!r} keeps {found.held:.4g} activations "
            'of a stage; set pipeline.schedule="auto", which looks for one that keeps to it, or '
            f"pipeline.max_in_flight={math.ceil(100 * found.held) / 100:g}"
        )
    return found, why


def _permutes_in_layers(config: Config, sizes: Mapping[str, int]) -> bool:
    """Whether a layer has collective-permutes, which wait for all devices of the program."""
    return sizes["context"] > 1 and config.parallel.context_method == "ring"


def _check_branches(config: Config, sizes: Mapping[str, int], schedule: PipelineSchedule) -> None:
    """Raises ValueError if ranks would wait in a layer for others that run another kind of task."""
    if not has_branches(route(schedule)):
        return
    pipe, number = sizes["pipe"], schedule.geometry.num_microbatches
    legal = ['"auto"']
    for name, recipe in SCHEDULES.items():
        with contextlib.suppress(ValueError):
            hop, chunks = schedule.geometry.hop, recipe.legal_chunks[0]
            if not has_branches(route(build_schedule(name, pipe, number, chunks, hop=hop))):
                legal.append(f'"{name}"')
    raise ValueError(
        f'pipeline.schedule="{config.pipeline.schedule}" branches at each tick on the kind of task, and with '
        f'parallel.context={sizes["context"]} and parallel.context_method="ring" a layer sends keys and values from '
        "device to device, which would wait for those in other branches; legal schedules: "
        f'{", ".join(legal)}; or set parallel.context_method="all_gather" or "ulysses"'
    )


def is_path(schedule: str) -> bool:
    """Whether `pipeline.schedule` names a file."""
    return "." in schedule or "/" in schedule


def _own_table(config: Config, sizes: Mapping[str, int]) -> PipelineSchedule:
    keys = config.pipeline
    path = Path(keys.schedule).expanduser()
    if not path.is_file():
        raise ValueError(
            f"pipeline.schedule={keys.schedule!r} is taken for a file, because of its dot or slash, and there is none; "
            f"legal names: {', '.join(['auto', *SCHEDULES])}"
        )
    schedule = read_table(path)
    geometry = schedule.geometry
    given = {
        "parallel.pipe": (sizes["pipe"], geometry.num_ranks),
        "pipeline.chunks": (keys.chunks or geometry.num_chunks, geometry.num_chunks),
        "pipeline.microbatches": (keys.microbatches or geometry.num_microbatches, geometry.num_microbatches),
        "pipeline.overlap": (keys.overlap, geometry.hop == 2),
    }
    for key, (value, table) in given.items():
        if value != table:
            raise ValueError(
                f"{key}={json.dumps(value)} does not go with the table in {keys.schedule}, which is for {key}="
                f"{json.dumps(table)}; set it to that, or name another table"
            )
    _check_microbatches(config, sizes, geometry.num_microbatches, f"the microbatches of {keys.schedule}")
    return schedule


def _costs(config: Config, pipe: int, num_layers: int, period: int, work: Work) -> Costs:
    """Of each rank's share of the layers, as predicted from the layers' numbers and the remat policy."""
    given = config.pipeline.costs
    if given and len(given) != len(_COSTS):
        raise ValueError(
            f"pipeline.costs={list(given)} has {len(given)} numbers; it takes three, for {', '.join(_COSTS)}: for "
            "example [1.0, 1.0, 1.0]"
        )
    numbers = given or (1.0, 1.0 + _RECOMPUTED[config.remat.policy], 1.0)
    if num_layers // period < pipe:
        return Costs(*numbers)
    counts = config.pipeline.layers_per_stage
    if len(counts) != pipe:
        counts = balanced_layers(num_layers, pipe, work, period=period)
    loads = [float(count) for count in counts]
    loads[0] += work.embed
    loads[-1] += work.head
    mean = math.fsum(loads) / pipe
    return Costs(*(tuple(number * load / mean for load in loads) for number in numbers))


def _chunks_to_try(given: int, pipe: int, num_turns: int) -> list[int]:
    """Numbers of chunks that "auto" considers: what is given, or 1 and those that give every stage as many layers."""
    if given:
        return [given]
    even = [number for number in range(2, _MOST_CHUNKS + 1) if num_turns % (pipe * number) == 0]
    return [1, *even]


def _reason(choice: Choice) -> str:
    """What "auto" says of its choice."""
    built = [candidate for candidate in choice.candidates if candidate.measured is not None]
    best, others = built[0].measured, [c for c in built[1:] if not c.refused]
    assert best is not None
    if not others or others[0].measured is None:
        return "the only one that fits"
    next_best, more = others[0], others[0].measured.slowdown / best.slowdown - 1
    chunks = f" of {next_best.num_chunks} chunks" if next_best.num_chunks > 1 else ""
    return f"the fastest of {len(others) + 1} by prediction, before {next_best.name}{chunks} with {more:.0%} more time"


def _notes(
    config: Config,
    sizes: Mapping[str, int],
    found: Measured,
    why: str,
    counts: Sequence[int],
    slot_sizes: Callable[[], SlotSizes],
) -> list[str]:
    schedule = found.schedule
    geometry = schedule.geometry
    chunks = f" of {geometry.num_chunks} chunks" if geometry.num_chunks > 1 else ""
    notes = [
        f"pipeline: {schedule.name}{f' ({why})' if why else ''}: {geometry.num_ranks} ranks{chunks}, layers of the "
        f"stages {'/'.join(map(str, counts))}, {geometry.num_microbatches} microbatches in {schedule.num_ticks} ticks",
        f"pipeline: predicted time {found.slowdown:.2f} × the work of the busiest rank; a rank has room for "
        f"{found.held:.4g} microbatches' activations",
    ]
    if geometry.num_microbatches < geometry.num_ranks:
        notes.append(
            f"pipeline: {geometry.num_microbatches} microbatches are fewer than parallel.pipe={geometry.num_ranks}, so "
            f"that some ranks always wait; train.batch_size={config.train.batch_size} gives up to "
            f"{_divisors(config, sizes)[-1]}"
        )
    if geometry.split:
        notes.append(
            f"pipeline: from its input's to its weights' gradients {schedule.name} keeps of a microbatch about as much "
            f"as {slot_sizes().backward:.2g} microbatches' activations (of whole arrays), whatever is recomputed"
        )
    if config.parallel.zero_stage == 3 and sizes["fsdp"] > 1:
        times = 2 * geometry.num_microbatches * config.train.microbatches
        notes.append(
            f"pipeline: parallel.zero_stage=3 gathers the weights of each stage {times} times a step, 2 or 1 once"
        )
    return notes


@lru_cache(maxsize=16)
def _forward(schedule: PipelineSchedule, num_microbatches: int) -> RoutedSchedule:
    return route(forward_schedule(schedule.geometry, num_microbatches))
