"""Every parameter by its own rule, every layer of a stacked parameter for itself."""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxpar.optim.rounding import random_key
from jaxpar.optim.rule import Arrays, Context, StoredRule
from jaxpar.parallel.rules import LogicalAxes, is_stacked

__all__ = ["AT_ONCE", "MapUpdates", "Optimizer", "Rows", "per_layer"]

Params = Any
State = dict[str, Any]
Group = dict[str, Any]
"""Path → gradient, state or parameter; of one layer, or stacked."""
Shared = dict[str, jax.Array]
"""Scalars of an update: `count`, `rate`, and `accept` where an update may be turned down."""
UpdateGroup = Callable[..., tuple[Group, Group]]
"""(`Shared`, layer index or None, gradients, state, parameters) → (new parameters, new state)."""


Rows = Callable[[int], Sequence[int]]
"""From a stack's length the number of the layer in each of its places, negative where there is none."""


class MapUpdates(NamedTuple):
    """How an `UpdateGroup` is mapped over arrays.

    `layers(update, shared, layer indices, gradients, state, parameters)` over the first dim of all arrays, and
    `others(update, shared, gradients, state, parameters)` over parameters that are in no stack.
    """

    layers: Callable[..., tuple[Group, Group]]
    others: Callable[..., tuple[Group, Group]]


class Optimizer(NamedTuple):
    """An update rule. `init(params)` gives the state; `apply(gradients, state, params)` the new parameters and state.

    A fourth argument, a boolean scalar, says whether the update is made: where it is false everything stays as it was.

    The state is `{"count": updates made, "arrays": ...}`, the latter the pytree of parameters with a dictionary of
    arrays by role in each one's place. A parameter whose first logical axis is "layers" has arrays with that first dim.
    """

    init: Callable[[Params], State]
    apply: Callable[..., tuple[Params, State]]


AT_ONCE = MapUpdates(
    layers=lambda update, shared, layers, *stacked: jax.vmap(partial(update, shared))(layers, *stacked),
    others=lambda update, shared, *groups: update(shared, None, *groups),
)
"""All layers in one batched computation, then everything else."""


def per_layer(
    rules: Mapping[str, StoredRule],
    axes: Mapping[str, LogicalAxes],
    schedule: optax.Schedule,
    *,
    seed: int,
    map_updates: MapUpdates = AT_ONCE,
    rows: Rows | None = None,
) -> Optimizer:
    """The optimizer that applies `rules[path]` to every parameter, mapped over the layers of those that are stacked.

    Rules see one layer, so that no statistic mixes layers. Parameters of stacks with as many layers are mapped
    together. `rows` gives the layers' numbers in the order in which they are stacked (negative where there is none)
    from the length of a stack; without, they are in order.
    """

    def numbers(size: int) -> np.ndarray:
        return np.arange(size, dtype=np.int32) if rows is None else np.maximum(np.asarray(rows(size), np.int32), 0)

    def init(params: Params) -> State:
        def init_one(keys: tuple, parameter: jax.Array) -> Arrays:
            path = _path(keys)
            rule = rules[path]
            return jax.vmap(rule.init)(parameter) if is_stacked(axes[path]) else rule.init(parameter)

        return {"count": jnp.zeros((), jnp.int32), "arrays": jax.tree_util.tree_map_with_path(init_one, params)}

    def apply(gradients: Params, state: State, params: Params, accept: jax.Array | None = None) -> tuple[Params, State]:
        by_path: dict[str, tuple[jax.Array, Arrays, jax.Array]] = {}

        def collect(keys: tuple, parameter: jax.Array, gradient: jax.Array, arrays: Arrays) -> None:
            by_path[_path(keys)] = (gradient, arrays, parameter)

        def spread(values: Mapping[str, Any]) -> Any:
            return jax.tree_util.tree_map_with_path(lambda keys, _: values[_path(keys)], params)

        jax.tree_util.tree_map_with_path(collect, params, gradients, state["arrays"])
        count = state["count"]
        stacks = _stacks({path: parameter for path, (*_, parameter) in by_path.items()}, axes)
        depths = {size: int(numbers(size).max()) + 1 for size in stacks if size}
        deepest = max(depths.values(), default=0)
        shared: Shared = {"count": count, "rate": jnp.asarray(schedule(count), jnp.float32)}
        shared |= {} if accept is None else {"accept": accept}
        new_params: Group = {}
        new_arrays: Group = {}
        for size, members in stacks.items():
            update = _if_accepted(_update_of_group(rules, seed, depths.get(size, deepest)))
            operands = [{path: by_path[path][part] for path in members} for part in range(3)]
            if size:
                changed = map_updates.layers(update, shared, jnp.asarray(numbers(size)), *operands)
            else:
                changed = map_updates.others(update, shared, *operands)
            new_params |= changed[0]
            new_arrays |= changed[1]
        next_count = optax.safe_increment(count)
        next_count = next_count if accept is None else jnp.where(accept, next_count, count)
        return spread(new_params), {"count": next_count, "arrays": spread(new_arrays)}

    return Optimizer(init, apply)


def _update_of_group(rules: Mapping[str, StoredRule], seed: int, num_layers: int) -> UpdateGroup:
    def update(
        shared: Shared, layer: jax.Array | None, gradients: Group, arrays: Group, parameters: Group
    ) -> tuple[Group, Group]:
        def context(path: str) -> Context:
            def key(purpose: str) -> jax.Array:
                return random_key(seed, f"{path}:{purpose}", shared["count"], 0 if layer is None else layer)

            return Context(shared["count"], shared["rate"], key, layer, num_layers)

        changed = {
            path: rules[path].apply(gradients[path], arrays[path], parameter, context(path))
            for path, parameter in parameters.items()
        }
        return {path: new[0] for path, new in changed.items()}, {path: new[1] for path, new in changed.items()}

    return update


def _if_accepted(update: UpdateGroup) -> UpdateGroup:
    """The choice is made group by group, so that it is made where the arrays are when they are updated."""

    def chosen(
        shared: Shared, layer: jax.Array | None, gradients: Group, arrays: Group, parameters: Group
    ) -> tuple[Group, Group]:
        changed = update(shared, layer, gradients, arrays, parameters)
        if "accept" not in shared:
            return changed
        return jax.tree.map(partial(jnp.where, shared["accept"]), changed, (parameters, arrays))

    return chosen


def _stacks(parameters: Mapping[str, jax.Array], axes: Mapping[str, LogicalAxes]) -> dict[int, list[str]]:
    """Paths by their stack's number of layers, 0 for those in no stack."""
    stacks: dict[int, list[str]] = defaultdict(list)
    for path, parameter in parameters.items():
        stacks[parameter.shape[0] if is_stacked(axes[path]) else 0].append(path)
    return dict(stacks)


def _path(keys: tuple) -> str:
    return jax.tree_util.keystr(keys, simple=True, separator="/")
