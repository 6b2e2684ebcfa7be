"""Learning rates against closed forms."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpar.config.schema import ConstantSchedule, CosineSchedule, LinearSchedule, ScheduleConfig, WsdSchedule
from jaxpar.optim import make_schedule

PEAK, STEPS = 4.0, 110


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (ConstantSchedule(), {0: 4.0, 110: 4.0}),
        (ConstantSchedule(warmup_steps=10), {0: 0.0, 1: 0.4, 5: 2.0, 10: 4.0, 11: 4.0, 110: 4.0}),
        (
            CosineSchedule(warmup_steps=10, final_fraction=0.25),
            {0: 0.0, 5: 2.0, 10: 4.0, 35: 1 + 1.5 * (1 + math.cos(math.pi / 4)), 60: 2.5, 110: 1.0, 500: 1.0},
        ),
        (CosineSchedule(warmup_steps=0, final_fraction=0.0), {0: 4.0, 55: 2.0, 110: 0.0}),
        (LinearSchedule(warmup_steps=10, final_fraction=0.25), {0: 0.0, 5: 2.0, 10: 4.0, 60: 2.5, 85: 1.75, 110: 1.0}),
        (WsdSchedule(warmup_steps=10, decay_steps=20), {0: 0.0, 5: 2.0, 10: 4.0, 90: 4.0, 91: 3.8, 100: 2.0, 110: 0.0}),
        (WsdSchedule(warmup_steps=10, decay_steps=100, final_fraction=0.5), {10: 4.0, 60: 3.0, 110: 2.0}),
        (WsdSchedule(warmup_steps=0, decay_steps=10), {0: 4.0, 100: 4.0, 105: 2.0, 110: 0.0}),
        (LinearSchedule(warmup_steps=110), {0: 0.0, 55: 2.0, 109: 4 * 109 / 110}),
    ],
    ids=repr,
)
def test_learning_rates_are_the_closed_forms(config: ScheduleConfig, expected: dict[int, float]) -> None:
    schedule = make_schedule(config, PEAK, STEPS)
    steps = jnp.array(list(expected))
    np.testing.assert_allclose(jax.vmap(schedule)(steps), list(expected.values()), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("kind", [ConstantSchedule, CosineSchedule, LinearSchedule])
def test_a_run_shorter_than_its_warmup_ends_in_it(kind: type) -> None:
    schedule = make_schedule(kind(warmup_steps=220), PEAK, STEPS)
    np.testing.assert_allclose([schedule(0), schedule(55), schedule(110)], [0.0, 1.0, 2.0], rtol=1e-6)


@pytest.mark.parametrize(
    ("warmup", "decay", "fits"),
    [(11, 100, "at most 99 decay steps fit"), (200, 1, "no decay fits after the warmup; .*constant")],
)
def test_warmup_and_decay_longer_than_the_run_are_refused(warmup: int, decay: int, fits: str) -> None:
    message = (
        rf"^schedule.warmup_steps={warmup} and schedule.decay_steps={decay} are longer than train.num_steps=110; "
        rf"{fits}"
    )
    with pytest.raises(ValueError, match=message):
        make_schedule(WsdSchedule(warmup_steps=warmup, decay_steps=decay), PEAK, STEPS)
