"""Logical axes of an optimizer's state, from which the optimizer's sharding table places it.

What an array is follows from its role:

- "rows", "columns": a statistic for each row or column of the parameter as a matrix; it has that dim's axis
- "first", "second", "master", "average": a moment, a float32 copy or a moving average, of the parameter's shape
- "first_codes", "second_codes": an 8-bit moment, of the parameter's shape
- "first_scales", "second_scales": scales of blocks along the parameter's last dim, whose axis the blocks have
"""

from collections.abc import Callable, Mapping
from typing import Any

import jax

from jaxpar.optim.matrices import MatrixView, matrix_view
from jaxpar.parallel.rules import LogicalAxes, of_one_matrix

__all__ = ["role_axes", "state_axes"]

_OF_MATRIX: dict[str, Callable[[MatrixView], LogicalAxes]] = {
    "rows": lambda view: (view.row_axis,),
    "columns": lambda view: (view.column_axis,),
}
_LIKE_PARAMETER = (
    "first",
    "second",
    "master",
    "average",
    "first_codes",
    "second_codes",
    "first_scales",
    "second_scales",
)


def state_axes(abstract_state: Any, abstract_params: Any, axes: Mapping[str, LogicalAxes]) -> Any:
    """The pytree of the state with a tuple of logical axes, one a dim, in place of each array.

    `abstract_state` is `jax.eval_shape(optimizer.init, abstract_params)`, `axes` has every parameter's path and axes.
    """

    def of_parameter(keys: tuple, _: Any, arrays: Mapping[str, Any]) -> dict[str, LogicalAxes]:
        path = jax.tree_util.keystr(keys, simple=True, separator="/")
        found = {role: role_axes(role, path, axes[path]) for role in arrays}
        for role, array in arrays.items():
            assert len(found[role]) == len(array.shape), f"{path}: {role} {array.shape} is not {found[role]}"
        return found

    arrays = jax.tree_util.tree_map_with_path(of_parameter, abstract_params, abstract_state["arrays"])
    return {"count": (), "arrays": arrays}


def role_axes(role: str, path: str, axes: LogicalAxes) -> LogicalAxes:
    """The logical axes of one array of a parameter's state.

    >>> role_axes("rows", "attention/output", ("layers", "heads", "head_dim", "embed"))
    ('layers', 'heads')
    """
    if role in _LIKE_PARAMETER:
        return axes
    of_one = of_one_matrix(axes)
    view = matrix_view(path, of_one)
    assert view is not None, f"{path}: a vector has no {role}"
    stack = axes[: len(axes) - len(of_one)]
    return (*stack, *_OF_MATRIX[role](view))
