"""Adam, its moments kept in float32, bfloat16 or 8 bits."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from jaxpar.config.optimizers import AdamW, AdamW8bit
from jaxpar.optim.quantization import dequantized, num_blocks, quantized, zero_code
from jaxpar.optim.rounding import stochastically_rounded
from jaxpar.optim.rule import Arrays, Context, Rounding, Rule
from jaxpar.parallel.rules import LogicalAxes

__all__ = ["FLOAT32", "MomentFormat", "adam", "adamw", "adamw8bit"]


class MomentFormat(NamedTuple):
    """How the moment called "first" or "second" is kept: its zeros, how it is read, and how it is written.

    `save` may round at random, with the key.
    """

    zeros: Callable[[str, jax.Array], Arrays]
    load: Callable[[str, Arrays], jax.Array]
    save: Callable[[str, jax.Array, Callable[[str], jax.Array]], Arrays]


FLOAT32 = MomentFormat(
    zeros=lambda name, parameter: {name: jnp.zeros_like(parameter)},
    load=lambda name, arrays: arrays[name],
    save=lambda name, moment, key: {name: moment},
)


def adamw(config: AdamW, path: str, axes: LogicalAxes) -> Rule:
    """`adam` with moments in the configured format."""
    moments = FLOAT32 if config.moments == "float32" else _bfloat16(config.moment_rounding)
    return adam(config.beta1, config.beta2, config.epsilon, lambda parameter: moments)


def adamw8bit(config: AdamW8bit, path: str, axes: LogicalAxes) -> Rule:
    """`adam` with large parameters' moments in 8 bits (Dettmers 2022)."""
    blockwise = _blockwise(config.block_size)
    return adam(
        config.beta1,
        config.beta2,
        config.epsilon,
        lambda parameter: blockwise if parameter.size >= config.min_size else FLOAT32,
    )


def adam(beta1: float, beta2: float, epsilon: float, moments_of: Callable[[jax.Array], MomentFormat]) -> Rule:
    """Adam (Kingma and Ba 2015, algorithm 1); `moments_of` chooses a parameter's format by its shape.

    m ← β1·m + (1 − β1)·g, v ← β2·v + (1 − β2)·g², and at step t = 1, 2, ... the step
    rate · m/(1 − β1^t) / (√(v/(1 − β2^t)) + epsilon), computed from the moments before they are rounded.
    """
    transform = optax.scale_by_adam(beta1, beta2, epsilon)

    def init(parameter: jax.Array) -> Arrays:
        moments = moments_of(parameter)
        return moments.zeros("first", parameter) | moments.zeros("second", parameter)

    def step(gradient: jax.Array, arrays: Arrays, parameter: jax.Array, context: Context) -> tuple[jax.Array, Arrays]:
        moments = moments_of(parameter)
        first, second = moments.load("first", arrays), moments.load("second", arrays)
        direction, state = transform.update(gradient, optax.ScaleByAdamState(context.count, first, second))
        saved = moments.save("first", state.mu, context.key) | moments.save("second", state.nu, context.key)
        return context.rate * direction, saved

    return Rule(init, step)


def _bfloat16(rounding: Rounding) -> MomentFormat:
    """Half the bytes. Rounded to nearest, a moment that changes by less than half its last bit does not change at all,
    for ever; rounded at random it is right on average."""

    def save(name: str, moment: jax.Array, key: Callable[[str], jax.Array]) -> Arrays:
        if rounding == "stochastic":
            return {name: stochastically_rounded(moment, key(name))}
        return {name: moment.astype(jnp.bfloat16)}

    return MomentFormat(
        zeros=lambda name, parameter: {name: jnp.zeros_like(parameter, jnp.bfloat16)},
        load=lambda name, arrays: arrays[name].astype(jnp.float32),
        save=save,
    )


def _blockwise(block_size: int) -> MomentFormat:
    """A quarter of the bytes and a little: codes of the parameter's shape, and a float32 scale for each block."""

    def zeros(name: str, parameter: jax.Array) -> Arrays:
        codes = jnp.full(parameter.shape, zero_code(signed=name == "first"), jnp.uint8)
        scales = jnp.zeros((*parameter.shape[:-1], num_blocks(parameter.shape[-1], block_size)), jnp.float32)
        return {f"{name}_codes": codes, f"{name}_scales": scales}

    def load(name: str, arrays: Arrays) -> jax.Array:
        codes, scales = arrays[f"{name}_codes"], arrays[f"{name}_scales"]
        return dequantized(codes, scales, block_size, signed=name == "first")

    def save(name: str, moment: jax.Array, key: Callable[[str], jax.Array]) -> Arrays:
        codes, scales = quantized(moment, block_size, signed=name == "first")
        return {f"{name}_codes": codes, f"{name}_scales": scales}

    return MomentFormat(zeros, load, save)
