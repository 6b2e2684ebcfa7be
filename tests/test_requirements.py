"""Every contradiction between sections, with the message that names keys, values and the nearest fix."""

import re
from typing import Any

import jax
import pytest

from jaxpar.config import parse_config
from jaxpar.plan import make_plan
from jaxpar.requirements import (
    check_calls,
    check_checkpoints,
    check_idle_keys,
    check_layout,
    check_offload,
    check_precision,
)

SIZES = {"pipe": 1, "data": 1, "fsdp": 1, "expert": 1, "context": 1, "tensor": 1}
MODEL = {"name": "transformer", "num_layers": 1, "embed_dim": 24, "num_heads": 6, "head_dim": 4, "mlp_dim": 12}


def _config(**sections: dict[str, Any]) -> Any:
    table = {
        "model": MODEL, "data": {"sequence_length": 16}, "train": {"batch_size": 12},
    }  # fmt: skip
    return parse_config(table | {name: table.get(name, {}) | section for name, section in sections.items()})


def _exactly(message: str) -> str:
    return f"^{re.escape(message)}$"


EXPERTS = {"experts": {"num_experts": 6}}


@pytest.mark.parametrize(
    ("sizes", "model", "message"),
    [
        (
            {"expert": 2}, {},
            "parallel.expert=2 splits experts, of which model.name='transformer' has none; set parallel.expert=1, or "
            "model.experts",
        ),
        (
            {"expert": 4}, EXPERTS,
            "parallel.expert=4 must divide model.experts.num_experts=6; legal values: 1, 2, 3, 6",
        ),
        (
            {"context": 2}, EXPERTS,
            "parallel.context=2: this version of jaxpar routes tokens to model.experts within whole sequences only; "
            "set parallel.context=1",
        ),
    ],
)  # fmt: skip
def test_experts_that_cannot_be_split(sizes: dict, model: dict, message: str) -> None:
    with pytest.raises(ValueError, match=_exactly(message)):
        check_layout(_config(model=model), SIZES | sizes)


def test_layers_that_alternate_have_no_decay_by_their_number() -> None:
    experts = {"experts": {"num_experts": 6, "every": 2}, "num_layers": 2}
    message = r"^optimizer\.layer_decay=0\.9 counts layers, which model\.experts\.every=2 puts into several stacks; "
    with pytest.raises(ValueError, match=message):
        check_layout(_config(model=experts, optimizer={"name": "adamw", "layer_decay": 0.9}), SIZES)


def test_experts_that_can_be_split() -> None:
    check_layout(_config(model=EXPERTS), SIZES | {"expert": 3})


def test_a_dim_that_no_axis_splits_need_not_divide() -> None:
    config = _config(parallel={"zero_stage": 0}, train={"batch_size": 10}, evaluation={"batch_size": 10})
    check_layout(config, SIZES | {"fsdp": 5})


@pytest.mark.parametrize(
    ("sizes", "sections", "message"),
    [
        (
            {"tensor": 4}, {},
            "parallel.tensor=4 must divide model.num_heads=6; legal values: 1, 2, 3, 6",
        ),
        (
            {"tensor": 3}, {"model": {"mlp_dim": 8}},
            "parallel.tensor=3 must divide model.mlp_dim=8; legal values: 1, 2, 4, 8",
        ),
        (
            {"fsdp": 5}, {},
            "parallel.fsdp=5 must divide model.embed_dim=24; legal values: 1, 2, 3, 4, 6, 8, 12, 24",
        ),
        (
            {"data": 8}, {},
            "train.batch_size=12 must divide by data=8 = 8, the devices that share the batch; "
            "nearest legal values: 8, 16",
        ),
        (
            {"data": 2, "fsdp": 4}, {"train": {"batch_size": 4}},
            "train.batch_size=4 must divide by data=2 × fsdp=4 = 8, the devices that share the batch; "
            "nearest legal values: 8",
        ),
        (
            {}, {"train": {"microbatches": 5}},
            "train.batch_size=12 must divide by train.microbatches=5 = 5; nearest legal values: 10, 15",
        ),
        (
            {"data": 2, "fsdp": 2}, {"train": {"microbatches": 2}},
            "train.batch_size=12 must divide by data=2 × fsdp=2 × train.microbatches=2 = 8; "
            "nearest legal values: 8, 16",
        ),
        (
            {"data": 4}, {"train": {"microbatches": 3}, "evaluation": {"batch_size": 6}},
            "evaluation.batch_size=6 must divide by data=4 = 4, the devices that share the batch; "
            "nearest legal values: 4, 8",
        ),
        (
            {"tensor": 3}, {"parallel": {"sequence_parallel": True}},
            "data.sequence_length=16 must divide by parallel.tensor=3 with parallel.sequence_parallel; "
            "nearest legal values: 15, 18",
        ),
        (
            {"context": 3}, {},
            "data.sequence_length=16 must divide by 6, for parallel.context=3 and two chunks for each device, with "
            'which parallel.context_method="ring" makes their work equal; nearest legal values: 12, 18',
        ),
        (
            {"context": 3}, {"parallel": {"context_method": "ulysses"}},
            "data.sequence_length=16 must divide by 3, for parallel.context=3; nearest legal values: 15, 18",
        ),
        (
            {"context": 2, "tensor": 3}, {"parallel": {"context_method": "all_gather", "sequence_parallel": True}},
            "data.sequence_length=16 must divide by 12, for parallel.context=2 and two chunks for each device, with "
            'which parallel.context_method="all_gather" makes their work equal and parallel.tensor=3 with '
            "parallel.sequence_parallel; nearest legal values: 12, 24",
        ),
        (
            {"context": 4, "tensor": 2}, {"parallel": {"context_method": "ulysses"}},
            'parallel.context_method="ulysses" gives each device whole heads: parallel.context=4 × parallel.tensor=2 '
            "= 8 must divide model.num_heads=6; legal values of parallel.context: 1, 3; or set "
            'parallel.context_method="ring", which does not split heads',
        ),
    ],
)  # fmt: skip
def test_what_does_not_divide(sizes: dict, sections: dict, message: str) -> None:
    with pytest.raises(ValueError, match=_exactly(message)):
        check_layout(_config(**sections), SIZES | sizes)


