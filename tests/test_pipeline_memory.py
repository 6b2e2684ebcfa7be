"""What the compiled pipeline keeps, and who computes what: read from the compiled program."""

from functools import cache
from typing import Any

import jax
import pytest

from jaxpar.config import Config
from jaxpar.config.schema import RematConfig
from jaxpar.inspect import compile_step
from jaxpar.models import TransformerConfig
from jaxpar.parallel.pipeline.backward import CutVjp, SplitBackward
from jaxpar.parallel.program import executions
from jaxpar.plan import Plan, make_plan
from jaxpar.state import abstract_state
from jaxpar.step import Step, abstract_batch

VOCAB_SIZE = 1016
"""A number that no other dim has."""
MODEL = TransformerConfig(
    num_layers=4, embed_dim=32, num_heads=2, mlp_dim=72, gated=False, tied=True, vocab_size=VOCAB_SIZE, vocab_multiple=8
)
MICROBATCH = 2


@cache
def compiled(schedule: str, microbatches: int, remat: str = "none") -> tuple[Plan, jax.stages.Compiled]:
    """The step of 4 ranks on batches of microbatches of one size."""
    config = Config.model_validate(
        {
            "model": MODEL,
            "data": {"sequence_length": 64},
            "train": {"batch_size": MICROBATCH * microbatches},
            "parallel": {"pipe": 4},
            "pipeline": {"schedule": schedule, "microbatches": microbatches},
            "remat": {"policy": remat},
            "optimizer": {"name": "sgd"},
            "kernels": {"attention": "reference"},
        }
    )
    plan = make_plan(config, jax.devices()[:4], VOCAB_SIZE)
    return plan, compile_step(plan)


def temporary_bytes(schedule: str, microbatches: int, remat: str = "none") -> int:
    return compiled(schedule, microbatches, remat)[1].memory_analysis().temp_size_in_bytes  # type: ignore[union-attr]


@pytest.mark.parametrize(("schedule", "few", "many"), [("1f1b", 4, 12), ("1f1b_aligned", 7, 14), ("zb_h1", 4, 12)])
def test_memory_is_flat_in_the_number_of_microbatches(schedule: str, few: int, many: int) -> None:
    """Once as many are in flight as the schedule keeps; the batch itself and the table have a row for each."""
    growth = temporary_bytes(schedule, many) - temporary_bytes(schedule, few)
    assert abs(growth) <= 256 * (many - few), growth


def test_where_more_is_in_flight_memory_grows_by_as_many_residuals() -> None:
    """GPipe keeps all microbatches, the aligned 1F1B 7 of 14; recomputation leaves a layer's input of each."""
    aligned, gpipe = temporary_bytes("1f1b_aligned", 14), temporary_bytes("gpipe", 14)
    assert gpipe > 1.5 * aligned
    layer_input = MICROBATCH * 64 * 32 * 4
    growth = temporary_bytes("gpipe", 14, "full") - temporary_bytes("gpipe", 7, "full")
    # What the stage received waits once to be used and once to be used again.
    assert growth == pytest.approx(7 * 2 * layer_input, rel=0.02)


@pytest.mark.parametrize(("schedule", "few", "many"), [("1f1b", 4, 12), ("1f1b_aligned", 7, 14), ("zb_h1", 4, 12)])
def test_the_program_is_as_long_for_any_number_of_microbatches(schedule: str, few: int, many: int) -> None:
    """And so takes as long to compile; what differs are numbers in it."""
    short, long = (compiled(schedule, number)[1].as_text() for number in (few, many))
    assert short is not None
    assert long is not None
    assert len(long.splitlines()) == pytest.approx(len(short.splitlines()), rel=0.01)


@pytest.mark.parametrize("remat", ["none", "dots", "full"])
def test_what_a_split_backward_keeps_more_is_predicted(remat: str) -> None:
    """In microbatches' activations, of which one is what GPipe keeps more for one more microbatch, without what waits
    to be used. What a backward leaves is in memory once more
    before it is in its slot."""
    growth = (temporary_bytes("gpipe", 14, remat) - temporary_bytes("gpipe", 7, remat)) / 7
    activation = growth - MICROBATCH * 64 * 32 * 4
    found = (temporary_bytes("zb_h1", 12, remat) - temporary_bytes("1f1b", 12, remat)) / activation
    split, whole = (compiled(schedule, 12, remat)[0].pipeline.measured.held for schedule in ("zb_h1", "1f1b"))
    backward = (split - 4) / 4
    assert whole == 4
    assert 0.5 < backward < 20
    assert found == pytest.approx(split - whole + backward, rel=0.05)


@pytest.mark.parametrize(("windows", "remat"), [((0,), "none"), ((8, 0), "full")])
def test_weights_are_not_kept_for_each_microbatch_in_flight(
    monkeypatch: pytest.MonkeyPatch, windows: tuple[int, ...], remat: str
) -> None:
    """Later tasks get them again: what is kept are activations, and the cotangents within layers."""
    kept: list[tuple[int, ...]] = []

    def recorded(function: Any) -> Any:
        def call(*arguments: Any) -> Any:
            outputs, between = function(*arguments)
            kept.extend(array.shape for array in between)
            return outputs, between

        return call

    monkeypatch.setattr(CutVjp, "forward", recorded(CutVjp.forward))
    monkeypatch.setattr(SplitBackward, "inputs", recorded(SplitBackward.inputs))
    model = MODEL.model_copy(update={"windows": windows, "num_layers": 4 * len(windows)})
    config = compiled("zb_h1", 12)[0].config.model_copy(update={"model": model, "remat": RematConfig(policy=remat)})
    plan = make_plan(config, jax.devices()[:4], VOCAB_SIZE)
    step = Step(plan)
    with plan.execution.active():
        step.train.lower(abstract_state(plan, step.optimizer), abstract_batch(plan))
    weights = [p.shape[1:] for p in plan.parameters if p.axes[0] == "layers" and len(p.shape) > 2]
    assert len(weights) > 2
    assert kept
    assert not {*weights, *((1, *shape) for shape in weights), *((2, *shape) for shape in weights)} & set(kept)


@pytest.mark.parametrize("schedule", ["1f1b", "1f1b_aligned"])
def test_only_one_rank_computes_logits(schedule: str) -> None:
    """Every product with the vocabulary is in a branch: of the rank that has the head."""
    text = compiled(schedule, 12 if schedule == "1f1b" else 14)[1].as_text()
    assert text is not None
    products = [run for run in executions(text) if run.instruction.opcode == "dot"]
    with_vocabulary = [run for run in products if str(VOCAB_SIZE) in run.instruction.shape + run.instruction.attributes]
    assert with_vocabulary
    assert all(run.conditional for run in with_vocabulary)
    assert schedule == "1f1b" or not all(run.conditional for run in products), "layers are in no branch"
