"""The part of a plan that says how microbatches pass through pipeline stages: schedule, layers of each stage."""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxpar.config.schema import Config
from jaxpar.parallel.constrain import Execution, recorded_calls
from jaxpar.parallel.layers import layers_left_out
from jaxpar.parallel.mesh import BATCH_AXES
from jaxpar.parallel.pipeline.backward import passes_through, reads
from jaxpar.parallel.pipeline.catalogue import SCHEDULES, build_schedule, forward_schedule
from jaxpar.parallel.pipeline.choice import Choice, Measured, choose_schedule, measure
from jaxpar.parallel.pipeline.makespan import Costs
from jaxpar.parallel.pipeline.partition import Partition, Work, balanced_layers, make_partition
from jaxpar.parallel.pipeline.routing import RoutedSchedule, route
from jaxpar.parallel.pipeline.schedule import PipelineSchedule
from jaxpar.parallel.pipeline.table_file import read_table
from jaxpar.parallel.rules import LogicalAxes, is_stacked

__all__ = ["PipelinePlan", "check_parts", "check_schedule_name", "is_path", "plan_pipeline", "work_of_ends"]

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

    schedule: PipelineSchedule
    partition: Partition
    num_layers: int
    num_batch_shards: int
    notes: tuple[str, ...]

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


def plan_pipeline(config: Config, sizes: Mapping[str, int], num_layers: int, period: int, work: Work) -> PipelinePlan:
    """The pipeline of `config` over `sizes["pipe"]` ranks.

    Args:
      num_layers: of the model, in turns of `period` layers that differ.
      work: what embedding and head cost, in layers.

    Raises:
      ValueError: it is impossible; the message names the keys, the values and the legal ones.
    """
    found, why = _schedule(config, sizes, num_layers, period, work)
    schedule = found.schedule
    counts = _layers_per_stage(config, schedule.geometry.num_stages, num_layers, period, work)
    return PipelinePlan(
        schedule=schedule,
        partition=make_partition(schedule.geometry, counts),
        num_layers=num_layers,
        num_batch_shards=_num_shards(sizes),
        notes=tuple(_notes(config, sizes, found, why, counts)),
    )


def check_schedule_name(config: Config) -> None:
    """Raises ValueError for a schedule that no number of ranks has, also where there is one rank."""
    name = config.pipeline.schedule
    if name != "auto" and name not in SCHEDULES and not is_path(name):
        build_schedule(name, 1, 1)


def check_parts(
    config: Config, execution: Execution, structure: Any, abstract_params: Any, axes: Mapping[str, LogicalAxes]
) -> None:
    """Raises ValueError if the model cannot be cut into stages."""
    name = f"model.name={config.model.name!r}"  # type: ignore[attr-defined]
    pipe = f"parallel.pipe={config.parallel.pipe}"
    if config.offload.parameters == "host" or config.offload.optimizer_state == "host":
        raise ValueError(
            f"{pipe} splits the layers over ranks, and [offload] goes through them one by one, which would wait for "
            'every rank at each; set offload.parameters="none" and offload.optimizer_state="none", or parallel.pipe=1'
        )
    model = nnx.merge(structure, abstract_params)
    missing = [part for part in ("embed", "layers", "head") if not callable(getattr(model, part, None))]
    if missing or not any(is_stacked(names) for names in axes.values()):
        what = f"no method {missing[0]}" if missing else 'no stacked blocks (parameters whose first axis is "layers")'
        raise ValueError(
            f"{pipe} needs a model in parts: embed(inputs, dropout_keys), layers(x, inputs, dropout_keys), which runs "
            f"its stacked blocks by jaxpar.parallel.layers.scan_layers, and head(x); {name} has {what}. Give it that, "
            "or set parallel.pipe=1"
        )
    shape = (config.train.batch_size, config.data.sequence_length)
    inputs = {key: jax.ShapeDtypeStruct(shape, jnp.int32) for key in ("tokens", "positions", "segment_ids")}

    def embed(params: Any, inputs: Any) -> jax.Array:
        return nnx.merge(structure, params).embed(inputs, None)

    def layers(params: Any, x: jax.Array, inputs: Any) -> jax.Array:
        return nnx.merge(structure, params).layers(x, inputs, None)

    def head(params: Any, x: jax.Array) -> Any:
        return nnx.merge(structure, params).head(x)

    with replace(execution, attention="reference").active(), recorded_calls() as calls:
        x = jax.eval_shape(embed, abstract_params, inputs)
        read = {
            "embed": reads(embed, abstract_params, inputs),
            "layers": reads(layers, abstract_params, x, inputs),
            "head": reads(head, abstract_params, x),
        }
    if "scan_layers" not in calls:
        raise ValueError(
            f"{pipe}: the method layers of {name} must run its stacked blocks by jaxpar.parallel.layers.scan_layers"
        )
    with replace(execution, attention="reference").active():
        _check_layers_alone(f"{pipe}: the method layers of {name}", layers, abstract_params, axes, x, inputs)
    for part, flags in read.items():
        for path, is_read in zip(_by_path(abstract_params), flags, strict=True):
            if is_read and is_stacked(axes[path]) != (part == "layers"):
                where = "only the stacked blocks" if part == "layers" else "no stacked blocks"
                raise ValueError(
                    f"{pipe}: the method {part} of {name} reads {path}, but it may read {where}, since the others are "
                    "not where it runs"
                )


