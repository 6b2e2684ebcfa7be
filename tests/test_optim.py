"""Learning rates against closed forms, AdamW against numpy, and which parameters decay."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpar.config.schema import AdamW, ConstantSchedule, CosineSchedule, LinearSchedule, ScheduleConfig, WsdSchedule
from jaxpar.optim import make_optimizer, make_schedule
from jaxpar.optim.build import decay_mask

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


AXES = {
    "blocks/attention/query": ("layers", "embed", "heads", "head_dim"),
    "blocks/attention/query_bias": ("layers", "heads", "head_dim"),
    "blocks/norm/scale": ("layers", "vector"),
    "embedding/table": ("vocab", "embed"),
    "final_norm/scale": ("vector",),
}


def _tree(values: dict) -> dict:
    tree: dict = {}
    for path, value in values.items():
        *parents, name = path.split("/")
        node = tree
        for parent in parents:
            node = node.setdefault(parent, {})
        node[name] = value
    return tree


@pytest.mark.parametrize(
    ("no_decay", "decaying"),
    [
        ((), {"blocks/attention/query", "embedding/table"}),
        (("embedding/*",), {"blocks/attention/query"}),
        (("*/query", "final_norm/scale"), {"embedding/table"}),
    ],
)
def test_matrices_decay_and_biases_norms_and_named_parameters_do_not(no_decay: tuple, decaying: set) -> None:
    mask = decay_mask(no_decay, AXES)(_tree(dict.fromkeys(AXES, 0.0)))
    assert mask == _tree({path: path in decaying for path in AXES})


def test_a_pattern_that_matches_nothing_is_refused() -> None:
    with pytest.raises(
        ValueError, match=r"^optimizer.no_decay: 'embed/\*' matches no parameter; there are: blocks/attention/query, "
    ):
        make_optimizer(AdamW(no_decay=("embed/*",)), lambda step: 0.1, AXES)  # fmt: skip


def test_adamw_is_adamw_with_decoupled_decay() -> None:
    config = AdamW(beta1=0.8, beta2=0.9, epsilon=1e-3, weight_decay=0.2, no_decay=("embedding/*",))
    shapes = {path: tuple(range(2, 2 + len(axes))) for path, axes in AXES.items()}
    random = np.random.default_rng(0)
    values = {path: random.normal(size=shape) for path, shape in shapes.items()}
    schedule = make_schedule(ConstantSchedule(warmup_steps=2), 0.1, 10)
    optimizer = make_optimizer(config, schedule, AXES)
    params = jax.tree.map(jnp.float32, _tree(values))
    state, update = optimizer.init(params), jax.jit(optimizer.update)
    first, second = ({path: np.zeros(shape) for path, shape in shapes.items()} for _ in range(2))
    for step, learning_rate in enumerate((0.0, 0.05, 0.1), start=1):
        grads = {path: random.normal(size=shape) for path, shape in shapes.items()}
        updates, state = update(jax.tree.map(jnp.float32, _tree(grads)), state, params)
        params = jax.tree.map(jnp.add, params, updates)
        for path, grad in grads.items():
            first[path] = 0.8 * first[path] + 0.2 * grad
            second[path] = 0.9 * second[path] + 0.1 * grad**2
            direction = first[path] / (1 - 0.8**step) / (np.sqrt(second[path] / (1 - 0.9**step)) + 1e-3)
            decay = 0.2 if path == "blocks/attention/query" else 0.0
            values[path] = values[path] - learning_rate * (direction + decay * values[path])
    for got, want in zip(jax.tree.leaves(params), jax.tree.leaves(_tree(values)), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)
