"""Optimizers with a momentum and nothing else: SGD and Lion."""

import jax
import jax.numpy as jnp
import optax

from jaxpar.config.optimizers import SGD, Lion
from jaxpar.optim.rule import Arrays, Context, Rule
from jaxpar.parallel.rules import LogicalAxes

__all__ = ["lion", "sgd"]


def sgd(config: SGD, path: str, axes: LogicalAxes) -> Rule:
    """m ← momentum·m + g, and the step rate·m; with Nesterov's momentum rate·(g + momentum·m)."""
    transform = optax.trace(config.momentum, nesterov=config.nesterov)

    def init(parameter: jax.Array) -> Arrays:
        return {"first": jnp.zeros_like(parameter)} if config.momentum else {}

    def step(gradient: jax.Array, arrays: Arrays, parameter: jax.Array, context: Context) -> tuple[jax.Array, Arrays]:
        if not config.momentum:
            return context.rate * gradient, {}
        direction, state = transform.update(gradient, optax.TraceState(arrays["first"]))
        return context.rate * direction, {"first": state.trace}

    return Rule(init, step)


def lion(config: Lion, path: str, axes: LogicalAxes) -> Rule:
    """The step rate·sign(β1·m + (1 − β1)·g), then m ← β2·m + (1 − β2)·g (Chen 2023, algorithm 2)."""
    transform = optax.scale_by_lion(config.beta1, config.beta2)

    def init(parameter: jax.Array) -> Arrays:
        return {"first": jnp.zeros_like(parameter)}

    def step(gradient: jax.Array, arrays: Arrays, parameter: jax.Array, context: Context) -> tuple[jax.Array, Arrays]:
        direction, state = transform.update(gradient, optax.ScaleByLionState(context.count, arrays["first"]))
        return context.rate * direction, {"first": state.mu}

    return Rule(init, step)
