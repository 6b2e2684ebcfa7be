"""Attention run by each device on its own sequences and key/value heads, for kernels that XLA cannot partition."""

import jax

from jaxpar.parallel.attention.splash import LocalAttention
from jaxpar.parallel.constrain import current_execution
from jaxpar.parallel.manual import device_by_device, spec_of

__all__ = ["by_batch_and_heads"]


def by_batch_and_heads(local: LocalAttention) -> LocalAttention:
    """`local` on each device's part of the batch and of the heads; `local` itself when no plan is active."""
    execution = current_execution()
    if execution.mesh is None:
        return local

    def attend(q_BTKGN: jax.Array, k_BTKN: jax.Array, v_BTKN: jax.Array, segment_ids_BT: jax.Array | None) -> jax.Array:
        table = execution.activations
        heads = "attention_heads"
        q_spec = spec_of(execution, "attention", q_BTKGN.shape, ("batch", None, heads, None, "head_dim"), table)
        kv_spec = spec_of(execution, "attention", k_BTKN.shape, ("batch", None, heads, "head_dim"), table)
        token_spec = spec_of(execution, "attention", q_BTKGN.shape[:2], ("batch", None), table)
        in_specs = (q_spec, kv_spec, kv_spec, token_spec)
        return device_by_device(execution, local, in_specs, q_spec)(q_BTKGN, k_BTKN, v_BTKN, segment_ids_BT)

    return attend
