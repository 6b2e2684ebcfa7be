"""`python benchmarks/memory.py [--write-readme] [KEY=VALUE ...]`: the state's bytes a device, beside the formulas.

For each optimizer, each ZeRO stage and each part that can be in the host's memory: the bytes of parameters, gradients
and optimizer state on a device, counted from the shapes and places of the step's arrays, and what ZeRO's formulas
(Rajbhandari 2020, section 3.1 and figure 1) say with the optimizer's bytes from `jaxpar.optim.PROPERTIES`. Nothing is
compiled or trained. Printed are a Markdown table and one JSON line; `--write-readme` puts it, and a table of what each
optimizer keeps, into the README.
Overrides change `memory.toml`, such as `model.name=llama3_8b` or `parallel.fsdp=4 parallel.tensor=2`.
"""

import argparse
import itertools
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import jax

from jaxpar.backend import prepare
from jaxpar.command_line import UserError, user_errors
from jaxpar.config import Config, load_config
from jaxpar.data import declared_vocab_size
from jaxpar.exit_status import USER_ERROR
from jaxpar.memory import state_parts
from jaxpar.optim import PROPERTIES
from jaxpar.optim.properties import state_arrays
from jaxpar.parallel.rules import is_stacked
from jaxpar.plan import Plan, make_plan
from jaxpar.state import optimizer_of

__all__ = ["OPTIMIZERS", "Row", "formula", "main", "markdown", "optimizer_table", "rows", "with_table"]

OPTIMIZERS: dict[str, dict[str, Any]] = {
    "AdamW": {"name": "adamw"},
    "AdamW, bfloat16 moments": {"name": "adamw", "moments": "bfloat16"},
    "AdamW, 8-bit moments": {"name": "adamw8bit"},
    "Adafactor": {"name": "adafactor"},
    "SM3": {"name": "sm3"},
    "SM3 without momentum": {"name": "sm3", "momentum": 0.0},
    "Lion": {"name": "lion"},
    "Muon": {"name": "muon"},
    "SGD": {"name": "sgd"},
}
"""What the rows call an optimizer → its section."""
_ON_HOST = {
    "": {},
    "state": {"optimizer_state": "host"},
    "state, layers' parameters": {"optimizer_state": "host", "parameters": "host"},
}
_STAGES = (0, 1, 2, 3)
_TENSOR_AXES = {"vocab", "heads", "kv_heads", "mlp"}


@dataclass(frozen=True)
class Row:
    """One configuration: bytes of the state on a device and on its host, counted and by the formula."""

    optimizer: str
    on_host: str
    zero_stage: int
    device_bytes: int
    host_bytes: int
    formula_device_bytes: float
    formula_host_bytes: float

    @property
    def difference(self) -> float:
        """Of all bytes from the formula's, relative to these."""
        formula = self.formula_device_bytes + self.formula_host_bytes
        return (self.device_bytes + self.host_bytes - formula) / formula


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the benchmark; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write-readme", action="store_true", help="replace the table in the README")
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE")
    options = parser.parse_args(arguments)
    try:
        with user_errors():
            config = load_config(Path(__file__).with_name("memory.toml"), options.overrides)
            for line in prepare(config.parallel, config.runtime):
                print(line)
            found = list(rows(config))
    except UserError as error:
        print(error, file=sys.stderr)
        return USER_ERROR
    table = markdown(found)
    print(table)
    if options.write_readme:
        readme = Path(__file__).parents[1] / "README.md"
        text = with_table(readme.read_text(encoding="utf-8"), "optimizers", optimizer_table())
        readme.write_text(with_table(text, "memory", table), encoding="utf-8")
    name = config.model.name  # type: ignore[attr-defined]
    print(json.dumps({"benchmark": "memory", "model": name, "rows": [asdict(row) for row in found]}))
    return 0


def rows(config: Config, optimizers: Sequence[str] = tuple(OPTIMIZERS)) -> Iterator[Row]:
    """Every combination of optimizer, place and stage, in the table's order."""
    for optimizer, on_host, stage in itertools.product(optimizers, _ON_HOST, _STAGES):
        changed = {
            "optimizer": OPTIMIZERS[optimizer],
            "offload": _ON_HOST[on_host],
            "parallel": config.parallel.model_dump() | {"zero_stage": stage},
        }
        sections = {name: getattr(config, name) for name in type(config).model_fields}
        vocab_size = getattr(config.model, "vocab_size", 0) or declared_vocab_size(config.data)
        plan = make_plan(Config.model_validate(sections | changed), jax.devices(), vocab_size)
        parts = state_parts(plan, optimizer_of(plan))
        device, host = formula(plan)
        yield Row(
            optimizer, on_host, stage, sum(part.device_bytes for part in parts), sum(part.host_bytes for part in parts),
            device, host,
        )  # fmt: skip


