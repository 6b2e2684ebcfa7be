"""From `[schedule]` to a learning rate."""

from collections.abc import Sequence
from functools import singledispatch

import optax

from jaxpar.config.schema import ConstantSchedule, CosineSchedule, LinearSchedule, ScheduleConfig, WsdSchedule

__all__ = ["make_schedule"]


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
