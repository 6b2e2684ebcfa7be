"""The README's example of a model that jaxpar does not know, run as its reader would."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import jax
import pytest

from jaxpar.config import load_config
from jaxpar.plan import make_plan

ROOT = Path(__file__).parents[1]
SMALL = (
    "parallel.simulated_devices=2",
    "parallel.fsdp=1",
    "model.num_layers=1",
    "data.sequence_length=16",
    "data.tokenizer={name='bytes'}",
    "data.sources=[{name='text', paths=['texts/*.txt']}]",
    "train.batch_size=4",
    f"runtime.compilation_cache='{ROOT / '.cache' / 'tests' / 'jax'}'",
)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with the two files that the README shows, and texts."""
    directory = tmp_path_factory.mktemp("user")
    blocks = re.findall(
        r"^```(?:python|toml)\n(# (my_model\.\w+).*?)^```$", (ROOT / "README.md").read_text(), re.M | re.S
    )
    assert [name for _, name in blocks] == ["my_model.py", "my_model.toml"]
    for content, name in blocks:
        (directory / name).write_text(content)
    (directory / "texts").mkdir()
    for number in range(11):
        (directory / "texts" / f"{number}.txt").write_text(f"One fish, two fish, red fish, blue fish: {number}. " * 20)
    return directory


@pytest.mark.parametrize(
    ("key", "value", "function"),
    [
        ("precision.products", "float8", "contract.contract"),
        ("remat.policy", "full", "layers.scan_layers"),
        ("kernels.unroll_layers", True, "layers.scan_layers"),
        ("kernels.attention", "blockwise", "attention.attention"),
    ],
)
def test_what_its_functions_do_not_reach_is_refused(
    directory: Path, monkeypatch: pytest.MonkeyPatch, key: str, value: str | bool, function: str
) -> None:
    monkeypatch.syspath_prepend(directory)
    off = {"precision.products": "compute", "remat.policy": "none", "kernels.attention": "auto"}.get(key, False)
    message = (
        f"{key}={json.dumps(value)} acts in jaxpar.parallel.{function}, which the model 'my_model:RecurrentConfig' "
        f"does not call; call it in the model, or set {key}={json.dumps(off)}"
    )
    emulated = ["precision.emulate_float8=true"] * (key == "precision.products")
    config = load_config(directory / "my_model.toml", [*SMALL, f"{key}={json.dumps(value)}", *emulated])
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        make_plan(config, jax.devices()[:2], 257)


def test_no_attention_is_chosen_for_a_model_without(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(directory)
    assert make_plan(load_config(directory / "my_model.toml", SMALL), jax.devices()[:2], 257).notes == ()


def _run(directory: Path, command: str, *overrides: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", f"jaxpar.{command}", "my_model.toml", *SMALL, *overrides],
        cwd=directory, env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True, check=False,
    )  # fmt: skip


def test_it_trains(directory: Path) -> None:
    learning_rate = ("optimizer.learning_rate=0.02", "schedule={name='constant'}")
    done = _run(directory, "train", "run.dir=run", "train.num_steps=12", "logging.every_steps=1", *learning_rate)
    assert done.returncode == 0, done.stderr
    num_parameters = 384 * 64 + 3 * 64 * 128  # 257 tokens are padded to 384 rows
    assert f"my_model:RecurrentConfig: {num_parameters:,} parameters, vocabulary 257" in done.stdout
    lines = [json.loads(line) for line in (directory / "run" / "metrics.jsonl").read_text().splitlines()]
    losses = [line["loss"] for line in lines if "loss" in line]
    assert len(losses) == 12
    assert losses[-1] < 0.6 * losses[0]
    assert 0.0 < lines[-1]["eval/loss"] < 0.6 * losses[0]


def test_its_layout_is_verified(directory: Path) -> None:
    done = _run(directory, "verify")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "all 6 agree: tensor=2" in done.stdout
