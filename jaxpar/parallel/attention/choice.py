"""Which implementation of attention runs, and why."""

from collections.abc import Callable
from dataclasses import dataclass
from difflib import get_close_matches

import jax
import jax.numpy as jnp

__all__ = ["BLOCKWISE_MIN_TOKENS", "IMPLEMENTATIONS", "choose"]

IMPLEMENTATIONS = ("reference", "blockwise", "cudnn", "pallas", "splash")

BLOCKWISE_MIN_TOKENS = 256
"""Sequences from this length on are faster blockwise on a CPU.

CPU seconds of forward and backward against the reference's, 8 heads of 64, float32 and bfloat16, jax 0.10.2 and 0.12:
equal at 128 tokens, 0.55 to 0.85 at 256, 0.3 to 0.65 at 512, 0.2 to 0.3 at 2048.
"""

_KEY = "kernels.attention"
_PALLAS_MAX_HEAD_DIM = 128


def choose(
    implementation: str,
    *,
    platform: str,
    sequence_length: int,
    head_dim: int,
    dtype: jax.typing.DTypeLike,
    has_segments: bool,
    window: int | None,
    softcap: float | None,
) -> tuple[str, str]:
    """The implementation that runs for `kernels.attention` = `implementation`, and the reason, for the log.

    Args:
      platform: "cpu", "gpu" or "tpu".
      sequence_length, head_dim, dtype, window, softcap: of the attention that will run.
      has_segments: sequences are packed, and attention stays within a document.

    Raises:
      ValueError: `implementation` is unknown, or is forced and cannot run.

    >>> form = {"head_dim": 64, "dtype": "float32", "has_segments": True, "window": None, "softcap": None}
    >>> choose("auto", platform="cpu", sequence_length=512, **form)[0]
    'blockwise'
    """
    form = _Form(platform, sequence_length, head_dim, jnp.dtype(dtype), has_segments, window, softcap)
    if implementation == "auto":
        return _fastest(form)
    if implementation not in IMPLEMENTATIONS:
        near = get_close_matches(implementation, ("auto", *IMPLEMENTATIONS), n=1)
        hint = f'; did you mean "{near[0]}"?' if near else ""
        legal = ", ".join(f'"{name}"' for name in ("auto", *IMPLEMENTATIONS))
        raise ValueError(f'{_KEY}="{implementation}" is unknown; legal values: {legal}{hint}')
    obstacles = _OBSTACLES[implementation](form)
    if obstacles:
        raise ValueError(f'{_KEY}="{implementation}" cannot run: {"; ".join(obstacles)}; take "auto" or "blockwise"')
    return implementation, f"set by {_KEY}"


@dataclass(frozen=True)
class _Form:
    """The attention that is asked for."""

    platform: str
    sequence_length: int
    head_dim: int
    dtype: jnp.dtype
    has_segments: bool
    window: int | None
    softcap: float | None


def _fastest(form: _Form) -> tuple[str, str]:
    if form.platform == "tpu":
        return "splash", "the TPU's flash attention kernel"
    if form.platform == "gpu":
        cudnn_obstacles = _cudnn_obstacles(form, max_head_dim=128)
        if not cudnn_obstacles:
            return "cudnn", "the GPU's flash attention kernel"
        without_cudnn = f"cuDNN cannot run: {'; '.join(cudnn_obstacles)}"
        pallas_obstacles = _pallas_obstacles(form)
        if not pallas_obstacles:
            return "pallas", f"JAX's flash attention kernel for GPUs; {without_cudnn}"
        without_pallas = f"Pallas cannot run: {'; '.join(pallas_obstacles)}"
        return "blockwise", f"memory linear in the sequence; {without_cudnn}; {without_pallas}"
    if form.platform == "cpu" and form.sequence_length < BLOCKWISE_MIN_TOKENS:
        return (
            "reference",
            f"the fastest on a CPU below {BLOCKWISE_MIN_TOKENS} tokens; there are {form.sequence_length}",
        )
    return "blockwise", "faster than the reference, and its memory is linear in the sequence"


def _cudnn_obstacles(form: _Form, max_head_dim: int = 256) -> list[str]:
    """Why cuDNN cannot run. Every supported GPU takes head dims up to 128, Hopper and later up to 256."""
    obstacles = []
    if form.platform != "gpu":
        obstacles.append(f"it needs an NVIDIA GPU, the backend is {form.platform}")
    if form.dtype not in (jnp.bfloat16, jnp.float16):
        obstacles.append(f"it needs precision.compute of 16 bits, not {form.dtype}")
    if form.head_dim % 8 or form.head_dim > max_head_dim:
        obstacles.append(f"it needs a head dim that is a multiple of 8 and at most {max_head_dim}, not {form.head_dim}")
    if form.sequence_length % 2:
        obstacles.append(f"it needs an even data.sequence_length, not {form.sequence_length}")
    if form.softcap is not None:
        obstacles.append(f"it has no soft cap on scores, and the model's is {form.softcap}")
    if form.has_segments:
        obstacles.append(
            'it cannot keep attention within packed documents (data.document_boundaries="ignore" drops that)'
        )
    return obstacles


def _pallas_obstacles(form: _Form) -> list[str]:
    """Why JAX's Pallas kernel for GPUs cannot run. Its float32 products are rounded to TF32: 16 bits only."""
    obstacles = []
    if form.platform != "gpu":
        obstacles.append(f"it needs a GPU, the backend is {form.platform}")
    if form.dtype not in (jnp.bfloat16, jnp.float16):
        obstacles.append(f"it needs precision.compute of 16 bits, not {form.dtype}")
    if form.head_dim % 16 or form.head_dim > _PALLAS_MAX_HEAD_DIM:
        obstacles.append(
            f"it needs a head dim that is a multiple of 16 and at most {_PALLAS_MAX_HEAD_DIM}, not {form.head_dim}"
        )
    if form.window is not None:
        obstacles.append(f"it has no window, and the model's is {form.window} tokens")
    if form.softcap is not None:
        obstacles.append(f"it has no soft cap on scores, and the model's is {form.softcap}")
    return obstacles


def _splash_obstacles(form: _Form) -> list[str]:
    return [] if form.platform == "tpu" else [f"it needs a TPU, the backend is {form.platform}"]


def _no_obstacles(form: _Form) -> list[str]:
    return []


_OBSTACLES: dict[str, Callable[[_Form], list[str]]] = {
    "reference": _no_obstacles,
    "blockwise": _no_obstacles,
    "cudnn": _cudnn_obstacles,
    "pallas": _pallas_obstacles,
    "splash": _splash_obstacles,
}
