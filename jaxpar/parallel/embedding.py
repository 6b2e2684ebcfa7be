"""Rows of a table by index, where the table's rows may be split over devices (Megatron-LM, Shoeybi 2019, section 3).

Each device looks up the indices that fall into its rows and the results are summed. The table's gradient is summed on
each device over its tokens, and then reduced once. Written device by device, since the automatic partitioner gathers
the table, or the activations of the whole batch, for some combinations of axes.

Shapes: B batch, T sequence, D embed, V rows of the table.
"""

import math
from functools import partial

import jax
import jax.numpy as jnp

from jaxpar.parallel.constrain import Execution, constrain_stored, current_execution, record_call, reduction_format
from jaxpar.parallel.manual import active_axes, axis_index, device_by_device, reduced, spec_of

__all__ = ["lookup"]


def lookup(table_VD: jax.Array, indices_BT: jax.Array, rows: str) -> jax.Array:
    """The rows [B, T, D] of the stored table, laid out like the residual stream; `rows` is the logical axis of its
    rows."""
    record_call("lookup")
    return _lookup(rows, table_VD, indices_BT)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _lookup(rows: str, table_VD: jax.Array, indices_BT: jax.Array) -> jax.Array:
    execution = current_execution()
    if execution.mesh is None:
        return jnp.take(table_VD, indices_BT, axis=0)
    used = execution.activations
    split = active_axes(execution, used, rows)
    scatter = tuple(axis for axis in active_axes(execution, used, "residual_sequence") if axis in split)
    sequence = _sequence_read(execution, rows)
    shape_BTD = (*indices_BT.shape, table_VD.shape[1])

    def local(table_VD: jax.Array, indices_BT: jax.Array) -> jax.Array:
        row_BT, here_BT = _local_rows(indices_BT, table_VD.shape[0], split)
        found = jnp.where(here_BT[..., None], jnp.take(table_VD, row_BT, axis=0), jnp.zeros((), table_VD.dtype))
        return reduced(found, split, scatter, dim=1)

    return device_by_device(
        execution,
        local,
        in_specs=(
            spec_of(execution, "embedding", table_VD.shape, (rows, "embed"), used),
            spec_of(execution, "embedding", indices_BT.shape, ("batch", sequence), used),
        ),
        out_specs=spec_of(execution, "embedding", shape_BTD, ("batch", "residual_sequence", "embed"), used),
    )(constrain_stored(table_VD, (rows, "embed")), indices_BT)


def _forward(rows: str, table_VD: jax.Array, indices_BT: jax.Array) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    return _lookup(rows, table_VD, indices_BT), (table_VD, indices_BT)


def _backward(rows: str, residuals: tuple[jax.Array, jax.Array], dx_BTD: jax.Array) -> tuple[jax.Array, None]:
    table_VD, indices_BT = residuals
    execution = current_execution()
    if execution.mesh is None:
        return _summed_rows(table_VD.shape[0], indices_BT, dx_BTD, ()).astype(table_VD.dtype), None
    used, stored = execution.activations, execution.gradients
    split = active_axes(execution, used, rows)
    sequence = _sequence_read(execution, rows)
    tokens = active_axes(execution, used, "batch") + active_axes(execution, used, sequence)
    scatter = active_axes(execution, stored, "embed")
    summed_in = reduction_format()  # here: inside, every axis is manual, and nothing seems to be summed
    num_rows = table_VD.shape[0] // math.prod(execution.mesh.shape[axis] for axis in split)

    def local(indices_BT: jax.Array, dx_BTD: jax.Array) -> jax.Array:
        dtable_VD = _summed_rows(num_rows, indices_BT, dx_BTD, split)
        return reduced(dtable_VD.astype(summed_in), tokens, scatter, dim=1)

    dtable_VD = device_by_device(
        execution,
        local,
        in_specs=(
            spec_of(execution, "embedding", indices_BT.shape, ("batch", sequence), used),
            spec_of(execution, "embedding", dx_BTD.shape, ("batch", sequence, "embed"), used),
        ),
        out_specs=spec_of(execution, "embedding", table_VD.shape, (rows, "embed"), stored),
    )(indices_BT, dx_BTD)
    return dtable_VD.astype(table_VD.dtype), None


_lookup.defvjp(_forward, _backward)


def _sequence_read(execution: Execution, rows: str) -> str:
    """The logical axis of the sequence that a device looks up: of devices that have all rows each reads the part that
    it keeps, those that share the rows read all of it and sum what they find."""
    split = active_axes(execution, execution.activations, rows)
    shares = any(axis in split for axis in active_axes(execution, execution.activations, "residual_sequence"))
    return "sequence" if shares else "residual_sequence"


def _local_rows(indices_BT: jax.Array, num_rows: int, split: tuple[str, ...]) -> tuple[jax.Array, jax.Array]:
    """Each index within this device's rows, and whether it is there."""
    row_BT = indices_BT - axis_index(split) * num_rows
    here_BT = (row_BT >= 0) & (row_BT < num_rows)
    return jnp.where(here_BT, row_BT, 0), here_BT


def _summed_rows(num_rows: int, indices_BT: jax.Array, dx_BTD: jax.Array, split: tuple[str, ...]) -> jax.Array:
    """Σ over tokens of dx in the row of each token's index, float32 [num_rows, D]."""
    row_BT, here_BT = _local_rows(indices_BT, num_rows, split)
    dx_ND = jnp.where(here_BT[..., None], dx_BTD.astype(jnp.float32), 0.0).reshape(-1, dx_BTD.shape[-1])
    return jnp.zeros((num_rows, dx_BTD.shape[-1]), jnp.float32).at[row_BT.reshape(-1)].add(dx_ND)
