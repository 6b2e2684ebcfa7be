"""The device mesh: six named axes, always all of them, slowest network first."""

import math
from collections.abc import Mapping, Sequence

import jax
import numpy as np
from jax.sharding import AxisType, Mesh

__all__ = ["AXES", "BATCH_AXES", "axis_sizes", "make_mesh"]

AXES = ("pipe", "data", "fsdp", "expert", "context", "tensor")
BATCH_AXES = ("data", "fsdp", "expert")


def axis_sizes(requested: Mapping[str, int], num_devices: int) -> dict[str, int]:
    """Sizes of the six mesh axes, with the one that is -1 filled.

    Raises:
      ValueError: two axes are -1, or the product cannot be `num_devices`.

    >>> axis_sizes({"data": -1, "tensor": 2}, 8)
    {'pipe': 1, 'data': 4, 'fsdp': 1, 'expert': 1, 'context': 1, 'tensor': 2}
    """
    sizes = {axis: requested.get(axis, 1) for axis in AXES}
    free = [axis for axis, size in sizes.items() if size == -1]
    if len(free) > 1:
        named, both = " and ".join(f"parallel.{axis}" for axis in free), "both" if len(free) == 2 else "all"
        raise ValueError(f"{named} are {both} -1; only one axis can take what is left")
    fixed = math.prod(size for size in sizes.values() if size != -1)
    factors = [f"parallel.{axis}={size}" for axis, size in sizes.items() if size not in (1, -1)]
    asked = " × ".join(factors) or "every axis of size 1"
    if free:
        if num_devices % fixed:
            product = f" = {fixed}" if len(factors) > 1 else ""
            raise ValueError(
                f"{asked}{product} does not divide the {num_devices} devices, so parallel.{free[0]}=-1 cannot take "
                f"what is left; {_nearest_factorizations(sizes, num_devices)}"
            )
        sizes[free[0]] = num_devices // fixed
    elif fixed != num_devices:
        raise ValueError(
            f"{asked} asks for {fixed} devices, but there are {num_devices}; set one axis to -1 to take what is left, "
            f"or {_nearest_factorizations(sizes, num_devices)}"
        )
    return sizes


def make_mesh(sizes: Mapping[str, int], devices: Sequence[jax.Device] | None = None) -> Mesh:
    """A mesh of the six axes over `devices` (default: all), laid out for the network by JAX; every axis is
    automatic."""
    shape = tuple(sizes[axis] for axis in AXES)
    devices = jax.devices() if devices is None else list(devices)
    automatic = (AxisType.Auto,) * len(AXES)
    if len(devices) == 1 or devices[0].platform == "cpu":
        return Mesh(np.array(devices, dtype=object).reshape(shape), AXES, axis_types=automatic)
    return jax.make_mesh(shape, AXES, axis_types=automatic, devices=devices)


def _nearest_factorizations(sizes: Mapping[str, int], num_devices: int) -> str:
    """The legal sizes of the used axes whose product is `num_devices`, closest to the request first."""
    used = [axis for axis, size in sizes.items() if size != 1] or ["data"]
    legal = sorted(
        _factorizations(num_devices, len(used)),
        key=lambda sizes_: sum(
            abs(math.log2(size / sizes[axis])) for axis, size in zip(used, sizes_, strict=True) if sizes[axis] > 0
        ),
    )
    shown = [", ".join(f"{axis}={size}" for axis, size in zip(used, choice, strict=True)) for choice in legal[:4]]
    return "legal: " + "; ".join(shown)


def _factorizations(number: int, num_factors: int) -> list[tuple[int, ...]]:
    if num_factors == 1:
        return [(number,)]
    return [
        (first, *rest)
        for first in range(1, number + 1)
        if number % first == 0
        for rest in _factorizations(number // first, num_factors - 1)
    ]
