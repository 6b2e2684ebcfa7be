"""What a plan decides, and every impossible one that it refuses before anything is compiled."""

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P
from pydantic import BaseModel

from jaxpar.config import Config, parse_config
from jaxpar.config.schema import PrecisionConfig
from jaxpar.parallel.mesh import BATCH_AXES
from jaxpar.plan import Plan, make_plan

VOCAB = 50


def _config(model: Any = None, *, batch: int = 8, length: int = 16, **parallel: Any) -> Config:
    table = {
        "model": {"name": "llama_tiny"} | (model or {}),
        "data": {"sequence_length": length},
        "train": {"batch_size": batch},
        "parallel": parallel,
    }
    return parse_config(table)


def _plan(model: Any = None, *, num_devices: int = 8, **rest: Any) -> Plan:
    return make_plan(_config(model, **rest), jax.devices()[:num_devices], VOCAB)


def test_parameters_live_where_megatron_and_fsdp_put_them() -> None:
    plan = _plan({"qkv_bias": True}, fsdp=2, tensor=2)
    assert dict(plan.mesh.shape) == {"pipe": 1, "data": 2, "fsdp": 2, "expert": 1, "context": 1, "tensor": 2}
    columns, rows = P(None, "fsdp", "tensor"), P(None, "tensor", "fsdp")
    assert {parameter.path: parameter.layout.spec for parameter in plan.parameters} == {
        "blocks/attention/key": columns,
        "blocks/attention/key_bias": P(None, "tensor"),
        "blocks/attention/output": P(None, "tensor", None, "fsdp"),
        "blocks/attention/query": columns,
        "blocks/attention/query_bias": P(None, "tensor"),
        "blocks/attention/value": columns,
        "blocks/attention/value_bias": P(None, "tensor"),
        "blocks/attention_norm/scale": P(),
        "blocks/mlp/down": rows,
        "blocks/mlp/gate": columns,
        "blocks/mlp/up": columns,
        "blocks/mlp_norm/scale": P(),
        "embedding/table": P("tensor", "fsdp"),
        "final_norm/scale": P(),
        "output": P("fsdp", "tensor"),
    }
    up = next(parameter for parameter in plan.parameters if parameter.path == "blocks/mlp/up")
    assert (up.shape, up.layout.local_shape, up.size, up.local_bytes) == ((2, 64, 176), (2, 32, 88), 22528, 22528)
    assert jax.tree.structure(plan.param_shardings) == jax.tree.structure(plan.abstract_params)
    assert plan.param_shardings["blocks"]["mlp"]["down"].spec == rows
    assert plan.batch_sharding.shard_shape((8, 16)) == (2, 16)


def test_tables_differ_by_what_is_gathered_and_by_sequence_parallelism() -> None:
    rules = _plan(tensor=2, sequence_parallel=True).rules
    assert (rules.params["embed"], rules.activations["embed"]) == (("fsdp",), ())
    assert rules.optimizer == rules.gradients == rules.params
    assert rules.activations["batch"] == BATCH_AXES
    assert rules.activations["sequence"] == ("context",)
    assert rules.activations["residual_sequence"] == ("context", "tensor")
    assert _plan(tensor=2).rules.activations["residual_sequence"] == ("context",)


@pytest.mark.parametrize(
    ("vocab_size", "tensor", "multiple", "padded"),
    [(151_936, 1, 128, 151_936), (151_936, 3, 128, 152_064), (151_936, 7, 256, 152_320), (50_257, 8, 1, 50_264)],
)
def test_a_vocabulary_that_does_not_divide_is_padded(vocab_size: int, tensor: int, multiple: int, padded: int) -> None:
    model = {"num_heads": tensor, "num_kv_heads": tensor, "embed_dim": 2 * tensor, "mlp_dim": tensor}
    model |= {"vocab_size": vocab_size, "vocab_multiple": multiple}
    plan = _plan(model, num_devices=tensor, tensor=tensor)
    assert (plan.vocab_size, plan.padded_vocab_size) == (vocab_size, padded)
    assert plan.abstract_params["embedding"]["table"].shape == (padded, 2 * tensor)


def test_notes_name_every_decision_that_a_user_did_not_make() -> None:
    plan = _plan({"num_kv_heads": 2, "vocab_size": 60}, tensor=4)
    vocabulary, heads, attention = plan.notes
    assert vocabulary == "model.vocab_size=60: the tokenizer uses the first 50 entries"
    assert heads.startswith(
        "model.num_kv_heads=2 does not divide by parallel.tensor=4: every tensor device stores all "
    )
    assert attention.startswith(f"attention: {plan.execution.attention} (")
    assert {p.layout.spec for p in plan.parameters if p.path.endswith(("/key", "/value"))} == {P()}
    assert len(_plan({"num_kv_heads": 2}, tensor=2).notes) == 1


