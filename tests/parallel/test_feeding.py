"""Each process reads the rows that its devices hold, and they become one global array."""

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxpar.parallel.feeding import from_own_rows, from_whole, own_rows


class OfSomeDevices:
    """A sharding of which only some devices are this process's."""

    def __init__(self, sharding: NamedSharding, own: Sequence[jax.Device]) -> None:
        self._sharding, self._own = sharding, set(own)

    def addressable_devices_indices_map(self, shape: tuple[int, ...]) -> dict[jax.Device, Any]:
        indices = self._sharding.devices_indices_map(shape)
        return {device: index for device, index in indices.items() if device in self._own}


def _sharding(order: Sequence[int], shape: tuple[int, int, int]) -> NamedSharding:
    devices = np.array([jax.devices()[i] for i in order], dtype=object).reshape(shape)
    return NamedSharding(Mesh(devices, ("data", "context", "tensor")), PartitionSpec("data", "context"))


@pytest.mark.parametrize(
    ("order", "shape", "rows"),
    [
        (range(8), (8, 1, 1), [[0, 1, 2, 3], [4, 5, 6, 7]]),
        ([0, 4, 1, 5, 2, 6, 3, 7], (8, 1, 1), [[0, 2, 4, 6], [1, 3, 5, 7]]),
        (range(8), (4, 1, 2), [[0, 1, 2, 3], [4, 5, 6, 7]]),
        ([0, 4, 1, 5, 2, 6, 3, 7], (4, 1, 2), [list(range(8)), list(range(8))]),
        ([0, 4, 1, 5, 2, 6, 3, 7], (4, 2, 1), [list(range(8)), list(range(8))]),
    ],
    ids=["side by side", "scattered", "tensor within", "tensor across", "context across"],
)
def test_the_rows_of_two_processes(order: Sequence[int], shape: tuple[int, int, int], rows: list[list[int]]) -> None:
    """Processes of four devices each: devices that share a row in two processes make both read it."""
    sharding = _sharding(order, shape)
    processes = (jax.devices()[:4], jax.devices()[4:])
    found = [own_rows(OfSomeDevices(sharding, own), 8, 6) for own in processes]  # type: ignore[arg-type]
    assert [list(own) for own in found] == rows


@pytest.mark.parametrize("shape", [(8, 1, 1), (4, 2, 1), (2, 2, 2), (1, 1, 8)])
def test_the_global_array_is_the_batch(shape: tuple[int, int, int]) -> None:
    sharding = _sharding([3, 1, 2, 0, 7, 5, 6, 4], shape)
    batch = {"tokens": np.arange(48, dtype=np.int32).reshape(8, 6), "loss_mask": np.arange(48).reshape(8, 6) % 3 == 0}
    rows = own_rows(sharding, 8, 6)
    arrays = from_own_rows(rows, {name: array[list(rows)] for name, array in batch.items()}, sharding, 8)
    assert arrays.keys() == batch.keys()
    for name, array in arrays.items():
        assert array.sharding == sharding
        assert array.dtype == batch[name].dtype
        np.testing.assert_array_equal(array, batch[name])


def test_a_part_is_cut_from_the_rows_that_are_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of rows 1, 3, 5, 7, as a process has them whose devices are scattered over the mesh."""
    monkeypatch.setattr(jax, "make_array_from_single_device_arrays", lambda shape, sharding, parts: (shape, parts))
    own = OfSomeDevices(_sharding([0, 4, 1, 5, 2, 6, 3, 7], (8, 1, 1)), jax.devices()[4:])
    tokens = np.arange(48).reshape(8, 6)
    made: Any = from_own_rows((1, 3, 5, 7), {"tokens": tokens[1::2]}, own, 8)  # type: ignore[arg-type]
    shape, parts = made["tokens"]
    assert shape == (8, 6)
    assert [part.devices() for part in parts] == [{device} for device in jax.devices()[4:]]
    for row, part in zip((1, 3, 5, 7), parts, strict=True):
        np.testing.assert_array_equal(part, tokens[row : row + 1])


@pytest.mark.parametrize("value", [np.arange(48).reshape(8, 6), np.float32(3.0)], ids=["batch", "scalar"])
def test_what_every_process_has_whole_becomes_a_global_array(value: np.ndarray) -> None:
    sharding = _sharding(range(8), (4, 2, 1))
    sharding = sharding if np.ndim(value) else NamedSharding(sharding.mesh, PartitionSpec())
    array = from_whole(value, sharding)
    assert array.sharding == sharding
    np.testing.assert_array_equal(array, value)
