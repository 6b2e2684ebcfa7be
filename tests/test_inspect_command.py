"""`python -m jaxpar.inspect`: every parameter with its place and bytes, totals, and what the compiled step does."""

import math
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
from jaxpar.metrics import find_accelerator
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
    assert list(state) == ["parameters", "gradients", "optimizer", "counters", "all"]
    elements = sum(parameter.size for parameter in plan.parameters)
    local_bytes = sum(parameter.local_bytes for parameter in plan.parameters)
    assert state["parameters"] == state["gradients"]
    assert state["parameters"][:2] == ["float32", f"{elements:,}"]
    assert num_bytes(state["parameters"][2]) == pytest.approx(local_bytes, rel=1e-3)
    assert num_bytes(state["parameters"][4]) == pytest.approx(4 * elements, rel=1e-3)
    # AdamW: two moments a parameter; the steps made, and the updates.
    assert state["optimizer"][:2] == ["float32", f"{2 * elements:,}"]
    assert num_bytes(state["optimizer"][2]) == pytest.approx(2 * local_bytes, rel=1e-3)
    assert state["counters"] == ["int32", "2", "8 B", "0 B", "8 B"]
    assert num_bytes(state["all"][2]) == pytest.approx(4 * local_bytes, rel=2e-3)
    # Two moments of norm scales: one of each layer's two norms, and the last.
    assert f"\noptimizer arrays that no rule splits: 6, with {2 * 5 * 64 * 4 / 1024:.1f} KiB a device\n" in out
    assert "do not divide" not in out


def test_every_part_of_the_state_has_its_format_and_its_memory(
    inspect: Callable[..., int], capsys: pytest.CaptureFixture, tmp_path: Path
) -> None:
    overrides = [
        "parallel.zero_stage=1", "train.microbatches=4", "train.ema_decay=0.9", "precision.parameters=bfloat16",
        "precision.compute=bfloat16", "precision.master_weights=true", "train.on_nonfinite=skip",
        "offload.optimizer_state=host",
    ]  # fmt: skip
    assert inspect("--no-compile", *overrides) == 0
    state = {row[0]: row[1:] for row in rows_of(capsys.readouterr().out, "State")}
    plan = make_plan(load_config(tmp_path / "run.toml", overrides), jax.devices(), 257)
    # Stage 1 splits the optimizer's arrays alone; sums of microbatches are float32.
    elements = sum(parameter.local_bytes for parameter in plan.parameters) / 2
    table = plan.shardings(plan.rules.optimizer)
    split = sum(
        math.prod(sharding.shard_shape(parameter.shape))
        for parameter, sharding in zip(plan.parameters, jax.tree.leaves(table), strict=True)
    )
    assert split < 0.6 * elements
    for name, format_, device, host in (
        ("parameters", "bfloat16", 2 * elements, 0),
        ("gradients", "float32", 4 * elements, 0),
        ("master weights", "float32", 0, 4 * split),
        ("moving average", "float32", 0, 4 * split),
        ("optimizer", "float32", 0, 8 * split),
        # Steps and updates; skipped steps, and how many in a row.
        ("counters", "int32", 16, 0),
    ):
        assert state[name][0] == format_, name
        assert num_bytes(state[name][2]) == pytest.approx(device, rel=1e-3), name
        assert num_bytes(state[name][3]) == pytest.approx(host, rel=1e-3), name
    assert num_bytes(state["all"][2]) == pytest.approx(6 * elements, rel=1e-2)
    assert num_bytes(state["all"][3]) == pytest.approx(16 * split, rel=1e-2)


@pytest.mark.parametrize("where", ["none", "host"])
def test_a_gradient_has_its_parameters_format_and_is_on_the_device(
    where: str, inspect: Callable[..., int], capsys: pytest.CaptureFixture
) -> None:
    bfloat16 = ["precision.parameters=bfloat16", "precision.compute=bfloat16", "precision.master_weights=true"]
    assert inspect("--no-compile", *bfloat16, "remat.policy=full", f"offload.parameters={where}") == 0
    state = {row[0]: row[1:] for row in rows_of(capsys.readouterr().out, "State")}
    assert state["gradients"][0] == "bfloat16"
    assert state["gradients"][3] == "0 B"
    assert (state["parameters"][3] != "0 B") is (where == "host")


def test_arrays_that_are_too_small_to_split_are_listed(
    inspect: Callable[..., int], capsys: pytest.CaptureFixture
) -> None:
    assert inspect("--no-compile", "optimizer={name='adamw8bit', min_size=1}") == 0
    rows = rows_of(capsys.readouterr().out, "Optimizer arrays that do not divide as their rule says")
    # The scales of blocks of 256 along the width of 64: one block.
    reason = "vocab → tensor; embed whole: 1 does not divide over fsdp = 2"
    assert ["embedding/table", "first_scales", "384×1", "384 B", reason] in rows
    assert {row[1] for row in rows} == {"first_scales", "second_scales"}


def test_buckets_are_compared_with_arrays_sent_alone(
    inspect: Callable[..., int], capsys: pytest.CaptureFixture
) -> None:
    overrides = ["parallel.zero_stage=1", "parallel.tensor=1", "parallel.fsdp=8", "train.batch_size=16",
                 "train.microbatches=2", "model.num_layers=1"]  # fmt: skip
    assert inspect("--buckets", *overrides) == 0
    out = capsys.readouterr().out
    title = "Collectives before and after combining (parallel.bucket_bytes=33554432)"
    rows = {(row[0], row[1]): row[2:] for row in rows_of(out, title)}
    scattered = rows["fsdp", "reduce-scatter"]
    # Nine matrices: q, k, v, output, gate, up, down, table and head.
    assert (scattered[0], scattered[3]) == ("9", "1")
    assert scattered[2] == scattered[5]
    assert num_bytes(scattered[1]) == pytest.approx(num_bytes(scattered[4]) / 9, rel=0.01)
    state = {row[0]: row[1:] for row in rows_of(out, "State")}
    assert num_bytes(scattered[5]) == pytest.approx(num_bytes(state["gradients"][4]), rel=0.02)
    assert inspect("--buckets", "--no-compile") == 2
    assert capsys.readouterr().err == "--buckets compares compiled steps: leave out --no-compile\n"


def test_the_compiled_step_shows_memory_and_collectives(
    inspect: Callable[..., int], capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    h100 = find_accelerator("NVIDIA H100 80GB HBM3")
    monkeypatch.setattr("jaxpar.inspect.find_accelerator", {"cpu": h100}.get)
    assert inspect("parallel.fsdp=1", "parallel.data=8", "parallel.tensor=1", "model.num_layers=1") == 0
    out = capsys.readouterr().out
    memory = {row[0]: num_bytes(row[1]) for row in rows_of(out, "Memory of the compiled step, a device")}
    state = {row[0]: num_bytes(row[3]) for row in rows_of(out, "State")}
    # The state and one row of a batch come in: four int32 and a mask of 16 tokens each.
    assert memory["argument"] == pytest.approx(state["parameters"] + state["optimizer"] + 17 * 16, rel=0.01)
    assert memory["temp"] > 0
    assert memory["of an H100 SXM's"] == pytest.approx(80e9, rel=0.01)
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
    assert (
        capsys.readouterr().err
        == "unknown option --no-compiling; options: --no-compile, --buckets, --print-config, --help\n"
    )
