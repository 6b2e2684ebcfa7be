"""Collectives that would wait for ranks in another branch are found in the compiled text, before it hangs."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType, PartitionSpec

from jaxpar.parallel.pipeline.divergence import WouldHangError, check_branches


def compiled(collective: Callable[[jax.Array], jax.Array], *, in_branch: bool) -> str:
    mesh = jax.make_mesh((4, 2), ("pipe", "tensor"), axis_types=(AxisType.Auto,) * 2)

    def local(x: jax.Array) -> jax.Array:
        if not in_branch:
            return collective(x)
        return jax.lax.cond(jax.lax.axis_index("pipe") == 0, collective, lambda x: x * 2.0, x)

    spec = PartitionSpec("pipe", "tensor")
    with jax.set_mesh(mesh):
        program = jax.jit(jax.shard_map(local, in_specs=spec, out_specs=spec, check_vma=False))
        return str(program.lower(jnp.ones((4, 8))).compile().as_text())


def shifted(axis: str, size: int) -> Callable[[jax.Array], jax.Array]:
    return lambda x: jax.lax.ppermute(x, axis, [(i, (i + 1) % size) for i in range(size)])


def summed(axis: str) -> Callable[[jax.Array], jax.Array]:
    return lambda x: jax.lax.psum(x, axis)


@pytest.mark.parametrize(
    ("collective", "what"),
    [(shifted("tensor", 2), "collective-permute over tensor"), (summed("pipe"), "all-reduce over pipe")],
)
def test_what_would_hang_is_refused(collective: Callable, what: str) -> None:
    shape = {"pipe": 4, "tensor": 2}
    check_branches(compiled(collective, in_branch=False), shape, aligned=False)
    text = compiled(collective, in_branch=True)
    start = (
        rf"^the compiled pipeline would hang: a {what} of \d+ bytes is in a branch that not all .* by jaxpar\.parallel"
    )
    with pytest.raises(WouldHangError, match=rf"{start}\.embedding\.lookup, and .*FactoredLogits .*configuration\)$"):
        check_branches(text, shape, aligned=True)
    with pytest.raises(WouldHangError, match=rf'{start}.* for a collective of a layer set an aligned .* or "gpipe"$'):
        check_branches(text, shape, aligned=False)


def test_reductions_of_one_ranks_devices_are_safe() -> None:
    check_branches(compiled(summed("tensor"), in_branch=True), {"pipe": 4, "tensor": 2}, aligned=False)
