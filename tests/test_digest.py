"""Digests depend on values and places alone, and any change shows."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from jaxpar.digest import Digest, digest_arrays, digest_blocks

VALUES = np.random.default_rng(0).normal(size=(8, 12, 4)).astype(np.float32)
EXTENT = (8, 11, 4)


def _digest(array: jax.Array, extent: tuple[int, ...] = EXTENT) -> Digest:
    return digest_arrays({"a": array}, {"a": extent})["a"]


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
    found.add(digest_blocks([(0, host)], EXTENT))
    found.add(digest_blocks([(0, host[:3]), (3, host[3:])], EXTENT))
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
    assert digest_blocks([(0, VALUES[:4]), (4, VALUES[4:])], EXTENT) == ours


def test_scalars_have_digests() -> None:
    three, four = (_digest(jnp.int32(value), ()) for value in (3, 4))
    assert three != four
    assert digest_blocks([(0, np.int32(3).reshape(()))], ()) == three
