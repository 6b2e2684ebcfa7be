"""Parameters as matrices: what Adafactor, SM3 and Muon see.

A parameter's axes are those of one layer here, without "layers".
"""

import math
from typing import NamedTuple

import jax
import numpy as np

from jaxpar.parallel.rules import LogicalAxes, is_vector

__all__ = ["MatrixView", "from_matrix", "matrix_shape", "matrix_view", "to_matrix"]


class MatrixView(NamedTuple):
    """Which dims are merged into rows and columns, and the logical axes of those: each its first dim's."""

    row_dims: tuple[int, ...]
    column_dims: tuple[int, ...]
    row_axis: str | None
    column_axis: str | None


def matrix_view(path: str, axes: LogicalAxes) -> MatrixView | None:
    """`embed` on one side and the other dims on the other; without `embed`, the first dim and the others.

    None for vectors.

    >>> matrix_view("attention/output", ("heads", "head_dim", "embed"))
    MatrixView(row_dims=(0, 1), column_dims=(2,), row_axis='heads', column_axis='embed')
    """
    if is_vector(path, axes):
        return None
    alone = axes.index("embed") if "embed" in axes else 0
    others = tuple(dim for dim in range(len(axes)) if dim != alone)
    rows, columns = ((0,), others) if alone == 0 else (others, (alone,))
    return MatrixView(rows, columns, axes[rows[0]], axes[columns[0]])


def matrix_shape(shape: tuple[int, ...], view: MatrixView) -> tuple[int, int]:
    """Rows and columns of a parameter of `shape`."""
    return math.prod(shape[dim] for dim in view.row_dims), math.prod(shape[dim] for dim in view.column_dims)


def to_matrix(array: jax.Array, view: MatrixView) -> jax.Array:
    """The array as [rows, columns]."""
    return array.transpose(view.row_dims + view.column_dims).reshape(matrix_shape(array.shape, view))


def from_matrix(matrix: jax.Array, view: MatrixView, shape: tuple[int, ...]) -> jax.Array:
    """The array of `shape` that `to_matrix` made the matrix of."""
    order = view.row_dims + view.column_dims
    return matrix.reshape([shape[dim] for dim in order]).transpose(np.argsort(order).tolist())
