"""Composes and compiles the step.

Each wrapper takes a function and returns one, and is the identity when off. The order, from the inside out:

1. `token_loss`: model and cross-entropy, a **sum** over valid tokens (remat happens inside, a layer at a time)
2. `in_compute_dtype`: weights cast before they are used, gradients back in the parameters' dtype
3. `loss_gradients`: the derivative of the weighted loss; with pipeline stages `pipelined_gradients` does 1 to 3
4. `accumulated`: the same, a microbatch at a time
5. `reduced_once`: the same on each device's part of the batch, with one reduction at the end
6. `mean_over_tokens`: the weight, which divides **once** by the global number of valid tokens; the loss scale
7. `clipped`: gradients scaled down to the largest global norm; the first one that is not finite
8. `balanced`: what routers balance experts by, which no loss decides
9. `in_sequence_order`: the batch's columns as the devices that share a sequence hold them; labels are shifted already
10. `updated`: the optimizer; nothing but the guard changes at a step that is not finite
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxpar.optim import Optimizer, learning_rates, make_schedule
from jaxpar.parallel.accumulation import accumulated
from jaxpar.parallel.auxiliary import LayerSums, LossWeights, expert_metrics, parted, weighted
from jaxpar.parallel.dispatch import one_at_a_time
from jaxpar.parallel.loss import LossSettings, LossSums, cross_entropy
from jaxpar.parallel.offload import gradient_proxies
from jaxpar.parallel.pipeline.divergence import check_branches
from jaxpar.parallel.pipeline.partition import in_rows
from jaxpar.parallel.reduction import on_own_batch, summed_over_devices
from jaxpar.parallel.sequence_order import reordered
from jaxpar.pipelined import checked, pipelined_gradients, pipelined_loss
from jaxpar.plan import Plan
from jaxpar.precision import in_compute_dtype, next_guard
from jaxpar.state import TrainState, guard_rules, optimizer_of, state_shardings

__all__ = ["Batch", "Step", "abstract_batch", "dropout_keys", "examination", "make_gradients", "token_loss"]

Batch = Mapping[str, jax.Array]
Params = Any
Metrics = dict[str, jax.Array]
Loss = Callable[[Params, Batch, jax.Array | None], tuple[LossSums, LayerSums | None]]
WeightedGradients = Callable[[Params, Batch, jax.Array | None, LossWeights], tuple[Params, dict[str, Any]]]
"""`(params, batch, a dropout key for each sequence, weights) -> (gradients, sums over valid tokens)`."""
Gradients = Callable[[Params, Batch, jax.Array | None, jax.Array | None], tuple[Params, Metrics]]
"""`(params, batch, a dropout key for each sequence, loss scale) -> (mean gradients in float32, metrics)`."""

_BATCH_DTYPES = {
    "tokens": jnp.int32, "targets": jnp.int32, "positions": jnp.int32, "segment_ids": jnp.int32, "loss_mask": jnp.bool_
}  # fmt: skip


def abstract_batch(plan: Plan) -> dict[str, jax.ShapeDtypeStruct]:
    """The training batch as shapes with shardings: [batch, sequence] each."""
    shape = (plan.config.train.batch_size, plan.config.data.sequence_length)
    return {
        name: jax.ShapeDtypeStruct(shape, dtype, sharding=plan.batch_sharding) for name, dtype in _BATCH_DTYPES.items()
    }


class Step:
    """The compiled functions of a run.

    `train(state, batch) -> (state, metrics)` donates its state; `evaluate(params, batch, bytes of each token)` gives
    the sums `nats`, `tokens` and `bytes` over valid tokens, without dropout, z-loss or smoothing. Both are jitted; call
    them inside `plan.execution.active()`.
    """

    def __init__(self, plan: Plan):
        config = plan.config
        schedule = make_schedule(config.schedule, config.optimizer.learning_rate, config.train.num_steps)
        self.schedule = learning_rates(config.optimizer, schedule)
        self.optimizer = optimizer_of(plan)
        self.shardings = state_shardings(plan, self.optimizer)
        gradients = make_gradients(plan)
        update = _make_update(plan, self.optimizer)
        evaluation_loss = _evaluation_loss(plan)

        def train(state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
            scale = None if state.guard is None else state.guard.scale
            grads, metrics = gradients(state.params, batch, dropout_keys(plan, state.step), scale)
            metrics["learning_rate"] = jnp.asarray(self.schedule(state.num_updates), jnp.float32)
            return update(state, grads, metrics)

        def evaluate(params: Params, batch: Batch, byte_lengths: jax.Array) -> dict[str, jax.Array]:
            nats = evaluation_loss(plan.readable(params, plan.evaluated_table), reordered(batch))
            mask = batch["loss_mask"]
            num_bytes = jnp.where(mask, jnp.take(byte_lengths, batch["targets"]), 0).sum()
            return {"nats": nats, "tokens": mask.sum(), "bytes": num_bytes}

        batch_shardings = dict.fromkeys(_BATCH_DTYPES, plan.batch_sharding)
        train = jax.jit(
            train,
            in_shardings=(self.shardings, batch_shardings),
            out_shardings=(self.shardings, plan.replicated),
            donate_argnums=0,
        )
        evaluate = jax.jit(
            evaluate,
            in_shardings=(self.shardings.evaluated(config), batch_shardings, plan.replicated),
            out_shardings=plan.replicated,
        )
        examine = examination(plan)
        self.train = one_at_a_time(train, plan.mesh, examine)
        self.evaluate = one_at_a_time(evaluate, plan.mesh, examine)


def make_gradients(plan: Plan) -> Gradients:
    """Wrappers 1 to 9: `(params, batch, dropout keys, loss scale) -> (clipped gradients, metrics)`."""
    config = plan.config
    settings = LossSettings(config.loss.z_loss, config.loss.label_smoothing, config.loss.chunk_tokens)
    if plan.pipeline is None:
        loss = in_compute_dtype(token_loss(plan, settings), config.precision.compute, plan.uncast)
        gradients = loss_gradients(loss, plan)
    else:
        gradients = pipelined_gradients(plan, settings)
    gradients = accumulated(gradients, config.train.microbatches, plan.by_path, plan.axes)
    mean = mean_over_tokens(reduced_once(gradients, plan), plan)
    return in_sequence_order(balanced(clipped(mean, config.train.max_grad_norm), plan))


def examination(plan: Plan) -> Callable[[jax.stages.Compiled], None] | None:
    """What looks at a compiled pipeline before it runs, for it might hang without a word; None with one stage."""
    if plan.pipeline is None:
        return None
    aligned = plan.pipeline.schedule.aligned
    return lambda compiled: check_branches(compiled.as_text() or "", plan.mesh.shape, aligned=aligned)


def _evaluation_loss(plan: Plan) -> Callable[[Params, Batch], jax.Array]:
    """The negative log-likelihood summed over a batch's valid tokens."""
    settings = LossSettings(chunk_tokens=plan.config.loss.chunk_tokens)
    if plan.pipeline is not None:
        sums = pipelined_loss(plan, settings)
        return lambda params, batch: sums(params, batch)["loss"]
    loss = in_compute_dtype(token_loss(plan, settings), plan.config.precision.compute, plan.uncast)
    return lambda params, batch: loss(params, batch, None)[0].negative_log_likelihood


