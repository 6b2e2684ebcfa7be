"""Number formats of parameters and of the arithmetic on them, and steps that are not finite: loss scaling, skipping."""

from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

__all__ = ["Guard", "GuardRules", "cast_to_compute", "in_compute_dtype", "next_guard"]


def in_compute_dtype(loss: Callable, dtype: str, kept: Collection[str]) -> Callable:
    """`loss(params, ...)` with weights cast to `dtype` first; gradients come back in the parameters' own dtype.

    Where they have that dtype already this changes nothing.

    Parameters whose paths are `kept` stay as they are: vectors (norm scales, biases), with which layers compute in
    float32.
    """

    return lambda params, *args: loss(cast_to_compute(params, dtype, kept), *args)


def cast_to_compute(params: Any, dtype: str, kept: Collection[str]) -> Any:
    """Parameters in `dtype`, but for those whose paths are `kept`."""

    def cast(keys: tuple, parameter: jax.Array) -> jax.Array:
        path = jax.tree_util.keystr(keys, simple=True, separator="/")
        return parameter if path in kept else parameter.astype(dtype)

    return jax.tree_util.tree_map_with_path(cast, params, is_leaf=lambda x: hasattr(x, "astype"))


@dataclass(frozen=True)
class GuardRules:
    """What happens at a step whose loss or gradients are not finite; `initial` is None without loss scaling.

    A fixed scale is one whose smallest and largest values are equal.
    """

    initial: float | None
    smallest: float = 1.0
    largest: float = 1.0
    growth_steps: int = 1

    def start(self) -> "Guard":
        """The guard of a new run."""
        zero = jnp.zeros((), jnp.int32)
        if self.initial is None:
            return Guard(zero, zero)
        return Guard(zero, zero, jnp.asarray(self.initial, jnp.float32), zero)


@partial(jax.tree_util.register_dataclass, data_fields=("skipped", "in_a_row", "scale", "finite"), meta_fields=())
@dataclass(frozen=True)
class Guard:
    """What a run remembers of steps that were not finite: scalars, a part of its state.

    `skipped` counts them (int32); `in_a_row` counts those since the last finite step that found no smaller scale left
    to try (int32). With loss scaling, `scale` is the factor of the loss (float32) and `finite` the number of finite
    steps since it last changed (int32).
    """

    skipped: Any
    in_a_row: Any
    scale: Any = None
    finite: Any = None


def next_guard(guard: Guard, is_finite: jax.Array, rules: GuardRules) -> Guard:
    """The guard after a step (Micikevicius 2018, section 3.2).

    The scale doubles after `growth_steps` finite steps in a row, up to its largest value, and halves at one that is not
    finite, down to its smallest.

    >>> rules = GuardRules(initial=8.0, smallest=1.0, largest=16.0, growth_steps=2)
    >>> print(next_guard(rules.start(), jnp.array(False), rules).scale)
    4.0
    """
    skipped = guard.skipped + jnp.where(is_finite, 0, 1)
    if guard.scale is None:
        return Guard(skipped, jnp.where(is_finite, 0, guard.in_a_row + 1))
    finite = jnp.where(is_finite, guard.finite + 1, 0)
    grows = finite >= rules.growth_steps
    larger = jnp.where(grows, jnp.minimum(guard.scale * 2, rules.largest), guard.scale)
    scale = jnp.where(is_finite, larger, jnp.maximum(guard.scale / 2, rules.smallest))
    at_floor = guard.scale <= rules.smallest
    in_a_row = jnp.where(is_finite | ~at_floor, 0, guard.in_a_row + 1)
    return Guard(skipped, in_a_row, scale, jnp.where(grows, 0, finite))
