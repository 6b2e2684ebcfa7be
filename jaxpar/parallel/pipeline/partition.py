"""Which layers each stage has, and in which order the layers' weights lie on the ranks.

Weights of all layers are one array whose first dim is split over `pipe`, so that each rank's part must be contiguous
and of one size: rank by rank, chunk by chunk, and within a chunk layer by layer, filled up with empty rows where a
chunk has fewer layers than the largest one.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from jaxpar.parallel.pipeline.schedule import Geometry

__all__ = ["EMPTY", "Partition", "Work", "balanced_layers", "in_rows", "make_partition"]

EMPTY = -1
"""In place of a layer's number: a row without a layer."""


@dataclass(frozen=True)
class Work:
    """What embedding and head cost for a token, in layers."""

    embed: float = 0.0
    head: float = 0.0


@dataclass(frozen=True)
class Partition:
    """`starts[s]`, `counts[s]`: the first layer of stage s and how many it has; `rows`: the layer that each row of the
    stacked weights has, in the order in which they lie, or EMPTY; `rows_per_chunk`: rows of a chunk."""

    starts: tuple[int, ...]
    counts: tuple[int, ...]
    rows: tuple[int, ...]
    rows_per_chunk: int


def make_partition(geometry: Geometry, layers_per_stage: Sequence[int]) -> Partition:
    """The layout of layers that lie on stages as `layers_per_stage` says, in their order.

    >>> make_partition(Geometry(2, 4, 2), (1, 1, 1, 1)).rows
    (0, 2, 1, 3)
    >>> make_partition(Geometry(2, 4), (2, 1)).rows
    (0, 1, 2, -1)
    """
    assert len(layers_per_stage) == geometry.num_stages
    starts = [sum(layers_per_stage[:stage]) for stage in range(geometry.num_stages)]
    size = max(layers_per_stage)
    rows = []
    for rank in range(geometry.num_ranks):
        for chunk in range(geometry.num_chunks):
            stage = geometry.stage(rank, chunk)
            count = layers_per_stage[stage]
            rows += [*range(starts[stage], starts[stage] + count), *[EMPTY] * (size - count)]
    return Partition(tuple(starts), tuple(layers_per_stage), tuple(rows), size)


def balanced_layers(num_layers: int, num_stages: int, work: Work, *, period: int = 1) -> tuple[int, ...]:
    """Layers of each stage such that the stage with the most work has little.

    Each stage has a multiple of `period` layers, at least one period. Every chunk has rows for the largest stage, so
    that a larger one must be worth it: the busiest stage's work must shrink by at least half as much as rows grow.

    >>> balanced_layers(8, 4, Work())
    (2, 2, 2, 2)
    >>> balanced_layers(32, 4, Work(head=2.5)), balanced_layers(80, 16, Work(head=1.2))[-3:]
    ((9, 9, 8, 6), (5, 5, 5))

    Raises:
      ValueError: there are fewer turns of the pattern than stages, or the last is not whole.
    """
    turns, rest = divmod(num_layers, period)
    if rest or turns < num_stages:
        raise ValueError(f"{num_layers} layers in turns of {period} do not give {num_stages} stages one each")
    extra = [0.0] * num_stages
    extra[0] += work.embed / period
    extra[-1] += work.head / period
    largest = -(-turns // num_stages)
    best = _lightest(turns, extra, largest)
    for size in range(largest + 1, turns):
        counts = _lightest(turns, extra, size)
        saved = 1 - _busiest(counts, extra) / _busiest(best, extra)
        if saved < (size / max(best) - 1) / 2:
            break
        best = counts
    return tuple(count * period for count in best)


def _lightest(turns: int, extra: Sequence[float], most: int) -> list[int]:
    """Turns of each stage, at most `most`, with the least work of the busiest one."""
    counts = [1] * len(extra)
    for _ in range(turns - len(extra)):
        # Greedy is optimal: every turn costs the same, and goes where the result is smallest.
        free = (stage for stage, count in enumerate(counts) if count < most)
        counts[min(free, key=lambda stage: (counts[stage] + extra[stage], stage))] += 1
    return counts


def _busiest(counts: Sequence[int], extra: Sequence[float]) -> float:
    return max(count + more for count, more in zip(counts, extra, strict=True))


def in_rows(stacked: jax.Array, rows: Sequence[int]) -> jax.Array:
    """The weights [layers, ...] in the order of `rows`, zeros in those that are EMPTY."""
    if tuple(rows) == tuple(range(stacked.shape[0])):
        return stacked
    taken = jnp.take(stacked, np.maximum(np.asarray(rows), 0), axis=0)
    is_empty = np.asarray(rows).reshape(-1, *(1,) * (stacked.ndim - 1)) == EMPTY
    return jnp.where(is_empty, jnp.zeros((), stacked.dtype), taken)