def formula(plan: Plan) -> tuple[float, float]:
    """Bytes of a device's state in its own memory and in its host's, if everything divided evenly.

    P parameters of p bytes with gradients of g bytes (4 where several microbatches are summed) and an optimizer state
    of S bytes, of which a device of `tensor` = T has a T-th where a dim is `vocab`, `heads`, `kv_heads` or `mlp`. Over
    F devices along `fsdp` a device has p·P + g·P + S at stage 0; stage 1 divides S by F, stage 2 also g·P, stage 3 also
    p·P. S has master weights and the moving average, 4·P each, in it. S may be on the host, and the layers' part of
    p·P.
    """
    config, shape = plan.config, plan.mesh.shape
    parameters = {"device": 0.0, "host": 0.0}
    gradients, state = 0.0, 4.0  # the count of updates
    for parameter in plan.parameters:
        size = parameter.size / (shape["tensor"] if _TENSOR_AXES & set(parameter.axes) else 1)
        place = "host" if config.offload.parameters == "host" and is_stacked(parameter.axes) else "device"
        parameters[place] += size * parameter.dtype.itemsize
        gradients += size * (4 if config.train.microbatches > 1 else parameter.dtype.itemsize)
        kept = state_arrays(
            config.optimizer, parameter.path, parameter.axes, parameter.shape,
            master_weights=config.precision.master_weights,
        )  # fmt: skip
        of_optimizer = sum(array.num_bytes for array in kept.values()) * size / parameter.size
        state += of_optimizer + (4 * size if config.train.ema_decay else 0)
    stage = config.parallel.zero_stage

    def divided(num_bytes: float, from_stage: int) -> float:
        return num_bytes / shape["fsdp"] if stage >= from_stage else num_bytes

    own_state, host_state = (0.0, state) if config.offload.optimizer_state == "host" else (state, 0.0)
    return (
        divided(parameters["device"], 3) + divided(gradients, 2) + divided(own_state, 1),
        divided(parameters["host"], 3) + divided(host_state, 1),
    )


def markdown(found: Sequence[Row]) -> str:
    """The table: a row for each optimizer and place, GB counted and, in brackets, by the formula."""
    lines = [
        "| optimizer | on the host | ZeRO 0 | ZeRO 1 | ZeRO 2 | ZeRO 3 | host, ZeRO 3 | largest difference |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for (optimizer, on_host), group in itertools.groupby(found, key=lambda row: (row.optimizer, row.on_host)):
        stages = list(group)
        cells = [_gigabytes(row.device_bytes, row.formula_device_bytes) for row in stages]
        host = _gigabytes(stages[-1].host_bytes, stages[-1].formula_host_bytes) if on_host else ""
        largest = max((row.difference for row in stages), key=abs)
        lines.append(f"| {' | '.join([optimizer, on_host, *cells, host, f'{largest:+.2%}'])} |")
    return "\n".join(lines)


def _gigabytes(counted: float, formula: float) -> str:
    return f"{counted / 1e9:.2f} ({formula / 1e9:.2f})"


def optimizer_table() -> str:
    """What each optimizer keeps for a matrix, and what it is good at, from `jaxpar.optim.PROPERTIES`."""
    lines = [
        "| `optimizer.name` | state of an n × m matrix | a parameter of a 4096 × 4096 one | good at |",
        "|---|---|---|---|",
    ]
    for kind, properties in PROPERTIES.items():
        arrays = state_arrays(kind(), "mlp/up", ("embed", "mlp"), (4096, 4096))
        each = sum(array.num_bytes for array in arrays.values()) / 4096**2
        state = f"{properties.matrix_bytes} bytes"
        lines.append(f"| `{kind().name}` | {state} | {each:.3g} bytes | {properties.good_at} |")
    return "\n".join(lines)


def with_table(text: str, name: str, table: str) -> str:
    """A document with the table between the marks of this name.

    Raises:
      ValueError: the document has no marks.
    """
    marks = f"<!-- begin {name}: benchmarks/memory.py --write-readme -->", f"<!-- end {name} -->"
    before, begin, rest = text.partition(marks[0])
    _, end, after = rest.partition(marks[1])
    if not begin or not end:
        raise ValueError(f"the document has no lines {marks[0]!r} and {marks[1]!r}")
    return f"{before}{begin}\n{table}\n{end}{after}"


if __name__ == "__main__":
    sys.exit(main())
