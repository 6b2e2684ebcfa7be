"""A model's loss and gradients through the stages of a pipeline, in the terms of the step.

The model is called in its parts: `embed(inputs, dropout_keys)`, `layers(x, inputs, dropout_keys)`, which calls
`scan_layers` and of all weights reads the stacked ones alone, and `head(x)`.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxpar.parallel.accumulation import microbatches
from jaxpar.parallel.auxiliary import LayerSums, LossWeights, parted
from jaxpar.parallel.constrain import constrain_gradient
from jaxpar.parallel.layers import StageLayers, stage_layers
from jaxpar.parallel.loss import FactoredLogits, LossSettings, cross_entropy
from jaxpar.parallel.pipeline.executor import PipelineFunctions, pipeline_gradients, pipeline_sums
from jaxpar.parallel.rules import is_stacked
from jaxpar.plan import Plan
from jaxpar.precision import cast_to_compute

__all__ = ["checked", "last_logits", "pipelined_gradients", "pipelined_logits", "pipelined_loss"]

Params = Any
Item = dict[str, Any]


def pipelined_gradients(plan: Plan, settings: LossSettings) -> Callable:
    """`(params, batch, dropout keys, weights) -> (gradients of the weighted loss in float32, sums over valid
    tokens)`."""
    assert plan.pipeline is not None
    functions = _functions(plan, partial(_loss, plan, settings))
    routed, number = plan.pipeline.routed, plan.pipeline.num_microbatches

    def gradients(
        params: Params, batch: Mapping[str, jax.Array], keys_B: jax.Array | None, weights: LossWeights
    ) -> tuple[Params, dict[str, Any]]:
        stacked, shared = _parted(plan, params)
        items = microbatches({"batch": dict(batch), "keys": keys_B}, number)
        found = pipeline_gradients(
            functions, routed, stacked, shared, items,
            weight=weights.loss,
            auxiliary_weights=_weights_of_sums(plan, weights.auxiliary),
        )  # fmt: skip
        sums = found.sums if found.auxiliary is None else found.sums | {"experts": found.auxiliary}
        return plan.as_params({**found.stacked, **found.shared}), sums

    return gradients


def pipelined_loss(plan: Plan, settings: LossSettings) -> Callable:
    """`(params, batch) -> sums over valid tokens`, without gradients or dropout."""
    functions = _functions(plan, partial(_loss, plan, settings))

    def sums(params: Params, batch: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
        return _forward(plan, functions, params, {"batch": dict(batch), "keys": None})

    return sums


def pipelined_logits(plan: Plan) -> Callable:
    """`(params, inputs, place) -> logits [B, vocabulary]` of the token after `place` in each sequence, float32.

    The head runs after the pipeline, on every rank: to cut logits out of arrays that are split over devices may take a
    collective-permute, which must not stand in one rank's branch.
    """

    def last(model: Any, x: jax.Array, item: Item) -> tuple[jax.Array, dict[str, jax.Array]]:
        return jnp.zeros(()), {"x": x.astype(jnp.float32)}

    functions = _functions(plan, last)

    def logits(params: Params, inputs: Mapping[str, Any], place: jax.Array) -> jax.Array:
        rows = dict(inputs) | {"segment_ids": jnp.zeros_like(inputs["tokens"])}
        x = _forward(plan, functions, params, {"batch": rows, "keys": None}, num_microbatches=1)["x"]
        _, shared = _parted(plan, params)
        model = nnx.merge(plan.structure, plan.as_params(dict.fromkeys(plan.axes) | shared))
        return last_logits(model.head(x.astype(plan.config.precision.compute)), place)

    return logits


def last_logits(prediction: FactoredLogits | jax.Array, place: jax.Array) -> jax.Array:
    """The logits [B, vocabulary] at one place of each sequence, float32."""
    if isinstance(prediction, FactoredLogits):
        hidden_BTD = jax.lax.dynamic_slice_in_dim(prediction.hidden_BTD, place, 1, axis=1)
        return replace(prediction, hidden_BTD=hidden_BTD).logits()[:, 0]
    return jax.lax.dynamic_slice_in_dim(prediction, place, 1, axis=1)[:, 0].astype(jnp.float32)


def checked(plan: Plan, prediction: FactoredLogits | jax.Array) -> FactoredLogits | jax.Array:
    """What the model returns, whose logits must be those of the vocabulary."""
    if isinstance(prediction, jax.Array) and prediction.shape[-1] != plan.vocab_size:
        raise ValueError(
            f"the model returns {prediction.shape[-1]} logits a token for a vocabulary of {plan.vocab_size}; "
            "cut off the padding, or return FactoredLogits, which does"
        )
    return prediction


def _functions(plan: Plan, head: Callable[[Any, jax.Array, Item], Any]) -> PipelineFunctions:
    """The model in parts; `head(model, x, item) -> (loss, sums)`."""
    assert plan.pipeline is not None
    partition = plan.pipeline.partition
    starts, counts = (jnp.asarray(numbers, jnp.int32) for numbers in (partition.starts, partition.counts))
    is_full = min(partition.counts) == partition.rows_per_chunk
    absent = dict.fromkeys(plan.axes)

    def model(leaves: Mapping[str, Any]) -> Any:
        return nnx.merge(plan.structure, plan.as_params(absent | dict(leaves)))

    def embed(shared: Params, item: Item) -> jax.Array:
        return model(shared).embed(_inputs(plan, item), item["keys"])

    def layers(weights: Params, x: jax.Array, item: Item, stage: jax.Array) -> tuple[jax.Array, LayerSums | None]:
        with stage_layers(StageLayers(starts[stage], counts[stage], is_full)):
            return parted(model(weights).layers(x, _inputs(plan, item), item["keys"]))

    def place(gradients: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
        # Of the stacked ones the first dim, over ranks, is [chunk, layer] here.
        return {
            path: constrain_gradient(gradient, (None,) * (gradient.ndim - len(plan.axes[path])) + plan.axes[path])
            for path, gradient in gradients.items()
        }

    return PipelineFunctions(embed, layers, lambda shared, x, item: head(model(shared), x, item), place, place)


def _weights_of_sums(plan: Plan, weight: jax.Array) -> LayerSums | None:
    """Of what layers add up the auxiliary loss alone is differentiated."""
    if plan.layer_sums is None:
        return None
    nothing = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), plan.layer_sums)
    return nothing._replace(auxiliary_loss=weight)


def _loss(plan: Plan, settings: LossSettings, model: Any, x: jax.Array, item: Item) -> tuple[jax.Array, dict]:
    batch = item["batch"]
    sums = cross_entropy(checked(plan, model.head(x)), batch["targets"], batch["loss_mask"], settings)
    return sums.loss, {"loss": sums.negative_log_likelihood, "objective": jax.lax.stop_gradient(sums.loss)}


def _inputs(plan: Plan, item: Item) -> dict[str, Any]:
    batch = item["batch"]
    segment_ids = batch["segment_ids"] if plan.config.data.document_boundaries == "respect" else None
    return {"tokens": batch["tokens"], "positions": batch["positions"], "segment_ids": segment_ids}


def _parted(plan: Plan, params: Params) -> tuple[dict[str, jax.Array], dict[str, jax.Array]]:
    """Weights in the compute format by path: those of layers, and the others."""
    leaves = plan.by_path(cast_to_compute(params, plan.config.precision.compute, plan.uncast))
    stacked = {path: leaf for path, leaf in leaves.items() if is_stacked(plan.axes[path])}
    return stacked, {path: leaf for path, leaf in leaves.items() if path not in stacked}


def _forward(
    plan: Plan, functions: PipelineFunctions, params: Params, rows: Item, num_microbatches: int | None = None
) -> dict[str, jax.Array]:
    assert plan.pipeline is not None
    number = num_microbatches or plan.pipeline.num_forward_microbatches(rows["batch"]["tokens"].shape[0])
    return pipeline_sums(functions, plan.pipeline.forward(number), *_parted(plan, params), microbatches(rows, number))
