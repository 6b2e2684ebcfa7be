"""The opponent of `step.py`: the same Llama-like training step written by hand in plain JAX, without names, rules or
plans.

Shapes: B batch, T sequence, D embed, H heads, N head width, F feed-forward width, V vocabulary. Every weight is one
matrix.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax

__all__ = ["Settings", "make_train_step"]


@dataclass(frozen=True)
class Settings:
    """The forms among which the fastest is looked for; none changes the mathematics."""

    unroll_layers: bool = False
    attention_block: int = 0
    """Query tokens a block; 0 holds all scores."""
    float32_products: bool = False
    transposed_weight_gradients: bool = False


def make_train_step(
    num_heads: int, dtype: str, learning_rate: float, max_norm: float, settings: Settings
) -> tuple[optax.GradientTransformation, Callable]:
    """The optimizer, and `step(params, optimizer state, tokens, targets) -> (params, optimizer state, loss)`,
    jitted."""
    optimizer = optax.chain(optax.clip_by_global_norm(max_norm), optax.adamw(learning_rate, b2=0.95, weight_decay=0.1))

    def loss_fn(params: Any, tokens: jax.Array, targets: jax.Array) -> jax.Array:
        cast = jax.tree.map(lambda p: p.astype(dtype) if p.ndim > 1 else p, params)
        return _loss(cast, tokens, targets, num_heads, settings)

    @partial(jax.jit, donate_argnums=(0, 1))
    def step(params: Any, state: Any, tokens: jax.Array, targets: jax.Array) -> tuple[Any, Any, jax.Array]:
        loss, grads = jax.value_and_grad(loss_fn)(params, tokens, targets)
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state, loss

    return optimizer, step


def _matmul(settings: Settings) -> Callable[[jax.Array, jax.Array], jax.Array]:
    def product(x: jax.Array, w: jax.Array) -> jax.Array:
        if settings.float32_products:
            return jnp.dot(x, w, preferred_element_type=jnp.float32).astype(x.dtype)
        return jnp.dot(x, w)

    if not settings.transposed_weight_gradients:
        return product

    @jax.custom_vjp
    def matmul(x: jax.Array, w: jax.Array) -> jax.Array:
        return product(x, w)

    def backward(residuals: tuple[jax.Array, jax.Array], dy: jax.Array) -> tuple[jax.Array, jax.Array]:
        x, w = residuals
        x_t = jax.lax.optimization_barrier(x.reshape(-1, x.shape[-1]).T)
        return product(dy, w.T), product(x_t, dy.reshape(-1, dy.shape[-1]))

    matmul.defvjp(lambda x, w: (matmul(x, w), (x, w)), backward)
    return matmul


def _loss(params: Any, tokens_BT: jax.Array, targets_BT: jax.Array, num_heads: int, settings: Settings) -> jax.Array:
    matmul = _matmul(settings)
    T = tokens_BT.shape[1]
    N = params["layers"]["query"].shape[-1] // num_heads
    angles = jnp.arange(T)[:, None] * 10_000.0 ** (-jnp.arange(0, N, 2) / N)[None]
    rotary = jnp.cos(angles)[None, :, None], jnp.sin(angles)[None, :, None]

    def layer(x: jax.Array, p: Any) -> tuple[jax.Array, None]:
        h = _rms_norm(x, p["attention_norm"])
        q, k, v = (matmul(h, p[name]).reshape(*h.shape[:2], num_heads, N) for name in ("query", "key", "value"))
        out = _attention(_rotate(q, rotary), _rotate(k, rotary), v, settings.attention_block)
        x = x + matmul(out.reshape(x.shape), p["output"])
        h = _rms_norm(x, p["mlp_norm"])
        return x + matmul(jax.nn.silu(matmul(h, p["gate"])) * matmul(h, p["up"]), p["down"]), None

    x = params["embedding"][tokens_BT]
    x, _ = jax.lax.scan(layer, x, params["layers"], unroll=settings.unroll_layers)
    h = _rms_norm(x, params["final_norm"]).reshape(-1, x.shape[-1])
    logits = matmul(h, params["head"]).astype(jnp.float32)
    return optax.softmax_cross_entropy_with_integer_labels(logits, targets_BT.reshape(-1)).mean()


def _rms_norm(x: jax.Array, scale: jax.Array) -> jax.Array:
    x32 = x.astype(jnp.float32)
    y = x32 * jax.lax.rsqrt(jnp.square(x32).mean(-1, keepdims=True) + 1e-5) * scale
    return y.astype(x.dtype)


def _rotate(x: jax.Array, rotary: tuple[jax.Array, jax.Array]) -> jax.Array:
    a, b = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    cosines, sines = rotary
    return jnp.concatenate([a * cosines - b * sines, b * cosines + a * sines], axis=-1).astype(x.dtype)


def _attention(q_BTHN: jax.Array, k_BTHN: jax.Array, v_BTHN: jax.Array, block: int) -> jax.Array:
    """Causal attention; in blocks of queries that see the keys before their end only, recomputed in the backward
    pass."""

    def rows(q: jax.Array, k: jax.Array, v: jax.Array, first: int) -> jax.Array:
        scores = jnp.einsum("bthn,bshn->bhts", q, k, preferred_element_type=jnp.float32) * q.shape[-1] ** -0.5
        visible = first + jnp.arange(q.shape[1])[:, None] >= jnp.arange(k.shape[1])[None]
        weights = jax.nn.softmax(jnp.where(visible[None, None], scores, -1e30), axis=-1).astype(v.dtype)
        return jnp.einsum("bhts,bshn->bthn", weights, v)

    T = q_BTHN.shape[1]
    if not block:
        return rows(q_BTHN, k_BTHN, v_BTHN, 0)
    parts = [
        jax.checkpoint(partial(rows, first=first))(
            q_BTHN[:, first : first + block], k_BTHN[:, : first + block], v_BTHN[:, : first + block]
        )
        for first in range(0, T, block)
    ]
    return jnp.concatenate(parts, axis=1)
