"""Stochastic rounding, moments and parameters in 16 bits, and the float32 copy."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from jaxpar.config.optimizers import SGD, AdamW
from jaxpar.optim import make_optimizer
from jaxpar.optim.rounding import random_key, stochastically_rounded

AXES = {"w": ("norm",)}
BELOW, ABOVE = 1.0, 1.0 + 2.0**-7


def test_what_bfloat16_holds_is_kept_and_the_rest_goes_to_a_neighbour() -> None:
    exact = jnp.array([0.0, -0.0, 1.0, -2.5, 3.0e38, 1e-40, np.inf, -np.inf], jnp.float32)
    exact = exact.astype(jnp.bfloat16).astype(jnp.float32)
    for seed in range(8):
        np.testing.assert_array_equal(stochastically_rounded(exact, jax.random.key(seed)), exact)
    not_numbers = jnp.asarray(np.array([0x7FC00000, 0x7FFFFFFF, 0xFFFFFFFF], np.uint32).view(np.float32))
    assert np.isnan(stochastically_rounded(not_numbers, jax.random.key(0))).all()
    between = stochastically_rounded(jnp.full(1000, -1.001, jnp.float32), jax.random.key(0))
    assert set(np.unique(between).astype(float)) == {-ABOVE, -BELOW}


@pytest.mark.parametrize("share", [0.02, 0.5, 0.9])
def test_the_expectation_is_the_value(share: float) -> None:
    value = BELOW + share * (ABOVE - BELOW)
    rounded = stochastically_rounded(jnp.full(40_000, value, jnp.float32), jax.random.key(1))
    shares = (rounded.astype(jnp.float32) == ABOVE).mean()
    assert float(shares) == pytest.approx(share, abs=4 * np.sqrt(share * (1 - share) / 40_000))


def test_bits_do_not_depend_on_the_layout() -> None:
    mesh = jax.make_mesh((4, 2), ("a", "b"), axis_types=(AxisType.Auto,) * 2)
    x = jax.random.normal(jax.random.key(0), (8, 6))
    split = jax.device_put(x, NamedSharding(mesh, PartitionSpec("a", "b")))
    rounded = jax.jit(stochastically_rounded, out_shardings=split.sharding)(split, jax.random.key(1))
    np.testing.assert_array_equal(rounded, stochastically_rounded(x, jax.random.key(1)))


def test_bits_depend_on_seed_name_count_and_layer() -> None:
    arguments = [(0, "a:first", 1, 0), (1, "a:first", 1, 0), (0, "b:first", 1, 0), (0, "a:first", 2, 0),
                 (0, "a:first", 1, 1), (0, "a:second", 1, 0), (0, "a:first", 0, 1)]  # fmt: skip
    keys = {tuple(jax.random.key_data(random_key(seed, name, jnp.int32(count), layer)).tolist())
            for seed, name, count, layer in arguments}  # fmt: skip
    assert len(keys) == len(arguments)


def _after(optimizer: Any, num_steps: int, gradient: jax.Array, state: Any, params: Any) -> tuple[Any, Any]:
    def step(_: int, carry: tuple[Any, Any]) -> tuple[Any, Any]:
        return optimizer.apply({"w": gradient}, *reversed(carry))

    return jax.jit(lambda: jax.lax.fori_loop(0, num_steps, step, (params, state)))()


@pytest.mark.parametrize(("rounding", "expected"), [("stochastic", 2 - 0.999**300), ("nearest", 1.0)])
def test_small_changes_of_bfloat16_moments_survive_stochastic_rounding_only(rounding: str, expected: float) -> None:
    """A trap: v ← v + 0.001·(2 − v) changes a bfloat16 v = 1 by less than half of its last bit, 0.004."""
    config = AdamW(beta2=0.999, moments="bfloat16", moment_rounding=rounding)
    optimizer = make_optimizer(config, lambda count: 0.0, AXES, seed=0)
    params = {"w": jnp.zeros(4096)}
    state = optimizer.init(params)
    state["arrays"]["w"]["second"] = jnp.ones(4096, jnp.bfloat16)
    _, state = _after(optimizer, 300, jnp.full(4096, 2.0**0.5), state, params)
    second = np.asarray(state["arrays"]["w"]["second"], np.float64)
    assert second.mean() == pytest.approx(expected, abs=0.004)


def test_moments_are_rounded_at_random_by_default() -> None:
    assert AdamW(moments="bfloat16").moment_rounding == "stochastic"


def test_the_moving_average_is_of_the_master_weights() -> None:
    """Which move by steps that bfloat16 parameters lose."""
    form = {"seed": 0, "master_weights": True, "average_decay": 0.5}
    optimizer = make_optimizer(SGD(momentum=0.0, weight_decay=0.0), lambda count: 2.0**-10, AXES, **form)
    params = {path: jnp.ones(4, jnp.bfloat16) for path in AXES}
    state = optimizer.init(params)
    for _ in range(2):
        params, state = optimizer.apply(jax.tree.map(jnp.ones_like, params), state, params)
    for path in AXES:
        assert (params[path] == 1.0).all()
        # Masters 1, 1 - u, 1 - 2u, halved twice and once.
        assert (state["arrays"][path]["average"] == 1.0 - 1.25 * 2.0**-10).all()


@pytest.mark.parametrize(
    ("master_weights", "rounding", "expected"),
    [(False, "nearest", 1.0), (False, "stochastic", 1.1), (True, "nearest", 1.1), (True, "stochastic", 1.1)],
)
def test_small_steps_of_bfloat16_parameters(master_weights: bool, rounding: Any, expected: float) -> None:
    optimizer = make_optimizer(
        SGD(momentum=0.0), lambda count: 0.001, AXES, seed=0, master_weights=master_weights, rounding=rounding
    )
    params = {"w": jnp.ones(4096, jnp.bfloat16)}
    params, state = _after(optimizer, 100, -jnp.ones(4096), optimizer.init(params), params)
    assert params["w"].dtype == jnp.bfloat16
    assert np.asarray(params["w"], np.float64).mean() == pytest.approx(expected, abs=0.005)
    assert set(state["arrays"]["w"]) == ({"master"} if master_weights else set())


def test_with_master_weights_the_parameter_is_the_rounded_float32_parameter() -> None:
    """16-bit parameters cost 12 bytes each: copy and two moments (Rajbhandari 2020)."""
    start = jax.random.normal(jax.random.key(0), (64,)).astype(jnp.bfloat16)
    gradient = jax.random.normal(jax.random.key(1), (64,))
    ends = {}
    for dtype in (jnp.float32, jnp.bfloat16, jnp.float16):
        params = {"w": start.astype(dtype)}
        optimizer = make_optimizer(AdamW(), lambda count: 0.1, AXES, seed=0, master_weights=True)
        ends[dtype] = _after(optimizer, 5, gradient, optimizer.init(params), params)
    exact, state = ends[jnp.float32]
    assert state["arrays"]["w"].keys() == {"first", "second"}
    params, state = ends[jnp.bfloat16]
    assert sum(array.nbytes for array in state["arrays"]["w"].values()) == 12 * 64
    np.testing.assert_array_equal(state["arrays"]["w"]["master"], exact["w"])
    np.testing.assert_array_equal(params["w"], exact["w"].astype(jnp.bfloat16))
    np.testing.assert_array_equal(ends[jnp.float16][0]["w"].dtype, jnp.float16)


def test_float32_parameters_are_never_rounded() -> None:
    params, gradient = {"w": jnp.ones(8)}, jnp.full(8, 1e-4)
    ends = [
        make_optimizer(SGD(), lambda count: 0.1, AXES, seed=0, rounding=rounding).apply(
            {"w": gradient}, make_optimizer(SGD(), lambda count: 0.1, AXES, seed=0).init(params), params
        )[0]["w"]
        for rounding in ("nearest", "stochastic")
    ]
    np.testing.assert_array_equal(*ends)


def test_float16_is_not_rounded_at_random() -> None:
    optimizer = make_optimizer(SGD(), lambda count: 0.1, AXES, seed=0, rounding="stochastic")
    with pytest.raises(ValueError, match=r"^stochastic rounding makes bfloat16 of float32; parameters are float16: "):
        optimizer.init({"w": jnp.ones(8, jnp.float16)})
