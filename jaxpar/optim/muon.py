"""Muon (Jordan 2024): the momentum of a matrix, orthogonalised."""

import jax
import jax.numpy as jnp
from optax import contrib

from jaxpar.config.optimizers import Muon
from jaxpar.optim.adam import FLOAT32, adam
from jaxpar.optim.matrices import from_matrix, matrix_view, to_matrix
from jaxpar.optim.rule import Arrays, Context, Rule
from jaxpar.parallel.rules import LogicalAxes

__all__ = ["ADAM_RMS", "is_hidden_matrix", "muon"]

ADAM_RMS = 0.2
"""Root mean square of AdamW's steps in practice, divided by the learning rate (Liu 2025, section 2.2)."""

_TABLES = ("vocab", "positions")


def muon(config: Muon, path: str, axes: LogicalAxes) -> Rule:
    """m ← β·m + (1 − β)·g; the step rate · 0.2·√max(rows, columns) · orthogonalised(m), AdamW where Muon does not fit.

    With Nesterov's momentum β·m + (1 − β)·g is orthogonalised. An orthogonalised matrix has singular values of about
    1, so that its root mean square is 1/√max(rows, columns) and the step's about that of AdamW (Liu 2025, equation 4):
    both share the learning rate. The products have JAX's default precision for float32; bfloat16 is enough (Jordan).
    """
    if not is_hidden_matrix(path, axes):
        return adam(config.adam_beta1, config.adam_beta2, config.adam_epsilon, lambda parameter: FLOAT32)
    view = matrix_view(path, axes)
    assert view is not None
    # Optax's own momentum is another one (bias-corrected as Nadam's is), so that it is switched off.
    transform = contrib.scale_by_muon(ns_steps=config.ns_steps, beta=0.0, nesterov=False)

    def init(parameter: jax.Array) -> Arrays:
        return {"first": jnp.zeros_like(parameter)}

    def step(gradient: jax.Array, arrays: Arrays, parameter: jax.Array, context: Context) -> tuple[jax.Array, Arrays]:
        momentum = config.momentum * arrays["first"] + (1 - config.momentum) * gradient
        ahead = config.momentum * momentum + (1 - config.momentum) * gradient if config.nesterov else momentum
        matrix = to_matrix(ahead, view)
        orthogonal, _ = transform.update(matrix, transform.init(matrix))
        size = ADAM_RMS * max(matrix.shape) ** 0.5
        return context.rate * size * from_matrix(orthogonal, view, parameter.shape), {"first": momentum}

    return Rule(init, step)


def is_hidden_matrix(path: str, axes: LogicalAxes) -> bool:
    """Whether Muon updates the parameter: a matrix that is neither a table of vectors nor the output kernel."""
    return matrix_view(path, axes) is not None and not any(axis in _TABLES for axis in axes)
