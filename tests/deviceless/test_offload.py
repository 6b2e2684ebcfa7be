"""What leaves the device's memory does so in the compiled program."""

from collections.abc import Callable
from typing import Any

import pytest

LAYOUT = {"data": 1, "fsdp": 4, "tensor": 2}


@pytest.fixture(scope="module")
def device_bytes(step: Callable[..., Any]) -> Callable[..., tuple[int, int]]:
    """Bytes on a device at the peak and in its host's memory, by `[offload]`."""

    def measured(**offload: str) -> tuple[int, int]:
        memory = step(parallel=LAYOUT, offload=offload, remat={"policy": "full"}, model={"num_layers": 16}).memory
        device = memory.argument_size_in_bytes + memory.output_size_in_bytes - memory.alias_size_in_bytes
        host = memory.host_argument_size_in_bytes
        return device + memory.temp_size_in_bytes, host

    return measured


def test_the_devices_memory_falls_by_what_the_host_takes(device_bytes: Callable[..., tuple[int, int]]) -> None:
    """AdamW's two moments of a stack of layers, then the layers' weights too; one layer's share passes through."""
    none, state, both = (
        device_bytes(),
        device_bytes(optimizer_state="host"),
        device_bytes(optimizer_state="host", parameters="host"),
    )
    assert none[1] == 0
    assert 0 < state[1] < both[1]
    saved = none[0] - state[0], none[0] - both[0]
    # A layer of sixteen, and the one fetched ahead, are on the device.
    assert saved[0] > 0.8 * state[1]
    assert saved[1] > 0.8 * both[1]
