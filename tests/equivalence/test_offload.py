"""What lives in the host's memory changes no result, and lives where it should."""

import re

import jax
import numpy as np
import pytest

from jaxpar.plan import make_plan
from jaxpar.state import abstract_state, local_bytes
from jaxpar.step import Step, abstract_batch

VOCAB_SIZE = 250
LAYOUT = {"data": 2, "fsdp": 2, "tensor": 2, "sequence_parallel": True}
TRAIN = {"num_steps": 3, "batch_size": 16, "max_grad_norm": 0.5}
STATE = {"optimizer_state": "host"}
ALL = STATE | {"parameters": "host"}
CASES = {
    "state": (STATE, {}, {}),
    "state-accumulated-zero1": (
        STATE, {"zero_stage": 1}, {"microbatches": 2, "ema_decay": 0.9, "on_nonfinite": "skip"}
    ),
    "update-on-host": (STATE | {"update_on_host": True}, {}, {"microbatches": 2}),
    "all": (ALL, {}, {}),
    "all-accumulated": (ALL, {}, {"microbatches": 2}),
    "all-accumulated-zero1": (ALL, {"zero_stage": 1}, {"microbatches": 2}),
    "all-on-host": (ALL | {"update_on_host": True}, {"zero_stage": 2}, {}),
}  # fmt: skip


def _layout(name: str) -> tuple[dict, dict, dict]:
    offload, parallel, train = CASES[name]
    remat = {"policy": "full" if offload.get("parameters") == "host" else "none"}
    return LAYOUT | parallel, {"train": TRAIN | train, "remat": remat}, {"offload": offload}


# Gemma's alternating windows matter to how slices are fetched; nothing else of a model does.
@pytest.mark.parametrize(("name", "model"), [*((name, "small") for name in CASES), ("all", "gemma")])
def test_results_are_those_without_offload(name, model, layout_run):
    layout, sections, offload = _layout(name)
    found, expected = layout_run(model, layout, **sections, **offload), layout_run(model, layout, **sections)
    for got, want in zip(found.metrics, expected.metrics, strict=True):
        assert got == pytest.approx(want, rel=1e-6)
    for path, want in expected.params.items():
        np.testing.assert_allclose(found.params[path], want, rtol=0, atol=1e-6 * np.abs(want).max(), err_msg=path)


@pytest.mark.parametrize("name", ["state", "all"])
def test_arrays_are_in_the_hosts_memory_before_and_after_the_step(name, config_for):
    layout, sections, offload = _layout(name)
    plan = make_plan(config_for("llama", layout, **sections, **offload), jax.devices(), VOCAB_SIZE)
    plain = make_plan(config_for("llama", layout, **sections), jax.devices(), VOCAB_SIZE)
    step = Step(plan)
    state = abstract_state(plan, step.optimizer)
    arrays = jax.tree.leaves(state.optimizer["arrays"])
    assert {leaf.sharding.memory_kind for leaf in arrays} == {"pinned_host"}
    for parameter in plan.parameters:
        on_host = name == "all" and "layers" in parameter.axes
        kind = plan.by_path(state.params)[parameter.path].sharding.memory_kind
        assert (kind == "pinned_host") == on_host, parameter.path
    whole = local_bytes(abstract_state(plain, Step(plain).optimizer), on_host=False)
    moved = local_bytes((state.optimizer["arrays"], state.params), on_host=True)
    assert moved > 0.6 * whole
    assert local_bytes(state, on_host=False) == whole - moved
    with plan.execution.active():
        traced = step.train.trace(state, abstract_batch(plan))
        compiled = traced.lower().compile()
        # XLA:CPU has one memory, and transfers leave no trace in a program for it.
        text = traced.lower(lowering_platforms=("cuda",)).as_text()
    (inputs, _), _ = compiled.input_shardings
    outputs, _ = compiled.output_shardings
    for shardings in (inputs, outputs):
        kinds = [sharding.memory_kind for sharding in jax.tree.leaves(shardings)]
        assert kinds == [leaf.sharding.memory_kind or "device" for leaf in jax.tree.leaves(state)]
    # Transfers to the device are of one layer's slices; whole stacks on the device are only what is kept there.
    pattern = r'annotate_device_placement.*?_xla_buffer_placement = "device".*?-> tensor<([\dx]+)x\w+>'
    transfers = set(re.findall(pattern, text))
    stacked = [parameter.shape for parameter in plan.parameters if "layers" in parameter.axes]
    assert {"x".join(map(str, shape[1:])) for shape in stacked} <= transfers
    if name == "all":
        assert not {"x".join(map(str, shape)) for shape in stacked} & transfers
