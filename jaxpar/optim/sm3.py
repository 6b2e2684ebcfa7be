"""SM3 (Anil, Gupta, Koren and Singer 2019): AdaGrad with statistics of rows and columns."""

import jax
import jax.numpy as jnp

from jaxpar.config.optimizers import SM3
from jaxpar.optim.matrices import from_matrix, matrix_shape, matrix_view, to_matrix
from jaxpar.optim.rule import Arrays, Context, Rule
from jaxpar.parallel.rules import LogicalAxes

__all__ = ["sm3"]


def sm3(config: SM3, path: str, axes: LogicalAxes) -> Rule:
    """The step rate · g/√ν with 0/0 = 0, where the sets r that cover an element are its row and its column: the cover
    by dims (section 4 of the paper) of the parameter as a matrix, `jaxpar.optim.matrices.matrix_view`.

    SM3-I: μ(r) ← μ(r) + max over r of g²; ν = min over the element's sets of μ(r).
    SM3-II: ν = min over the element's sets of μ(r) + g²; μ(r) ← max over r of ν.

    Each element of a vector is a set of its own, which makes both AdaGrad. With momentum the step is the average
    m ← β·m + (1 − β)·g/√ν, times the rate.
    """
    view = matrix_view(path, axes)

    def init(parameter: jax.Array) -> Arrays:
        momentum = {"first": jnp.zeros_like(parameter)} if config.momentum else {}
        if view is None:
            return momentum | {"second": jnp.zeros_like(parameter)}
        num_rows, num_columns = matrix_shape(parameter.shape, view)
        return momentum | {"rows": jnp.zeros(num_rows, jnp.float32), "columns": jnp.zeros(num_columns, jnp.float32)}

    def step(gradient: jax.Array, arrays: Arrays, parameter: jax.Array, context: Context) -> tuple[jax.Array, Arrays]:
        if view is None:
            sums = arrays["second"] + jnp.square(gradient)
            new = {"second": sums}
        else:
            squares = jnp.square(to_matrix(gradient, view))
            bounds, new = _bounds(config.variant, squares, arrays["rows"], arrays["columns"])
            sums = from_matrix(bounds, view, parameter.shape)
        direction = jnp.where(sums > 0, gradient * jax.lax.rsqrt(sums), 0.0)
        if config.momentum:
            direction = config.momentum * arrays["first"] + (1 - config.momentum) * direction
            new["first"] = direction
        return context.rate * direction, new

    return Rule(init, step)


def _bounds(variant: str, squares: jax.Array, rows: jax.Array, columns: jax.Array) -> tuple[jax.Array, Arrays]:
    """ν of each element [rows, columns], and the new statistics."""
    if variant == "I":
        rows, columns = rows + squares.max(1), columns + squares.max(0)
        return jnp.minimum(rows[:, None], columns[None, :]), {"rows": rows, "columns": columns}
    bounds = jnp.minimum(rows[:, None], columns[None, :]) + squares
    return bounds, {"rows": bounds.max(1), "columns": bounds.max(0)}