def test_what_divides() -> None:
    """An evaluation has no microbatches."""
    sections = {"train": {"microbatches": 3}, "evaluation": {"batch_size": 4}, "parallel": {"sequence_parallel": True}}
    check_layout(_config(**sections), SIZES | {"data": 2, "fsdp": 2, "tensor": 2})


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        (
            {"precision": {"parameters": "float16", "compute": "float16"}},
            'precision.parameters="float16" loses small updates; set precision.master_weights=true, or '
            'precision.parameters="float32" with precision.compute="float16", which keeps the master weights '
            "themselves",
        ),
        (
            {"precision": {"master_weights": True}},
            'precision.master_weights=true copies 16-bit parameters, but precision.parameters="float32", which are '
            'master weights already; set precision.master_weights=false, or precision.parameters="bfloat16"',
        ),
        (
            {"precision": {"master_weights": True, "compute": "float16"}},
            'precision.master_weights=true copies 16-bit parameters, but precision.parameters="float32", which are '
            'master weights already; set precision.master_weights=false, or precision.parameters="float16"',
        ),
        (
            {"precision": {"rounding": "stochastic"}},
            'precision.rounding="stochastic" is for parameters kept in bfloat16 alone, not for precision.parameters='
            '"float32" with precision.master_weights=false; set precision.rounding="nearest"',
        ),
        (
            {"precision": {"rounding": "stochastic", "parameters": "bfloat16", "master_weights": True}},
            'precision.rounding="stochastic" is for parameters kept in bfloat16 alone, not for precision.parameters='
            '"bfloat16" with precision.master_weights=true; set precision.rounding="nearest"',
        ),
        (
            {"precision": {"loss_scale": 128.0}},
            'precision.loss_scale=128.0 is for precision.compute="float16"; float32 needs none: set '
            'precision.loss_scale="auto"',
        ),
        (
            {"precision": {"loss_scale": "dynamic", "compute": "bfloat16"}},
            'precision.loss_scale="dynamic" is for precision.compute="float16"; bfloat16 needs none: set '
            'precision.loss_scale="auto"',
        ),
        (
            {"precision": {"scale_initial": 0.5}},
            "precision.scale_initial=0.5 must lie between precision.scale_min=1 and precision.scale_max=1.67772e+07",
        ),
        (
            {"precision": {"scale_initial": 1e39, "scale_max": 1e40}},
            "precision.scale_initial=1e+39 is beyond the range of float32, in which the loss scale is kept; "
            "it must lie between 1.17549e-38 and 8.50706e+37",
        ),
        (
            {"precision": {"scale_initial": 4.0, "scale_max": 2.0}},
            "precision.scale_initial=4 must lie between precision.scale_min=1 and precision.scale_max=2",
        ),
        (
            {"evaluation": {"parameters": "ema"}},
            'evaluation.parameters="ema" needs a moving average: set train.ema_decay, for example to 0.999, or '
            'evaluation.parameters="current"',
        ),
    ],
)  # fmt: skip
def test_formats_that_contradict_each_other(sections: dict, message: str) -> None:
    config = _config(**sections)
    with pytest.raises(ValueError, match=_exactly(message)):
        check_precision(config)
    with pytest.raises(ValueError, match=_exactly(message)):
        make_plan(config, jax.devices()[:1], 30)


