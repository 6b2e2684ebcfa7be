"""How many floating-point operations of matrix products a model needs, by formula and by counting a traced function.

The formula gives *model* FLOPs, the numerator of model FLOPs utilisation (MFU; Chowdhery 2022, appendix B): what the
mathematics asks for, whatever is recomputed. The count gives what a traced function executes, recomputation included.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

if TYPE_CHECKING:
    import jax.core
    from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn

__all__ = ["CONVENTION", "FlopsPerToken", "count_matmul_flops", "transformer_flops_per_token"]

CONVENTION = (
    "MFU = FLOPs of the model's matrix products / (seconds x peak). Backward counts as twice forward, recomputation "
    "not at all; attention counts in full, neither halved for causality nor cut at documents, and a sliding "
    "window at its width; the output head counts, the embedding lookup does not."
)
"""What a utilisation figure means; shown beside the first one of a run."""

_MATMULS = ("dot_general", "ragged_dot_general")
_OPAQUE = ("conv_general_dilated", "pallas_call", "ffi_call", "custom_call")


@dataclass(frozen=True)
class FlopsPerToken:
    """Forward FLOPs of matrix products for one token, over all layers, by part."""

    attention_projections: int
    """Query, key, value and output projections."""
    attention_scores: int
    """Queries by keys and probabilities by values."""
    feed_forward: int
    head: int
    """Projection onto the vocabulary."""

    @property
    def forward(self) -> int:
        """All parts together."""
        return self.attention_projections + self.attention_scores + self.feed_forward + self.head

    @property
    def training(self) -> int:
        """Forward and backward: 3 × forward, since each product has two gradients of its own size."""
        return 3 * self.forward


def transformer_flops_per_token(
    *,
    embed_dim: int,
    num_layers: int,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    mlp_dim: int,
    gated: bool,
    vocab_size: int,
    sequence_length: int,
    windows: Sequence[int | None] | None = None,
    expert_layers: int = 0,
    expert_dim: int = 0,
    num_experts: int = 0,
) -> FlopsPerToken:
    """FLOPs per token of a decoder-only Transformer, by the convention of `CONVENTION`.

    With h = embed_dim, N and K query and key/value heads of H dims, f = mlp_dim, v = vocab_size, a layer whose queries
    see c keys needs, for one token, `4hH(N + K)` for projections, `4cNH` for attention, and `2hf` for each of the two
    feed-forward matrices, or three when gated; the head needs `2hv` once. For K = N, H = h/N, f = 4h and c = s this is
    `24h² + 4sh` a layer (Narayanan 2021).

    Args:
        vocab_size: entries of the vocabulary, without padding.
        windows: for each layer the width of its sliding window, or None for full attention; None for all full.
        expert_layers: layers in which a token goes through a router of `num_experts` and then, instead of `mlp_dim`,
            through experts of `expert_dim` together: only what is computed for it counts.

    Raises:
        ValueError: `windows` does not have one entry a layer, or an entry is not positive.

    >>> transformer_flops_per_token(embed_dim=64, num_layers=2, num_heads=4, num_kv_heads=4, head_dim=16, mlp_dim=256,
    ...                             gated=False, vocab_size=1000, sequence_length=128).training
    1170432
    """
    layer_windows = [None] * num_layers if windows is None else list(windows)
    if len(layer_windows) != num_layers:
        raise ValueError(
            f"windows has {len(layer_windows)} entries; it must have one for each of the {num_layers} layers"
        )
    if bad := [window for window in layer_windows if window is not None and window < 1]:
        raise ValueError(f"windows has the entry {bad[0]}; a window must be at least 1, or None for full attention")
    dims = (num_layers - expert_layers) * mlp_dim + expert_layers * expert_dim
    keys_seen = sum(min(window or sequence_length, sequence_length) for window in layer_windows)
    return FlopsPerToken(
        attention_projections=num_layers * 4 * embed_dim * head_dim * (num_heads + num_kv_heads),
        attention_scores=4 * keys_seen * num_heads * head_dim,
        feed_forward=(3 if gated else 2) * 2 * embed_dim * dims + expert_layers * 2 * embed_dim * num_experts,
        head=2 * embed_dim * vocab_size,
    )


def count_matmul_flops(jaxpr: "ClosedJaxpr | Jaxpr") -> int:
    """FLOPs of the matrix products that one call of a traced function executes, over all devices.

    A scan's body counts once for each iteration, a cond's costliest branch counts, and what is manual in a shard_map
    counts once for each of its shards. Recomputation in a gradient counts; element-wise work does not.

    Raises:
        ValueError: the function has matrix products in a while loop, whose number of iterations is unknown, or a
            kernel that cannot be looked into.

    >>> import jax, jax.numpy as jnp
    >>> count_matmul_flops(jax.make_jaxpr(lambda x, y: x @ y)(jnp.ones((2, 3)), jnp.ones((3, 5))))
    60
    """
    return sum(_equation_flops(equation) for equation in jaxpr.eqns)


def _equation_flops(equation: "JaxprEqn") -> int:
    name, params = equation.primitive.name, equation.params
    if name in _MATMULS:
        return _product_flops(equation)
    if name in _OPAQUE or name.startswith("dot_product_attention"):
        raise ValueError(f"cannot count the FLOPs of {name!r}; trace an implementation made of matrix products instead")
    if name == "cond":
        return max(count_matmul_flops(branch) for branch in params["branches"])
    inner = sum(count_matmul_flops(jaxpr) for value in params.values() for jaxpr in _jaxprs_in(value))
    if name == "while" and inner:
        raise ValueError("cannot count matrix products in a while loop of unknown length; write it as a scan")
    if name == "scan":
        return inner * int(params["length"])
    if name == "shard_map":
        return inner * math.prod(params["mesh"].shape[axis] for axis in params["newly_manual_axes"])
    return inner


def _product_flops(equation: "JaxprEqn") -> int:
    """2 × (elements of the left operand) × (right dims that are neither contracted, nor batch, nor groups)."""
    lhs, rhs = (cast("jax.core.ShapedArray", variable.aval) for variable in equation.invars[:2])
    used: set[int] = set()
    if equation.primitive.name == "dot_general":
        dimension_numbers = equation.params["dimension_numbers"]
    else:
        ragged = equation.params["ragged_dot_dimension_numbers"]
        dimension_numbers = ragged.dot_dimension_numbers
        used.update(ragged.rhs_group_dimensions)
    (_, rhs_contracting), (_, rhs_batch) = dimension_numbers
    used.update(rhs_contracting, rhs_batch)
    return 2 * math.prod(lhs.shape) * math.prod(size for dim, size in enumerate(rhs.shape) if dim not in used)


def _jaxprs_in(value: Any) -> Iterator["ClosedJaxpr | Jaxpr"]:
    from jax.extend.core import ClosedJaxpr, Jaxpr

    if isinstance(value, ClosedJaxpr | Jaxpr):
        yield value
    elif isinstance(value, tuple | list):
        for item in value:
            yield from _jaxprs_in(item)
