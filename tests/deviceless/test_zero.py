"""The collectives of each ZeRO stage, as a GPU's compiler makes them (the CPU's keeps some all-reduces)."""

import math
from collections.abc import Callable
from typing import Any

import pytest

SCALARS = 1024
"""Bytes that losses, counts and the parts of the norm may take."""


@pytest.mark.parametrize("microbatches", [1, 2])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_gradients_are_reduced_and_parameters_gathered_as_the_stage_says(
    stage: int, microbatches: int, step: Callable[..., Any]
) -> None:
    """Over 8 devices, from stage 1 on without an all-reduce of a matrix, and from stage 3 on layer by layer."""
    train = {"microbatches": microbatches}
    found = step(parallel={"data": 1, "fsdp": 8, "zero_stage": stage, "bucket_bytes": 1 << 20}, train=train)
    matrices = [p for p in found.plan.parameters if p.path not in found.plan.uncast]
    vectors = sum(4 * p.size for p in found.plan.parameters if p.path in found.plan.uncast)
    elements = sum(p.size for p in matrices)
    by_kind = found.collectives("fsdp")
    in_bytes = {kind: sum(count * size for count, size in rows) for kind, rows in by_kind.items()}
    if stage == 0:
        assert by_kind.keys() == {"all-reduce"}
        assert in_bytes["all-reduce"] == pytest.approx(4 * elements + vectors, rel=0.001)
        return
    assert in_bytes["all-reduce"] <= microbatches * vectors + SCALARS
    reductions = microbatches if stage >= 2 else 1
    assert in_bytes["reduce-scatter"] == pytest.approx(4 * elements * reductions, rel=0.001)
    if stage < 3:
        # The updated parameters, once.
        assert in_bytes["all-gather"] == pytest.approx(4 * elements, rel=0.001)
        return
    # Weights in the compute format, forward and again backward; tables are gathered once in each microbatch and pass.
    stacked = sum(p.size for p in matrices if p.axes[0] == "layers")
    assert in_bytes["all-gather"] >= microbatches * 2 * 2 * stacked
    assert in_bytes["all-gather"] <= microbatches * 2 * 2 * elements
    largest_layer = max(2 * math.prod(p.shape[1:]) for p in matrices if p.axes[0] == "layers")
    tables = max(2 * p.size for p in matrices if p.axes[0] != "layers")
    # None gathers several layers at once: the compiler may join a layer's weights, up to the bucket.
    assert max(size for _, size in by_kind["all-gather"]) <= max(4 * largest_layer, tables)
