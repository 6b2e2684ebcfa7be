"""`python -m jaxpar.verify`: equal layouts pass, a wrong gradient is named, every family has a small copy."""

import math
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import jax
import numpy as np
import pytest

from jaxpar import backend
from jaxpar.config import load_config
from jaxpar.models.transformer import Transformer
from jaxpar.parallel.accumulation import microbatches
from jaxpar.parallel.constrain import current_execution
from jaxpar.parallel.loss import FactoredLogits
from jaxpar.plan import make_plan
from jaxpar.verify import cut, differences, main, synthetic_batch

ROOT = Path(__file__).parents[1]
CONFIG = """
[model]
name = "transformer"
num_layers = 1
embed_dim = 16
num_heads = 2
mlp_dim = 16
dropout = 0.1
vocab_multiple = 1

[data]
sequence_length = 16
tokenizer = { name = "bytes" }

[train]
batch_size = 8

[parallel]
data = 2
fsdp = 2
tensor = 2
"""


@pytest.fixture
def verify(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    """The command line in this process, on its 8 devices."""
    monkeypatch.setattr(backend, "prepare", lambda parallel, runtime: [])
    path = tmp_path / "run.toml"
    path.write_text(CONFIG)
    return lambda *arguments: main([str(path), *arguments])


def test_the_layouts_of_a_sound_model_agree(verify: Callable[..., int], capsys: pytest.CaptureFixture) -> None:
    """Also where one layout pads the vocabulary (257) and the other does not."""
    assert verify() == 0
    out = capsys.readouterr().out
    assert "all 13 agree: data=2, fsdp=2, tensor=2" in out
    assert "DIFFERS" not in out
    names = [line.split("│")[1].strip() for line in out.splitlines() if line.startswith("│")]
    assert (names[0], names[-1]) == ("loss", "grad_norm")
    assert {"embedding/table", "blocks/attention/query", "final_norm/scale"} < set(names)


def _faulty(head: Callable[..., FactoredLogits]) -> Callable[..., FactoredLogits]:
    """A head whose gradient of the last norm is twice as large where there are several devices."""

    def faulty(self: Transformer, x_BTD: jax.Array) -> FactoredLogits:
        times = 2 if current_execution().mesh.size > 1 else 1
        scale = self.final_norm.scale[...]
        self.final_norm.scale[...] = times * scale - (times - 1) * jax.lax.stop_gradient(scale)
        return head(self, x_BTD)

    return faulty


def test_a_wrong_gradient_is_named_and_no_other(
    verify: Callable[..., int], capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last norm's gradient counted twice, as replicated parameters' are in many a bug."""
    monkeypatch.setattr(Transformer, "head", _faulty(Transformer.head))
    assert verify() == 1
    out = capsys.readouterr().out
    differing = [line.split("│")[1].strip() for line in out.splitlines() if "DIFFERS" in line]
    assert differing == ["final_norm/scale", "grad_norm"]
    assert out.splitlines()[-1] == "2 of 13 differ; the first is final_norm/scale"


@pytest.mark.parametrize(
    "preset", ["gpt2_xl", "llama3.1_405b", "qwen2_7b", "qwen3_32b", "mistral_7b_v0.1", "gemma2_27b"]
)
def test_a_small_copy_of_every_family_agrees(
    verify: Callable[..., int], capsys: pytest.CaptureFixture, tmp_path: Path, preset: str
) -> None:
    """With sequence parallelism, and sizes that divide by the layout although the model's own need not fit here."""
    path = tmp_path / "run.toml"
    path.write_text(f'[model]\nname = "{preset}"\n\n' + CONFIG[CONFIG.index("[data]") :])
    tensor = 1 if preset == "gpt2_xl" else 2
    overrides = [f"parallel.tensor={tensor}", "parallel.data=-1", "parallel.sequence_parallel=true"]
    assert verify("--scaled-down", *overrides) == 0
    out = capsys.readouterr().out
    assert f"agree: data={4 // tensor}, fsdp=2" in out


@pytest.mark.parametrize(
    ("preset", "method"), [("gemma2_27b", "ring"), ("mistral_7b_v0.1", "all_gather"), ("qwen2_7b", "ulysses")]
)
def test_a_small_copy_with_shared_sequences_agrees(
    verify: Callable[..., int], capsys: pytest.CaptureFixture, tmp_path: Path, preset: str, method: str
) -> None:
    """On one device nothing is shared. Qwen2 7B has 28 heads and 4 key/value heads."""
    path = tmp_path / "run.toml"
    path.write_text(f'[model]\nname = "{preset}"\n\n' + CONFIG[CONFIG.index("[data]") :])
    sizes = ["parallel.data=1", "parallel.fsdp=2", "parallel.context=2", "parallel.tensor=2"]
    overrides = [*sizes, f"parallel.context_method={method}", "parallel.sequence_parallel=true"]
    assert verify("--scaled-down", *overrides) == 0
    assert "agree: fsdp=2, context=2, tensor=2" in capsys.readouterr().out


def test_a_small_copy_of_a_pipeline_agrees(verify: Callable[..., int], capsys: pytest.CaptureFixture) -> None:
    """Of the run's schedule, whatever the number of microbatches; its stages are uneven."""
    overrides = ["parallel.pipe=2", "parallel.tensor=1", "parallel.data=-1", "pipeline.schedule=zb_v"]
    assert verify("--scaled-down", *overrides, "model.num_layers=8") == 0
    assert "agree: pipe=2, data=2, fsdp=2" in capsys.readouterr().out


FLOAT8 = ("precision.products=float8", "precision.emulate_float8=true")
STAGES = (
    "parallel.pipe=2",
    "parallel.tensor=1",
    "pipeline.schedule=1f1b",
    "pipeline.microbatches=2",
    "model.num_layers=2",
    "train.batch_size=16",
    "train.microbatches=2",
)


def test_float8_is_compared_with_the_same_microbatches(
    verify: Callable[..., int], capsys: pytest.CaptureFixture
) -> None:
    """Its scales belong to a microbatch. With the whole batch at once gradients differ by a tenth, and with other
    microbatches too."""
    assert verify(*FLOAT8, *STAGES) == 0
    rows = [line.split("│") for line in capsys.readouterr().out.splitlines() if line.count("│") == 6]
    found = {row[1].strip(): float(row[3]) for row in rows}
    assert len(found) == 13
    assert max(found.values()) < 0.02
    assert found["loss"] < 1e-5


def test_the_cut_of_a_batch_is_that_of_the_step(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text(CONFIG)
    plan = make_plan(load_config(path, STAGES), jax.devices(), 257)
    with plan.execution.active():
        parts = np.asarray(microbatches(np.arange(16), 2))
        expected = [np.asarray(microbatches(part, 2)) for part in parts]
    number, order = cut(plan)
    assert number == 4
    np.testing.assert_array_equal(order, np.ravel(expected))
    assert sorted(order) == list(range(16)) != list(order)


REDUCTION = ("precision.reduction=bfloat16", "parallel.zero_stage=1", "train.microbatches=2")


@pytest.mark.parametrize(
    "overrides",
    [
        ("precision.compute=float16", "precision.loss_scale=128.0"),
        ("precision.parameters=bfloat16", "precision.rounding=stochastic"),
        REDUCTION,
    ],
    ids=["float16", "parameters", "reduction"],
)
def test_formats_that_round_agree(
    overrides: tuple[str, ...], verify: Callable[..., int], capsys: pytest.CaptureFixture
) -> None:
    assert verify(*overrides) == 0
    assert "all 13 agree: data=2, fsdp=2, tensor=2" in capsys.readouterr().out


def test_rounding_does_not_hide_a_wrong_gradient(
    verify: Callable[..., int], capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Transformer, "head", _faulty(Transformer.head))
    assert verify(*REDUCTION) == 1
    assert capsys.readouterr().out.splitlines()[-1].endswith("the first is final_norm/scale")


def test_a_small_copy_of_a_run_with_many_microbatches_agrees(
    verify: Callable[..., int], capsys: pytest.CaptureFixture
) -> None:
    assert verify("--scaled-down", "train.batch_size=96", "train.microbatches=8") == 0
    assert "all 13 agree: data=2, fsdp=2, tensor=2" in capsys.readouterr().out


def test_bfloat16_reductions_run_on_cpu_as_users_start_it(tmp_path: Path) -> None:
    """Without the tests' compiler flags, in a step that is partly manual: XLA:CPU has crashed on such."""
    (tmp_path / "run.toml").write_text(CONFIG)
    overrides = ["precision.reduction=bfloat16", "train.microbatches=2", "parallel.simulated_devices=8"]
    environment = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    done = subprocess.run(
        [sys.executable, "-m", "jaxpar.verify", "run.toml", *overrides, "parallel.sequence_parallel=true"],
        env=environment | {"PYTHONPATH": str(ROOT)}, cwd=tmp_path, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert "all 13 agree" in done.stdout


_BARE = """
from pydantic import BaseModel
from jaxpar.models import TransformerConfig

class Bare(BaseModel):
    name: str

    def make(self, **sizes):
        return TransformerConfig(num_layers=1, embed_dim=16, num_heads=2, mlp_dim=16).make(**sizes)
"""


def test_a_model_without_a_small_copy_is_told_so(
    verify: Callable[..., int], capsys: pytest.CaptureFixture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "bare_model.py").write_text(_BARE)
    monkeypatch.syspath_prepend(tmp_path)
    assert verify("--scaled-down", "model={name='bare_model:Bare'}") == 2
    message = "--scaled-down: Bare has no method scaled_down(tensor=..., fsdp=..., stages=...)\n"
    assert capsys.readouterr().err == message


def test_differences_are_relative_and_see_what_is_not_finite() -> None:
    reference = {
        "loss": np.float32(2.0), "a": np.array([3.0, -4.0]), "zero": np.zeros(2), "padded": np.array([[1.0]]),
        "nan": np.ones(1), "grad_norm": np.float32(1.0),
    }  # fmt: skip
    found = {
        "loss": np.float32(2.5), "a": np.array([3.0, -3.0]), "zero": np.array([0.0, 4e-4]),
        "padded": np.array([[1.0, 0.0], [0.0, 0.5]]), "nan": np.array([np.nan]), "grad_norm": np.float32(1.0),
    }  # fmt: skip
    relative = {each.name: each.relative for each in differences(found, reference)}
    expected = {"loss": 0.25, "a": 0.25, "zero": 0.1, "padded": 0.5, "nan": math.inf, "grad_norm": 0.0}
    assert relative == pytest.approx(expected)


def test_the_batch_has_documents_and_masked_targets(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text(CONFIG)
    overrides = ["train.batch_size=32", "data.sequence_length=128"]
    plan = make_plan(load_config(tmp_path / "run.toml", overrides), jax.devices(), 300)
    batch = synthetic_batch(plan)
    assert {name: array.shape for name, array in batch.items()} == dict.fromkeys(batch, (32, 128))
    assert batch["tokens"].max() < 300
    assert 0.8 < batch["loss_mask"].mean() < 0.97
    assert batch["segment_ids"].max(1).mean() > 2
    np.testing.assert_array_equal(batch["positions"][:, 1:] == 0, np.diff(batch["segment_ids"], axis=1) == 1)
    np.testing.assert_array_equal(batch["targets"][:, :-1], batch["tokens"][:, 1:])
    again, other = synthetic_batch(plan), synthetic_batch(plan, seed=1)
    np.testing.assert_array_equal(again["tokens"], batch["tokens"])
    assert not np.array_equal(other["tokens"], batch["tokens"])
