"""Causal self-attention with grouped heads: one function, five implementations that agree, the choice among them, and
three methods for a sequence that devices share.

Shapes: B batch, T tokens, K key/value heads, G queries per key/value head, N head dim.
"""

from functools import partial

import jax
from jax.ad_checkpoint import checkpoint_name

from jaxpar.parallel.attention.blockwise import blockwise_attention
from jaxpar.parallel.attention.choice import BLOCKWISE_MIN_TOKENS, IMPLEMENTATIONS, choose
from jaxpar.parallel.attention.cudnn import cudnn_attention
from jaxpar.parallel.attention.pallas_gpu import pallas_gpu_attention
from jaxpar.parallel.attention.reference import reference_attention
from jaxpar.parallel.attention.ring import ring_attention
from jaxpar.parallel.attention.sharding import by_batch_and_heads
from jaxpar.parallel.attention.splash import splash_attention
from jaxpar.parallel.attention.ulysses import by_heads
from jaxpar.parallel.constrain import current_execution, num_shards, record_call

__all__ = ["BLOCKWISE_MIN_TOKENS", "IMPLEMENTATIONS", "attention", "choose"]


def attention(
    q_BTKGN: jax.Array,
    k_BTKN: jax.Array,
    v_BTKN: jax.Array,
    *,
    segment_ids_BT: jax.Array | None,
    window: int | None,
    softcap: float | None,
    scale: float,
    implementation: str,
    block: int,
) -> jax.Array:
    """softmax(cap(scale · q·k) + mask) · v [B, T, K, G, N] in q's dtype, where cap(x) = c · tanh(x / c).

    A query sees itself and what lies before it in the sequence, in its own segment, and no further back than the
    window. Where the active plan has devices share a sequence, its columns are in the plan's order. Softmax and sums
    are float32. Padding (segment 0) attends to padding: its outputs and gradients are finite.
    For remat policies the output is named "attention_output", and what "blockwise" keeps besides "attention_logsumexp".

    Args:
      segment_ids_BT: int32 document of each token, 0 for padding; None means one document in each sequence.
      window: tokens that a query sees, itself among them; None sees all (Mistral 7B, section 2).
      softcap: bound on scores (Gemma 2, section 2); None leaves them.
      implementation: one of `IMPLEMENTATIONS`, as `choose` names it; where keys come to a device's queries ("ring",
        "all_gather") tiles as in "blockwise" are computed, whatever it is.
      block: queries and keys in one tile of "blockwise", and upper limit of it in "splash" and "pallas"; the others
        ignore it.

    Raises:
      ValueError: `window`, `softcap` or `block` is not positive, or the implementation cannot do what is asked of it.

    >>> import jax.numpy as jnp
    >>> q, kv = jnp.ones((1, 4, 2, 3, 8)), jnp.ones((1, 4, 2, 8))
    >>> form = {"segment_ids_BT": None, "window": None, "softcap": None, "scale": 1.0}
    >>> attention(q, kv, kv, **form, implementation="blockwise", block=2).shape
    (1, 4, 2, 3, 8)
    """
    record_call("attention")
    for name, value in (("window", window), ("softcap", softcap), ("block", block)):
        if value is not None and value <= 0:
            raise ValueError(
                f"attention's {name} must be positive, not {value}" + ("; None is without" if name != "block" else "")
            )
    local = partial(
        _on_whole_sequences, window=window, softcap=softcap, scale=scale, implementation=implementation, block=block
    )
    operands = (q_BTKGN, k_BTKN, v_BTKN, segment_ids_BT)
    if num_shards("sequence") == 1:
        return local(*operands)
    method = current_execution().context_method
    if method == "ulysses":
        return by_heads(local)(*operands)
    gathers = method == "all_gather"
    return ring_attention(*operands, window=window, softcap=softcap, scale=scale, block=block, gathers=gathers)


def _on_whole_sequences(
    q_BTKGN: jax.Array,
    k_BTKN: jax.Array,
    v_BTKN: jax.Array,
    segment_ids_BT: jax.Array | None,
    *,
    window: int | None,
    softcap: float | None,
    scale: float,
    implementation: str,
    block: int,
) -> jax.Array:
    operands = (q_BTKGN, k_BTKN, v_BTKN, segment_ids_BT)
    # XLA partitions along batch and heads without communication, but not the Pallas kernels: those are given `shard`.
    match implementation:
        case "reference":
            out = reference_attention(*operands, window=window, softcap=softcap, scale=scale)
            return checkpoint_name(out, "attention_output")
        case "blockwise":
            return blockwise_attention(*operands, window=window, softcap=softcap, scale=scale, block=block)
        case "cudnn":
            if segment_ids_BT is not None or softcap is not None:
                raise ValueError('attention "cudnn" takes neither segment_ids_BT nor softcap; use "blockwise"')
            out = cudnn_attention(q_BTKGN, k_BTKN, v_BTKN, window=window, scale=scale, shard=by_batch_and_heads)
            return checkpoint_name(out, "attention_output")
        case "pallas":
            if window is not None or softcap is not None:
                raise ValueError('attention "pallas" takes neither window nor softcap; use "blockwise"')
            out = pallas_gpu_attention(*operands, scale=scale, block=block, shard=by_batch_and_heads)
            return checkpoint_name(out, "attention_output")
        case "splash":
            return splash_attention(
                *operands, window=window, softcap=softcap, scale=scale, block=block, shard=by_batch_and_heads
            )
    raise ValueError(
        f'attention implementation "{implementation}" is unknown; legal values: {", ".join(IMPLEMENTATIONS)}'
    )
