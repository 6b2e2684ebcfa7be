"""What a plan decides for pipeline stages, and what it refuses before anything is compiled."""

import dataclasses
import re
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from pydantic import BaseModel

from jaxpar.config import Config
from jaxpar.inspect import compile_step
from jaxpar.memory import state_parts
from jaxpar.models import TransformerConfig
from jaxpar.models.experts_config import ExpertsConfig, TopK
from jaxpar.parallel.constrain import constrain
from jaxpar.parallel.embedding import lookup
from jaxpar.parallel.layers import scan_layers
from jaxpar.parallel.loss import FactoredLogits
from jaxpar.parallel.pipeline.catalogue import build_schedule
from jaxpar.parallel.pipeline.divergence import WouldHangError
from jaxpar.parallel.pipeline.partition import Work, balanced_layers
from jaxpar.parallel.pipeline.table_file import write_table
from jaxpar.plan import Plan, make_plan
from jaxpar.state import optimizer_of

MODEL = TransformerConfig(num_layers=8, embed_dim=64, num_heads=2, mlp_dim=128, tied=True)


def plan_of(pipeline: dict[str, Any] | None = None, model: Any = MODEL, **sections: Any) -> Plan:
    """4 ranks of 2 devices, 16 sequences for each group of devices."""
    config = Config.model_validate(
        {
            "model": model,
            "data": {"sequence_length": 16},
            "train": {"batch_size": 32},
            "parallel": {"pipe": 4, "data": 2},
            "pipeline": pipeline or {},
        }
        | sections
    )
    return make_plan(config, jax.devices(), 100)


def pipeline_of(*arguments: Any, **sections: Any) -> Any:
    pipeline = plan_of(*arguments, **sections).pipeline
    assert pipeline is not None
    return pipeline


@pytest.mark.parametrize(
    ("keys", "remat", "name", "chunks"),
    [
        ({}, "none", "zb_v", 2),
        ({}, "full", "interleaved_aligned", 2),
        ({"chunks": 1}, "full", "1f1b_aligned", 1),
        ({"costs": [1.0, 1.0, 1.0]}, "full", "zb_v", 2),
        ({"max_in_flight": 4.0}, "full", "1f1b", 1),
        ({"max_in_flight": 1.0}, "full", "naive", 1),
    ],
)
def test_auto_takes_the_fastest_that_fits(keys: dict, remat: str, name: str, chunks: int) -> None:
    """Recomputation makes the input's gradient dearer than the weights', and in lockstep zero-bubble tables wait."""
    pipeline = pipeline_of(keys, remat={"policy": remat})
    assert (pipeline.schedule.name, pipeline.schedule.geometry.num_chunks) == (name, chunks)
    assert pipeline.notes[0].startswith(f"pipeline: {name} (the ")


@pytest.mark.parametrize(("method", "name"), [("ring", "interleaved_aligned"), ("ulysses", "zb_v")])
def test_auto_takes_one_without_branches_for_a_ring(method: str, name: str) -> None:
    parallel = {"pipe": 4, "context": 2, "context_method": method}
    assert pipeline_of(parallel=parallel).schedule.name == name


def test_too_few_microbatches_are_pointed_out() -> None:
    notes = pipeline_of({"schedule": "gpipe"}, train={"batch_size": 4}).notes
    few = r"pipeline: 2 microbatches are fewer than parallel\.pipe=4, .*; train\.batch_size=4 gives up to 2"
    assert any(re.fullmatch(few, note) for note in notes)
    assert not any("are fewer than" in note for note in pipeline_of({"schedule": "gpipe"}).notes)


def test_a_batch_is_cut_into_up_to_four_parts_for_each_stage() -> None:
    assert pipeline_of().num_microbatches == 16
    assert pipeline_of(train={"batch_size": 32, "microbatches": 2}).num_microbatches == 8
    assert pipeline_of(train={"batch_size": 12}).num_microbatches == 6
    assert pipeline_of(train={"batch_size": 80}).num_microbatches == 10
    assert pipeline_of({"microbatches": 4}).num_microbatches == 4


def test_overlap_gives_results_a_tick_more() -> None:
    assert pipeline_of({"schedule": "1f1b_aligned"}).schedule.geometry.hop == 1
    assert pipeline_of({"schedule": "1f1b_aligned", "overlap": True}).schedule.geometry.hop == 2


def test_head_and_embedding_are_work() -> None:
    """The head of 1,024 words costs as much as 1.6 of these layers."""
    model = MODEL.model_copy(update={"num_layers": 13, "vocab_size": 1024})
    matrices = 64 * 64 * 4 + 64 * 128 * 3
    assert 1024 * 64 / matrices == 1.6
    assert pipeline_of({"schedule": "1f1b"}, model).partition.counts == (3, 4, 4, 2)
    given = pipeline_of({"schedule": "1f1b", "layers_per_stage": [3, 3, 3, 4]}, model).partition
    assert given.counts == (3, 3, 3, 4)
    assert given.starts == (0, 3, 6, 9)


