"""`benchmarks/memory.py`: its formula by hand, its count against it, and the README's tables."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import jax
import pytest

from jaxpar.config import load_config, parse_config
from jaxpar.plan import make_plan

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def memory() -> ModuleType:
    """The script as a module."""
    spec = importlib.util.spec_from_file_location("memory_benchmark", ROOT / "benchmarks" / "memory.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(("stage", "per_parameter"), [(0, 16.0), (1, 4 + 12 / 8), (2, 2 + 14 / 8), (3, 16 / 8)])
def test_the_formula_is_the_papers(memory: ModuleType, stage: int, per_parameter: float) -> None:
    """Mixed-precision Adam: 2 + 2 + 12 bytes a parameter (Rajbhandari 2020, figure 1), and a count of updates."""
    config = parse_config(
        {
            "model": {"name": "transformer", "num_layers": 1, "embed_dim": 64, "num_heads": 8, "mlp_dim": 64},
            "train": {"batch_size": 8},
            "parallel": {"data": 1, "fsdp": 8, "zero_stage": stage},
            "precision": {"parameters": "bfloat16", "compute": "bfloat16", "master_weights": True},
        }
    )
    plan = make_plan(config, jax.devices(), 256)
    size = sum(parameter.size for parameter in plan.parameters)
    device, host = memory.formula(plan)
    assert device == pytest.approx(per_parameter * size, abs=4)
    assert host == 0


def test_the_formula_knows_the_other_axes_and_what_else_is_kept(memory: ModuleType) -> None:
    """Replicas divide nothing, `tensor` all of these matrices at every stage; the average is a part of the state."""
    overrides = [
        "parallel.data=2",
        "parallel.fsdp=2",
        "parallel.tensor=2",
        "train.microbatches=2",
        "train.ema_decay=0.9",
    ]
    config = load_config(ROOT / "benchmarks" / "memory.toml", overrides)
    num_parameters = 1_235_814_400
    for row in memory.rows(config, ["AdamW", "Adafactor"]):
        assert 0 <= row.difference < 0.003, row
        if (row.optimizer, row.on_host, row.zero_stage) == ("AdamW", "", 2):
            per_parameter = (2 + (4 + 12 + 4) / 2) / 2
            assert row.formula_device_bytes == pytest.approx(per_parameter * num_parameters, rel=1e-3)


def test_what_the_user_got_wrong_is_one_message(memory: ModuleType, capsys: pytest.CaptureFixture) -> None:
    assert memory.main(["parallel.fsdp=3"]) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith("parallel.fsdp=3")
    assert len(captured.err.splitlines()) == 1


def test_the_readme_has_the_tables_that_the_script_makes(memory: ModuleType) -> None:
    config = load_config(ROOT / "benchmarks" / "memory.toml")
    found = list(memory.rows(config))
    # Vectors stay whole, and nothing else is counted beside the formula.
    assert min(row.difference for row in found) >= 0
    assert max(row.difference for row in found) < 0.003
    by_key = {(row.optimizer, row.on_host, row.zero_stage): row for row in found}
    assert len(by_key) == len(memory.OPTIMIZERS) * 3 * 4
    moved = by_key["AdamW", "state", 1]
    assert moved.host_bytes + moved.device_bytes == by_key["AdamW", "", 1].device_bytes
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert memory.with_table(text, "memory", memory.markdown(found)) == text
    assert memory.with_table(text, "optimizers", memory.optimizer_table()) == text


def test_a_document_without_marks_is_refused(memory: ModuleType) -> None:
    with pytest.raises(
        ValueError, match=r"^the document has no lines '<!-- begin memory: .*' and '<!-- end memory -->'$"
    ):
        memory.with_table("# Text", "memory", "| |")
