"""Devices that share a sequence compute what one device computes, by every method: loss, every gradient, five
steps."""

import pytest

METHODS = ("ring", "all_gather", "ulysses")
LAYOUTS = {
    "alone": {"context": 8},
    "two": {"data": 4, "context": 2},
    "tensor": {"context": 4, "tensor": 2},
    "tensor and its sequences": {"context": 2, "tensor": 2, "fsdp": 2, "sequence_parallel": True},
    "fsdp": {"fsdp": 2, "context": 4},
}


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize("method", METHODS)
def test_a_shared_sequence_equals_one_device(method, layout, reference, layout_run, assert_same):
    kernels = {"attention_block": 3}
    assert_same(layout_run("llama", layout | {"context_method": method}, kernels=kernels), reference("llama"))
