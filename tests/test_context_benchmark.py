"""`benchmarks/context.py`: the search for the longest sequence, and what it says of a tiny model."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

from jaxpar.config import load_config

ROOT = Path(__file__).parents[1]
TINY = [
    "model.num_layers=2",
    "model.embed_dim=16",
    "model.num_heads=2",
    "model.num_kv_heads=1",
    "model.mlp_dim=16",
    "model.vocab_size=128",
    "data.sequence_length=512",
]


@pytest.fixture(scope="module")
def context() -> ModuleType:
    """The script as a module."""
    spec = importlib.util.spec_from_file_location("context_benchmark", ROOT / "benchmarks" / "context.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("limit", [0, 12, 13, 16, 100, 1000])
def test_the_longest_is_the_last_that_fits(context: ModuleType, limit: int) -> None:
    def step_bytes(n: int) -> int:
        return 10 + 3 * n + n // 7

    found = context.longest(step_bytes, limit)
    assert found == 0 or step_bytes(found) <= limit
    assert step_bytes(found + 1) > limit


def test_shared_sequences_are_longer_and_what_is_sent_is_the_formula(context: ModuleType) -> None:
    config = load_config(ROOT / "benchmarks" / "context.toml", TINY)
    one, *two = context.rows(config, [1, 2], ["ring", "ulysses"], 12 * 2**20)
    assert [row.method for row in two] == ["ring", "ulysses"]
    assert one.longest % 512 == 0
    for row in two:
        assert row.longest >= 1.25 * one.longest > 0
        assert 0 <= row.sent_bytes - row.formula_bytes <= 400
    assert context.markdown([one, *two], 512, 12).count("\n") == 4


def test_what_the_user_got_wrong_is_one_message(context: ModuleType, capsys: pytest.CaptureFixture) -> None:
    assert context.main(["--devices", "2", "data.sequence_length=4097"]) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith("data.sequence_length=4097 must divide by 4, for parallel.context=2 and")
    assert captured.err.count("\n") == 1
