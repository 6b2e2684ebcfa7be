"""Operands of matrix products in float8, each tensor with one scale of its own (current scaling).

An array x is read as values · scale, float32, with scale = max|x| / m and values = round(x / scale) in a float8 format
whose largest number is m; a product of two is (values · values) · (scale · scale), summed in float32. Operands of the
forward pass are e4m3 (3 bits of mantissa, m = 448), gradients e5m2 (2 bits and a wider range, m = 57344), as
Micikevicius 2022, "FP8 formats for deep learning", section 3, recommends. The maximum is over the logical tensor: how
it is split over devices changes nothing, and costs a reduction of one scalar over the devices that share the tensor.

Rounding is Flax's (`flax.linen.fp8_ops`); its `compute_scale` is not used, because it keeps the old scale for a tensor
with infinities, which are then cut to m where no check finds them, and makes 0/0 of a tensor below 1e-36.
"""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax.linen import fp8_ops

from jaxpar.parallel.constrain import current_execution, manual_batch_axes

__all__ = ["FORWARD", "GRADIENT", "Operand", "read", "read_together", "rescaled"]

FORWARD = jnp.float8_e4m3fn
GRADIENT = jnp.float8_e5m2


class Operand(NamedTuple):
    """What a matrix product reads: `values`, in float8 times the scalar `scale`."""

    values: jax.Array
    scale: jax.Array | None = None

    @property
    def precision(self) -> jax.lax.Precision | None:
        """Of the operand's products. Float8 ones are summed by cuBLAS in less than float32 unless told HIGHEST."""
        return None if self.scale is None else jax.lax.Precision.HIGHEST


def read(x: jax.Array, float8: jnp.dtype) -> Operand:
    """`x` as the active execution's products read it: itself, or rounded to the format `float8`.

    >>> from jaxpar.parallel.constrain import Execution
    >>> with Execution(products="emulated_float8").active():
    ...     read(jnp.array([0.0, 3.0, 112.0]), FORWARD)
    Operand(values=Array([  0.,  12., 448.], dtype=float32), scale=Array(0.25, dtype=float32))
    """
    (values,), scale = read_together([x], float8)
    return Operand(values, scale)


def read_together(arrays: Sequence[jax.Array], float8: jnp.dtype) -> tuple[list[jax.Array], jax.Array | None]:
    """The values of several arrays, and the scale that they share.

    Emulated, the values keep their array's dtype; every float8 number is one of any of the compute formats.
    """
    products = current_execution().products
    if products == "compute":
        return list(arrays), None
    # In float32 before the reduction: 16-bit maxima over devices crash XLA:CPU in partly manual shard_maps.
    largest = [jnp.max(jnp.abs(x.astype(jnp.float32))) for x in arrays]
    largest_of_all = jnp.max(jnp.stack(largest))
    if axes := manual_batch_axes():
        # Each device has its own sequences only; what every device has whole is the same there and here.
        largest_of_all = jax.lax.pmax(largest_of_all, axes)
    # Not 0 for a tensor of zeros, whose values are then 0; infinite or NaN with the tensor, and so is the product.
    scale = jnp.maximum(largest_of_all / _largest(float8), jnp.finfo(jnp.float32).tiny)
    rounded = [fp8_ops.quantize(x, float8, scale, jnp.float32) for x in arrays]
    if products == "emulated_float8":
        rounded = [values.astype(x.dtype) for values, x in zip(rounded, arrays, strict=True)]
    return rounded, scale


def rescaled(product: jax.Array, x: Operand, y: Operand) -> jax.Array:
    """The product of the operands' values times their scales, in float32; itself if there are none."""
    if x.scale is None or y.scale is None:
        return product
    return fp8_ops.dequantize(product, jnp.float32, x.scale * y.scale)


def _largest(float8: jnp.dtype) -> jax.Array:
    return fp8_ops.get_fp8_max(float8, jnp.float32)
