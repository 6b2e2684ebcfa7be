"""`python -m jaxpar.inspect CONFIG [KEY=VALUE ...]`: where every parameter lives and why, memory, and communication.

Nothing is trained and no data is read. With `--no-compile` only what follows from shapes is printed; with `--buckets`
the step is compiled once more without combining small arrays, to compare its collectives. For a cluster that is not
here, add `parallel.simulated_devices=N`. Exit status: 0, or 2 if something in the configuration is wrong.
"""

import sys
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

import jax
from rich.console import Console
from rich.table import Table

from jaxpar.command_line import UserError, run_command, user_errors
from jaxpar.compiler_flags import without_combining
from jaxpar.config import Config
from jaxpar.data import declared_vocab_size
from jaxpar.memory import OptimizerArray, optimizer_arrays, state_parts
from jaxpar.metrics import find_accelerator, with_unit
from jaxpar.parallel.collectives import CollectiveRow, group_by_axis, parse_collectives
from jaxpar.parallel.pipeline.makespan import in_flight
from jaxpar.parallel.program import memory_table
from jaxpar.pipeline_plan import PipelinePlan
from jaxpar.plan import Plan, make_plan
from jaxpar.state import abstract_state
from jaxpar.step import Step, abstract_batch, examination
from jaxpar.traffic import ExpectedTraffic, expected_traffic

__all__ = ["compile_step", "main"]

_NO_COMPILE = "--no-compile"
_BUCKETS = "--buckets"


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line; returns the exit status."""
    arguments = sys.argv[1:] if arguments is None else arguments
    return run_command("jaxpar.inspect", __doc__, _inspect, arguments, flags=[_NO_COMPILE, _BUCKETS])


def compile_step(plan: Plan, options: Mapping[str, str | bool] | None = None) -> jax.stages.Compiled:
    """The compiled training step, from shapes alone; `options` are the compiler's."""
    step = Step(plan)
    # Outside the mesh: Optax computes a scalar, which devices that are only described cannot.
    state = abstract_state(plan, step.optimizer)
    with plan.execution.active():
        compiled = step.train.lower(state, abstract_batch(plan)).compile(compiler_options=dict(options or {}))
    if (examine := examination(plan)) is not None:
        examine(compiled)
    return compiled


def _inspect(config: Config, flags: Collection[str]) -> int:
    if {_NO_COMPILE, _BUCKETS} <= set(flags):
        raise UserError(f"{_BUCKETS} compares compiled steps: leave out {_NO_COMPILE}")
    with user_errors():
        plan = make_plan(
            config, jax.devices(), getattr(config.model, "vocab_size", 0) or declared_vocab_size(config.data)
        )
        step = Step(plan)
    console = Console(width=None if sys.stdout.isatty() else 160)
    sizes = ", ".join(f"{axis} {size}" for axis, size in plan.mesh.shape.items())
    console.print(f"mesh of {plan.mesh.size} devices: {sizes}", highlight=False)
    for note in plan.notes:
        console.print(note, highlight=False)
    console.print(_parameter_table(plan))
    if plan.pipeline is not None:
        console.print(_pipeline_table(plan.pipeline))
    _print_state(console, plan, step)
    if _NO_COMPILE not in flags:
        compiled = compile_step(plan)
        console.print(_memory_table(plan, compiled))
        console.print(_traffic_table(plan, compiled))
        if _BUCKETS in flags:
            console.print(_bucket_table(plan, compiled))
            if plan.mesh.devices.flat[0].platform == "cpu":
                console.print(
                    "XLA's own combining on CPU cannot be switched off and is in both columns", highlight=False
                )
    return 0


def _parameter_table(plan: Plan) -> Table:
    columns = ("path", "shape", "logical axes → mesh axes", "local shape", "bytes a device", "why")
    table = _table("Parameters", columns, right=("bytes a device",))
    for parameter in plan.parameters:
        spec = [*parameter.layout.spec, *(None,) * (len(parameter.axes) - len(parameter.layout.spec))]
        axes = ", ".join(
            f"{name}→{'+'.join(entry) if isinstance(entry, tuple) else entry or '·'}"
            for name, entry in zip(parameter.axes, spec, strict=True)
        )
        table.add_row(
            parameter.path, _shape(parameter.shape), axes, _shape(parameter.layout.local_shape),
            with_unit(parameter.local_bytes), parameter.layout.reason,
        )  # fmt: skip
    return table


def _pipeline_table(pipeline: PipelinePlan) -> Table:
    """Which layers are where, and what a rank keeps for their backward passes."""
    geometry, partition = pipeline.schedule.geometry, pipeline.partition
    columns = ("rank", "layers of its chunks", "tasks", "idle", "activations in flight")
    title = f"Pipeline ({pipeline.schedule.name}; python -m jaxpar.plot_pipeline draws it)"
    table = _table(title, columns, right=columns[2:])
    num_ticks, held = pipeline.schedule.num_ticks, in_flight(pipeline.schedule)
    for rank in range(geometry.num_ranks):
        stages = [geometry.stage(rank, chunk) for chunk in range(geometry.num_chunks)]
        layers = [f"{partition.starts[s]}-{partition.starts[s] + partition.counts[s] - 1}" for s in stages]
        tasks = sum(row[rank] is not None for row in pipeline.schedule.table)
        idle, kept = f"{1 - tasks / num_ticks:.0%}", f"{held.chunks[rank]} of a chunk"
        table.add_row(str(rank), ", ".join(layers), str(tasks), idle, kept)
    return table


