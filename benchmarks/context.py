"""`python benchmarks/context.py [--memory-mib M] [--devices C ...] [--methods A,B] [KEY=VALUE ...]`

How much longer sequences become when devices share them, and what each method sends for it.

For each number of devices and each `parallel.context_method`: the longest sequence whose training step fits a fixed
memory on each device (arguments and temporaries of the compiled step), to 512 tokens a device; and, at
`data.sequence_length`, the bytes that a device sends over `context` in a step, from the compiled step's text, beside
the formula's. Nothing is run or timed. Overrides change `context.toml`. The last line is one JSON object.
"""

import argparse
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path

import jax

from jaxpar.backend import prepare
from jaxpar.command_line import UserError, user_errors
from jaxpar.config import Config, load_config
from jaxpar.exit_status import USER_ERROR
from jaxpar.inspect import compile_step
from jaxpar.metrics.units import with_unit
from jaxpar.parallel.collectives import parse_collectives
from jaxpar.parallel.program import memory_table
from jaxpar.plan import Plan, make_plan
from jaxpar.traffic import expected_traffic

__all__ = ["METHODS", "Row", "longest", "main", "markdown", "rows"]

METHODS = ("ring", "all_gather", "ulysses")
UNIT = 512
"""Tokens of a device in which the longest sequence is looked for."""


@dataclass(frozen=True)
class Row:
    """One number of devices and one method; bytes are of one device in one step, over `context`."""

    devices: int
    method: str
    longest: int
    sent_bytes: int
    formula_bytes: int


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the benchmark; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--memory-mib", type=int, default=256, help="of each device")
    parser.add_argument("--devices", nargs="+", default=["1", "2", "4", "8"], metavar="C")
    parser.add_argument("--methods", default=",".join(METHODS), help="names with commas between them")
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE")
    options = parser.parse_args(arguments)
    # An option that takes several words takes the overrides behind it too.
    devices = [int(word) for word in options.devices if "=" not in word]
    overrides = [*options.overrides, *(word for word in options.devices if "=" in word)]
    try:
        with user_errors():
            config = load_config(Path(__file__).with_name("context.toml"), overrides)
            for line in prepare(config.parallel, config.runtime):
                print(line)
            found = list(rows(config, devices, options.methods.split(","), options.memory_mib * 2**20))
    except UserError as error:
        print(error, file=sys.stderr)
        return USER_ERROR
    print(markdown(found, config.data.sequence_length, options.memory_mib))
    print(json.dumps({"benchmark": "context", "memory_mib": options.memory_mib, "rows": [asdict(r) for r in found]}))
    return 0


def rows(config: Config, devices: Sequence[int], methods: Sequence[str], limit_bytes: int) -> Iterator[Row]:
    """Every combination; one device has no method."""
    for number in devices:
        for method in methods if number > 1 else methods[:1]:

            @cache
            def step_bytes(units: int, number: int = number, method: str = method) -> int:
                plan = _planned(config, number, method, units * UNIT * number)
                memory = memory_table(compile_step(plan))
                return memory["argument_bytes"] + memory["temp_bytes"]

            sent, formula = _sent(_planned(config, number, method, config.data.sequence_length))
            units = longest(step_bytes, limit_bytes)
            yield Row(number, method if number > 1 else "", units * UNIT * number, sent, formula)


def longest(step_bytes: Callable[[int], int], limit_bytes: int) -> int:
    """The largest n with step_bytes(n) <= limit_bytes, of a function that grows about linearly; 0 if there is none.

    >>> longest(lambda n: 10 + 3 * n + n // 7, 100)
    28
    """
    first, second = step_bytes(2), step_bytes(4)
    guess = 2 + 2 * (limit_bytes - first) // max(second - first, 1)
    while guess > 0 and step_bytes(guess) > limit_bytes:
        guess -= 1
    while guess > 0 and step_bytes(guess + 1) <= limit_bytes:
        guess += 1
    return max(guess, 0)


def markdown(found: Sequence[Row], length: int, memory_mib: int) -> str:
    """The table of the rows."""
    lines = [
        f"| devices | method | longest sequence in {memory_mib} MiB | sent in a step of {length} tokens | by formula |",
        "|---|---|---|---|---|",
    ]
    for row in found:
        method = f"`{row.method}`" if row.method else ""
        sent = [with_unit(number) if row.devices > 1 else "" for number in (row.sent_bytes, row.formula_bytes)]
        lines.append(f"| {row.devices} | {method} | {row.longest:,} | {' | '.join(sent)} |")
    return "\n".join(lines)


def _planned(config: Config, devices: int, method: str, length: int) -> Plan:
    parallel = config.parallel.model_copy(update={"context": devices, "context_method": method})
    data = config.data.model_copy(update={"sequence_length": length})
    changed = config.model_copy(update={"parallel": parallel, "data": data})
    return make_plan(changed, jax.devices()[:devices], changed.model.vocab_size)  # type: ignore[attr-defined]


def _sent(plan: Plan) -> tuple[int, int]:
    """Bytes that a device sends over `context`, without the sums of gradients: measured, and by formula."""
    text = compile_step(plan).as_text() or ""
    measured = sum(
        each.count * each.sent_bytes
        for each in parse_collectives(text, plan.mesh.shape)
        if each.axes == ("context",) and each.kind != "all-reduce"
    )
    formula = sum(
        item.traffic.sent_bytes
        for item in expected_traffic(plan)
        if item.axes == ("context",) and item.traffic.kind != "all-reduce"
    )
    return measured, formula


if __name__ == "__main__":
    sys.exit(main())
