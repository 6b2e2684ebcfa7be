"""Number formats of parameters and of the arithmetic on them."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

__all__ = ["in_compute_dtype"]


def in_compute_dtype(loss: Callable, dtype: str, axes: Mapping[str, Sequence[str | None]]) -> Callable:
    """`loss(params, ...)` with weights cast to `dtype` first; gradients come back in the parameters' own dtype.

    `axes` has every parameter's path and logical axes. Vectors (norm scales, biases), stacked over layers or not,
    stay as they are: the layers that use them compute in float32.
    """

    def cast(keys: tuple, parameter: jax.Array) -> jax.Array:
        path = jax.tree_util.keystr(keys, simple=True, separator="/")
        return parameter.astype(dtype) if sum(axis != "layers" for axis in axes[path]) >= 2 else parameter

    def cast_loss(params: Any, *args: Any) -> Any:
        return loss(jax.tree_util.tree_map_with_path(cast, params), *args)

    return loss if jnp.dtype(dtype) == jnp.float32 else cast_loss