def _print_state(console: Console, plan: Plan, step: Step) -> None:
    columns = ("what", "format", "elements", "bytes a device", "bytes on its host", "bytes in all")
    table = _table("State", columns, right=columns[2:])
    parts = state_parts(plan, step.optimizer)
    for part in parts:
        sizes = (part.device_bytes, part.host_bytes, part.total_bytes)
        table.add_row(part.name, " ".join(part.formats), f"{part.elements:,}", *map(with_unit, sizes))
    sums = [sum(getattr(part, f"{where}_bytes") for part in parts) for where in ("device", "host", "total")]
    table.add_row("all", "", "", *map(with_unit, sums))
    console.print(table)
    arrays = optimizer_arrays(plan, step.optimizer)
    if not any(any(array.layout.spec) for array in arrays):
        return
    no_rule = [array for array in arrays if not any(array.layout.spec) and not array.layout.undivided]
    if no_rule:
        size = with_unit(sum(array.local_bytes for array in no_rule))
        console.print(f"optimizer arrays that no rule splits: {len(no_rule)}, with {size} a device", highlight=False)
    if undivided := [array for array in arrays if array.layout.undivided]:
        console.print(_undivided_table(undivided))


def _undivided_table(arrays: Sequence[OptimizerArray]) -> Table:
    title = "Optimizer arrays that do not divide as their rule says"
    table = _table(title, ("path", "array", "shape", "bytes a device", "why"), right=("bytes a device",))
    for array in arrays:
        table.add_row(array.path, array.role, _shape(array.shape), with_unit(array.local_bytes), array.layout.reason)
    return table


def _memory_table(plan: Plan, compiled: jax.stages.Compiled) -> Table:
    table = _table("Memory of the compiled step, a device", ("what", "bytes"), right=("bytes",))
    for name, value in memory_table(compiled).items():
        table.add_row(name.removesuffix("_bytes").replace("_", " "), with_unit(value))
    if accelerator := find_accelerator(plan.mesh.devices.flat[0].device_kind):
        table.add_row(f"of an {accelerator.name}'s", with_unit(accelerator.memory_gb * 1e9))
    return table


def _traffic_table(plan: Plan, compiled: jax.stages.Compiled) -> Table:
    expected: dict[tuple[tuple[str, ...], str], list[ExpectedTraffic]] = defaultdict(list)
    for item in expected_traffic(plan):
        expected[item.axes, item.traffic.kind].append(item)
    numbers = ("count", "array bytes", "bytes sent", "formula: bytes sent")
    title = "Collectives of the compiled step, a device (the formula is for a step without recomputation)"
    table = _table(title, ("mesh axes", "kind", *numbers, "for"), right=numbers)
    for row in _rows(plan, compiled).values():
        measured = (_count(row), with_unit(row.payload_bytes), with_unit(row.sent_bytes))
        table.add_row("+".join(row.axes), row.kind, *measured, *_formula(expected.pop((row.axes, row.kind), [])))
    for (axes, kind), items in expected.items():
        table.add_row("+".join(axes), kind, "0", "0 B", "0 B", *_formula(items))
    return table


def _bucket_table(plan: Plan, compiled: jax.stages.Compiled) -> Table:
    """Before: our own buckets and the compiler's combining are off."""
    config = plan.config
    parallel = config.parallel.model_copy(update={"bucket_bytes": 0})
    alone = replace(plan, config=config.model_copy(update={"parallel": parallel}))
    before = compile_step(alone, without_combining(plan.mesh.devices.flat[0].platform))
    rows = [_rows(plan, program) for program in (before, compiled)]
    title = f"Collectives before and after combining (parallel.bucket_bytes={config.parallel.bucket_bytes})"
    numbers = [f"{when}: {what}" for when in ("before", "after") for what in ("count", "mean bytes", "array bytes")]
    table = _table(title, ("mesh axes", "kind", *numbers), right=numbers)
    for axes, kind in dict.fromkeys([*rows[0], *rows[1]]):
        cells: list[str] = []
        for found in rows:
            row = found.get((axes, kind))
            mean = 0 if row is None else row.payload_bytes / row.count
            cells += ["0" if row is None else _count(row), with_unit(mean), with_unit(mean * row.count if row else 0)]
        table.add_row("+".join(axes), kind, *cells)
    return table


def _rows(plan: Plan, compiled: jax.stages.Compiled) -> dict[tuple[tuple[str, ...], str], CollectiveRow]:
    """Axes and kind → what the program communicates."""
    text = compiled.as_text()
    assert text is not None
    return {(row.axes, row.kind): row for row in group_by_axis(parse_collectives(text, plan.mesh.shape))}


def _table(title: str, columns: Sequence[str], right: Sequence[str]) -> Table:
    table = Table(title=title, title_justify="left", min_width=len(title))
    for name in columns:
        table.add_column(name, justify="right" if name in right else "left")
    return table


def _formula(items: list[ExpectedTraffic]) -> tuple[str, str]:
    if not items:
        return "", ""
    return with_unit(sum(item.traffic.sent_bytes for item in items)), ", ".join(
        dict.fromkeys(item.purpose for item in items)
    )


def _count(row: CollectiveRow) -> str:
    unknown = "" if row.trip_count_known else " (a loop's length is unknown)"
    return f"{row.count}{unknown}{' (in a branch)' if row.conditional else ''}"


def _shape(shape: Sequence[int]) -> str:
    return "×".join(str(size) for size in shape) or "scalar"


if __name__ == "__main__":
    sys.exit(main())
