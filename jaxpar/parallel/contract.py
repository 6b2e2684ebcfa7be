"""Where weights meet activations: one contraction with its gather, its number formats and its backward pass.

A stored weight may be split over `fsdp`; to be used it is laid out like an activation (`embed` whole, `heads`, `mlp`
and `vocab` split over `tensor`). The backward pass gathers it again instead of keeping the gathered copy, as ZeRO-3
does, and lays the weight's gradient out like the stored weight, which is where a reduce-scatter can happen.
"""

from collections.abc import Callable, Sequence
from functools import partial

import jax
import jax.numpy as jnp

from jaxpar.parallel.constrain import constrain, constrain_gradient, current_execution, reduction_format
from jaxpar.parallel.rules import LogicalAxes

__all__ = ["contract"]

Fuse = Callable[..., jax.Array]


def contract(
    equation: str,
    x: jax.Array,
    kernels: Sequence[jax.Array],
    axes: Sequence[LogicalAxes],
    fuse: Fuse = lambda kernel: kernel,
) -> jax.Array:
    """`einsum(equation, x, fuse(*kernels))` in x's dtype, summed in float32.

    Args:
      equation: an einsum of two operands, in which every index occurs in two of the three terms.
      x: the activation.
      kernels: stored weights; `axes` has the logical axes of each.
      fuse: joins several weights into one, so that their input's gradient is one sum and needs one reduction.

    >>> x, w = jnp.ones((2, 3)), jnp.ones((3, 4))
    >>> contract("bd,df->bf", x, [w], [("embed", "mlp")]).shape
    (2, 4)
    """
    return _contract(equation, tuple(tuple(a) for a in axes), fuse, x, tuple(kernels))


@partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _contract(
    equation: str, axes: tuple[LogicalAxes, ...], fuse: Fuse, x: jax.Array, kernels: tuple[jax.Array, ...]
) -> jax.Array:
    return _product(equation, x, fuse(*_usable(kernels, axes)), x.dtype)


def _forward(
    equation: str, axes: tuple[LogicalAxes, ...], fuse: Fuse, x: jax.Array, kernels: tuple[jax.Array, ...]
) -> tuple[jax.Array, tuple]:
    return _contract(equation, axes, fuse, x, kernels), (x, kernels)


def _backward(
    equation: str, axes: tuple[LogicalAxes, ...], fuse: Fuse, residuals: tuple, dy: jax.Array
) -> tuple[jax.Array, tuple[jax.Array, ...]]:
    x, kernels = residuals
    terms, result = equation.split("->")
    x_term, kernel_term = terms.split(",")
    dx = _product(f"{result},{kernel_term}->{x_term}", dy, fuse(*_usable(kernels, axes)), x.dtype)
    # In the format of the reduction until it is reduced over the devices that share the batch.
    gradient = _weight_gradient(x_term, result, kernel_term, x, dy)
    unfuse = jax.linear_transpose(fuse, *(jax.ShapeDtypeStruct(kernel.shape, gradient.dtype) for kernel in kernels))
    dkernels = unfuse(gradient)
    reduced = (constrain_gradient(dkernel, names) for dkernel, names in zip(dkernels, axes, strict=True))
    return dx, tuple(dkernel.astype(kernel.dtype) for dkernel, kernel in zip(reduced, kernels, strict=True))


_contract.defvjp(_forward, _backward)


def _usable(kernels: Sequence[jax.Array], axes: Sequence[LogicalAxes]) -> list[jax.Array]:
    return [constrain(kernel, names) for kernel, names in zip(kernels, axes, strict=True)]


def _product(equation: str, x: jax.Array, y: jax.Array, dtype: jnp.dtype) -> jax.Array:
    preferred = jnp.float32 if current_execution().float32_products else dtype
    return jnp.einsum(equation, x, y, preferred_element_type=preferred).astype(dtype)


def _weight_gradient(x_term: str, y_term: str, kernel_term: str, x: jax.Array, dy: jax.Array) -> jax.Array:
    """Σ over the shared (batch) dims of x ⊗ dy, summed in float32 on each device, in the layout of the kernel."""
    product = partial(jnp.einsum, preferred_element_type=reduction_format())
    if not current_execution().transposed_weight_gradients:
        return product(f"{x_term},{y_term}->{kernel_term}", x, dy)
    shared = [index for index in x_term if index in y_term]
    rows, columns = ([i for i in term if i not in shared] for term in (x_term, y_term))
    x_t = jax.lax.optimization_barrier(jnp.einsum(f"{x_term}->{''.join(rows + shared)}", x))
    dy_t = jnp.einsum(f"{y_term}->{''.join(shared + columns)}", dy)
    return product(f"{''.join(rows + shared)},{''.join(shared + columns)}->{kernel_term}", x_t, dy_t)
