"""Where weights meet activations: one contraction with its gather, its number formats and its backward pass.

A stored weight may be split over `fsdp`; to be used it is laid out like an activation (`embed` whole, `heads`, `mlp`
and `vocab` split over `tensor`). The backward pass gathers it again instead of keeping the gathered copy, as ZeRO-3
does, and lays the weight's gradient out like the stored weight, which is where a reduce-scatter can happen.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp

from jaxpar.parallel.constrain import (
    constrain,
    constrain_gradient,
    constrain_stored,
    current_execution,
    record_call,
    reduction_format,
)
from jaxpar.parallel.float8 import FORWARD, GRADIENT, Operand, read, read_together, rescaled
from jaxpar.parallel.rules import LogicalAxes

__all__ = ["contract"]

Fuse = Callable[..., jax.Array]


def contract(
    equation: str,
    x: jax.Array,
    kernels: Sequence[jax.Array],
    axes: Sequence[LogicalAxes],
    fuse: Fuse = lambda kernel: kernel,
    result: LogicalAxes | None = None,
) -> jax.Array:
    """`einsum(equation, x, fuse(*kernels))` in x's dtype, summed in float32; of operands rounded to float8, here and in
    the backward pass, if the active execution says so.

    Args:
      equation: an einsum of two operands, in which every index occurs in two of the three terms, or in all (of each
        of which there is a product of its own).
      x: the activation.
      kernels: stored weights; `axes` has the logical axes of each.
      fuse: rearranges or joins several weights into one, so that their input's gradient is one sum and needs one
        reduction.
      result: logical axes of the result's gradient where the backward pass reads it, if it may arrive split further
        (sequence parallelism): gathered here it is gathered once, which the automatic partitioner does not see for its
        two products inside of a partly manual shard_map.

    >>> x, w = jnp.ones((2, 3)), jnp.ones((3, 4))
    >>> contract("bd,df->bf", x, [w], [("embed", "mlp")]).shape
    (2, 4)
    """
    record_call("contract")
    return _contract(_Contraction(equation, tuple(tuple(a) for a in axes), fuse, result), x, tuple(kernels))


@dataclass(frozen=True)
class _Contraction:
    """What is known of a contraction when compiling; as `contract` says."""

    equation: str
    axes: tuple[LogicalAxes, ...]
    fuse: Fuse
    result: LogicalAxes | None


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _contract(of: _Contraction, x: jax.Array, kernels: tuple[jax.Array, ...]) -> jax.Array:
    return _forward(of, x, kernels)[0]


def _forward(of: _Contraction, x: jax.Array, kernels: tuple[jax.Array, ...]) -> tuple[jax.Array, tuple]:
    operand, (values, scale) = read(x, FORWARD), read_together(kernels, FORWARD)
    weights = _stored(values, of), scale
    # Weights that nothing was done to are kept as they are: whoever keeps residuals can see that it has them already.
    kept = weights if scale is not None else (kernels, None)
    return _product(of.equation, operand, _usable(weights, of), x.dtype), (operand, kept, kernels)


def _backward(of: _Contraction, residuals: tuple, dy: jax.Array) -> tuple[jax.Array, tuple[jax.Array, ...]]:
    # The weights as they were read: rounded again, a recomputed layer would gather them twice, because the compiler
    # does not see that two maxima over devices, and so the values behind them, are the same.
    x, (values, scale), kernels = residuals
    weights = (values if scale is not None else _stored(values, of)), scale
    terms, result = of.equation.split("->")
    x_term, kernel_term = terms.split(",")
    gradient = read(dy, GRADIENT)
    if of.result is not None:
        gradient = gradient._replace(values=constrain(gradient.values, of.result))
    dx = _product(f"{result},{kernel_term}->{x_term}", gradient, _usable(weights, of), dy.dtype)
    # In the format of the reduction until it is reduced over the devices that share the batch; scales come after, or
    # they would stand between the sum over devices and the slice that make a reduce-scatter.
    dkernel = _weight_gradient(x_term, result, kernel_term, x, gradient)
    unfuse = jax.linear_transpose(of.fuse, *(jax.ShapeDtypeStruct(kernel.shape, dkernel.dtype) for kernel in kernels))
    dkernels = unfuse(dkernel)
    reduced = (constrain_gradient(dkernel, names) for dkernel, names in zip(dkernels, of.axes, strict=True))
    return dx, tuple(
        rescaled(dkernel, x, gradient).astype(kernel.dtype) for dkernel, kernel in zip(reduced, kernels, strict=True)
    )


_contract.defvjp(_forward, _backward)


def _stored(kernels: Sequence[jax.Array], of: _Contraction) -> list[jax.Array]:
    return [constrain_stored(kernel, names) for kernel, names in zip(kernels, of.axes, strict=True)]


def _usable(weights: tuple[list[jax.Array], jax.Array | None], of: _Contraction) -> Operand:
    """The weights gathered and joined; they are rounded to float8 before, so that fewer bytes travel."""
    values, scale = weights
    return Operand(of.fuse(*(constrain(kernel, names) for kernel, names in zip(values, of.axes, strict=True))), scale)


def _product(equation: str, x: Operand, y: Operand, dtype: jnp.dtype) -> jax.Array:
    # A sum of float8 values can exceed float16's range before it is scaled.
    in_float32 = current_execution().float32_products or (x.scale is not None and dtype == jnp.float16)
    preferred = jnp.float32 if in_float32 else dtype
    product = jnp.einsum(equation, x.values, y.values, preferred_element_type=preferred, precision=x.precision)
    return rescaled(product, x, y).astype(dtype)


def _weight_gradient(x_term: str, y_term: str, kernel_term: str, x: Operand, dy: Operand) -> jax.Array:
    """Σ over the dims that x and dy share and the kernel has not (batch) of x ⊗ dy, not scaled yet, summed in float32
    on each device, in the layout of the kernel."""
    product = partial(jnp.einsum, preferred_element_type=reduction_format(), precision=x.precision)
    if not current_execution().transposed_weight_gradients:
        return product(f"{x_term},{y_term}->{kernel_term}", x.values, dy.values)
    each = [index for index in x_term if index in y_term and index in kernel_term]
    shared = [index for index in x_term if index in y_term and index not in each]
    rows, columns = ([i for i in term if i not in shared + each] for term in (x_term, y_term))
    x_t_term, dy_t_term = "".join(each + rows + shared), "".join(each + shared + columns)
    x_t = jax.lax.optimization_barrier(jnp.einsum(f"{x_term}->{x_t_term}", x.values))
    return product(f"{x_t_term},{dy_t_term}->{kernel_term}", x_t, jnp.einsum(f"{y_term}->{dy_t_term}", dy.values))
