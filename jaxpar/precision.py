"""Number formats of parameters and of the arithmetic on them."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

__all__ = ["in_compute_dtype"]


def in_compute_dtype(loss: Callable, dtype: str) -> Callable:
    """`loss(params, ...)` with weights cast to `dtype` first; gradients come back in the parameters' own dtype.

    Vectors (norm scales, biases) stay as they are: the layers that use them compute in float32.
    """

    def cast(parameter: jax.Array) -> jax.Array:
        return parameter.astype(dtype) if parameter.ndim >= 2 else parameter

    def cast_loss(params: Any, *args: Any) -> Any:
        return loss(jax.tree.map(cast, params), *args)

    return loss if jnp.dtype(dtype) == jnp.float32 else cast_loss
