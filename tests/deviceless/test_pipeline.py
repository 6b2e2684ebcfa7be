"""What pipeline stages send each other, as it is compiled for GPUs: beside computation, and only what is due."""

import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from jaxpar.parallel.pipeline.divergence import check_branches
from jaxpar.parallel.pipeline.tick_loops import num_transfers

_COMPUTE = ("fusion", "while", "conditional", "custom-call", "call")


def _compiled(step: Callable[..., Any], *, overlap: bool, schedule: str = "1f1b_aligned", **parallel: int) -> Any:
    return step(
        options={"xla_gpu_enable_latency_hiding_scheduler": True},
        parallel={"data": 1, "pipe": 4, "zero_stage": 0} | (parallel or {"data": 2}),
        pipeline={"schedule": schedule, "microbatches": 8, "overlap": overlap},
        remat={"policy": "full"},
    )


def _computations(text: str) -> Iterator[dict[str, tuple[str, str]]]:
    """Each computation as name → (opcode, line), in the order in which it runs."""
    found: dict[str, tuple[str, str]] = {}
    for line in text.splitlines():
        if line.startswith("}"):
            yield found
            found = {}
        elif match := re.match(r"\s+(?:ROOT )?%(\S+) = (?:\(.*?\)|\S+) ([\w\-]+)\(", line):
            found[match[1]] = match[2], line
    yield found


def _transfers(text: str) -> Iterator[tuple[bool, int]]:
    """Of each transfer whether it sends what the same turn of its loop computes, and how much runs while it is on its
    way."""
    for found in _computations(text):
        names = list(found)
        for start in (name for name, (opcode, _) in found.items() if opcode == "collective-permute-start"):
            (done,) = (name for name, (_, line) in found.items() if f"collective-permute-done(%{start})" in line)
            meanwhile = names[names.index(start) + 1 : names.index(done)]
            yield _depends_on_compute(found, start), sum(found[name][0] in _COMPUTE for name in meanwhile)


def _depends_on_compute(found: dict[str, tuple[str, str]], name: str) -> bool:
    waiting, seen = [name], set()
    while waiting:
        opcode, line = found[waiting.pop()]
        if opcode in _COMPUTE:
            return True
        operands = set(re.findall(r"%([\w.\-]+)", line.partition(f" {opcode}(")[2].partition(")")[0]))
        waiting += [operand for operand in operands & found.keys() if operand not in seen]
        seen |= operands
    return False


def test_a_transfer_need_not_wait_for_the_tick_that_it_runs_beside(step: Callable[..., Any]) -> None:
    """With overlap what the tick before made is sent; of the three loops, those of backwards alone and of both in turn
    begin with that. Without, every transfer sends what its own tick has made.

    A public report: with latencies hidden the compiler found a cycle at a pipeline's collective-permute.
    """
    beside, after = (list(_transfers(_compiled(step, overlap=overlap).text)) for overlap in (True, False))
    assert [depends for depends, _ in after] == [True] * len(after)
    free = [meanwhile for depends, meanwhile in beside if not depends]
    assert len(free) >= 2
    assert sum(free) > 0, "and the compiler has put computation between start and end of some"


@pytest.mark.parametrize(("schedule", "parallel"), [("1f1b_aligned", {"tensor": 2}), ("zb_h1", {"fsdp": 2})])
def test_no_rank_waits_in_a_branch_and_what_is_sent_is_what_the_formula_says(
    step: Callable[..., Any], schedule: str, parallel: dict[str, int]
) -> None:
    compiled = _compiled(step, overlap=True, schedule=schedule, **parallel)
    check_branches(compiled.text, compiled.plan.mesh.shape, aligned=compiled.plan.pipeline.schedule.aligned)
    sent = compiled.collectives("pipe")["collective-permute"]
    assert sum(count for count, _ in sent) == num_transfers(compiled.plan.pipeline.routed)
