"""Attention of a sequence that devices share, each with some of the heads and all tokens of them (Jacobs 2023).

All-to-alls before exchange heads for tokens, one after exchanges them back. In between, attention is that of any
implementation on whole sequences.
"""

from functools import partial

import jax

from jaxpar.parallel.attention.splash import LocalAttention
from jaxpar.parallel.constrain import constrain, current_execution
from jaxpar.parallel.manual import active_axes, device_by_device, spec_of
from jaxpar.parallel.rules import LogicalAxes

__all__ = ["by_heads"]


def by_heads(attend: LocalAttention) -> LocalAttention:
    """`attend`, between all-to-alls; takes and gives arrays laid out by ("batch", "sequence", "heads")."""

    def exchanged(
        q_BTKGN: jax.Array, k_BTKN: jax.Array, v_BTKN: jax.Array, segment_ids_BT: jax.Array | None
    ) -> jax.Array:
        segments = None if segment_ids_BT is None else constrain(segment_ids_BT, ("batch", None))
        q, k, v = (_exchange(True, x) for x in (q_BTKGN, k_BTKN, v_BTKN))
        return _exchange(False, attend(q, k, v, segments))

    return exchanged


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _exchange(to_heads: bool, x: jax.Array) -> jax.Array:
    """`x` [B, T, K, ...], the same array in another layout: of each device's part of the tokens all heads, or of its
    part of the heads all tokens."""
    execution = current_execution()
    rest = (None,) * (x.ndim - 3)
    by_tokens: LogicalAxes = ("batch", "sequence", "heads", *rest)
    by_heads: LogicalAxes = ("batch", None, "attention_heads", *rest)
    specs = [spec_of(execution, "attention", x.shape, names, execution.activations) for names in (by_tokens, by_heads)]
    split, joined = (2, 1) if to_heads else (1, 2)
    (axis,) = active_axes(execution, execution.activations, "sequence")

    def local(x: jax.Array) -> jax.Array:
        return jax.lax.all_to_all(x, axis, split_axis=split, concat_axis=joined, tiled=True)

    source, target = specs if to_heads else reversed(specs)
    return device_by_device(execution, local, in_specs=source, out_specs=target)(x)


def _forward(to_heads: bool, x: jax.Array) -> tuple[jax.Array, None]:
    return _exchange(to_heads, x), None


def _backward(to_heads: bool, _: None, dx: jax.Array) -> tuple[jax.Array]:
    return (_exchange(not to_heads, dx),)


_exchange.defvjp(_forward, _backward)
