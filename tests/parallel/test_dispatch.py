"""Programs run one at a time only where gloo would mix them up."""

from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpar.parallel import dispatch
from jaxpar.parallel.dispatch import one_at_a_time


def _mesh(platform: str, processes: list[int]) -> Any:
    devices = [SimpleNamespace(platform=platform, process_index=index) for index in processes]
    return SimpleNamespace(devices=np.array(devices, dtype=object).reshape(-1, 1))


@pytest.mark.parametrize(("platform", "processes"), [("cpu", [0, 0]), ("gpu", [0, 1]), ("tpu", [0, 1])])
def test_elsewhere_it_is_the_program_itself(platform: str, processes: list[int]) -> None:
    program = jax.jit(jnp.sin)
    assert one_at_a_time(program, _mesh(platform, processes)) is program


def test_on_the_cpus_of_several_processes_it_waits_before_and_after_and_all_start_together(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    events: list[Any] = []

    def program(x: int, y: int) -> int:
        events.append("runs")
        return x + y

    def lower(*arguments: int) -> SimpleNamespace:
        events.append(("lowered", arguments))
        return SimpleNamespace(compile=lambda: program)

    monkeypatch.setattr(jax, "block_until_ready", lambda values: events.append(values) or values)
    monkeypatch.setattr(dispatch, "agreed", lambda value: events.append(value))
    alone = one_at_a_time(SimpleNamespace(lower=lower), _mesh("cpu", [0, 1]))
    assert alone(1, 2) == 3
    assert events == [(1, 2), ("lowered", (1, 2)), "compiled", "runs", 3]
    events.clear()
    assert alone(3, 4) == 7
    assert events == [(3, 4), "runs", 7]
