"""Writes text with a model, a token at a time, each from a forward pass over the last `data.sequence_length` tokens."""

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxpar.parallel.loss import FactoredLogits
from jaxpar.parallel.mesh import BATCH_AXES
from jaxpar.plan import Plan

__all__ = ["continue_tokens"]


def continue_tokens(
    plan: Plan, params: Any, prompt: Sequence[int], *, num_tokens: int, temperature: float, end_of_text: int
) -> list[int]:
    """The tokens that follow `prompt`, at most `num_tokens`, until an end of text.

    Every device group that shares the batch computes the same row. Temperature 0 takes the likeliest token.
    """
    length = plan.config.data.sequence_length
    rows = math.prod(plan.mesh.shape[axis] for axis in BATCH_AXES)
    next_token = jax.jit(
        partial(_next_token, plan, temperature),
        in_shardings=(plan.param_shardings, plan.batch_sharding, plan.replicated, plan.replicated),
        out_shardings=plan.replicated,
    )
    tokens = list(prompt)
    key = jax.random.key(plan.config.run.seed)
    with plan.execution.active():
        for number in range(num_tokens):
            window = tokens[-length:]
            padded = np.zeros((rows, length), np.int32)
            padded[:, : len(window)] = window
            batch = jax.device_put(padded, plan.batch_sharding)
            last = jax.device_put(np.int32(len(window) - 1), plan.replicated)
            token = int(next_token(params, batch, last, jax.random.fold_in(key, number)))
            if token == end_of_text:
                break
            tokens.append(token)
    return tokens[len(prompt) :]


def _next_token(
    plan: Plan, temperature: float, params: Any, tokens_BT: jax.Array, last: jax.Array, key: jax.Array
) -> jax.Array:
    positions_BT = jnp.broadcast_to(jnp.arange(tokens_BT.shape[1], dtype=jnp.int32), tokens_BT.shape)
    inputs = {"tokens": tokens_BT, "positions": positions_BT, "segment_ids": None}
    prediction = nnx.merge(plan.structure, params)(inputs)
    if isinstance(prediction, FactoredLogits):
        hidden_BTD = jax.lax.dynamic_slice_in_dim(prediction.hidden_BTD, last, 1, axis=1)
        logits_BTV = replace(prediction, hidden_BTD=hidden_BTD).logits()
    else:
        logits_BTV = jax.lax.dynamic_slice_in_dim(prediction, last, 1, axis=1)
    logits_V = logits_BTV[0, 0]
    return jnp.argmax(logits_V) if temperature == 0.0 else jax.random.categorical(key, logits_V / temperature)
