"""`python -m jaxpar.inspect`: every parameter with its place and bytes, totals, and what the compiled step does."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import jax
import pytest

from jaxpar import backend
from jaxpar.config import load_config
from jaxpar.inspect import main
from jaxpar.plan import make_plan

ROOT = Path(__file__).parents[1]
CONFIG = """
[model]
name = "transformer"
num_layers = 2
embed_dim = 64
num_heads = 4
num_kv_heads = 2
mlp_dim = 128
tied = false

[data]
sequence_length = 16
tokenizer = { name = "bytes" }

[train]
batch_size = 8

[parallel]
data = 1
fsdp = 2
tensor = 4
"""
UNITS = {"B": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}


@pytest.fixture
def inspect(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    """The command line in this process, on its 8 devices."""
    monkeypatch.setattr(backend, "prepare", lambda parallel, runtime: [])
    path = tmp_path / "run.toml"
    path.write_text(CONFIG)
    return lambda *arguments: main([str(path), *arguments])


def rows_of(out: str, title: str) -> list[list[str]]:
    """The cells of a table; a cell that is wrapped is joined again."""
    lines = out[out.index(f"\n{title}") :].splitlines()[5:]
    rows: list[list[str]] = []
    for line in lines:
        if not line.startswith("│"):
            break
        cells = [cell.strip() for cell in line.strip("│").split("│")]
        if cells[0]:
            rows.append(cells)
        else:
            rows[-1] = [f"{a} {b}".strip() for a, b in zip(rows[-1], cells, strict=True)]
    return rows


def num_bytes(text: str) -> float:
    number, unit = text.split()
    return float(number.replace(",", "")) * UNITS[unit]


def test_every_parameter_has_its_place_and_its_bytes(
    inspect: Callable[..., int], capsys: pytest.CaptureFixture, tmp_path: Path
) -> None:
    assert inspect("--no-compile") == 0
    out = capsys.readouterr().out
    assert out.startswith("mesh of 8 devices: pipe 1, data 1, fsdp 2, expert 1, context 1, tensor 4\n")
    assert "model.num_kv_heads=2 does not divide by parallel.tensor=4" in out
    assert "Memory" not in out
    rows = {row[0]: row[1:] for row in rows_of(out, "Parameters")}
    plan = make_plan(load_config(tmp_path / "run.toml"), jax.devices(), 257)
    assert list(rows) == [parameter.path for parameter in plan.parameters]
    # 257 entries are padded to 384; 96 of them, and 32 of 64 columns, are a device's.
    vocabulary = ["384×64", "vocab→tensor, embed→fsdp", "96×32", "12.0 KiB", "vocab → tensor, embed → fsdp"]
    assert rows["embedding/table"] == vocabulary
    assert rows["output"][:4] == ["64×384", "embed→fsdp, vocab→tensor", "32×96", "12.0 KiB"]
    key = ["2×64×2×16", "layers→·, embed→fsdp, kv_heads→·, head_dim→·", "2×32×2×16", "8.0 KiB"]
    assert rows["blocks/attention/key"][:4] == key
    assert rows["blocks/attention/key"][4].startswith("embed → fsdp")
    assert rows["final_norm/scale"] == ["64", "norm→·", "64", "256 B", "replicated: no rule splits norm"]

    state = {row[0]: row[1:] for row in rows_of(out, "State")}
    assert state.keys() == {"parameters", "gradients", "optimizer"}
    elements = sum(parameter.size for parameter in plan.parameters)
    local_bytes = sum(parameter.local_bytes for parameter in plan.parameters)
    assert state["parameters"] == state["gradients"]
    assert state["parameters"][0] == f"{elements:,}"
    assert num_bytes(state["parameters"][1]) == pytest.approx(local_bytes, rel=1e-3)
    assert num_bytes(state["parameters"][2]) == pytest.approx(4 * elements, rel=1e-3)
    # AdamW: two moments a parameter, and the count of updates.
    assert state["optimizer"][0] == f"{2 * elements + 1:,}"
    assert num_bytes(state["optimizer"][1]) == pytest.approx(2 * local_bytes + 4, rel=1e-3)


def test_gradients_have_bytes_of_their_own(inspect: Callable[..., int], capsys: pytest.CaptureFixture) -> None:
    """In float32 beside bfloat16 parameters, and in stage 2 split although parameters are whole."""
    precision = ("precision.parameters=bfloat16", "precision.master_weights=true", "precision.compute=bfloat16")
    shown = {}
    for stage in (1, 2):
        assert inspect("--no-compile", f"parallel.zero_stage={stage}", "train.ema_decay=0.9", *precision) == 0
        shown[stage] = {row[0]: num_bytes(row[2]) for row in rows_of(capsys.readouterr().out, "State")}
    assert shown[1]["gradients"] == pytest.approx(2 * shown[1]["parameters"], rel=0.01)
    assert shown[2]["parameters"] == shown[1]["parameters"]
    assert shown[2]["gradients"] == pytest.approx(shown[1]["gradients"] / 2, rel=0.02)
    assert shown[1]["moving average"] == pytest.approx(shown[2]["gradients"], rel=1e-3)


def test_the_compiled_step_shows_memory_and_collectives(
    inspect: Callable[..., int], capsys: pytest.CaptureFixture
) -> None:
    assert inspect("parallel.fsdp=1", "parallel.data=8", "parallel.tensor=1", "model.num_layers=1") == 0
    out = capsys.readouterr().out
    memory = {row[0]: num_bytes(row[1]) for row in rows_of(out, "Memory of the compiled step, a device")}
    state = {row[0]: num_bytes(row[2]) for row in rows_of(out, "State")}
    # The state and one row of a batch come in: four int32 and a mask of 16 tokens each.
    assert memory["argument"] == pytest.approx(state["parameters"] + state["optimizer"] + 17 * 16, rel=0.01)
    assert memory["temp"] > 0
    rows = [row for row in rows_of(out, "Collectives of the compiled step, a device") if row[1] == "all-reduce"]
    # Each gradient is reduced once over 8 devices, which sends 2·7/8 of it; a few scalars beside.
    (row,) = [row for row in rows if row[0] == "data"]
    assert num_bytes(row[4]) == pytest.approx(state["gradients"] * 2 * 7 / 8, rel=0.02)
    assert num_bytes(row[4]) == pytest.approx(num_bytes(row[5]), rel=0.02)
    assert "gradients" in row[6]


def test_a_cluster_that_is_not_here_is_simulated(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text(CONFIG)
    done = subprocess.run(
        [sys.executable, "-m", "jaxpar.inspect", str(path), "parallel.simulated_devices=32", "parallel.data=4",
         "--no-compile"],
        env=os.environ | {"PYTHONPATH": str(ROOT)}, cwd=tmp_path, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    assert "mesh of 32 devices: pipe 1, data 4, fsdp 2, expert 1, context 1, tensor 4\n" in done.stdout
    assert "\nsimulating 32 devices on the CPU\n" in f"\n{done.stdout}"


def test_an_impossible_layout_and_an_unknown_option_are_refused(
    inspect: Callable[..., int], capsys: pytest.CaptureFixture
) -> None:
    assert inspect("parallel.fsdp=3") == 2
    assert capsys.readouterr().err.startswith("parallel.fsdp=3 × parallel.tensor=4 asks for 12 devices")
    assert inspect("--no-compiling") == 2
    assert capsys.readouterr().err == "unknown option --no-compiling; options: --no-compile, --print-config, --help\n"