def dropout_keys(plan: Plan, step: jax.Array | int) -> jax.Array:
    """A key for each sequence of the batch, a pure function of the seed, the step and its place in the batch."""
    key = jax.random.fold_in(jax.random.key(plan.config.run.seed), step)
    return jax.vmap(jax.random.fold_in, (None, 0))(key, jnp.arange(plan.config.train.batch_size))


def token_loss(plan: Plan, settings: LossSettings) -> Loss:
    """The model's loss summed over the batch's valid tokens, and what layers of experts add up."""
    with_segments = plan.config.data.document_boundaries == "respect"

    def loss(params: Params, batch: Batch, keys_B: jax.Array | None) -> tuple[LossSums, LayerSums | None]:
        model = nnx.merge(plan.structure, params)
        segment_ids = batch["segment_ids"] if with_segments else None
        inputs = {"tokens": batch["tokens"], "positions": batch["positions"], "segment_ids": segment_ids}
        prediction, experts = parted(model(inputs, dropout_keys=keys_B))
        return cross_entropy(checked(plan, prediction), batch["targets"], batch["loss_mask"], settings), experts

    return loss


def loss_gradients(loss: Loss, plan: Plan) -> WeightedGradients:
    """Gradients of the weighted loss, and the sums, unweighted."""

    def gradients(
        params: Params, batch: Batch, keys_B: jax.Array | None, weights: LossWeights
    ) -> tuple[Params, dict[str, Any]]:
        def total(proxies: Params) -> tuple[jax.Array, tuple[LossSums, LayerSums | None]]:
            sums, experts = loss(plan.readable(params, plan.rules.params, proxies), batch, keys_B)
            return weighted(weights, sums.loss, experts), (sums, experts)

        grads, (sums, experts) = jax.grad(total, has_aux=True)(gradient_proxies(params))
        found = {"loss": sums.negative_log_likelihood, "objective": sums.loss}
        return grads, found if experts is None else found | {"experts": experts}

    return gradients


