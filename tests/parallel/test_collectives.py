"""Collectives of real programs on 8 simulated devices, exactly; test_collective_text has what CPU never prints."""

from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxpar.parallel import communication
from jaxpar.parallel.collectives import Collective, CollectiveRow, group_by_axis, parse_collectives

NAMES = ("pipe", "data", "fsdp", "expert", "context", "tensor")
SIZES = (1, 2, 2, 1, 1, 2)
BATCH = P(("data", "fsdp"))
L, B, S, D, F = 3, 4, 8, 16, 32


@pytest.fixture(params=["in order", "shuffled"])
def mesh(request: pytest.FixtureRequest) -> Iterator[Mesh]:
    """The mesh of 8 devices; their order must not matter, as partitions are numbered by their place in the mesh."""
    order = range(8) if request.param == "in order" else (3, 1, 0, 2, 7, 6, 5, 4)
    devices = np.array([jax.devices()[i] for i in order], dtype=object).reshape(SIZES)
    mesh = Mesh(devices, NAMES, axis_types=(AxisType.Auto,) * len(NAMES))
    with jax.set_mesh(mesh):
        yield mesh


def struct(mesh: Mesh, shape: tuple[int, ...], spec: P, dtype: Any = jnp.float32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec))


def collectives_of(mesh: Mesh, f: Callable[..., Any], *args: Any, **options: Any) -> list[Collective]:
    text = jax.jit(f, **options).lower(*args).compile().as_text()
    assert text is not None
    return parse_collectives(text, mesh.shape)


def rows_of(mesh: Mesh, f: Callable[..., Any], *args: Any, **options: Any) -> dict[tuple[Any, ...], CollectiveRow]:
    return {(row.kind, *row.axes): row for row in group_by_axis(collectives_of(mesh, f, *args, **options))}