IDLE = "changes nothing here; it is for"


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        (
            {"precision": {"scale_max": 2.0**20}},
            f'precision.scale_max=1048576.0 {IDLE} a dynamic loss scale, which precision.compute="float16" with '
            'precision.loss_scale="auto" has; or leave it at its default, 16777216.0',
        ),
        (
            {"precision": {"compute": "float16", "loss_scale": 8.0, "scale_growth_steps": 7}},
            f'precision.scale_growth_steps=7 {IDLE} a dynamic loss scale, which precision.compute="float16" with '
            'precision.loss_scale="auto" has; or leave it at its default, 2000',
        ),
        (
            {"train": {"max_skipped": 3}},
            f'train.max_skipped=3 {IDLE} steps that are skipped: set train.on_nonfinite="skip"; or leave it at its '
            "default, 20",
        ),
        (
            {"optimizer": {"name": "adamw", "moment_rounding": "nearest"}},
            f'optimizer.moment_rounding="nearest" {IDLE} moments in 16 bits: set optimizer.moments="bfloat16"; or '
            'leave it at its default, "stochastic"',
        ),
        (
            {"optimizer": {"name": "sgd", "momentum": 0.0, "nesterov": True}},
            f"optimizer.nesterov=true {IDLE} a momentum: set optimizer.momentum, for example to 0.9; or leave it at "
            "its default, false",
        ),
        (
            {"optimizer": {"name": "adafactor", "parameter_scale": False, "min_parameter_scale": 0.1}},
            f"optimizer.min_parameter_scale=0.1 {IDLE} relative steps: set optimizer.parameter_scale=true; or leave it "
            "at its default, 0.001",
        ),
    ],
)  # fmt: skip
def test_keys_that_refine_what_is_off(sections: dict, message: str) -> None:
    config = _config(**sections)
    with pytest.raises(ValueError, match=_exactly(message)):
        check_idle_keys(config)
    with pytest.raises(ValueError, match=_exactly(message)):
        make_plan(config, jax.devices()[:1], 30)


@pytest.mark.parametrize(
    "sections",
    [
        {},
        {"precision": {"compute": "float16", "scale_max": 2.0**20}, "train": {"max_skipped": 3}},
        {"train": {"max_skipped": 3, "on_nonfinite": "skip"}},
        {"optimizer": {"name": "adamw", "moment_rounding": "nearest", "moments": "bfloat16"}},
        {"optimizer": {"name": "sgd", "nesterov": True}},
        {"optimizer": {"name": "muon", "nesterov": False}},
    ],
    ids=str,
)
def test_keys_that_refine_what_is_on(sections: dict) -> None:
    check_idle_keys(_config(**sections))


@pytest.mark.parametrize(
    "precision",
    [
        {"compute": "float16"},
        {"compute": "float16", "loss_scale": 128.0},
        {"compute": "float16", "loss_scale": "dynamic", "parameters": "float16", "master_weights": True},
        {"parameters": "bfloat16", "rounding": "stochastic"},
        {"parameters": "bfloat16", "master_weights": True, "compute": "bfloat16"},
    ],
    ids=str,
)
def test_formats_that_go_together(precision: dict) -> None:
    check_precision(_config(precision=precision, train={"ema_decay": 0.9}, evaluation={"parameters": "ema"}))


OFF = "set offload.update_on_host=false"


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        (
            {"offload": {"parameters": "host"}},
            'offload.parameters="host" with remat.policy="none" would keep every layer on the device for the backward '
            'pass; set remat.policy="full" or "dots", or offload.parameters="none"',
        ),
        (
            {"offload": {"update_on_host": True}},
            'offload.update_on_host=true needs the state there: set offload.optimizer_state="host", or '
            "offload.update_on_host=false",
        ),
        (
            {"offload": {"update_on_host": True, "optimizer_state": "host"}, "optimizer": {"name": "muon"}},
            "offload.update_on_host=true is for optimizers that update each element for itself in float32 (adamw, sgd, "
            f'lion), which optimizer.name="muon" does not with these keys; {OFF}',
        ),
        (
            {
                "offload": {"update_on_host": True, "optimizer_state": "host"},
                "optimizer": {"name": "adamw", "moments": "bfloat16"},
            },
            "offload.update_on_host=true is for optimizers that update each element for itself in float32 (adamw, sgd, "
            f'lion), which optimizer.name="adamw" does not with these keys; {OFF}',
        ),
    ],
)  # fmt: skip
def test_what_cannot_move_to_the_host(sections: dict, message: str) -> None:
    with pytest.raises(ValueError, match=_exactly(message)):
        make_plan(_config(**sections), jax.devices()[:1], 30)