def test_experts_that_a_token_does_not_go_through_are_no_work() -> None:
    """Of 2 layers one has 8 experts, of which a token goes through 2; the head is 5 such layers, on the average."""
    experts = ExpertsConfig(num_experts=8, every=2, router=TopK(experts_per_token=2))
    model = MODEL.model_copy(update={"num_layers": 26, "vocab_size": 4096, "experts": experts})
    attention, mlp, router = 64 * 64 * 4, 64 * 128 * 3, 64 * 8
    counts = []
    for layer in (attention + (mlp + 2 * mlp + router) / 2, attention + (mlp + 8 * mlp + router) / 2):
        counts.append(balanced_layers(26, 4, Work(embed=64 / layer, head=4096 * 64 / layer), period=2))
    assert counts[0] != counts[1]
    assert pipeline_of({"schedule": "1f1b"}, model).partition.counts == counts[0]


def test_layers_lie_where_they_run_and_empty_places_count_as_no_parameter() -> None:
    model = MODEL.model_copy(update={"num_layers": 6})
    plan, whole = plan_of({"schedule": "1f1b"}, model), plan_of(None, model, parallel={"data": 8})
    assert plan.pipeline is not None
    assert plan.pipeline.partition.rows == (0, -1, 1, 2, 3, 4, 5, -1)
    for parameter in plan.parameters:
        is_layer = parameter.axes[0] == "layers"
        assert (parameter.layout.spec[:1] == ("pipe",)) == is_layer, parameter.path
        assert not is_layer or parameter.layout.local_shape[0] == 2
    assert plan.num_parameters == whole.num_parameters == sum(p.size for p in whole.parameters)
    with plan.execution.active():
        initial = plan.in_layer_order(plan.by_path(jax.device_get(jax.jit(plan.make_params)())))
        for path, want in whole.by_path(jax.device_get(jax.jit(whole.make_params)())).items():
            assert (initial[path] == want).all(), path
    parts = {part.name: part for part in state_parts(plan, optimizer_of(plan))}
    assert parts["gradients"].formats == ("float32",)


