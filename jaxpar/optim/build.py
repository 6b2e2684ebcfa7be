"""From `[optimizer]` and `[schedule]` to an Optax transformation and a learning rate."""

from collections.abc import Callable, Mapping, Sequence
from fnmatch import fnmatchcase
from functools import singledispatch
from typing import Any

import jax
import optax

from jaxpar.config.schema import (
    AdamW,
    ConstantSchedule,
    CosineSchedule,
    LinearSchedule,
    OptimizerConfig,
    ScheduleConfig,
    WsdSchedule,
)

__all__ = ["decay_mask", "make_optimizer", "make_schedule"]


@singledispatch
def make_schedule(config: ScheduleConfig, peak: float, num_steps: int) -> optax.Schedule:
    """The learning rate as a function of the number of updates already made.

    Raises:
      ValueError: warmup and the decay of "wsd" together are longer than the run.
    """
    raise TypeError(f"no schedule for {type(config).__name__}")


@make_schedule.register
def _constant(config: ConstantSchedule, peak: float, num_steps: int) -> optax.Schedule:
    return _warmed_up(config.warmup_steps, peak, [optax.constant_schedule(peak)], [])


@make_schedule.register
def _cosine(config: CosineSchedule, peak: float, num_steps: int) -> optax.Schedule:
    steps = max(num_steps - config.warmup_steps, 1)
    decay = optax.cosine_decay_schedule(peak, steps, alpha=config.final_fraction)
    return _warmed_up(config.warmup_steps, peak, [decay], [])


@make_schedule.register
def _linear(config: LinearSchedule, peak: float, num_steps: int) -> optax.Schedule:
    steps = max(num_steps - config.warmup_steps, 1)
    decay = optax.linear_schedule(peak, peak * config.final_fraction, steps)
    return _warmed_up(config.warmup_steps, peak, [decay], [])


@make_schedule.register
def _wsd(config: WsdSchedule, peak: float, num_steps: int) -> optax.Schedule:
    if config.warmup_steps + config.decay_steps > num_steps:
        raise ValueError(
            f"schedule.warmup_steps={config.warmup_steps} and schedule.decay_steps={config.decay_steps} are longer "
            f"than train.num_steps={num_steps}; {_what_fits(num_steps - config.warmup_steps)}"
        )
    decay = optax.linear_schedule(peak, peak * config.final_fraction, config.decay_steps)
    parts = [optax.constant_schedule(peak), decay]
    return _warmed_up(config.warmup_steps, peak, parts, [num_steps - config.decay_steps])


def _what_fits(num_decay_steps: int) -> str:
    if num_decay_steps > 0:
        return f"at most {num_decay_steps} decay steps fit"
    return 'no decay fits after the warmup; take fewer warmup steps, or schedule={name="constant"}'


def _warmed_up(
    warmup_steps: int, peak: float, parts: Sequence[optax.Schedule], boundaries: Sequence[int]
) -> optax.Schedule:
    """A linear rise, then `parts`; a run that is shorter than its warmup ends in it."""
    warmup = optax.linear_schedule(0.0, peak, warmup_steps)
    return optax.join_schedules([warmup, *parts], [warmup_steps, *boundaries])


def make_optimizer(
    config: OptimizerConfig, schedule: optax.Schedule, axes: Mapping[str, Sequence[str | None]]
) -> optax.GradientTransformation:
    """The update rule; `axes` has every parameter's path and logical axes.

    Raises:
      ValueError: a pattern of `optimizer.no_decay` matches no parameter.
    """
    return _BUILDERS[type(config)](config, schedule, axes)


def _adamw(
    config: AdamW, schedule: optax.Schedule, axes: Mapping[str, Sequence[str | None]]
) -> optax.GradientTransformation:
    return optax.adamw(
        schedule,
        b1=config.beta1,
        b2=config.beta2,
        eps=config.epsilon,
        weight_decay=config.weight_decay,
        mask=decay_mask(config.no_decay, axes),
    )


_BUILDERS: dict[type, Callable[..., optax.GradientTransformation]] = {AdamW: _adamw}


def decay_mask(no_decay: Sequence[str], axes: Mapping[str, Sequence[str | None]]) -> Callable[[Any], Any]:
    """A function from a pytree of parameters to one of booleans: which of them decay.

    Those with two or more dims (the layer not counted) decay, but for biases and for paths that match a pattern of
    `no_decay`.
    """
    for pattern in no_decay:
        if not any(fnmatchcase(path, pattern) for path in axes):
            raise ValueError(f"optimizer.no_decay: {pattern!r} matches no parameter; there are: {', '.join(axes)}")

    def decays(path: str) -> bool:
        num_dims = sum(axis != "layers" for axis in axes[path])
        is_bias = path.rsplit("/", 1)[-1].endswith("bias")
        return num_dims >= 2 and not is_bias and not any(fnmatchcase(path, pattern) for pattern in no_decay)

    def mask(params: Any) -> Any:
        return jax.tree_util.tree_map_with_path(
            lambda keys, _: decays(jax.tree_util.keystr(keys, simple=True, separator="/")), params
        )

    return mask
