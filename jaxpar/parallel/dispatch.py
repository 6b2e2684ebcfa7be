"""How compiled programs are started."""

from typing import Any, TypeVar

import jax
from jax.sharding import Mesh

from jaxpar.parallel.agreement import agreed

__all__ = ["one_at_a_time", "start_alone"]

Program = TypeVar("Program", bound=Any)


def start_alone(mesh: Mesh) -> bool:
    """Whether programs on this mesh start and end alone: on the CPUs of several processes."""
    devices = list(mesh.devices.flat)
    return devices[0].platform == "cpu" and len({device.process_index for device in devices}) > 1


def one_at_a_time(program: Program, mesh: Mesh) -> Program:
    """A jitted program, which starts and ends alone where `start_alone` says so; elsewhere the program itself.

    With two programs on their way at once, gloo takes messages of one for the other's, and both wait for ever: so it
    was with jax 0.10.2 in every second run of two processes with two devices each, whatever
    `jax_cpu_enable_async_dispatch` was. And gloo waits for another process for 30 seconds only, which is less than one
    may compile longer than another: they start together. All calls must have arguments of the same shapes.
    """
    if not start_alone(mesh):
        return program

    compiled: list[jax.stages.Compiled] = []

    def alone(*arguments: object) -> object:
        jax.block_until_ready(arguments)
        if not compiled:
            compiled.append(program.lower(*arguments).compile())
            agreed("compiled")
        return jax.block_until_ready(compiled[0](*arguments))

    return alone  # type: ignore[return-value]