def test_layers_that_the_model_runs_itself_cannot_move_to_the_host() -> None:
    config = _config(offload={"parameters": "host"}, remat={"policy": "full"})
    check_calls(config, {"scan_layers"}, 1)
    with pytest.raises(ValueError, match=r"^remat\.policy="):
        check_calls(config, {"contract", "attention"}, 1)
    message = (
        "offload.parameters=\"host\" acts in jaxpar.parallel.layers.scan_layers, which the model 'transformer' does "
        'not call; call it in the model, or set offload.parameters="none"'
    )
    with pytest.raises(ValueError, match=_exactly(message)):
        check_calls(_config(offload={"parameters": "host"}), {"contract"}, 1)


def test_a_shared_sequence_needs_the_attention_that_follows_the_plan() -> None:
    check_calls(_config(), {"attention"}, 2)
    check_calls(_config(), {}, 1)
    message = (
        "parallel.context=2 acts in jaxpar.parallel.attention.attention, which the model 'transformer' does not call; "
        "call it in the model, or set parallel.context=1"
    )
    with pytest.raises(ValueError, match=_exactly(message)):
        check_calls(_config(), {"scan_layers", "contract"}, 2)


def test_kernels_for_whole_sequences_are_refused_where_tiles_are_computed() -> None:
    kernels = {"attention": "reference"}
    message = (
        'kernels.attention="reference" works on whole sequences, and parallel.context_method="ring" with '
        'parallel.context=2 on tiles of them; set kernels.attention="auto", or parallel.context_method="ulysses"'
    )
    with pytest.raises(ValueError, match=_exactly(message)):
        check_layout(_config(kernels=kernels), SIZES | {"context": 2})
    check_layout(_config(kernels=kernels, parallel={"context_method": "ulysses"}), SIZES | {"context": 2})
    check_layout(_config(kernels={"attention": "blockwise"}), SIZES | {"context": 2})


def test_parameters_without_layers_cannot_move_to_the_host() -> None:
    config = _config(offload={"parameters": "host"}, remat={"policy": "full"})
    check_offload(config, {"up": ("layers", "embed", "mlp")})
    message = (
        'offload.parameters="host" moves layers one by one, but the model has no stacked layers, which are parameters '
        'whose first logical axis is "layers"; set offload.parameters="none"'
    )
    with pytest.raises(ValueError, match=_exactly(message)):
        check_offload(config, {"table": ("vocab", "embed")})


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        (
            {"checkpoint": {"directory": "s3://me:hidden@bucket/run"}},
            "checkpoint.directory='s3://***@bucket/run' has credentials in it, which every copy of the configuration "
            "would have too; leave them out, and give them in the environment (AWS_ACCESS_KEY_ID and "
            "AWS_SECRET_ACCESS_KEY, or GOOGLE_APPLICATION_CREDENTIALS)",
        ),
        (
            {"checkpoint": {"every_steps": 4, "keep_every_steps": 10}},
            "checkpoint.keep_every_steps=10 must be a multiple of checkpoint.every_steps=4, since other steps are not "
            "saved; nearest legal value: a multiple of 4: 8, 12",
        ),
        (
            {"checkpoint": {"keep_every_steps": 10}},
            "checkpoint.keep_every_steps=10 must be a multiple of checkpoint.every_steps=0, since other steps are not "
            "saved; nearest legal value: 0",
        ),
        (
            {"checkpoint": {"every_steps": 4, "keep_best": 1}, "data": {"holdout_every": 0}},
            "checkpoint.keep_best=1 needs a held-out loss, and data.holdout_every=0 holds nothing out; set "
            "data.holdout_every, or checkpoint.keep_best=0",
        ),
        (
            {"checkpoint": {"every_steps": 30, "keep_best": 1}, "evaluation": {"every_steps": 7},
             "train": {"num_steps": 200}},
            "checkpoint.keep_best=1 needs steps that are evaluated and saved, and there are none before the last with "
            "evaluation.every_steps=7 and checkpoint.every_steps=30; set both, for example to 30",
        ),
        (
            {"checkpoint": {"keep_best": 1}, "evaluation": {"every_steps": 0}},
            "checkpoint.keep_best=1 needs steps that are evaluated and saved, and there are none before the last with "
            "evaluation.every_steps=0 and checkpoint.every_steps=0; set both, for example to 100",
        ),
    ],
)  # fmt: skip
def test_checkpoints_that_could_never_be_kept_and_credentials(sections: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=_exactly(message)):
        check_checkpoints(_config(**sections))


def test_checkpoints_that_can_be_kept() -> None:
    check_checkpoints(_config(checkpoint={"every_steps": 4, "keep_every_steps": 8, "keep_best": 2}))
