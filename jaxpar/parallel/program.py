"""A compiled program read back: which instructions run, how often in one execution, and the memory it takes.

The text is XLA's, as `compiled.as_text()` gives it after optimisation, on any backend.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from graphlib import TopologicalSorter
from typing import Any

import jax

__all__ = ["Execution", "Instruction", "executions", "memory_table"]


@dataclass(frozen=True)
class Instruction:
    """One line of a program's text: `%name = shape opcode(operands), attributes`."""

    name: str
    opcode: str
    shape: str
    attributes: str


@dataclass(frozen=True)
class Execution:
    """An instruction and how often it runs.

    Attributes:
      computation: name of the computation that holds the instruction.
      count: times the trip counts of the loops around it, once for each call of its computation.
      trip_count_known: False where a loop around it runs an unknown number of times; `count` then takes that loop as 1.
      conditional: True inside a branch of a conditional; `count` then takes the branch as always taken.
    """

    instruction: Instruction
    computation: str
    count: int
    trip_count_known: bool
    conditional: bool


def executions(text: str) -> Iterator[Execution]:
    """Every instruction of a compiled program that runs, those of called computations too.

    A loop's condition runs once more than its body. The halves of an asynchronous pair (`x-start`, `x-done`) are two
    instructions; what a pair wraps is called by its start alone.

    Raises:
      ValueError: the text is not a compiled program's.
    """
    computations, entry = _computations(text)
    calls = {name: _calls(instructions, computations) for name, instructions in computations.items()}
    callees_first = TopologicalSorter(
        {name: {call.callee for call in made} for name, made in calls.items()}
    ).static_order()
    runs = {name: _Runs() for name in computations}
    runs[entry].count = 1
    for name in reversed(list(callees_first)):
        for call in calls[name]:
            runs[call.callee].add(runs[name], call)
    for name, instructions in computations.items():
        run = runs[name]
        if run.count:
            for instruction in instructions:
                yield Execution(instruction, name, run.count, run.trip_count_known, run.conditional)


def memory_table(compiled: jax.stages.Compiled) -> dict[str, int]:
    """Bytes that one device needs for a compiled program, as the backend's analysis gives them.

    Always `argument_bytes`, `output_bytes`, `temp_bytes`, `alias_bytes` (outputs that reuse a donated argument) and
    `generated_code_bytes`; `host_*` where not zero; `peak_bytes` except on CPU, whose figure omits temporaries.

    Raises:
      ValueError: the backend has no memory analysis.
    """
    analysis = compiled.memory_analysis()
    if analysis is None:
        raise ValueError("this backend has no memory analysis of compiled programs")
    names = ("argument", "output", "temp", "alias", "generated_code")
    table = {f"{name}_bytes": int(getattr(analysis, f"{name}_size_in_bytes")) for name in names}
    host = {f"host_{name}_bytes": int(getattr(analysis, f"host_{name}_size_in_bytes")) for name in names}
    table |= {name: size for name, size in host.items() if size}
    if "cpu" not in _platforms(compiled):
        table["peak_bytes"] = int(analysis.peak_memory_in_bytes)
    return table


def _platforms(compiled: jax.stages.Compiled) -> set[str]:
    shardings: list[Any] = jax.tree.leaves((compiled.input_shardings, compiled.output_shardings))
    return {device.platform for sharding in shardings for device in sharding.device_set}


@dataclass(frozen=True)
class _Call:
    callee: str
    count: int = 1
    trip_count_known: bool = True
    conditional: bool = False


@dataclass
class _Runs:
    """How often a computation runs, summed over the calls seen so far."""

    count: int = 0
    trip_count_known: bool = True
    conditional: bool = False

    def add(self, caller: "_Runs", call: _Call) -> None:
        if caller.count:
            self.count += caller.count * call.count
            self.trip_count_known &= caller.trip_count_known and call.trip_count_known
            self.conditional |= caller.conditional or call.conditional


_HEADER = re.compile(r"^(ENTRY )?%([\w.\-]+) .*\{$")
_LEFT_SIDE = re.compile(r"^\s+(?:ROOT )?%([\w.\-]+) = ")
_OPCODE = re.compile(r" ?([\w\-]+)\(")
_BRACKET = re.compile(r"[()]")
_QUOTED = re.compile(r'"(?:[^"\\]|\\.)*"')
_CALLED = re.compile(r"([\w\-]+)=\{?(%[\w.\-]+(?:, ?%[\w.\-]+)*)")
_TRIP_COUNT = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')
_BRANCHES = ("branch_computations", "true_computation", "false_computation")


def _computations(text: str) -> tuple[dict[str, list[Instruction]], str]:
    """The instructions of every computation by its name, and the entry computation's name."""
    computations: dict[str, list[Instruction]] = {}
    entry = current = None
    for line in text.split("\n"):
        if header := _HEADER.match(line):
            current = header.group(2)
            computations[current] = []
            entry = current if header.group(1) else entry
        elif line.startswith("}"):
            current = None
        elif current is not None:
            computations[current].append(_instruction(line))
    if entry is None:
        raise ValueError("the text has no ENTRY computation; pass compiled.as_text()")
    return computations, entry


def _instruction(line: str) -> Instruction:
    if left := _LEFT_SIDE.match(line):
        start = left.end()
        end = _closing(line, start) if line.startswith("(", start) else line.find(" ", start)
        if opcode := _OPCODE.match(line, end):
            attributes = line[_closing(line, opcode.end() - 1) :]
            return Instruction(left.group(1), opcode.group(1), line[start:end], attributes)
    raise ValueError(f"not an instruction of a compiled program: {line.strip()[:200]}")


def _closing(line: str, start: int) -> int:
    """The position after the bracket that closes the one at `start`, or the end: a literal may leave it open."""
    depth = 0
    for bracket in _BRACKET.finditer(line, start):
        depth += 1 if bracket.group() == "(" else -1
        if depth == 0:
            return bracket.end()
    return len(line)


def _calls(instructions: list[Instruction], computations: dict[str, list[Instruction]]) -> list[_Call]:
    """The calls of other computations, each as often as one run of these instructions makes it."""
    calls = []
    for instruction in instructions:
        # Starts alone call what asynchronous pairs wrap: some versions of XLA repeat `calls=` on the other halves.
        if "%" in instruction.attributes and instruction.opcode not in ("async-update", "async-done"):
            for key, names in _CALLED.findall(_QUOTED.sub("", instruction.attributes)):
                called = [name for name in re.findall(r"%([\w.\-]+)", names) if name in computations]
                if key != "control-predecessors":
                    calls += [_call(instruction, key, name) for name in called]
    return calls


def _call(instruction: Instruction, key: str, callee: str) -> _Call:
    if instruction.opcode != "while":
        return _Call(callee, conditional=key in _BRANCHES)
    if trip_count := _TRIP_COUNT.search(instruction.attributes):
        return _Call(callee, int(trip_count.group(1)) + (key == "condition"))
    return _Call(callee, trip_count_known=False)
