"""How compiled programs are started."""

from collections.abc import Callable
from typing import TypeVar

import jax
from jax.sharding import Mesh

__all__ = ["one_at_a_time", "start_alone"]

Program = TypeVar("Program", bound=Callable)


def start_alone(mesh: Mesh) -> bool:
    """Whether programs on this mesh start and end alone: on the CPUs of several processes."""
    devices = list(mesh.devices.flat)
    return devices[0].platform == "cpu" and len({device.process_index for device in devices}) > 1


def one_at_a_time(program: Program, mesh: Mesh) -> Program:
    """The program, which starts and ends alone where `start_alone` says so; elsewhere the program itself.

    With two programs on their way at once, gloo takes messages of one for the other's, and both wait for ever: so it
    was with jax 0.10.2 in every second run of two processes with two devices each, whatever
    `jax_cpu_enable_async_dispatch` was.
    """
    if not start_alone(mesh):
        return program

    def alone(*arguments: object) -> object:
        jax.block_until_ready(arguments)
        return jax.block_until_ready(program(*arguments))

    return alone  # type: ignore[return-value]
