"""Programs run one at a time only where gloo would mix them up."""

from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpar.parallel.dispatch import one_at_a_time


def _mesh(platform: str, processes: list[int]) -> Any:
    devices = [SimpleNamespace(platform=platform, process_index=index) for index in processes]
    return SimpleNamespace(devices=np.array(devices, dtype=object).reshape(-1, 1))


@pytest.mark.parametrize(("platform", "processes"), [("cpu", [0, 0]), ("gpu", [0, 1]), ("tpu", [0, 1])])
def test_elsewhere_it_is_the_program_itself(platform: str, processes: list[int]) -> None:
    program = jax.jit(jnp.sin)
    assert one_at_a_time(program, _mesh(platform, processes)) is program


def test_on_the_cpus_of_several_processes_it_waits_before_and_after(monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[Any] = []
    monkeypatch.setattr(jax, "block_until_ready", lambda values: events.append(values) or values)
    alone = one_at_a_time(lambda x, y: events.append("runs") or x + y, _mesh("cpu", [0, 1]))
    assert alone(1, 2) == 3
    assert events == [(1, 2), "runs", 3]
