"""Composes and compiles the step.

Each wrapper takes a function and returns one, and is the identity when off. The order, from the inside out:

1. `token_loss`: model and cross-entropy, a **sum** over valid tokens (remat happens inside, a layer at a time)
2. `in_compute_dtype`: weights cast before they are used, gradients back in the parameters' dtype
3. `loss_and_gradients`: the derivative, divided **once** by the global number of valid tokens
4. `clipped`: gradients scaled down to the largest global norm
5. the optimizer's update
"""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from jaxpar.optim import learning_rates, make_optimizer, make_schedule
from jaxpar.parallel.loss import LossSettings, LossSums, cross_entropy
from jaxpar.plan import Plan
from jaxpar.precision import in_compute_dtype
from jaxpar.state import TrainState, state_shardings

__all__ = ["Batch", "Step", "abstract_batch", "clipped", "loss_and_gradients", "make_gradients", "token_loss"]

Batch = Mapping[str, jax.Array]
Params = Any
Loss = Callable[[Params, Batch, jax.Array | None], tuple[jax.Array, LossSums]]
Gradients = Callable[[Params, Batch, jax.Array | None], tuple[Params, dict[str, jax.Array]]]


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
        self.optimizer = make_optimizer(config.optimizer, schedule, plan.axes, seed=config.run.seed)
        self.shardings = state_shardings(plan, self.optimizer)
        gradients = make_gradients(plan)
        evaluation_loss = in_compute_dtype(
            token_loss(plan, LossSettings(chunk_tokens=config.loss.chunk_tokens)), config.precision.compute, plan.axes
        )

        def train(state: TrainState, batch: Batch) -> tuple[TrainState, dict[str, jax.Array]]:
            key = jax.random.fold_in(jax.random.key(config.run.seed), state.step)
            grads, metrics = gradients(state.params, batch, key)
            params, optimizer_state = self.optimizer.apply(grads, state.optimizer, state.params)
            metrics["learning_rate"] = jnp.asarray(self.schedule(state.step), jnp.float32)
            return TrainState(state.step + 1, params, optimizer_state), metrics

        def evaluate(params: Params, batch: Batch, byte_lengths: jax.Array) -> dict[str, jax.Array]:
            _, sums = evaluation_loss(params, batch, None)
            mask = batch["loss_mask"]
            num_bytes = jnp.where(mask, jnp.take(byte_lengths, batch["targets"]), 0).sum()
            return {"nats": sums.negative_log_likelihood, "tokens": mask.sum(), "bytes": num_bytes}

        batch_shardings = dict.fromkeys(_BATCH_DTYPES, plan.batch_sharding)
        self.train = jax.jit(
            train,
            in_shardings=(self.shardings, batch_shardings),
            out_shardings=(self.shardings, plan.replicated),
            donate_argnums=0,
        )
        self.evaluate = jax.jit(
            evaluate,
            in_shardings=(self.shardings.params, batch_shardings, plan.replicated),
            out_shardings=plan.replicated,
        )


def make_gradients(plan: Plan) -> Gradients:
    """Wrappers 1 to 4: `(params, batch, dropout key) -> (clipped gradients, metrics)`."""
    config = plan.config
    settings = LossSettings(config.loss.z_loss, config.loss.label_smoothing, config.loss.chunk_tokens)
    loss = token_loss(plan, settings)
    loss = in_compute_dtype(loss, config.precision.compute, plan.axes)
    return clipped(loss_and_gradients(loss), config.train.max_grad_norm)


def token_loss(plan: Plan, settings: LossSettings) -> Loss:
    """The model's loss summed over the batch's valid tokens."""
    with_segments = plan.config.data.document_boundaries == "respect"

    def loss(params: Params, batch: Batch, dropout_key: jax.Array | None) -> tuple[jax.Array, LossSums]:
        model = nnx.merge(plan.structure, params)
        segment_ids = batch["segment_ids"] if with_segments else None
        inputs = {"tokens": batch["tokens"], "positions": batch["positions"], "segment_ids": segment_ids}
        prediction = model(inputs, dropout_key=dropout_key)
        if isinstance(prediction, jax.Array) and prediction.shape[-1] != plan.vocab_size:
            raise ValueError(
                f"the model returns {prediction.shape[-1]} logits a token for a vocabulary of {plan.vocab_size}; "
                "cut off the padding, or return FactoredLogits, which does"
            )
        sums = cross_entropy(prediction, batch["targets"], batch["loss_mask"], settings)
        return sums.loss, sums

    return loss


def loss_and_gradients(loss: Loss) -> Gradients:
    """Gradients of the mean loss over the global batch's valid tokens, and metrics."""
    derivative = jax.grad(loss, has_aux=True)

    def gradients(params: Params, batch: Batch, key: jax.Array | None) -> tuple[Params, dict[str, jax.Array]]:
        grads, sums = derivative(params, batch, key)
        tokens = batch["loss_mask"].sum()
        scale = 1.0 / jnp.maximum(tokens, 1).astype(jnp.float32)
        grads = jax.tree.map(lambda gradient: gradient * scale, grads)
        return grads, {"loss": sums.negative_log_likelihood * scale, "objective": sums.loss * scale, "tokens": tokens}

    return gradients


def clipped(gradients: Gradients, max_norm: float) -> Gradients:
    """Gradients scaled to a global norm of at most `max_norm`; the norm before is reported as `grad_norm`."""

    def clipped_gradients(params: Params, batch: Batch, key: jax.Array | None) -> tuple[Params, dict[str, jax.Array]]:
        grads, metrics = gradients(params, batch, key)
        norm = optax.tree.norm(grads)
        scale = jnp.minimum(1.0, max_norm / jnp.maximum(norm, 1e-12))
        return jax.tree.map(lambda gradient: gradient * scale, grads), metrics | {"grad_norm": norm}

    return clipped_gradients
