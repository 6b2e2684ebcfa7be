"""Cross-entropy over a vocabulary that may be split over devices, computed in chunks of tokens.

A model returns `FactoredLogits` (final hidden states and the output kernel), so that the [batch, sequence,
vocabulary] array never exists: each chunk of tokens is projected, its loss **and** its gradients are taken while the
logits are there, and the logits are dropped. Across a split vocabulary three numbers a token are reduced: the largest
logit, the sum of exponentials and the target's logit (Megatron-LM, Shoeybi 2019, section 3; the last two travel
together).

Shapes: B batch, T sequence, D embed, V vocabulary (padded), N tokens of a chunk.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from jaxpar.parallel.constrain import Execution, constrain_stored, current_execution, reduction_format
from jaxpar.parallel.manual import active_axes, axis_index, device_by_device, reduced, spec_of

__all__ = ["FactoredLogits", "LossSettings", "LossSums", "cross_entropy"]

_EXCLUDED = -1e30


@partial(
    jax.tree_util.register_dataclass, data_fields=("hidden_BTD", "kernel_DV"), meta_fields=("vocab_size", "softcap")
)
@dataclass(frozen=True)
class FactoredLogits:
    """Logits as a product that is not multiplied out: softcap(hidden · kernel), of which the first `vocab_size`
    columns count."""

    hidden_BTD: jax.Array
    kernel_DV: jax.Array
    vocab_size: int
    softcap: float | None = None

    def logits(self) -> jax.Array:
        """The logits [..., vocab_size], float32, multiplied out."""
        raw = jnp.einsum("...d,dv->...v", self.hidden_BTD, self.kernel_DV, preferred_element_type=jnp.float32)
        return _capped(raw, self.softcap)[..., : self.vocab_size]


@dataclass(frozen=True)
class LossSettings:
    """What is added to the negative log-likelihood, and how many tokens a device projects at once (0: all)."""

    z_loss: float = 0.0
    label_smoothing: float = 0.0
    chunk_tokens: int = 0


class LossSums(NamedTuple):
    """Sums over valid tokens, float32 scalars: the differentiable loss, and the plain negative log-likelihood in
    nats."""

    loss: jax.Array
    negative_log_likelihood: jax.Array


def cross_entropy(
    prediction: FactoredLogits | jax.Array, targets_BT: jax.Array, mask_BT: jax.Array, settings: LossSettings
) -> LossSums:
    """Σ over tokens with mask of  lse(z) − (1−ε)·z[target] − ε·mean(z) + w·lse(z)²  (ε label smoothing, w z-loss).

    Args:
      prediction: `FactoredLogits`, or logits [B, T, vocabulary] from a model that multiplies them out itself.
      targets_BT: int32 token ids.
      mask_BT: True where a token counts.
    """
    if isinstance(prediction, jax.Array):
        loss, nll, _ = _token_losses(prediction, targets_BT, prediction.shape[-1], 0, (), settings)
        sums = jnp.where(mask_BT, loss, 0.0).sum(), jnp.where(mask_BT, nll, 0.0).sum()
    else:
        head = _Head(prediction.vocab_size, prediction.softcap, settings)
        sums = _factored(head, prediction.hidden_BTD, prediction.kernel_DV, targets_BT, mask_BT)
    return LossSums(sums[0], jax.lax.stop_gradient(sums[1]))


@dataclass(frozen=True)
class _Head:
    """What is known of the projection and its loss when compiling."""

    vocab_size: int
    softcap: float | None
    settings: LossSettings


Sums = tuple[jax.Array, jax.Array]
SumsAndGradients = tuple[jax.Array, jax.Array, jax.Array, jax.Array]


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _factored(
    head: _Head, hidden_BTD: jax.Array, kernel_DV: jax.Array, targets_BT: jax.Array, mask_BT: jax.Array
) -> Sums:
    return _on_mesh(head, False, hidden_BTD, kernel_DV, targets_BT, mask_BT)  # type: ignore[return-value]


def _factored_forward(
    head: _Head, hidden_BTD: jax.Array, kernel_DV: jax.Array, targets_BT: jax.Array, mask_BT: jax.Array
) -> tuple[Sums, tuple[jax.Array, jax.Array, jax.Array]]:
    loss, nll, *gradients = _on_mesh(head, True, hidden_BTD, kernel_DV, targets_BT, mask_BT)
    return (loss, nll), (gradients[0], gradients[1], jnp.zeros((), kernel_DV.dtype))


def _factored_backward(
    head: _Head, residuals: tuple[jax.Array, jax.Array, jax.Array], cotangents: Sums
) -> tuple[jax.Array, jax.Array, None, None]:
    dhidden, dkernel, kernel_format = residuals
    weight = cotangents[0] / _magnified(dhidden.dtype)
    return (weight * dhidden).astype(dhidden.dtype), (weight * dkernel).astype(kernel_format.dtype), None, None


_factored.defvjp(_factored_forward, _factored_backward)


@dataclass(frozen=True)
class _Axes:
    """Mesh axes that the local computation reduces over, and the format in which the kernel's gradient is summed."""

    vocab: tuple[str, ...] = ()
    tokens: tuple[str, ...] = ()
    scatter_hidden: tuple[str, ...] = ()
    scatter_kernel: tuple[str, ...] = ()
    kernel_format: str = "float32"