def reduced_once(gradients: WeightedGradients, plan: Plan) -> WeightedGradients:
    """`gradients` by each device on its own part of the batch along `plan.deferred_axes`, and one sum at the end."""
    axes, parallel = plan.deferred_axes, plan.config.parallel
    if not axes:
        return gradients

    def once(
        params: Params, batch: Batch, keys_B: jax.Array | None, weights: LossWeights
    ) -> tuple[Params, dict[str, Any]]:
        own = on_own_batch(lambda whole, split: gradients(whole[0], split[0], split[1], whole[1]), axes)
        stacked, sums = own((params, weights), (batch, keys_B))
        grads = summed_over_devices(
            plan.by_path(stacked), axes, plan.axes, plan.rules.optimizer,
            dtype=plan.config.precision.reduction, bucket_bytes=parallel.bucket_bytes,
        )  # fmt: skip
        return plan.as_params(grads), jax.tree.map(lambda parts: parts.sum(0), sums)

    return once


def mean_over_tokens(gradients: WeightedGradients, plan: Plan) -> Gradients:
    """Gradients of the mean loss over the global batch's valid tokens, free of the loss scale, and metrics."""
    has_padding = plan.config.data.document_boundaries == "respect"

    def mean(params: Params, batch: Batch, keys_B: jax.Array | None, scale: jax.Array | None) -> tuple[Params, Metrics]:
        tokens = batch["loss_mask"].sum()
        routed = (batch["segment_ids"] != 0).sum() if has_padding else jnp.int32(batch["tokens"].size)
        shares = LossWeights(*(1.0 / jnp.maximum(count, 1).astype(jnp.float32) for count in (tokens, routed)))
        weights = shares if scale is None else jax.tree.map(lambda share: share * scale, shares)
        grads, sums = gradients(params, batch, keys_B, weights)
        unscaled = (lambda g: g) if scale is None else (lambda g: g / scale)
        grads = jax.tree.map(lambda gradient: unscaled(gradient.astype(jnp.float32)), grads)
        metrics = {name: sums[name] * shares.loss for name in ("loss", "objective")} | {"tokens": tokens}
        if "experts" in sums:
            metrics |= expert_metrics(sums["experts"], routed)
            metrics["objective"] += metrics["experts/auxiliary_loss"]
        return grads, metrics

    return mean


