"""Writes text with a model, a token at a time, each from a forward pass over the last `data.sequence_length` tokens."""

import math
from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxpar.parallel.auxiliary import parted
from jaxpar.parallel.dispatch import one_at_a_time
from jaxpar.parallel.feeding import from_whole
from jaxpar.parallel.mesh import BATCH_AXES
from jaxpar.parallel.sequence_order import column_of, reordered
from jaxpar.pipelined import last_logits, pipelined_logits
from jaxpar.plan import Plan
from jaxpar.step import examination

__all__ = ["continue_tokens"]


def continue_tokens(
    plan: Plan,
    params: Any,
    prompt: Sequence[int],
    *,
    num_tokens: int,
    temperature: float,
    vocab_size: int,
    end_of_text: int,
) -> list[int]:
    """The tokens that follow `prompt`, at most `num_tokens`, until an end of text; all are below `vocab_size`.

    A pure function of the arguments and `run.seed`. Every device group that shares the batch computes the same row.
    Temperature 0 takes the likeliest token.

    Raises:
      ValueError: the prompt has no token to start from.
    """
    if not prompt:
        raise ValueError("the prompt has no tokens; a text is continued from at least one")
    length = plan.config.data.sequence_length
    rows = math.prod(plan.mesh.shape[axis] for axis in BATCH_AXES)
    next_token = _next_token_program(plan, temperature, vocab_size)
    tokens = list(prompt)
    with plan.execution.active():
        for number in range(num_tokens):
            window = tokens[-length:]
            padded = np.zeros((rows, length), np.int32)
            padded[:, : len(window)] = window
            batch = from_whole(padded, plan.batch_sharding)
            last, count = (from_whole(np.int32(value), plan.replicated) for value in (len(window) - 1, number))
            token = int(next_token(params, batch, last, count))
            if token == end_of_text:
                break
            tokens.append(token)
    return tokens[len(prompt) :]


@lru_cache(maxsize=1)
def _next_token_program(plan: Plan, temperature: float, vocab_size: int) -> Callable[..., jax.Array]:
    """The compiled choice of a token.

    Cached so that it outlives its last run: XLA:CPU with oneDNN aborts the process ("Check failed: available_.size() ==
    num_created_") if a program is freed at the moment in which its threads return their resources.
    """
    program = jax.jit(
        partial(_next_token, plan, temperature, vocab_size),
        in_shardings=(None, plan.batch_sharding, plan.replicated, plan.replicated),
        out_shardings=plan.replicated,
    )
    return one_at_a_time(program, plan.mesh, examination(plan))


def _next_token(
    plan: Plan,
    temperature: float,
    vocab_size: int,
    params: Any,
    tokens_BT: jax.Array,
    last: jax.Array,
    count: jax.Array,
) -> jax.Array:
    positions_BT = jnp.broadcast_to(jnp.arange(tokens_BT.shape[1], dtype=jnp.int32), tokens_BT.shape)
    columns = reordered({"tokens": tokens_BT, "positions": positions_BT})
    inputs = {**columns, "segment_ids": None}
    last = column_of(last, tokens_BT.shape[1])
    params = plan.readable(params, plan.evaluated_table)
    if plan.pipeline is not None:
        logits_BV = pipelined_logits(plan)(params, inputs, last)
    else:
        logits_BV = last_logits(parted(nnx.merge(plan.structure, params)(inputs))[0], last)
    logits_V = logits_BV[0]
    logits_V = jnp.where(jnp.arange(logits_V.size) < vocab_size, logits_V, -jnp.inf)
    if temperature == 0.0:
        return jnp.argmax(logits_V)
    key = jax.random.fold_in(jax.random.key(plan.config.run.seed), count)
    return jax.random.categorical(key, logits_V / temperature)
