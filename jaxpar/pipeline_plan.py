"""The part of a plan that says how microbatches pass through pipeline stages: schedule, layers of each stage."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxpar.config.schema import Config
from jaxpar.parallel.constrain import Execution, recorded_calls
from jaxpar.parallel.mesh import BATCH_AXES
from jaxpar.parallel.pipeline.backward import reads
from jaxpar.parallel.pipeline.catalogue import SCHEDULES, build_schedule, forward_schedule
from jaxpar.parallel.pipeline.partition import Partition, Work, balanced_layers, make_partition
from jaxpar.parallel.pipeline.routing import RoutedSchedule, route
from jaxpar.parallel.pipeline.schedule import PipelineSchedule
from jaxpar.parallel.rules import LogicalAxes, is_stacked

__all__ = ["PipelinePlan", "check_parts", "plan_pipeline", "work_of_ends"]

_MICROBATCHES_PER_STAGE = 4


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
    number = _num_microbatches(config, sizes)
    schedule = _schedule(config, sizes["pipe"], number, num_layers, period)
    stages = schedule.geometry.num_stages
    counts = _layers_per_stage(config, stages, num_layers, period, work)
    return PipelinePlan(
        schedule=schedule,
        partition=make_partition(schedule.geometry, counts),
        num_layers=num_layers,
        num_batch_shards=_num_shards(sizes),
        notes=_notes(config, schedule, counts, work),
    )


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
    for part, flags in read.items():
        for path, is_read in zip(_by_path(abstract_params), flags, strict=True):
            if is_read and is_stacked(axes[path]) != (part == "layers"):
                where = "only the stacked blocks" if part == "layers" else "no stacked blocks"
                raise ValueError(
                    f"{pipe}: the method {part} of {name} reads {path}, but it may read {where}, since the others are "
                    "not where it runs"
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
    parts = _num_shards(sizes) * config.train.microbatches
    sequences, wanted = config.train.batch_size // parts, config.pipeline.microbatches
    divisors = [number for number in range(1, sequences + 1) if sequences % number == 0]
    if not wanted:
        return max(number for number in divisors if number <= _MICROBATCHES_PER_STAGE * sizes["pipe"])
    if wanted not in divisors:
        raise ValueError(
            f"pipeline.microbatches={wanted} must divide the {sequences} sequences that train.batch_size="
            f"{config.train.batch_size} gives each group of devices ({_shares(config, sizes)}); legal values: "
            f"{', '.join(map(str, divisors))}"
        )
    return wanted


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


def _schedule(config: Config, pipe: int, num_microbatches: int, num_layers: int, period: int) -> PipelineSchedule:
    keys = config.pipeline
    hop = 2 if keys.overlap else 1
    name = "1f1b_aligned" if keys.schedule == "auto" else keys.schedule
    chunks = keys.chunks or (SCHEDULES[name].legal_chunks[0] if name in SCHEDULES else 1)
    _check_num_stages(config, pipe, chunks, num_layers, period)
    return build_schedule(name, pipe, num_microbatches, chunks, hop=hop)


def _notes(config: Config, schedule: PipelineSchedule, counts: Sequence[int], work: Work) -> tuple[str, ...]:
    geometry = schedule.geometry
    busy = geometry.num_tasks / (schedule.num_ticks * geometry.num_ranks)
    stages = "/".join(map(str, counts))
    return (
        f"pipeline: {schedule.name}, {geometry.num_microbatches} microbatches, {schedule.num_ticks} ticks, of which a "
        f"rank is idle {1 - busy:.0%}; layers of each stage: {stages}",
    )


@lru_cache(maxsize=16)
def _forward(schedule: PipelineSchedule, num_microbatches: int) -> RoutedSchedule:
    return route(forward_schedule(schedule.geometry, num_microbatches))