def clipped(gradients: Gradients, max_norm: float) -> Gradients:
    """Gradients scaled to a global norm of at most `max_norm`.

    Reported are the norm before, `grad_norm`, and `nonfinite`: the place (in the order of `Plan.parameters`) of the
    first parameter whose gradient is not finite, the number of parameters if only the loss is not, -1 if all are. A
    gradient whose norm is above 1.8e19, whose square float32 cannot hold, counts as not finite.
    """

    def clipped_gradients(
        params: Params, batch: Batch, keys_B: jax.Array | None, scale: jax.Array | None
    ) -> tuple[Params, Metrics]:
        grads, metrics = gradients(params, batch, keys_B, scale)
        squares = jnp.stack([jnp.sum(jnp.square(gradient)) for gradient in jax.tree.leaves(grads)])
        norm = jnp.sqrt(squares.sum())
        failed = ~jnp.isfinite(jnp.append(squares, metrics["objective"]))
        metrics |= {"grad_norm": norm, "nonfinite": jnp.where(failed.any(), jnp.argmax(failed), -1)}
        factor = jnp.minimum(1.0, max_norm / jnp.maximum(norm, 1e-12))
        return jax.tree.map(lambda gradient: gradient * factor, grads), metrics

    return clipped_gradients


def balanced(gradients: Gradients, plan: Plan) -> Gradients:
    """In place of gradients that are zero, of parameters by which routers balance their experts, how far each expert's
    share of the step's tokens is from the mean."""
    biases = [parameter for parameter in plan.parameters if parameter.balance_rate]
    if not biases:
        return gradients

    def with_loads(
        params: Params, batch: Batch, keys_B: jax.Array | None, scale: jax.Array | None
    ) -> tuple[Params, Metrics]:
        grads, metrics = gradients(params, batch, keys_B, scale)
        shares_LE = metrics["experts/load"]
        beyond_LE = shares_LE - 1.0 / shares_LE.shape[-1]
        leaves = plan.by_path(grads)
        for bias in biases:
            rows = None if plan.pipeline is None else plan.pipeline.rows_as_laid_out(bias.shape[0])
            leaves[bias.path] = beyond_LE if rows is None else in_rows(beyond_LE, rows)
        return plan.as_params(leaves), metrics

    return with_loads


def in_sequence_order(gradients: Gradients) -> Gradients:
    """`gradients` of a batch in logical order."""

    def in_order(
        params: Params, batch: Batch, keys_B: jax.Array | None, scale: jax.Array | None
    ) -> tuple[Params, Metrics]:
        return gradients(params, reordered(batch), keys_B, scale)

    return in_order


def _make_update(
    plan: Plan, optimizer: Optimizer
) -> Callable[[TrainState, Params, Metrics], tuple[TrainState, Metrics]]:
    """Wrapper 10."""
    rules = guard_rules(plan.config)

    def updated(state: TrainState, grads: Params, accept: jax.Array | None) -> TrainState:
        grads = plan.constrained(grads, plan.rules.optimizer)
        params = plan.constrained(state.params, plan.rules.optimizer)
        params, optimizer_state = optimizer.apply(grads, state.optimizer, params, accept)
        params = plan.constrained(params, plan.rules.optimizer)
        return replace(state, step=state.step + 1, params=params, optimizer=optimizer_state)

    def guarded(state: TrainState, grads: Params, metrics: Metrics) -> tuple[TrainState, Metrics]:
        if rules is None:
            return updated(state, grads, None), metrics
        assert state.guard is not None
        is_finite = metrics["nonfinite"] < 0
        guard = next_guard(state.guard, is_finite, rules)
        metrics = metrics | {"skipped": guard.skipped, "skipped_in_a_row": guard.in_a_row}
        if guard.scale is not None:
            metrics["loss_scale"] = state.guard.scale
        return replace(updated(state, grads, is_finite), guard=guard), metrics

    return guarded
