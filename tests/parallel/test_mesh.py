"""The six axes: filling, refusing, and laying out devices."""

import math

import jax
import pytest
from jax.sharding import AxisType

from jaxpar.parallel.mesh import AXES, axis_sizes, make_mesh


@pytest.mark.parametrize(
    ("requested", "num_devices", "used"),
    [
        ({}, 1, {}),
        ({"data": -1}, 1, {}),
        ({"data": -1}, 8, {"data": 8}),
        ({"data": -1, "fsdp": 2, "tensor": 2}, 8, {"data": 2, "fsdp": 2, "tensor": 2}),
        ({"data": 1, "tensor": -1}, 6, {"tensor": 6}),
        ({"data": -1, "tensor": 8}, 8, {"tensor": 8}),
        ({"pipe": 2, "expert": 3, "context": 5}, 30, {"pipe": 2, "expert": 3, "context": 5}),
    ],
)
def test_one_axis_takes_what_is_left(requested: dict[str, int], num_devices: int, used: dict[str, int]) -> None:
    sizes = axis_sizes(requested, num_devices)
    assert tuple(sizes) == AXES == ("pipe", "data", "fsdp", "expert", "context", "tensor")
    assert {axis: size for axis, size in sizes.items() if size > 1} == used
    assert math.prod(sizes.values()) == num_devices


@pytest.mark.parametrize(
    ("requested", "num_devices", "message"),
    [
        (
            {"data": -1, "tensor": -1},
            8,
            "parallel.data and parallel.tensor are both -1; only one axis can take what is left",
        ),
        ({"data": -1, "fsdp": -1, "tensor": -1}, 8, "parallel.data and parallel.fsdp and parallel.tensor are all -1"),
        (
            {"data": -1, "tensor": 3},
            8,
            "parallel.tensor=3 does not divide the 8 devices, so parallel.data=-1 cannot take what is left; "
            "legal: data=2, tensor=4; data=4, tensor=2; data=1, tensor=8; data=8, tensor=1",
        ),
        (
            {"data": 4, "tensor": 4},
            8,
            "parallel.data=4 × parallel.tensor=4 asks for 16 devices, but there are 8; "
            "set one axis to -1 to take what is left, or legal: data=2, tensor=4; data=4, tensor=2; ",
        ),
        (
            {"data": 1},
            8,
            "every axis of size 1 asks for 1 devices, but there are 8; "
            "set one axis to -1 to take what is left, or legal: data=8",
        ),
    ],
)  # fmt: skip
def test_impossible_meshes_are_refused_with_the_nearest_legal_ones(
    requested: dict[str, int], num_devices: int, message: str
) -> None:
    with pytest.raises(ValueError, match=r"devices|-1") as error:
        axis_sizes(requested, num_devices)
    assert str(error.value).startswith(message)


def test_a_mesh_has_all_axes_automatic_with_the_last_one_fastest() -> None:
    devices = jax.devices()
    mesh = make_mesh(axis_sizes({"data": 2, "fsdp": 2, "tensor": 2}, 8), devices)
    assert mesh.axis_names == AXES
    assert set(mesh.axis_types) == {AxisType.Auto}
    assert mesh.devices[0, 0, 0, 0, 0].tolist() == devices[:2]
    assert mesh.devices[0, 1, 0, 0, 0].tolist() == devices[4:6]
    assert make_mesh(axis_sizes({"tensor": 3}, 3), devices[5:]).devices.ravel().tolist() == devices[5:]
