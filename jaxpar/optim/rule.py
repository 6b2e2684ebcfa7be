"""The update rule of one parameter of one layer, and what every rule is dressed in.

A wrapper takes a rule and returns one, and is the identity when off. From the inside out: `of_each` (experts),
`with_weight_decay`, `scaled` (layer-wise decay), `stored` (number formats), `averaged` (a moving average of the
parameters).
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp

from jaxpar.optim.rounding import stochastically_rounded

__all__ = [
    "Arrays",
    "Context",
    "Rounding",
    "Rule",
    "StoredRule",
    "averaged",
    "balancing",
    "of_each",
    "scaled",
    "stored",
    "with_weight_decay",
]

Arrays = dict[str, jax.Array]
"""A parameter's state by role: "first", "second", "rows", "columns", ... (`jaxpar.optim.layout` says what they are)."""

Rounding = Literal["nearest", "stochastic"]


@dataclass(frozen=True)
class Context:
    """What a rule may use besides its parameter.

    `count` (int32) updates were made before this one, which is made at `rate`. `key(purpose)` gives randomness that
    depends on seed, count, path, layer and purpose only. `layer` is None outside of a stack; `num_layers` is the
    parameter's stack's, outside of one the deepest stack's.
    """

    count: jax.Array
    rate: jax.Array
    key: Callable[[str], jax.Array]
    layer: jax.Array | None
    num_layers: int


class Rule(NamedTuple):
    """`init(parameter)` gives the state, `step(gradient, state, parameter, context)` what is subtracted from the
    parameter, and the new state. Gradient, parameter and step are float32."""

    init: Callable[[jax.Array], Arrays]
    step: Callable[[jax.Array, Arrays, jax.Array, Context], tuple[jax.Array, Arrays]]


class StoredRule(NamedTuple):
    """As `Rule`, for a parameter in its own number format, of which `apply` gives the new value."""

    init: Callable[[jax.Array], Arrays]
    apply: Callable[[jax.Array, Arrays, jax.Array, Context], tuple[jax.Array, Arrays]]


def with_weight_decay(rule: Rule, weight_decay: float) -> Rule:
    """The rule's step plus rate · weight_decay · parameter (decoupled: Loshchilov and Hutter 2019)."""

    def step(gradient: jax.Array, arrays: Arrays, parameter: jax.Array, context: Context) -> tuple[jax.Array, Arrays]:
        difference, arrays = rule.step(gradient, arrays, parameter, context)
        return difference + context.rate * weight_decay * parameter, arrays

    return rule._replace(step=step) if weight_decay else rule


def scaled(rule: Rule, scale: Callable[[Context], jax.Array | float]) -> Rule:
    """The rule's step times `scale(context)`."""

    def step(gradient: jax.Array, arrays: Arrays, parameter: jax.Array, context: Context) -> tuple[jax.Array, Arrays]:
        difference, arrays = rule.step(gradient, arrays, parameter, context)
        return scale(context) * difference, arrays

    return rule._replace(step=step)


def of_each(rule: Rule) -> Rule:
    """The rule for every entry of a parameter's first dim by itself: experts, of which each is a matrix."""

    def step(gradient: jax.Array, arrays: Arrays, parameter: jax.Array, context: Context) -> tuple[jax.Array, Arrays]:
        def one(
            index: jax.Array, gradient: jax.Array, arrays: Arrays, parameter: jax.Array
        ) -> tuple[jax.Array, Arrays]:
            def key(purpose: str) -> jax.Array:
                return jax.random.fold_in(context.key(purpose), index)

            return rule.step(gradient, arrays, parameter, replace(context, key=key))

        return jax.vmap(one)(jnp.arange(parameter.shape[0]), gradient, arrays, parameter)

    return Rule(jax.vmap(rule.init), step)


def balancing(rate: float) -> Rule:
    """Steps of one size against the sign of what is given as the gradient, whatever the learning rate: the load of an
    expert less the mean one (DeepSeek-V3, Liu 2024, section 2.1.2)."""

    def step(gradient: jax.Array, arrays: Arrays, parameter: jax.Array, context: Context) -> tuple[jax.Array, Arrays]:
        return rate * jnp.sign(gradient), arrays

    return Rule(lambda parameter: {}, step)


def stored(rule: Rule, *, master_weights: bool, rounding: Rounding) -> StoredRule:
    """The rule in float32 arithmetic for a parameter in its own format.

    With `master_weights` a 16-bit parameter is the rounding of a float32 copy in the state, its "master"; without, the
    parameter itself is read and rounded. Stochastic rounding is for bfloat16; float32 parameters are never rounded.

    Raises:
      ValueError: stochastic rounding of another 16-bit format.
    """

    def init(parameter: jax.Array) -> Arrays:
        if rounding == "stochastic" and parameter.dtype not in (jnp.float32, jnp.bfloat16):
            raise ValueError(
                f"stochastic rounding makes bfloat16 of float32; parameters are {parameter.dtype}: take bfloat16, or "
                "rounding to nearest"
            )
        weights = parameter.astype(jnp.float32)
        master = {"master": weights} if _has_master(parameter) else {}
        return rule.init(weights) | master

    def apply(gradient: jax.Array, arrays: Arrays, parameter: jax.Array, context: Context) -> tuple[jax.Array, Arrays]:
        rest = {role: array for role, array in arrays.items() if role != "master"}
        weights = arrays["master"] if _has_master(parameter) else parameter.astype(jnp.float32)
        difference, rest = rule.step(gradient.astype(jnp.float32), rest, weights, context)
        weights = weights - difference
        if rounding == "stochastic" and parameter.dtype == jnp.bfloat16:
            rounded = stochastically_rounded(weights, context.key("parameter"))
        else:
            rounded = weights.astype(parameter.dtype)
        return rounded, rest | ({"master": weights} if _has_master(parameter) else {})

    def _has_master(parameter: jax.Array) -> bool:
        return master_weights and parameter.dtype != jnp.float32

    return StoredRule(init, apply)


def averaged(rule: StoredRule, decay: float) -> StoredRule:
    """The rule with a float32 average of the parameter in its state: average ← decay · average + (1 − decay) · new.

    Averaged is the master weight where there is one. The average starts at the first parameter. A decay of 0 keeps
    none.
    """

    def init(parameter: jax.Array) -> Arrays:
        return rule.init(parameter) | {"average": parameter.astype(jnp.float32)}

    def apply(gradient: jax.Array, arrays: Arrays, parameter: jax.Array, context: Context) -> tuple[jax.Array, Arrays]:
        rest = {role: array for role, array in arrays.items() if role != "average"}
        parameter, rest = rule.apply(gradient, rest, parameter, context)
        weights = rest["master"] if "master" in rest else parameter.astype(jnp.float32)
        average = decay * arrays["average"] + (1 - decay) * weights
        return parameter, rest | {"average": average}

    return StoredRule(init, apply) if decay else rule
