"""`python -m jaxpar.inspect CONFIG [KEY=VALUE ...]`: where every parameter lives and why, memory, and communication.

Nothing is trained and no data is read. With `--no-compile` only what follows from shapes is printed. For a cluster that
is not here, add `parallel.simulated_devices=N`. Exit status: 0, or 2 if something in the configuration is wrong.
"""

import math
import sys
from collections import defaultdict
from collections.abc import Collection, Sequence

import jax
from rich.console import Console
from rich.table import Table

from jaxpar.command_line import run_command, user_errors
from jaxpar.config import Config
from jaxpar.data import declared_vocab_size
from jaxpar.metrics import with_unit
from jaxpar.parallel.collectives import CollectiveRow, group_by_axis, parse_collectives
from jaxpar.parallel.program import memory_table
from jaxpar.plan import Plan, make_plan
from jaxpar.state import abstract_state
from jaxpar.step import Step, abstract_batch
from jaxpar.traffic import ExpectedTraffic, expected_traffic

__all__ = ["compile_step", "main"]

_NO_COMPILE = "--no-compile"


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line; returns the exit status."""
    arguments = sys.argv[1:] if arguments is None else arguments
    return run_command("jaxpar.inspect", __doc__, _inspect, arguments, flags=[_NO_COMPILE])


def compile_step(plan: Plan) -> jax.stages.Compiled:
    """The compiled training step, from shapes alone."""
    step = Step(plan)
    # Outside the mesh: Optax computes a scalar, which devices that are only described cannot.
    state = abstract_state(plan, step.optimizer)
    with plan.execution.active():
        return step.train.lower(state, abstract_batch(plan)).compile()


def _inspect(config: Config, flags: Collection[str]) -> int:
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
    console.print(_state_table(plan, step))
    if _NO_COMPILE not in flags:
        compiled = compile_step(plan)
        console.print(_memory_table(compiled))
        console.print(_traffic_table(plan, compiled))
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


def _state_table(plan: Plan, step: Step) -> Table:
    state = abstract_state(plan, step.optimizer)
    columns = ("what", "elements", "bytes a device", "bytes in all")
    table = _table("State", columns, right=columns[1:])
    # A gradient has its parameter's shape, format and place.
    for name, tree in (("parameters", state.params), ("gradients", state.params), ("optimizer", state.optimizer)):
        leaves = jax.tree.leaves(tree)
        local = sum(math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize for leaf in leaves)
        total = sum(leaf.size * leaf.dtype.itemsize for leaf in leaves)
        table.add_row(name, f"{sum(leaf.size for leaf in leaves):,}", with_unit(local), with_unit(total))
    return table


def _memory_table(compiled: jax.stages.Compiled) -> Table:
    table = _table("Memory of the compiled step, a device", ("what", "bytes"), right=("bytes",))
    for name, value in memory_table(compiled).items():
        table.add_row(name.removesuffix("_bytes").replace("_", " "), with_unit(value))
    return table


def _traffic_table(plan: Plan, compiled: jax.stages.Compiled) -> Table:
    text = compiled.as_text()
    assert text is not None
    expected: dict[tuple[tuple[str, ...], str], list[ExpectedTraffic]] = defaultdict(list)
    for item in expected_traffic(plan):
        expected[item.axes, item.traffic.kind].append(item)
    numbers = ("count", "array bytes", "bytes sent", "formula: bytes sent")
    title = "Collectives of the compiled step, a device (the formula is for a step without recomputation)"
    table = _table(title, ("mesh axes", "kind", *numbers, "for"), right=numbers)
    for row in group_by_axis(parse_collectives(text, plan.mesh.shape)):
        measured = (_count(row), with_unit(row.payload_bytes), with_unit(row.sent_bytes))
        table.add_row("+".join(row.axes), row.kind, *measured, *_formula(expected.pop((row.axes, row.kind), [])))
    for (axes, kind), items in expected.items():
        table.add_row("+".join(axes), kind, "0", "0 B", "0 B", *_formula(items))
    return table


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
