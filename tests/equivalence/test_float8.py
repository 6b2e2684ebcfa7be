"""Float8 products change a model's numbers by their rounding, and a layout changes them no further."""

import numpy as np
import pytest

EMULATED = {"products": "float8", "emulate_float8": True}
LAYOUT = {"data": 2, "fsdp": 2, "tensor": 2, "sequence_parallel": True}


def relative(found: dict, expected: dict) -> dict[str, float]:
    """Each gradient's distance in the Euclidean norm, relative."""
    return {path: np.linalg.norm(found[path] - want) / np.linalg.norm(want) for path, want in expected.items()}


@pytest.mark.parametrize("zero_stage", [1, 3])
@pytest.mark.parametrize("native", [False, True], ids=["emulated", "native"])
def test_a_layout_rounds_as_one_device_does(native, zero_stage, reference, layout_run, monkeypatch):
    """The first step. A sum in another order can still round an entry of an operand the other way, which moves a
    gradient by a small part of what float8 moves it (a fifth), and grows from step to step. XLA:CPU multiplies float8,
    if not natively."""
    monkeypatch.setattr("jaxpar.execution_choices.has_float8_products", lambda device: native)
    found = layout_run("llama", LAYOUT | {"zero_stage": zero_stage}, precision=EMULATED)
    expected = reference("llama", products="float8")
    assert max(relative(found.gradients, expected.gradients).values()) < 0.02
    losses = [[metrics["loss"] for metrics in trace.metrics] for trace in (found, expected)]
    np.testing.assert_allclose(losses[0][0], losses[1][0], rtol=1e-4)
    np.testing.assert_allclose(*losses, rtol=5e-3)


def test_training_follows_the_unrounded_model(reference):
    rounded, exact = reference("llama", products="float8"), reference("llama")
    distances = relative(rounded.gradients, exact.gradients)
    # What the layers' products do not enter but through the loss is nearly exact; what they make is rounded.
    assert distances["final_norm/scale"] < 0.1 < distances["blocks/mlp/up"]
    assert max(distances.values()) < 0.4
    losses = [[metrics["loss"] for metrics in trace.metrics] for trace in (rounded, exact)]
    np.testing.assert_allclose(*losses, rtol=0.01)
    assert losses[0][-1] < losses[0][0] - 0.15
