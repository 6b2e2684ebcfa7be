"""What a model's names mean with and without a plan, and inside a shard_map."""

import contextlib

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxpar.parallel.constrain import Execution, constrain, constrain_gradient, current_execution, num_shards


def _spec(function, x: jax.Array) -> P:  # type: ignore[no-untyped-def]
    sharding = jax.jit(function)(x).sharding
    return sharding.spec if isinstance(sharding, NamedSharding) else P()


def test_without_a_plan_names_are_free_and_nothing_happens() -> None:
    x = jnp.ones((3, 5))
    assert constrain(x, ("any", "name")) is x
    assert constrain_gradient(x, ("any", "name")) is x
    assert num_shards("heads") == 1


def test_activations_and_parameters_follow_their_own_tables(execution_on) -> None:
    x = jnp.ones((8, 8))
    with execution_on(fsdp=2, tensor=4).active():
        assert num_shards("heads") == 4
        assert num_shards("batch") == 2
        assert _spec(lambda x: constrain(x, ("embed", "mlp")), x) == P(None, "tensor")
        assert _spec(lambda x: constrain_gradient(x, ("embed", "mlp")), x) == P("fsdp", "tensor")
        with pytest.raises(ValueError, match="activation: unknown logical axis 'emebd'"):
            constrain(x, ("batch", "emebd"))


def test_axes_that_are_manual_in_a_shard_map_are_dropped(execution_on) -> None:
    execution = execution_on(data=2, tensor=4)
    x = jnp.arange(32.0).reshape(4, 8)

    def local(x: jax.Array) -> jax.Array:
        assert x.shape == (2, 8)
        return constrain(2 * x, ("batch", "mlp"))

    with execution.active():
        split = jax.shard_map(local, in_specs=P("data"), out_specs=P("data"), axis_names={"data"})
        y = jax.jit(split)(x)
        inner = jax.make_jaxpr(split)(x).eqns[0].params["jaxpr"]
    assert (y == 2 * x).all()
    constraints = [equation for equation in inner.eqns if equation.primitive.name == "sharding_constraint"]
    assert [equation.params["sharding"].spec for equation in constraints] == [P(None, "tensor")]


def test_an_execution_ends_with_its_block_even_when_that_fails() -> None:
    outer, inner = Execution(attention="outer"), Execution(attention="inner")
    before = current_execution()
    with outer.active():
        with contextlib.suppress(KeyError), inner.active():
            assert current_execution() is inner
            raise KeyError
        assert current_execution() is outer
    assert current_execution() is before