def _check_layers_alone(
    what: str, layers: Callable, abstract_params: Any, axes: Mapping[str, LogicalAxes], x: Any, inputs: Any
) -> None:
    """Each stage runs all of `layers`: beside its layers there may be nothing that changes what passes through."""
    calls: list[tuple[int, Any]] = []

    def without_layers(params: Any, x: jax.Array, inputs: Any) -> tuple[jax.Array, Any]:
        calls.clear()
        with layers_left_out(lambda num_layers, extras: calls.append((num_layers, extras))):
            result = layers(params, x, inputs)
        return result, [extras for _, extras in calls]

    is_x, extras_read_x = passes_through(without_layers, abstract_params, x, inputs)
    depths = {_by_path(abstract_params)[path].shape[0] for path in axes if is_stacked(axes[path])}
    if len(calls) != 1 or depths != {calls[0][0]}:
        raise ValueError(
            f"{what} must call scan_layers once, with all stacked blocks; it calls it {len(calls)} times, for "
            f"{' and '.join(str(number) for number, _ in calls)} layers, and there are stacks of "
            f"{', '.join(map(str, sorted(depths)))}"
        )
    if not is_x or extras_read_x:
        where = "give what scan_layers returns" if not is_x else "give scan_layers extras that do not depend on x"
        raise ValueError(
            f"{what} runs on every stage, so that it must {where}; what else it does belongs to embed or head"
        )


def _by_path(params: Any) -> dict[str, Any]:
    leaves = jax.tree_util.tree_leaves_with_path(params)
    return {jax.tree_util.keystr(keys, simple=True, separator="/"): leaf for keys, leaf in leaves}


def work_of_ends(abstract_params: Any, axes: Mapping[str, LogicalAxes]) -> Work:
    """Embedding and head in layers, by multiplications and additions for a token: a layer's matrices count their
    elements, the head's product the table's; a lookup adds one row."""
    sizes = {path: leaf.shape for path, leaf in _by_path(abstract_params).items()}
    matrices = sum(
        math.prod(shape[1:]) for path, shape in sizes.items() if is_stacked(axes[path]) and len(axes[path]) > 2
    )
    tables = [shape for path, shape in sizes.items() if set(axes[path]) == {"vocab", "embed"}]
    if not matrices or not tables:
        return Work()
    return Work(embed=min(tables[0]) / matrices, head=math.prod(tables[0]) / matrices)


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
    config: Config, sizes: Mapping[str, int], num_layers: int, period: int, work: Work
) -> tuple[Measured, str]:
    """The schedule with its predicted numbers, and why it is this one."""
    keys, pipe = config.pipeline, sizes["pipe"]
    hop, bound = (2 if keys.overlap else 1), keys.max_in_flight or None
    costs = _costs(config, pipe, num_layers, period, work)
    if is_path(keys.schedule):
        found, why = measure(_own_table(config, sizes), costs), f"from {keys.schedule}"
    elif keys.schedule == "auto":
        # Layers that are given say how many stages there are.
        given = keys.chunks or len(keys.layers_per_stage) // pipe
        allowed = _chunks_to_try(given, pipe, num_layers // period)
        _check_num_stages(config, pipe, min(allowed), num_layers, period)
        choice = choose_schedule(pipe, _num_microbatches(config, sizes), allowed, costs, max_in_flight=bound, hop=hop)
        found, why = measure(choice.schedule, costs), _reason(choice)
    else:
        if keys.overlap and keys.schedule in _NOTHING_TO_OVERLAP:
            raise ValueError(
                f"pipeline.overlap=true sends while the next tick computes, which with pipeline.schedule="
                f'"{keys.schedule}" waits for what is sent; set pipeline.overlap=false, or another schedule'
            )
        chunks = keys.chunks or (SCHEDULES[keys.schedule].legal_chunks[0] if keys.schedule in SCHEDULES else 1)
        _check_num_stages(config, pipe, chunks, num_layers, period)
        schedule = build_schedule(keys.schedule, pipe, _num_microbatches(config, sizes), chunks, hop=hop)
        found, why = measure(schedule, costs), ""
    _check_num_stages(config, pipe, found.schedule.geometry.num_chunks, num_layers, period)
    if bound is not None and found.held > bound:
        raise ValueError(
            f"pipeline.max_in_flight={bound:g}: pipeline.schedule={keys.schedule!r} keeps {found.held:g} activations "
            'of a stage; set pipeline.schedule="auto", which looks for one that keeps to it, or '
            f"pipeline.max_in_flight={found.held:g}"
        )
    return found, why


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


def _notes(config: Config, sizes: Mapping[str, int], found: Measured, why: str, counts: Sequence[int]) -> list[str]:
    schedule = found.schedule
    geometry = schedule.geometry
    chunks = f" of {geometry.num_chunks} chunks" if geometry.num_chunks > 1 else ""
    notes = [
        f"pipeline: {schedule.name}{f' ({why})' if why else ''}: {geometry.num_ranks} ranks{chunks}, layers of the "
        f"stages {'/'.join(map(str, counts))}, {geometry.num_microbatches} microbatches in {schedule.num_ticks} ticks",
        f"pipeline: predicted time {found.slowdown:.2f} × the work of the busiest rank; a rank has room for "
        f"{found.held:g} microbatches' activations",
    ]
    if geometry.split and config.remat.policy != "none":
        notes.append(
            f"pipeline: {schedule.name} keeps what is within layers until their weights' gradients are computed, which "
            f"remat.policy={config.remat.policy!r} does not shrink"
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