def test_a_table_of_ones_own_is_read(tmp_path: Path) -> None:
    path = tmp_path / "mine.txt"
    write_table(dataclasses.replace(build_schedule("zb_h1", 4, 8), name="mine"), path)
    pipeline = pipeline_of({"schedule": str(path)})
    assert (pipeline.schedule.name, pipeline.num_microbatches) == ("mine", 8)
    assert pipeline.schedule.geometry.split
    for keys, message in (
        ({"microbatches": 4}, r"^pipeline\.microbatches=4 does not go with the table in \S+mine\.txt, which is for "
         r"pipeline\.microbatches=8; set it to that"),
        ({"chunks": 2}, r"^pipeline\.chunks=2 does not go with the table"),
        ({"overlap": True}, r"^pipeline\.overlap=true does not go with the table in .* is for pipeline\.overlap=false"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=message):
            plan_of({"schedule": str(path)} | keys)
    with pytest.raises(ValueError, match=r"^the microbatches of \S+=8 must divide the 4 sequences that train\.batch"):
        plan_of({"schedule": str(path)}, train={"batch_size": 8})
    path.write_text(path.read_text().replace("B0", "B1", 1))
    with pytest.raises(ValueError, match=r"mine\.txt"):
        plan_of({"schedule": str(path)})


SIX = MODEL.model_copy(update={"num_layers": 6, "windows": (4, 0)})
EIGHT = MODEL.model_copy(update={"windows": (4, 0)})
REFUSED: dict[str, tuple[dict, dict, str]] = {
    "a mistyped schedule": (
        {"schedule": "1fb1"}, {}, r'^pipeline\.schedule="1fb1" is unknown; legal values: "naive", .*; did you mean "1f'
    ),
    "also with one rank": ({"schedule": "1fb1"}, {"parallel": {"data": 8}}, r'^pipeline\.schedule="1fb1" is unknown'),
    "no such file": (
        {"schedule": "no.txt"}, {}, r"^pipeline\.schedule='no\.txt' is taken for a file, .* legal names: auto, naive, "
    ),
    "microbatches that do not divide": (
        {"microbatches": 3}, {}, r"^pipeline\.microbatches=3 must divide the 16 sequences that train\.batch_size=32 "
        r"gives each group of devices \(parallel\.data=2\); legal values: 1, 2, 4, 8, 16$",
    ),
    "too few microbatches": (
        {"schedule": "zb_h1", "microbatches": 2}, {}, r"^pipeline\.microbatches=2 is too few for .*values: 4 or more"
    ),
    "microbatches that are no rounds": (
        {"schedule": "interleaved", "microbatches": 2}, {}, r"must be a multiple of parallel\.pipe=4 .* nearest legal "
    ),
    "more stages than layers": (
        {"schedule": "interleaved", "chunks": 3}, {}, r"^parallel\.pipe=4 × pipeline\.chunks=3 = 12 stages, but the "
        r"model has 8 layers, and each stage needs one; nearest legal values: parallel\.pipe=2 or pipeline\.chunks=2",
    ),
    "chunks that the schedule has not": (
        {"schedule": "1f1b", "chunks": 2}, {}, r'^pipeline\.chunks=2 does not go with pipeline\.schedule="1f1b"'
    ),
    "layers for other stages": (
        {"layers_per_stage": [4, 4]}, {}, r"^pipeline\.layers_per_stage=\[4, 4\] has 2 stages and 8 layers; there are"
    ),
    "a layer too few": (
        {"schedule": "1f1b", "layers_per_stage": [2, 2, 2, 1]}, {}, r"has 4 stages and 7 layers; there are 4 stages "
        r"and 8 layers, for example \[2, 2, 2, 2\]",
    ),
    "two costs": (
        {"costs": [1.0, 2.0]}, {}, r"^pipeline\.costs=\[1\.0, 2\.0\] has 2 numbers; it takes three, for forward, "
    ),
    "a schedule beyond the bound": (
        {"schedule": "gpipe", "max_in_flight": 4.0}, {}, r"^pipeline\.max_in_flight=4: pipeline\.schedule='gpipe' keeps"
    ),
    "a bound that none keeps": (
        {"max_in_flight": 0.5}, {}, r'^pipeline\.schedule="auto": every schedule keeps more .*; the least is 1'
    ),
    "overlap where there is none": (
        {"schedule": "gpipe", "overlap": True}, {}, r'^pipeline\.overlap=true .* with pipeline\.schedule="gpipe" waits'
    ),
    "offload": (
        {}, {"offload": {"optimizer_state": "host"}}, r"^parallel\.pipe=4 splits the layers over ranks, and \[offload\]"
    ),
    "fewer layers than ranks": (
        {}, {"model": MODEL.model_copy(update={"num_layers": 3})}, r"^parallel\.pipe=4 × pipeline\.chunks=1 = 4 stages"
    ),
    "fewer turns than ranks": (
        {"schedule": "1f1b"}, {"model": SIX}, r"has 3 turns of 2 layers, in which model\.windows repeats, and each "
    ),
    "a ring in branches": (
        {"schedule": "1f1b"}, {"parallel": {"pipe": 4, "context": 2}},
        r'^pipeline\.schedule="1f1b" branches at each tick on the kind of task, and with parallel\.context=2 and '
        r'parallel\.context_method="ring" a layer sends .* in other branches; legal schedules: "auto", "gpipe", '
        r'"1f1b_aligned", "interleaved_aligned"; or set parallel\.context_method="all_gather" or "ulysses"$',
    ),
    "a ring where nothing without branches fits": (
        {"max_in_flight": 1.0}, {"parallel": {"pipe": 4, "context": 2}},
        r'^pipeline\.schedule="auto": every schedule keeps more activations of a stage than max_in_flight=1; the least',
    ),
    "half a turn": (
        {"schedule": "1f1b", "layers_per_stage": [3, 1, 2, 2]}, {"model": EIGHT},
        r"^pipeline\.layers_per_stage=\[3, 1, 2, 2\] must be multiples of 2, .* for example \[2, 2, 2, 2\]",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_is_refused(case: tuple[dict, dict, str]) -> None:
    keys, sections, message = case
    with pytest.raises(ValueError, match=message):
        plan_of(keys, **sections)


RESIDUAL = ("batch", "residual_sequence", "embed")


class Parts(nnx.Module):
    """A model of one's own in parts, of which one may read what is not its own."""

    def __init__(self, rngs: nnx.Rngs, vocab_size: int, wrong: str) -> None:
        self.wrong = wrong
        axes = (None, "embed", "mlp") if wrong == "no blocks" else ("layers", "embed", "mlp")
        self.table = nnx.Param(rngs.params.normal((vocab_size, 8)), out_sharding=("vocab", "embed"))
        self.scale = nnx.Param(jnp.ones(8), out_sharding=("norm",))
        self.kernels = nnx.Param(rngs.params.normal((4, 8, 8)), out_sharding=axes)

    def embed(self, inputs: Any, dropout_keys: Any = None) -> jax.Array:
        if self.wrong in ("head", "roll"):
            return lookup(self.table[...], inputs["tokens"], "vocab")
        return self.table[...][inputs["tokens"]] * (self.kernels[...].sum() if self.wrong == "embed" else 1.0)

    def layers(self, x: jax.Array, inputs: Any, dropout_keys: Any = None) -> jax.Array:
        scale = self.scale[...][None, None] if self.wrong == "layers" else 1.0
        if self.wrong == "loop":
            return x + self.kernels[...].sum()
        extras = {"extras": x.mean(), "extras of weights": self.kernels[...].mean()}.get(self.wrong)
        roll = (
            (lambda x: constrain(jnp.roll(constrain(x, RESIDUAL), 1, axis=1), RESIDUAL))
            if self.wrong == "roll"
            else jnp.tanh
        )
        body = lambda kernel, x, extras, index, slot: x + roll(x @ kernel) * scale  # noqa: E731
        for _ in range(2 if self.wrong == "twice" else 1):
            x = scan_layers(body, x, self.kernels[...], extras, num_layers=4)
        if self.wrong == "dropout" and dropout_keys is not None:
            return x * jax.random.bernoulli(dropout_keys[0], 0.9, x.shape)
        return 2.0 * x if self.wrong == "scaled" else x

    def head(self, x: jax.Array) -> jax.Array:
        x = x * self.scale[...][None, None]
        if self.wrong == "roll":
            return FactoredLogits(x, self.table[...].T, 100)
        return x @ self.table[...].T

    def __call__(self, inputs: Any, *, dropout_keys: Any = None) -> jax.Array:
        return self.head(self.layers(self.embed(inputs), inputs))


class Headless(Parts):
    head = None  # type: ignore[assignment]

    def __call__(self, inputs: Any, *, dropout_keys: Any = None) -> jax.Array:
        return self.layers(self.embed(inputs), inputs)


class PartsConfig(BaseModel):
    """`[model]` of it."""

    name: str = "parts"
    wrong: str

    def make(self, *, vocab_size: int, padded_vocab_size: int, sequence_length: int, rngs: nnx.Rngs) -> nnx.Module:
        return (Headless if self.wrong == "no head" else Parts)(rngs, padded_vocab_size, self.wrong)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ("embed", r"the method embed of model\.name='parts' reads kernels, but it may read no stacked blocks"),
        ("layers", r"the method layers of model\.name='parts' reads scale, but it may read only the stacked blocks"),
        ("loop", r"the method layers of model\.name='parts' must run its stacked blocks by jaxpar\.parallel\.layers\."),
        ("dropout", r"must give what scan_layers returns; what else it does belongs to embed or head"),
        ("scaled", r"runs on every stage, so that it must give what scan_layers returns; what else it does belongs to"),
        (
            "extras",
            r"runs on every stage, so that it must give scan_layers extras that read inputs alone; what else",
        ),
        (
            "extras of weights",
            r"it must give scan_layers extras that read inputs alone; what else it does belongs",
        ),
        (
            "twice",
            r"must call scan_layers once, with all stacked blocks; it calls it 2 times, for 4 and 4 layers, and ",
        ),
        ("no head", r"needs a model in parts: .* model\.name='parts' has no method head"),
        ("no blocks", r"needs a model in parts: .* model\.name='parts' has no stacked blocks"),
    ],
)
def test_a_model_that_cannot_be_cut_is_refused(wrong: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        plan_of(None, PartsConfig(wrong=wrong))


@pytest.mark.parametrize(
    ("wrong", "layout", "message"),
    [
        (
            "",
            {"tensor": 2},
            r"^parallel\.pipe=4 with parallel\.tensor=2: the method embed of model\.name='parts' must look",
        ),
        (
            "",
            {"fsdp": 2},
            r"^parallel\.pipe=4 with parallel\.fsdp=2: the method embed .* must look tokens up by jaxpar\.",
        ),
        (
            "head",
            {"tensor": 2},
            r"with parallel\.tensor=2: the method head of model\.name='parts' must return jaxpar\.p",
        ),
    ],
)
def test_plain_lookups_and_products_in_a_split_table_are_refused(wrong: str, layout: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        plan_of({"schedule": "1f1b"}, PartsConfig(wrong=wrong), parallel={"pipe": 4} | layout)


def test_what_the_compiler_makes_of_layers_is_examined_before_it_runs() -> None:
    """A roll along a split dim is a collective-permute."""
    keys, layout = {"schedule": "1f1b"}, {"pipe": 4, "tensor": 2, "sequence_parallel": True}
    plan = plan_of(keys, PartsConfig(wrong="roll"), parallel=layout)
    with pytest.raises(WouldHangError, match=r"would hang: .*; for a collective of a layer set an aligned schedule"):
        compile_step(plan)


def test_a_model_of_ones_own_in_parts_is_cut() -> None:
    assert pipeline_of({"schedule": "1f1b"}, PartsConfig(wrong="")).partition.counts == (1, 1, 1, 1)
