"""How compiled programs are started."""

from collections.abc import Callable
from typing import Any, TypeVar

import jax
from jax.sharding import Mesh

from jaxpar.parallel.agreement import agreed

__all__ = ["one_at_a_time", "start_alone"]

Program = TypeVar("Program", bound=Any)
Examine = Callable[[jax.stages.Compiled], None]


def start_alone(mesh: Mesh) -> bool:
    """Whether programs on this mesh start and end alone: on the CPUs of several processes."""
    devices = list(mesh.devices.flat)
    return devices[0].platform == "cpu" and len({device.process_index for device in devices}) > 1


def one_at_a_time(program: Program, mesh: Mesh, examine: Examine | None = None) -> Program:
    """A jitted program, which starts and ends alone where `start_alone` says so; elsewhere the program itself.

    With two programs on their way at once, gloo takes messages of one for the other's, and both wait for ever: so it
    was with jax 0.10.2 in every second run of two processes with two devices each, whatever
    `jax_cpu_enable_async_dispatch` was. And gloo waits for another process for 30 seconds only, which is less than one
    may compile longer than another: they start together. All calls must have arguments of the same shapes.

    `examine` gets the program once it is compiled, before it runs.
    """
    if not start_alone(mesh) and examine is None:
        return program
    return _Compiled(program, start_alone(mesh), examine)  # type: ignore[return-value]


class _Compiled:
    """A program that is compiled at its first call."""

    def __init__(self, program: Any, is_alone: bool, examine: Examine | None) -> None:
        self._program, self._is_alone, self._examine = program, is_alone, examine
        self._compiled: jax.stages.Compiled | None = None

    def lower(self, *arguments: object) -> jax.stages.Lowered:
        """As of a jitted function."""
        return self._program.lower(*arguments)

    def __call__(self, *arguments: object) -> object:
        if self._is_alone:
            jax.block_until_ready(arguments)
        if self._compiled is None:
            self._compiled = self._program.lower(*arguments).compile()
            if self._examine is not None:
                self._examine(self._compiled)
            if self._is_alone:
                agreed("compiled")
        results = self._compiled(*arguments)
        return jax.block_until_ready(results) if self._is_alone else results