def test_data_parallel_gradient_is_one_reduction_of_the_parameters(mesh: Mesh) -> None:
    def loss(w: jax.Array, x: jax.Array) -> jax.Array:
        return jnp.sum(jnp.tanh(x @ w) ** 2)

    w, x = struct(mesh, (D, F), P()), struct(mesh, (8, D), BATCH)
    (only,) = collectives_of(mesh, jax.grad(loss), w, x, out_shardings=w.sharding)
    assert (only.kind, only.axes, only.count) == ("all-reduce", ("data", "fsdp"), 1)
    assert [(dtype, sorted(shape)) for dtype, shape in only.operands] == [("f32", [D, F])]
    assert (only.payload_bytes, only.sent_bytes) == (D * F * 4, 2 * D * F * 4 * 3 // 4)
    assert only.trip_count_known
    assert not only.conditional
    assert "dot_general" in only.source
    (expected,) = communication.data_parallel(D * F, 4, element_bytes=4)
    assert only.sent_bytes == expected.sent_bytes


def test_fsdp_gathers_in_both_passes_of_a_scan_and_reduces_once(mesh: Mesh) -> None:
    def layer(x_BD: jax.Array, w_DD: jax.Array) -> tuple[jax.Array, None]:
        gathered_DD = jax.lax.with_sharding_constraint(w_DD, P())
        return jnp.tanh(x_BD @ gathered_DD), None

    def loss(w_LDD: jax.Array, x_BD: jax.Array) -> jax.Array:
        return jnp.sum(jax.lax.scan(jax.checkpoint(layer), x_BD, w_LDD)[0] ** 2)

    w, x = struct(mesh, (L, D, D), P(None, "fsdp")), struct(mesh, (B, D), P("fsdp"))
    rows = rows_of(mesh, jax.grad(loss), w, x, out_shardings=w.sharding)
    # On CPU the gradients are reduced whole, and cut.
    (gather,) = communication.gathered_parameters(2 * L * D * D, 2, element_bytes=4)
    (reduce,) = communication.data_parallel(L * D * D, 2, element_bytes=4)
    assert set(rows) == {("all-gather", "fsdp"), ("all-reduce", "fsdp")}
    gathers, reduces = rows["all-gather", "fsdp"], rows["all-reduce", "fsdp"]
    assert (gathers.count, gathers.payload_bytes, gathers.sent_bytes) == (2 * L, 2 * L * D * D * 4, gather.sent_bytes)
    assert (reduces.count, reduces.payload_bytes, reduces.sent_bytes) == (L, L * D * D * 4, reduce.sent_bytes)


@pytest.mark.parametrize("sequence_axis", [None, "tensor"])
def test_megatron_mlp_communicates_once_each_way(mesh: Mesh, sequence_axis: str | None) -> None:
    whole, residual, split = (P(*BATCH, *rest) for rest in ((None, None), (sequence_axis, None), (None, "tensor")))

    def loss(w1_DF: jax.Array, w2_FD: jax.Array, x_BSD: jax.Array) -> jax.Array:
        constrain = jax.lax.with_sharding_constraint
        h_BSF = constrain(jnp.tanh(constrain(x_BSD, whole) @ w1_DF), split)
        return jnp.sum(constrain(h_BSF @ w2_FD, residual) ** 2)

    w1, w2 = struct(mesh, (D, F), P(None, "tensor")), struct(mesh, (F, D), P("tensor", None))
    x = struct(mesh, (4 * B, S, D), residual)
    shardings = (w1.sharding, w2.sharding, x.sharding)
    rows = rows_of(mesh, jax.grad(loss, argnums=(0, 1, 2)), w1, w2, x, out_shardings=shardings)
    gradients = rows.pop(("all-reduce", "data", "fsdp"))
    assert gradients.payload_bytes == (D * F + F * D) // 2 * 4
    if sequence_axis:
        layer = communication.sequence_parallel_layer(B, S, D, 2, element_bytes=4, reduce_scatter=False)
    else:
        layer = communication.tensor_parallel_layer(B, S, D, 2, element_bytes=4)
    assert set(rows) == {(expected.kind, "tensor") for expected in layer}
    for expected in layer:  # of a whole layer, of which the feed-forward is half
        row = rows[expected.kind, "tensor"]
        assert 2 * row.count == expected.count
        assert 2 * row.payload_bytes == expected.payload_bytes
        assert 2 * row.sent_bytes == expected.sent_bytes


def test_collectives_written_by_hand(mesh: Mesh) -> None:
    def body(x: jax.Array) -> tuple[jax.Array, ...]:  # [4, 16] on each device
        return (
            jax.lax.psum(x, "tensor"),
            jax.lax.psum(x.astype(jnp.bfloat16), ("data", "tensor")),
            jax.lax.pmax((x > 0).astype(jnp.int32), ("data", "fsdp", "tensor")),
            jax.lax.psum(x, "pipe"),  # one device: nothing is sent
            jax.lax.psum_scatter(x, "data", tiled=True),
            jax.lax.all_gather(x, ("data", "fsdp"), tiled=True),
            jax.lax.all_to_all(x, "fsdp", 0, 1, tiled=True),
            jax.lax.ppermute(x, "data", [(0, 1), (1, 0)]),
        )

    spec = P(("data", "fsdp"), "tensor")
    manual = jax.shard_map(body, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
    found = collectives_of(mesh, manual, struct(mesh, (16, 32), spec))
    assert {(c.kind, c.axes, c.operands[0][0], c.payload_bytes, c.sent_bytes) for c in found} == {
        ("all-reduce", ("tensor",), "f32", 256, 256),
        ("all-reduce", ("data", "tensor"), "f32", 256, 384),  # XLA:CPU reduces bfloat16 as float32
        ("all-reduce", ("data", "fsdp", "tensor"), "s32", 256, 448),
        ("reduce-scatter", ("data",), "f32", 256, 128),
        ("all-gather", ("data", "fsdp"), "f32", 1024, 768),
        ("all-to-all", ("fsdp",), "f32", 256, 128),
        ("collective-permute", ("data",), "f32", 256, 256),
    }
    assert [c.count for c in found] == [1] * 7
    shapes = {c.kind: c.operands for c in found}
    assert shapes["reduce-scatter"] == (("f32", (4, 16)),)
    assert shapes["all-gather"] == (("f32", (16, 16)),)
    assert shapes["all-to-all"] == (("f32", (2, 16)),) * 2


def test_loops_multiply_and_conditionals_are_marked(mesh: Mesh) -> None:
    def inner(x: jax.Array, _: None) -> tuple[jax.Array, None]:
        return jax.lax.psum(x, "fsdp"), None

    def outer(x: jax.Array, _: None) -> tuple[jax.Array, None]:
        return jax.lax.ppermute(jax.lax.scan(inner, x, None, length=3)[0], "data", [(0, 1)]), None

    def body(x: jax.Array) -> jax.Array:
        x = jax.lax.cond(x[0, 0] > 0, lambda x: jax.lax.psum(x, "tensor"), lambda x: 2 * x, x)
        x = jax.lax.scan(outer, x, None, length=5)[0]
        return jax.lax.while_loop(lambda x: jnp.sum(x) < 100, lambda x: jax.lax.psum(x, "data"), x)

    spec = P(("data", "fsdp"), "tensor")
    manual = jax.shard_map(body, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
    found = collectives_of(mesh, manual, struct(mesh, (16, 32), spec))
    assert {(c.kind, c.axes, c.count, c.trip_count_known, c.conditional) for c in found} == {
        ("all-reduce", ("tensor",), 1, True, True),
        ("all-reduce", ("fsdp",), 15, True, False),
        ("collective-permute", ("data",), 5, True, False),
        ("all-reduce", ("data",), 1, False, False),
    }
    assert group_by_axis(found) == [
        CollectiveRow("all-reduce", ("data",), 1, 256, 256, trip_count_known=False, conditional=False),
        CollectiveRow("collective-permute", ("data",), 5, 1280, 1280, trip_count_known=True, conditional=False),
        CollectiveRow("all-reduce", ("fsdp",), 15, 3840, 3840, trip_count_known=True, conditional=False),
        CollectiveRow("all-reduce", ("tensor",), 1, 256, 256, trip_count_known=True, conditional=True),
    ]


def test_a_program_without_communication_has_no_rows(mesh: Mesh) -> None:
    assert rows_of(mesh, jnp.tanh, struct(mesh, (16, 32), P(("data", "fsdp"), "tensor"))) == {}
