"""Layers on stages: balanced by work, in rows that are as many on every rank."""

import itertools

import jax.numpy as jnp
import numpy as np
import pytest

from jaxpar.parallel.pipeline.partition import Work, balanced_layers, in_rows, make_partition
from jaxpar.parallel.pipeline.schedule import Geometry


@pytest.mark.parametrize(
    ("geometry", "counts", "rows"),
    [
        (Geometry(2, 4), (2, 2), (0, 1, 2, 3)),
        (Geometry(2, 4), (1, 3), (0, -1, -1, 1, 2, 3)),
        (Geometry(2, 4, 2), (1, 1, 1, 1), (0, 2, 1, 3)),
        (Geometry(2, 4, 2, "vee"), (1, 1, 1, 1), (0, 3, 1, 2)),
        (Geometry(2, 4, 2), (2, 1, 1, 1), (0, 1, 3, -1, 2, -1, 4, -1)),
    ],
    ids=["even", "uneven", "two chunks", "run back", "two chunks, uneven"],
)
def test_rows_are_rank_by_rank_and_chunk_by_chunk(geometry: Geometry, counts: tuple, rows: tuple) -> None:
    partition = make_partition(geometry, counts)
    assert partition.rows == rows
    assert partition.rows_per_chunk == max(counts)
    weights = jnp.arange(1.0, sum(counts) + 1)[:, None] * jnp.ones((1, 3))
    stacked = np.asarray(in_rows(weights, rows))
    for row, layer in enumerate(rows):
        assert (stacked[row] == layer + 1).all() if layer >= 0 else not stacked[row].any()
    for stage in range(geometry.num_stages):
        rank, chunk = geometry.locate(stage)
        first = (rank * geometry.num_chunks + chunk) * partition.rows_per_chunk
        assert rows[first] == partition.starts[stage]


@pytest.mark.parametrize("num_layers", [4, 7, 9])
@pytest.mark.parametrize("work", [Work(), Work(head=1.3), Work(embed=0.4, head=2.6)], ids=str)
def test_no_other_partition_with_as_many_rows_has_a_lighter_busiest_stage(num_layers: int, work: Work) -> None:
    def busiest(counts: tuple[int, ...]) -> float:
        return max(counts[0] + work.embed, *counts[1:-1], counts[-1] + work.head)

    every = [c for c in itertools.product(range(1, num_layers + 1), repeat=4) if sum(c) == num_layers]
    found = balanced_layers(num_layers, 4, work)
    assert found in every
    assert busiest(found) == min(busiest(counts) for counts in every if max(counts) <= max(found))
    # One with fewer rows costs more than they save; one with more saves less than they cost.
    for counts in every:
        fewer, saved = max(found) - max(counts), 1 - busiest(found) / busiest(counts)
        assert fewer <= 0 or saved >= fewer / max(counts) / 2
        if max(counts) == max(found) + 1:
            assert 1 - busiest(counts) / busiest(found) < 1 / max(found) / 2


def test_a_turn_of_layers_that_differ_stays_whole() -> None:
    assert balanced_layers(12, 4, Work(head=1.0), period=2) == (4, 4, 2, 2)
    with pytest.raises(ValueError, match=r"6 layers in turns of 2 do not give 4 stages one each"):
        balanced_layers(6, 4, Work(), period=2)
