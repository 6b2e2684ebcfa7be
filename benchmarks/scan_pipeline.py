"""The opponent of `pipeline.py`: GPipe as a scan over ticks differentiated as a whole, as in MaxText and praxis.

Of each tick autodiff keeps what the stage's backward pass needs, so that memory grows with the number of microbatches;
`jax.checkpoint` around the stage keeps its input alone and computes the stage again.

Microbatches lie spread over the ranks, m / p on each, and circulate (MaxText's circulating input and output): a tick
moves one slot of every rank to the rank before, the first stage takes what it finds there and the last one leaves its
output there. In the end rank r has the outputs of its own microbatches again, so that embedding and head run on all
ranks, each on its share of the batch, and nothing is held twice.

Shapes: p ranks, m microbatches, n layers of a stage, B sequences of a microbatch, X what travels between stages.
"""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec

from jaxpar.parallel.accumulation import microbatches
from jaxpar.parallel.auxiliary import LossWeights
from jaxpar.parallel.constrain import num_shards
from jaxpar.parallel.layers import StageLayers, stage_layers
from jaxpar.parallel.loss import LossSettings, cross_entropy
from jaxpar.parallel.rules import is_stacked
from jaxpar.plan import Plan
from jaxpar.precision import cast_to_compute

__all__ = ["scan_gradients"]

_AXIS = "pipe"

Leaves = Mapping[str, Any]
"""Path → weight, or its gradient."""


def scan_gradients(plan: Plan, settings: LossSettings, *, checkpoint_stage: bool) -> Callable:
    """`(params, batch, dropout keys, weight) -> (gradients of weight · loss in float32, sums over valid tokens)`.

    The plan has one stage a rank. Layers are recomputed as its remat policy says, whether or not the stage is.

    Raises:
      ValueError: the microbatches do not divide by the ranks.
    """
    assert plan.pipeline is not None
    geometry = plan.pipeline.schedule.geometry
    num_ranks, num_microbatches = geometry.num_ranks, geometry.num_microbatches
    assert geometry.num_chunks == 1
    if num_microbatches % num_ranks:
        raise ValueError(
            f"--microbatches {num_microbatches} must be a multiple of parallel.pipe={num_ranks}: the scan that is "
            "compared has as many microbatches on every rank"
        )
    ring = [(rank, (rank + 1) % num_ranks) for rank in range(num_ranks)]
    back = [(to, rank) for rank, to in ring]

    def stage(stacked: Leaves, x: jax.Array, item: Any) -> jax.Array:
        partition, rank = plan.pipeline.partition, jax.lax.axis_index(_AXIS)  # type: ignore[union-attr]
        first, count = (jnp.asarray(numbers, jnp.int32)[rank] for numbers in (partition.starts, partition.counts))
        with stage_layers(StageLayers(first, count, min(partition.counts) == partition.rows_per_chunk)):
            return _model(plan, stacked).layers(x, _inputs(plan, item), item["keys"])

    if checkpoint_stage:
        # In a scan nothing is merged with what the forward pass computed.
        stage = jax.checkpoint(stage, prevent_cse=False)

    def pipelined(stacked: Leaves, circulating: jax.Array, items: Any) -> jax.Array:
        """The microbatches [m / p, X] of this rank, after all layers."""
        rank = jax.lax.axis_index(_AXIS)

        def tick(carry: tuple[jax.Array, jax.Array], number: jax.Array) -> tuple[tuple[jax.Array, jax.Array], None]:
            received, circulating = carry
            slot = number % circulating.shape[0]
            found = jax.lax.dynamic_index_in_dim(circulating, slot, keepdims=False)
            item = _at(items, jnp.clip(number - rank, 0, num_microbatches - 1))
            y = stage(stacked, jnp.where(rank == 0, found, received), item)
            left = jnp.where(rank == num_ranks - 1, y, jax.lax.ppermute(found, _AXIS, back))
            circulating = jax.lax.dynamic_update_index_in_dim(circulating, left, slot, 0)
            return (jax.lax.ppermute(y, _AXIS, ring), circulating), None

        start = jnp.zeros_like(circulating[0]), circulating
        (_, circulating), _ = jax.lax.scan(tick, start, jnp.arange(num_microbatches + num_ranks - 1))
        return jnp.roll(circulating, 1 - num_ranks, axis=0)

    def local(
        stacked: Leaves, shared: Leaves, items: Any, own: Any, weight: jax.Array
    ) -> tuple[Leaves, Leaves, dict[str, jax.Array]]:
        own = jax.tree.map(_merged, own)

        def loss(stacked: Leaves, shared: Leaves) -> tuple[jax.Array, dict[str, jax.Array]]:
            model = _model(plan, shared)
            x = _cut(model.embed(_inputs(plan, own), own["keys"]), num_microbatches // num_ranks)
            x = _merged(pipelined(stacked, x, items))
            sums = cross_entropy(model.head(x), own["batch"]["targets"], own["batch"]["loss_mask"], settings)
            return weight * sums.loss, {"loss": sums.negative_log_likelihood, "objective": sums.loss}

        (dstacked, dshared), sums = jax.grad(loss, (0, 1), has_aux=True)(stacked, shared)
        dstacked, dshared = jax.tree.map(lambda a: a.astype(jnp.float32), (dstacked, dshared))
        return dstacked, *jax.lax.psum((dshared, sums), _AXIS)

    def gradients(
        params: Any, batch: Mapping[str, jax.Array], keys_B: jax.Array | None, weights: LossWeights
    ) -> tuple[Any, dict[str, jax.Array]]:
        leaves = plan.by_path(cast_to_compute(params, plan.config.precision.compute, plan.uncast))
        stacked = {path: leaf for path, leaf in leaves.items() if is_stacked(plan.axes[path])}
        shared = {path: leaf for path, leaf in leaves.items() if path not in stacked}
        items = microbatches({"batch": dict(batch), "keys": keys_B}, num_microbatches)
        whole, split = PartitionSpec(), PartitionSpec(_AXIS)
        dstacked, dshared, sums = jax.shard_map(
            local,
            in_specs=(split, whole, whole, split, whole),
            out_specs=(split, whole, whole),
            axis_names={_AXIS},
            check_vma=False,
        )(stacked, shared, items, items, weights.loss)
        return plan.as_params({**dstacked, **dshared}), sums

    return gradients


def _model(plan: Plan, leaves: Leaves) -> Any:
    return nnx.merge(plan.structure, plan.as_params(dict.fromkeys(plan.axes) | dict(leaves)))


def _inputs(plan: Plan, item: Any) -> dict[str, Any]:
    batch = item["batch"]
    segment_ids = batch["segment_ids"] if plan.config.data.document_boundaries == "respect" else None
    return {"tokens": batch["tokens"], "positions": batch["positions"], "segment_ids": segment_ids}


def _merged(parts: jax.Array) -> jax.Array:
    """[number, B, ...] as [number · B, ...] in such an order that every device keeps its sequences."""
    number, shards = parts.shape[0], num_shards("batch")
    own = jnp.swapaxes(parts.reshape(number, shards, -1, *parts.shape[2:]), 0, 1)
    return own.reshape(-1, *parts.shape[2:])


def _cut(rows: jax.Array, number: int) -> jax.Array:
    """The inverse of `_merged`."""
    own = rows.reshape(num_shards("batch"), number, -1, *rows.shape[1:])
    return jnp.swapaxes(own, 0, 1).reshape(number, -1, *rows.shape[1:])


def _at(tree: Any, index: jax.Array) -> Any:
    return jax.tree.map(lambda a: jax.lax.dynamic_index_in_dim(a, index, keepdims=False), tree)
