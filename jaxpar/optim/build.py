"""From `[optimizer]` to an update rule."""

from collections.abc import Callable, Mapping, Sequence
from fnmatch import fnmatchcase
from functools import singledispatch
from typing import Any

import optax

from jaxpar.config.optimizers import SGD, SM3, Adafactor, AdamW, AdamW8bit, Lion, Muon, OptimizerConfig
from jaxpar.config.schema import ConstantSchedule, ScheduleConfig
from jaxpar.optim.adafactor import adafactor, relative_step
from jaxpar.optim.adam import adamw, adamw8bit
from jaxpar.optim.momentum import lion, sgd
from jaxpar.optim.muon import muon
from jaxpar.optim.per_layer import AT_ONCE, MapUpdates, Optimizer, Rows, per_layer
from jaxpar.optim.rule import (
    Context,
    Rounding,
    Rule,
    StoredRule,
    averaged,
    balancing,
    of_each,
    scaled,
    stored,
    with_weight_decay,
)
from jaxpar.optim.sm3 import sm3
from jaxpar.parallel.rules import LogicalAxes, is_stacked, is_vector, of_one_layer, of_one_matrix

__all__ = ["RULES", "check_optimizer", "decays", "learning_rates", "make_optimizer"]

RULES: dict[type, Callable[[Any, str, LogicalAxes], Rule]] = {
    AdamW: adamw,
    AdamW8bit: adamw8bit,
    SGD: sgd,
    Adafactor: adafactor,
    SM3: sm3,
    Lion: lion,
    Muon: muon,
}
"""Config → (config, path, logical axes of one layer) → the rule of that parameter."""


def make_optimizer(
    config: OptimizerConfig,
    schedule: optax.Schedule,
    axes: Mapping[str, LogicalAxes],
    *,
    seed: int,
    master_weights: bool = False,
    rounding: Rounding = "nearest",
    average_decay: float = 0.0,
    map_updates: MapUpdates = AT_ONCE,
    rows: Rows | None = None,
    balance_rates: Mapping[str, float] | None = None,
) -> Optimizer:
    """The update rule for parameters with the paths and logical axes `axes`.

    Args:
      config: `[optimizer]`.
      schedule: The learning rate after a number of updates.
      axes: Every parameter's logical axes by its path.
      seed: Of random bits, where something is rounded stochastically.
      master_weights: Whether 16-bit parameters have a float32 copy in the state.
      rounding: How the update of a bfloat16 parameter is rounded.
      average_decay: Of a moving average of the parameters, kept in the state; 0 keeps none.
      map_updates: How updates are mapped over the layers of stacked parameters, and over the others.
      balance_rates: Of parameters that no loss decides, but how far a load is from balance, by path.
      rows: From a stack's length the number of the layer in each of its places, if they are not in order.

    Raises:
      ValueError: a pattern of `optimizer.no_decay` matches no parameter, or there are no layers for
        `optimizer.layer_decay`.
    """
    _check_parameters(config, axes)
    rules = {path: _rule(config, path, names, master_weights, rounding) for path, names in axes.items()}
    for path, rate in (balance_rates or {}).items():
        rules[path] = stored(balancing(rate), master_weights=master_weights, rounding=rounding)
    rules = {path: averaged(rule, average_decay) for path, rule in rules.items()}
    return per_layer(rules, axes, learning_rates(config, schedule), seed=seed, map_updates=map_updates, rows=rows)


@singledispatch
def learning_rates(config: OptimizerConfig, schedule: optax.Schedule) -> optax.Schedule:
    """The rates that the optimizer makes of its schedule; the schedule itself but for Adafactor's relative steps."""
    return schedule


@learning_rates.register
def _adafactor_rates(config: Adafactor, schedule: optax.Schedule) -> optax.Schedule:
    return relative_step(schedule) if config.relative_step else schedule


def check_optimizer(config: OptimizerConfig, schedule: ScheduleConfig, axes: Mapping[str, LogicalAxes]) -> None:
    """Raises ValueError for what cannot work together: optimizer, schedule and the model's parameters."""
    _check_schedule(config, schedule)
    _check_parameters(config, axes)


def decays(path: str, axes: LogicalAxes, no_decay: Sequence[str]) -> bool:
    """Whether the weights decay: matrices do, unless a pattern of `no_decay` matches their path."""
    return not is_vector(path, axes) and not any(fnmatchcase(path, pattern) for pattern in no_decay)


@singledispatch
def _check_schedule(config: OptimizerConfig, schedule: ScheduleConfig) -> None:
    """Any schedule goes with most optimizers."""


@_check_schedule.register
def _check_adafactor_schedule(config: Adafactor, schedule: ScheduleConfig) -> None:
    if config.relative_step and not isinstance(schedule, ConstantSchedule):
        raise ValueError(
            f'optimizer.relative_step=true sets the learning rate of each step, which schedule.name="{schedule.name}" '
            'would set too; set schedule.name="constant" (its warmup may stay), or optimizer.relative_step=false'
        )


def _check_parameters(config: OptimizerConfig, axes: Mapping[str, LogicalAxes]) -> None:
    for pattern in config.no_decay:
        if not any(fnmatchcase(path, pattern) for path in axes):
            raise ValueError(f"optimizer.no_decay: {pattern!r} matches no parameter; there are: {', '.join(axes)}")
    if config.layer_decay != 1.0 and not any(is_stacked(names) for names in axes.values()):
        raise ValueError(
            f"optimizer.layer_decay={config.layer_decay}: the model has no layers, which are parameters whose first "
            'logical axis is "layers"; set optimizer.layer_decay=1.0'
        )


def _rule(
    config: OptimizerConfig, path: str, axes: LogicalAxes, master_weights: bool, rounding: Rounding
) -> StoredRule:
    rule = RULES[type(config)](config, path, of_one_matrix(axes))
    rule = of_each(rule) if of_one_matrix(axes) != of_one_layer(axes) else rule
    rule = with_weight_decay(rule, config.weight_decay if decays(path, axes, config.no_decay) else 0.0)
    rule = _with_layer_decay(rule, config.layer_decay, axes)
    return stored(rule, master_weights=master_weights, rounding=rounding)


def _with_layer_decay(rule: Rule, layer_decay: float, axes: LogicalAxes) -> Rule:
    """Steps of layer i of L times layer_decay^(L − i), of tables times layer_decay^(L + 1) (Clark 2020)."""

    def of_layer(context: Context) -> Any:
        return layer_decay ** (context.num_layers - context.layer)  # type: ignore[operator]

    def of_table(context: Context) -> float:
        return layer_decay ** (context.num_layers + 1)

    if layer_decay == 1.0 or not axes:
        return rule
    if is_stacked(axes):
        return scaled(rule, of_layer)
    return scaled(rule, of_table) if axes[0] in ("vocab", "positions") else rule
