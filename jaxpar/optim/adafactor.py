"""Adafactor (Shazeer and Stern 2018), put together from Optax's parts on matrix views."""

import jax
import jax.numpy as jnp
import optax

from jaxpar.config.optimizers import Adafactor
from jaxpar.optim.matrices import MatrixView, from_matrix, matrix_shape, matrix_view, to_matrix
from jaxpar.optim.rule import Arrays, Context, Rule
from jaxpar.parallel.rules import LogicalAxes

__all__ = ["adafactor", "factored_view", "relative_step"]


def adafactor(config: Adafactor, path: str, axes: LogicalAxes) -> Rule:
    """The step of algorithm 4: with β = 1 − t^−exponent and means over rows and columns of the matrix,

    rows ← β·rows + (1 − β)·mean over columns of (g² + epsilon), columns likewise,
    u = g / √(rows · columns / mean(rows)), scaled down to a root mean square of at most the threshold, times the rate
    and times the parameter's root mean square (at least `min_parameter_scale`); then the momentum's average of steps.

    Vectors, and matrices with few rows or columns, keep the whole second moment instead.
    """
    clip = optax.clip_by_block_rms(config.clipping_threshold)
    scale = optax.scale_by_param_block_rms(config.min_parameter_scale) if config.parameter_scale else optax.identity()

    def init(parameter: jax.Array) -> Arrays:
        view = factored_view(config, path, axes, parameter.shape)
        momentum = {"first": jnp.zeros_like(parameter)} if config.momentum else {}
        if view is None:
            return momentum | {"second": jnp.zeros_like(parameter)}
        num_rows, num_columns = matrix_shape(parameter.shape, view)
        return momentum | {"rows": jnp.zeros(num_rows, jnp.float32), "columns": jnp.zeros(num_columns, jnp.float32)}

    def step(gradient: jax.Array, arrays: Arrays, parameter: jax.Array, context: Context) -> tuple[jax.Array, Arrays]:
        view = factored_view(config, path, axes, parameter.shape)
        weights = parameter if view is None else to_matrix(parameter, view)
        update = gradient if view is None else to_matrix(gradient, view)
        state = _optax_state(arrays, view, weights.shape, context.count)
        # Optax would factor a bias of two large dims.
        second_moment = optax.scale_by_factored_rms(
            factored=view is not None,
            decay_rate=config.decay_exponent,
            min_dim_size_to_factor=config.min_dim_size_to_factor,
            epsilon=config.epsilon,
        )
        update, state = second_moment.update(update, state, weights)
        update, _ = clip.update(update, optax.EmptyState())
        update, _ = scale.update(context.rate * update, optax.EmptyState(), weights)
        update = update if view is None else from_matrix(update, view, parameter.shape)
        new = _arrays(state, view, weights.shape)
        if config.momentum:
            update = config.momentum * arrays["first"] + (1 - config.momentum) * update
            new["first"] = update
        return update, new

    return Rule(init, step)


def factored_view(config: Adafactor, path: str, axes: LogicalAxes, shape: tuple[int, ...]) -> MatrixView | None:
    """The matrix whose rows and columns have a statistic each; None where the second moment is kept whole."""
    view = matrix_view(path, axes)
    if view is None or min(matrix_shape(shape, view)) < config.min_dim_size_to_factor:
        return None
    return view


def relative_step(schedule: optax.Schedule) -> optax.Schedule:
    """At most 1/√t at step t = 1, 2, ...: min(10^-2, 1/√t) with the T5 variant's learning rate."""
    return lambda count: jnp.minimum(schedule(count), jax.lax.rsqrt(jnp.asarray(count + 1, jnp.float32)))


def _roles(shape: tuple[int, ...]) -> tuple[str, str]:
    """What Optax's `v_row` and `v_col` are: `v_row` belongs to the smaller dim, of equal ones to the first."""
    return ("rows", "columns") if shape[0] <= shape[1] else ("columns", "rows")


def _optax_state(
    arrays: Arrays, view: MatrixView | None, shape: tuple[int, ...], count: jax.Array
) -> optax.FactoredState:
    unused = jnp.zeros(1, jnp.float32)
    if view is None:
        return optax.FactoredState(count, v_row=unused, v_col=unused, v=arrays["second"])
    row, column = _roles(shape)
    return optax.FactoredState(count, v_row=arrays[row], v_col=arrays[column], v=unused)


def _arrays(state: optax.FactoredState, view: MatrixView | None, shape: tuple[int, ...]) -> Arrays:
    if view is None:
        return {"second": state.v}
    row, column = _roles(shape)
    return {row: state.v_row, column: state.v_col}