def _on_mesh(
    head: _Head,
    with_gradients: bool,
    hidden_BTD: jax.Array,
    kernel_DV: jax.Array,
    targets_BT: jax.Array,
    mask_BT: jax.Array,
) -> Sums | SumsAndGradients:
    """`_local_sums` on each device's tokens and columns, every mesh axis manual."""
    execution = current_execution()
    local = partial(_local_sums, head, with_gradients)
    if execution.mesh is None:
        return local(_Axes(), hidden_BTD, kernel_DV, targets_BT, mask_BT)
    axes, specs = _layout(execution, hidden_BTD.shape, kernel_DV.shape)
    scalar = PartitionSpec()
    return device_by_device(
        execution,
        partial(local, axes),
        in_specs=(specs["hidden"], specs["kernel"], specs["tokens"], specs["tokens"]),
        out_specs=(scalar, scalar, specs["dhidden"], specs["dkernel"]) if with_gradients else (scalar, scalar),
    )(hidden_BTD, constrain_stored(kernel_DV, ("embed", "vocab")), targets_BT, mask_BT)


def _layout(
    execution: Execution, hidden_shape: tuple[int, ...], kernel_shape: tuple[int, ...]
) -> tuple[_Axes, dict[str, PartitionSpec]]:
    used, stored = execution.activations, execution.gradients
    vocab = active_axes(execution, used, "vocab")
    axes = _Axes(
        vocab=vocab,
        tokens=active_axes(execution, used, "batch") + active_axes(execution, used, "sequence"),
        scatter_hidden=tuple(axis for axis in active_axes(execution, used, "residual_sequence") if axis in vocab),
        scatter_kernel=active_axes(execution, stored, "embed"),
        kernel_format=reduction_format(),
    )
    spec = partial(spec_of, execution, "cross-entropy")
    return axes, {
        "hidden": spec(hidden_shape, ("batch", "sequence", "embed"), used),
        "tokens": spec(hidden_shape[:2], ("batch", "sequence"), used),
        "kernel": spec(kernel_shape, ("embed", "vocab"), used),
        "dhidden": spec(hidden_shape, ("batch", "residual_sequence", "embed"), used),
        "dkernel": spec(kernel_shape, ("embed", "vocab"), stored),
    }


def _local_sums(
    head: _Head,
    with_gradients: bool,
    axes: _Axes,
    hidden_BTD: jax.Array,
    kernel_DV: jax.Array,
    targets_BT: jax.Array,
    mask_BT: jax.Array,
) -> Sums | SumsAndGradients:
    """Sums over this device's tokens and columns, chunk by chunk; then one reduction of each result over the mesh."""
    B, T, D = hidden_BTD.shape
    num_tokens = B * T
    num_chunks = math.ceil(num_tokens / (head.settings.chunk_tokens or num_tokens))
    size = math.ceil(num_tokens / num_chunks)
    padding = num_chunks * size - num_tokens

    def chunked(x: jax.Array) -> jax.Array:
        flat = x.reshape(num_tokens, *x.shape[2:])
        return jnp.pad(flat, ((0, padding), *((0, 0),) * (flat.ndim - 1))).reshape(num_chunks, size, *x.shape[2:])

    first_column = axis_index(axes.vocab) * kernel_DV.shape[1]
    chunk = partial(_chunk, head, with_gradients, axes.vocab, first_column, kernel_DV)
    start = (jnp.zeros(()), jnp.zeros(()), jnp.zeros(kernel_DV.shape, jnp.float32) if with_gradients else None)
    xs = (chunked(hidden_BTD), chunked(targets_BT), chunked(mask_BT))
    (loss, nll, dkernel_DV), dhidden = jax.lax.scan(chunk, start, xs)
    sums = jax.lax.psum(jnp.stack([loss, nll]), axes.tokens) if axes.tokens else jnp.stack([loss, nll])
    if not with_gradients:
        return sums[0], sums[1]
    assert dkernel_DV is not None
    assert dhidden is not None
    dhidden_BTD = dhidden.reshape(num_chunks * size, D)[:num_tokens].reshape(B, T, D)
    dhidden_BTD = reduced(dhidden_BTD, axes.vocab, axes.scatter_hidden, dim=1)
    dkernel_DV = reduced(dkernel_DV.astype(axes.kernel_format), axes.tokens, axes.scatter_kernel, dim=0)
    return sums[0], sums[1], dhidden_BTD.astype(hidden_BTD.dtype), dkernel_DV.astype(jnp.float32)


