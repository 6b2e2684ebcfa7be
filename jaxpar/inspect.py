"""`python -m jaxpar.inspect CONFIG [KEY=VALUE ...]`: where every parameter lives and why, memory, and communication.

Nothing is trained and no data is read. With `--no-compile` only what follows from shapes is printed. For a cluster that is not
here, add `parallel.simulated_devices=N`. Exit status: 0, or 2 if something in the configuration is wrong.
"""

import math
import sys
from collections import defaultdict
from collections.abc import Sequence

import jax
from rich.console import Console
from rich.table import Table

from jaxpar.command_line import run_command, user_errors
from jaxpar.config import Config
from jaxpar.data import declared_vocab_size
from jaxpar.parallel.collectives import CollectiveRow, group_by_axis, parse_collectives
from jaxpar.parallel.program import memory_table
from jaxpar.plan import Plan, make_plan
from jaxpar.state import abstract_state
from jaxpar.step import Step, abstract_batch
from jaxpar.traffic import ExpectedTraffic, expected_traffic

__all__ = ["compile_step", "main"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line; returns the exit status."""
    arguments = sys.argv[1:] if arguments is None else arguments
    with_compile = "--no-compile" not in arguments
    rest = [argument for argument in arguments if argument != "--no-compile"]
    return run_command("jaxpar.inspect", __doc__, lambda config: _inspect(config, with_compile), rest)


def compile_step(plan: Plan) -> jax.stages.Compiled:
    """The compiled training step, from shapes alone."""
    step = Step(plan)
    with plan.execution.active():
        return step.train.lower(abstract_state(plan, step.optimizer), abstract_batch(plan)).compile()


def _inspect(config: Config, with_compile: bool) -> int:
    with user_errors():
        plan = make_plan(config, jax.devices(), declared_vocab_size(config.data))
        step = Step(plan)
    console = Console(width=None if sys.stdout.isatty() else 160)
    sizes = ", ".join(f"{axis} {size}" for axis, size in plan.mesh.shape.items())
    console.print(f"mesh of {plan.mesh.size} devices: {sizes}", highlight=False)
    for note in plan.notes:
        console.print(note, highlight=False)
    console.print(_parameter_table(plan))
    console.print(_state_table(plan, step))
    if with_compile:
        compiled = compile_step(plan)
        console.print(_memory_table(compiled))
        console.print(_traffic_table(plan, compiled))
    return 0


def _parameter_table(plan: Plan) -> Table:
    table = Table(title="Parameters", title_justify="left")
    for name in ("path", "shape", "logical axes → mesh axes", "local shape", "bytes a device", "why"):
        table.add_column(name, justify="right" if name == "bytes a device" else "left")
    for parameter in plan.parameters:
        spec = [*parameter.layout.spec, *(None,) * (len(parameter.axes) - len(parameter.layout.spec))]
        axes = ", ".join(
            f"{name}→{'+'.join(entry) if isinstance(entry, tuple) else entry or '·'}"
            for name, entry in zip(parameter.axes, spec, strict=True)
        )
        table.add_row(
            parameter.path, _shape(parameter.shape), axes, _shape(parameter.layout.local_shape),
            _bytes(parameter.local_bytes), parameter.layout.reason,
        )  # fmt: skip
    return table


def _state_table(plan: Plan, step: Step) -> Table:
    state = abstract_state(plan, step.optimizer)
    table = Table(title="State", title_justify="left")
    for name in ("what", "elements", "bytes a device", "bytes in all"):
        table.add_column(name, justify="left" if name == "what" else "right")
    # A gradient has its parameter's shape, format and place.
    for name, tree in (("parameters", state.params), ("gradients", state.params), ("optimizer", state.optimizer)):
        leaves = jax.tree.leaves(tree)
        local = sum(math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize for leaf in leaves)
        total = sum(leaf.size * leaf.dtype.itemsize for leaf in leaves)
        table.add_row(name, f"{sum(leaf.size for leaf in leaves):,}", _bytes(local), _bytes(total))
    return table


def _memory_table(compiled: jax.stages.Compiled) -> Table:
    table = Table("what", title="Memory of the compiled step, a device", title_justify="left")
    table.add_column("bytes", justify="right")
    for name, value in memory_table(compiled).items():
        table.add_row(name.removesuffix("_bytes").replace("_", " "), _bytes(value))
    return table


def _traffic_table(plan: Plan, compiled: jax.stages.Compiled) -> Table:
    text = compiled.as_text()
    assert text is not None
    rows = group_by_axis(parse_collectives(text, plan.mesh.shape))
    expected: dict[tuple[tuple[str, ...], str], list[ExpectedTraffic]] = defaultdict(list)
    for item in expected_traffic(plan):
        expected[item.axes, item.traffic.kind].append(item)
    title = "Collectives of the compiled step, a device (the formula is for a step without recomputation)"
    table = Table(title=title, title_justify="left")
    for name in ("mesh axes", "kind", "count", "array bytes", "bytes sent", "formula: bytes sent", "for"):
        table.add_column(name, justify="left" if name in ("mesh axes", "kind", "for") else "right")
    for row in rows:
        items = expected.pop((row.axes, row.kind), [])
        table.add_row(
            "+".join(row.axes), row.kind, _count(row), _bytes(row.payload_bytes), _bytes(row.sent_bytes), *_formula(items)
        )
    for (axes, kind), items in expected.items():
        table.add_row("+".join(axes), kind, "0", "0 B", "0 B", *_formula(items))
    return table


def _formula(items: list[ExpectedTraffic]) -> tuple[str, str]:
    if not items:
        return "", ""
    return _bytes(sum(item.traffic.sent_bytes for item in items)), ", ".join(item.purpose for item in items)


def _count(row: CollectiveRow) -> str:
    marks = ("" if row.trip_count_known else " (a loop's length is unknown)") + (" (in a branch)" if row.conditional else "")
    return f"{row.count}{marks}"


def _shape(shape: Sequence[int]) -> str:
    return "×".join(str(size) for size in shape) or "scalar"


def _bytes(value: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024 or unit == "GiB":
            return f"{value:,.0f} {unit}" if unit == "B" else f"{value:,.1f} {unit}"
        value /= 1024
    raise AssertionError


if __name__ == "__main__":
    sys.exit(main())
