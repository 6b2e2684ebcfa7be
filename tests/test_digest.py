"""Digests depend on values and places alone, and any change shows."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from jaxpar.digest import Digest, digest_arrays, digest_blocks
from jaxpar.extent import Extent

VALUES = np.random.default_rng(0).normal(size=(8, 12, 4)).astype(np.float32)
SHAPE = (8, 11, 4)


def _digest(array: jax.Array, shape: tuple[int, ...] = SHAPE) -> Digest:
    return digest_arrays({"a": array}, {"a": Extent(shape)})["a"]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "float8_e4m3fn", "int32", "uint8", "bool"])
def test_a_digest_is_the_same_on_every_mesh_in_every_memory_and_on_the_host(dtype: str) -> None:
    array = jnp.asarray(VALUES * 100).astype(dtype)
    mesh = Mesh(np.array(jax.devices()).reshape(4, 2), ("a", "b"), axis_types=(AxisType.Auto,) * 2)
    places = [
        NamedSharding(mesh, spec, memory_kind=kind)
        for spec, kind in (
            (PartitionSpec(), "device"),
            (PartitionSpec("a", None, "b"), "device"),
            (PartitionSpec(("a", "b")), "pinned_host"),
        )
    ]
    found = {_digest(jax.device_put(array, place)) for place in places}
    host = np.asarray(array)
    found.add(digest_blocks([(0, host)], SHAPE))
    found.add(digest_blocks([(0, host[:3]), (3, host[3:])], SHAPE))
    assert len(found) == 1
    assert found.pop().padding != "0" * 16


def test_every_kind_of_change_shows() -> None:
    array = jnp.asarray(VALUES)
    content = {_digest(array).content}
    flipped = VALUES.copy()
    flipped.view(np.uint32)[5, 7, 2] ^= 1
    signs = VALUES.copy()
    signs[[1, 2], [3, 3], [0, 0]] *= -1
    changed = {
        "one bit": flipped,
        "two signs": signs,
        "two rows exchanged": VALUES[[1, 0, *range(2, 8)]],
        "two columns exchanged": VALUES[:, :, [1, 0, 2, 3]],
        "moved on": np.roll(VALUES, 1, axis=0),
        "the last layer gone": np.concatenate([VALUES[:7], np.zeros_like(VALUES[:1])]),
    }
    for name, values in changed.items():
        digest = _digest(jnp.asarray(values)).content
        assert digest not in content, name
        content.add(digest)


def test_padding_has_a_digest_of_its_own() -> None:
    padded = VALUES.copy()
    padded[:, 11] = 0.0
    ours, other, narrow = (_digest(jnp.asarray(values)) for values in (VALUES, padded, VALUES[:, :11]))
    assert ours.content == other.content == narrow.content
    assert len({ours.padding, other.padding, narrow.padding}) == 3
    assert narrow.padding == "0" * 16
    assert digest_blocks([(0, VALUES[:4]), (4, VALUES[4:])], SHAPE) == ours


# 8 layers in the order of the model, of interleaved chunks, of a vee, and of stages that differ in size.
ROWS = {
    "in order": (),
    "interleaved": (0, 1, 4, 5, 2, 3, 6, 7),
    "vee": (0, 7, 1, 6, 2, 5, 3, 4),
    "uneven": (0, 1, 2, 3, 4, -1, 5, -1, -1, 6, 7, -1),
}


def _in_rows(rows: tuple[int, ...], values: np.ndarray = VALUES) -> np.ndarray:
    """The layers where `rows` say, with something else in rows that have none."""
    return np.stack([values[row] if row >= 0 else np.full_like(values[0], 9 * i) for i, row in enumerate(rows)])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "uint8"])
def test_a_stack_of_layers_has_one_digest_in_every_order(dtype: str) -> None:
    mesh = Mesh(np.array(jax.devices()).reshape(4, 2), ("pipe", "tensor"), axis_types=(AxisType.Auto,) * 2)
    values = np.asarray(jnp.asarray(VALUES * 100).astype(dtype))
    found = {digest_blocks([(0, values[:3]), (3, values[3:])], SHAPE)}
    for rows in ROWS.values():
        laid_out = _in_rows(rows, values) if rows else values
        for spec in (PartitionSpec(), PartitionSpec("pipe", "tensor")):
            array = jax.device_put(laid_out, NamedSharding(mesh, spec))
            found.add(digest_arrays({"a": array}, {"a": Extent(SHAPE, rows)})["a"])
    assert len(found) == 1
    assert found.pop().padding != "0" * 16


@pytest.mark.parametrize("rows", [rows for rows in ROWS.values() if rows], ids=[name for name in ROWS if ROWS[name]])
def test_layers_that_are_not_where_the_rows_say_show(rows: tuple[int, ...]) -> None:
    right = digest_arrays({"a": jnp.asarray(_in_rows(rows))}, {"a": Extent(SHAPE, rows)})["a"]
    content = {right.content}
    for one, other in ((0, 1), (3, 6)):
        swapped = tuple({one: other, other: one}.get(row, row) for row in rows)
        digest = digest_arrays({"a": jnp.asarray(_in_rows(swapped))}, {"a": Extent(SHAPE, rows)})["a"]
        content.add(digest.content)
        assert digest.padding != right.padding
        assert digest == digest_arrays({"a": jnp.asarray(_in_rows(rows))}, {"a": Extent(SHAPE, swapped)})["a"]
    assert len(content) == 3
    # As if the rows were in order, of which the one before the last has no layer.
    assert digest_arrays({"a": jnp.asarray(_in_rows(rows))}, {"a": Extent((len(rows), 11, 4))})["a"] != right


def test_scalars_have_digests() -> None:
    three, four = (_digest(jnp.int32(value), ()) for value in (3, 4))
    assert three != four
    assert digest_blocks([(0, np.int32(3).reshape(()))], ()) == three