def _chunk(
    head: _Head,
    with_gradients: bool,
    vocab_axes: tuple[str, ...],
    first_column: jax.Array | int,
    kernel_DV: jax.Array,
    carry: tuple[jax.Array, jax.Array, jax.Array | None],
    chunk: tuple[jax.Array, jax.Array, jax.Array],
) -> tuple[tuple[jax.Array, jax.Array, jax.Array | None], jax.Array | None]:
    """Adds one chunk's losses, and its part of the kernel's gradient, to the carry; returns the gradient of its hidden
    states."""
    loss_sum, nll_sum, dkernel_DV = carry
    hidden_ND, targets_N, mask_N = chunk
    raw_NV = jnp.einsum("nd,dv->nv", hidden_ND, kernel_DV, preferred_element_type=jnp.float32)
    capped_NV = _capped(raw_NV, head.softcap)
    loss_N, nll_N, gradient = _token_losses(
        capped_NV, targets_N, head.vocab_size, first_column, vocab_axes, head.settings
    )
    loss_sum += jnp.where(mask_N, loss_N, 0.0).sum()
    nll_sum += jnp.where(mask_N, nll_N, 0.0).sum()
    if not with_gradients:
        return (loss_sum, nll_sum, None), None
    dz_NV = jnp.where(mask_N[:, None], gradient(), 0.0)
    if head.softcap is not None:
        dz_NV *= 1.0 - jnp.square(capped_NV / head.softcap)
    dz_NV = (dz_NV * _magnified(hidden_ND.dtype)).astype(hidden_ND.dtype)
    assert dkernel_DV is not None
    dkernel_DV += jnp.einsum("nd,nv->dv", hidden_ND, dz_NV, preferred_element_type=jnp.float32)
    dhidden_ND = jnp.einsum("nv,dv->nd", dz_NV, kernel_DV, preferred_element_type=jnp.float32)
    return (loss_sum, nll_sum, dkernel_DV), dhidden_ND


def _token_losses(
    z: jax.Array,
    targets: jax.Array,
    vocab_size: int,
    first_column: jax.Array | int,
    vocab_axes: tuple[str, ...],
    settings: LossSettings,
) -> tuple[jax.Array, jax.Array, Callable[[], jax.Array]]:
    """Loss and negative log-likelihood [...] of logits z [..., columns], and a function that gives ∂loss/∂z.

    Columns from `vocab_size` on are padding: they get no probability, no smoothing and no gradient.
    """
    column = first_column + jax.lax.broadcasted_iota(jnp.int32, z.shape, z.ndim - 1)
    counts = column < vocab_size
    is_target = column == targets[..., None]
    z = jnp.where(counts, z.astype(jnp.float32), _EXCLUDED)
    largest = jax.lax.stop_gradient(z).max(-1)
    if vocab_axes:
        largest = jax.lax.pmax(largest, vocab_axes)
    exponentials = jnp.exp(z - largest[..., None])
    parts = [exponentials.sum(-1), jnp.where(is_target, z, 0.0).sum(-1)]
    if settings.label_smoothing:
        parts.append(jnp.where(counts, z, 0.0).sum(-1) / vocab_size)
    sums = jax.lax.psum(jnp.stack(parts), vocab_axes) if vocab_axes else jnp.stack(parts)
    normaliser, target = sums[0], sums[1]
    lse = largest + jnp.log(normaliser)
    nll = lse - target
    smoothing, weight = settings.label_smoothing, settings.z_loss
    loss = nll + weight * jnp.square(lse)
    if smoothing:
        loss += smoothing * (target - sums[2])

    def gradient() -> jax.Array:
        probabilities = exponentials * ((1.0 + 2.0 * weight * lse) / normaliser)[..., None]
        return (
            probabilities - jnp.where(is_target, 1.0 - smoothing, 0.0) - jnp.where(counts, smoothing / vocab_size, 0.0)
        )

    return loss, nll, gradient


def _magnified(dtype: jnp.dtype) -> float:
    """The factor of gradients that are kept between the passes: small probabilities vanish in float16 as they are."""
    return 256.0 if dtype == jnp.float16 else 1.0


def _capped(z: jax.Array, softcap: float | None) -> jax.Array:
    return z if softcap is None else softcap * jnp.tanh(z / softcap)