@pytest.mark.parametrize(
    ("model", "keys", "message"),
    [
        ({}, {"tensor": -1}, r"parallel.data and parallel.tensor are both -1"),
        ({}, {"tensor": 3}, r"parallel.tensor=3 does not divide the 8 devices"),
        ({}, {"tensor": 8}, r"parallel.tensor=8 must divide model.num_heads=4; legal values: 1, 2, 4$"),
        (
            {"vocab_size": 40},
            {},
            r"model.vocab_size=40 is smaller than the tokenizer's 50 entries; "
            r"set it to 0 \(takes the tokenizer's\) or to 50 or more$",
        ),
        (
            {"positions": "learned", "max_positions": 8},
            {},
            r"data.sequence_length=16 exceeds model.max_positions=8, the rows of the position table",
        ),
    ],
)  # fmt: skip
def test_impossible_layouts_are_refused(model: dict, keys: dict, message: str) -> None:
    with pytest.raises(ValueError, match=f"^{message}"):
        _plan(model, **keys)


class _Own(nnx.Module):
    """A user's model with one table, whose names, and whether it keeps randomness and a counter, are the test's."""

    def __init__(self, names: tuple | None, stateful: bool, padded_vocab_size: int, rngs: nnx.Rngs) -> None:
        annotation = {} if names is None else {"out_sharding": names}
        self.table = nnx.Param(jnp.zeros((padded_vocab_size, 6)), **annotation)
        if stateful:
            self.rngs = rngs
            self.calls = nnx.Variable(jnp.zeros(()))

    def __call__(self, inputs: dict, *, dropout_keys: Any = None) -> jax.Array:
        return jnp.take(self.table[...], inputs["tokens"], axis=0)


class _OwnConfig(BaseModel):
    """Its configuration, which has none of the fields of jaxpar's own models."""

    name: str = "mine"
    names: tuple | None = ("vocab", "embed")
    stateful: bool = False

    def make(self, *, vocab_size: int, padded_vocab_size: int, sequence_length: int, rngs: nnx.Rngs) -> nnx.Module:
        return _Own(self.names, self.stateful, padded_vocab_size, rngs)


def _own_plan(**values: Any) -> Plan:
    config = _config(fsdp=2, tensor=4).model_copy(update={"model": _OwnConfig(**values)})
    return make_plan(config, jax.devices(), VOCAB)


def test_a_users_model_needs_names_only() -> None:
    plan = _own_plan()
    assert (plan.vocab_size, plan.padded_vocab_size) == (50, 128)
    assert [(p.path, p.layout.spec, p.layout.local_shape) for p in plan.parameters] == [
        ("table", P("tensor", "fsdp"), (32, 3))
    ]


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (
            {"stateful": True},
            r"^model.name='mine' keeps state that is not an nnx.Param \(calls, rngs/default/count, rngs/default/key\); "
            r"take randomness from the dropout_keys argument and keep no counters",
        ),
        ({"names": None}, r"^parameter table \(128, 6\) has no logical axes; annotate it: nnx.Param"),
        ({"names": ("vocab", "width")}, r"^table: unknown logical axis 'width'; the rules know embed, experts, "),
        ({"names": ("vocab",)}, r"^table: 1 logical axes \('vocab',\) for 2 dims \(128, 6\)$"),
        ({"names": ("vocab", "mlp")}, r"^table: mesh axis 'tensor' is used twice, by logical axes 'vocab' and 'mlp'"),
        ({"names": ("vocab", "heads")}, r"^table: mesh axis 'tensor' is used twice"),
        ({"names": (None, "mlp")}, r"^table: dim 'mlp' of size 6 does not divide over tensor = 4; .*: 4, 8$"),
    ],
)  # fmt: skip
def test_a_users_model_that_cannot_be_laid_out_is_refused(values: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        _own_plan(**values)


def _float8_plan(**precision: Any) -> Plan:
    config = _config().model_copy(update={"precision": PrecisionConfig(compute="bfloat16", **precision)})
    return make_plan(config, jax.devices(), VOCAB)


def test_float8_products_are_native_where_the_device_has_them_and_emulated_where_asked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert _float8_plan().execution.products == "compute"
    emulated = _float8_plan(products="float8", emulate_float8=True)
    assert emulated.execution.products == "emulated_float8"
    assert any(
        "emulated on cpu" in note and "multiplied in bfloat16, which is slower" in note for note in emulated.notes
    )
    monkeypatch.setattr("jaxpar.execution_choices.has_float8_products", lambda device: True)
    for emulate in (False, True):
        native = _float8_plan(products="float8", emulate_float8=emulate)
        assert native.execution.products == "float8"
        assert any("which cpu multiplies natively" in note for note in native.notes)


@pytest.mark.parametrize(
    ("precision", "message"),
    [
        (
            {"products": "float8"},
            r"^precision\.products='float8' needs float8 products, .* capability 8\.9 .* TPU v7 .*\(cpu\) has not; "
            r"set precision\.emulate_float8=true .*, or precision\.products='compute'$",
        ),
        (
            {"emulate_float8": True},
            r"^precision\.emulate_float8=true has nothing to emulate with precision\.products='compute'; "
            r"set precision\.products='float8', or precision\.emulate_float8=false$",
        ),
    ],
    ids=["no-float8", "nothing-to-emulate"],
)
def test_float8_that_cannot_be_is_refused(precision: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        _float8_plan(**precision)
