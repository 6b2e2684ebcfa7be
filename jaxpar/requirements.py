"""What a configuration must satisfy across its sections; `make_plan` asks before anything is compiled."""

import json
import math
from collections.abc import Mapping

from jaxpar.config.credentials import has_credentials, masked
from jaxpar.config.schema import Config
from jaxpar.multiples import nearest_multiples
from jaxpar.optim import PROPERTIES
from jaxpar.parallel.mesh import BATCH_AXES
from jaxpar.parallel.rules import LogicalAxes

__all__ = ["check_checkpoints", "check_layout", "check_offload", "check_precision"]

_SMALLEST_SCALE, _LARGEST_SCALE = 2.0**-126, 2.0**126
"""Normal float32 numbers, and twice each."""


def check_layout(config: Config, sizes: Mapping[str, int]) -> None:
    """Raises ValueError if the mesh of `sizes` cannot split what the configuration asks for."""
    for axis in ("pipe", "expert", "context"):
        if sizes[axis] != 1:
            raise ValueError(
                f"parallel.{axis}={sizes[axis]}: this version of jaxpar splits work over data, fsdp and tensor only; "
                f"set parallel.{axis}=1"
            )
    _check_divides(config, sizes)


def check_precision(config: Config) -> None:
    """Raises ValueError if number formats contradict each other."""
    precision = config.precision
    if precision.parameters == "float16" and not precision.master_weights:
        raise ValueError(
            'precision.parameters="float16" loses small updates; set precision.master_weights=true, or '
            'precision.parameters="float32" with precision.compute="float16", which keeps the master weights themselves'
        )
    if precision.master_weights and precision.parameters == "float32":
        raise ValueError(
            'precision.master_weights=true copies 16-bit parameters, but precision.parameters="float32", which are '
            f'master weights already; set precision.master_weights=false, or precision.parameters="{_16_bit(config)}"'
        )
    if precision.rounding == "stochastic" and (precision.parameters != "bfloat16" or precision.master_weights):
        raise ValueError(
            f'precision.rounding="stochastic" is for parameters kept in bfloat16 alone, not for precision.parameters='
            f'"{precision.parameters}" with precision.master_weights={str(precision.master_weights).lower()}; '
            'set precision.rounding="nearest"'
        )
    if precision.loss_scale != "auto" and precision.compute != "float16":
        raise ValueError(
            f'precision.loss_scale={json.dumps(precision.loss_scale)} is for precision.compute="float16"; '
            f'{precision.compute} needs none: set precision.loss_scale="auto"'
        )
    scales = {
        "scale_min": precision.scale_min,
        "scale_initial": precision.scale_initial,
        "scale_max": precision.scale_max,
    }
    if isinstance(precision.loss_scale, float):
        scales["loss_scale"] = precision.loss_scale
    for key, value in scales.items():
        if not _SMALLEST_SCALE <= value <= _LARGEST_SCALE:
            raise ValueError(
                f"precision.{key}={value:g} is beyond the range of float32, in which the loss scale is kept; "
                f"it must lie between {_SMALLEST_SCALE:g} and {_LARGEST_SCALE:g}"
            )
    if not precision.scale_min <= precision.scale_initial <= precision.scale_max:
        raise ValueError(
            f"precision.scale_initial={precision.scale_initial:g} must lie between precision.scale_min="
            f"{precision.scale_min:g} and precision.scale_max={precision.scale_max:g}"
        )
    if config.evaluation.parameters == "ema" and not config.train.ema_decay:
        raise ValueError(
            'evaluation.parameters="ema" needs a moving average: set train.ema_decay, for example to 0.999, or '
            'evaluation.parameters="current"'
        )


def check_offload(config: Config, axes: Mapping[str, LogicalAxes]) -> None:
    """Raises ValueError for what cannot be moved to the host; `axes` are the model's parameters by path."""
    offload, optimizer = config.offload, config.optimizer
    if offload.parameters == "host" and config.remat.policy == "none":
        raise ValueError(
            'offload.parameters="host" with remat.policy="none" would keep every layer on the device for the backward '
            'pass; set remat.policy="full" or "dots", or offload.parameters="none"'
        )
    if offload.parameters == "host" and not any("layers" in names for names in axes.values()):
        raise ValueError(
            'offload.parameters="host" moves layers one by one, but the model has no stacked layers, which are '
            'parameters whose first logical axis is "layers"; set offload.parameters="none"'
        )
    if not offload.update_on_host:
        return
    if offload.optimizer_state == "none":
        raise ValueError(
            'offload.update_on_host=true needs the state there: set offload.optimizer_state="host", or '
            "offload.update_on_host=false"
        )
    stochastic = config.precision.rounding == "stochastic" or getattr(optimizer, "moments", "float32") != "float32"
    if not PROPERTIES[type(optimizer)].elementwise or stochastic:
        names = ", ".join(kind().name for kind, row in PROPERTIES.items() if row.elementwise)
        raise ValueError(
            "offload.update_on_host=true is for optimizers that update each element for itself in float32 "
            f'({names}), which optimizer.name="{optimizer.name}" does not with these keys; '
            "set offload.update_on_host=false"
        )


def check_checkpoints(config: Config) -> None:
    """Raises ValueError for checkpoints that could never be kept, and for credentials that would be stored."""
    checkpoint, evaluation = config.checkpoint, config.evaluation
    every = checkpoint.every_steps
    if has_credentials(checkpoint.directory):
        raise ValueError(
            f"checkpoint.directory={masked(checkpoint.directory)!r} has credentials in it, which every copy of the "
            "configuration would have too; leave them out, and give them in the environment (AWS_ACCESS_KEY_ID and "
            "AWS_SECRET_ACCESS_KEY, or GOOGLE_APPLICATION_CREDENTIALS)"
        )
    if checkpoint.keep_every_steps and (not every or checkpoint.keep_every_steps % every):
        fix = f"a multiple of {every}: {nearest_multiples(checkpoint.keep_every_steps, every)}" if every else "0"
        raise ValueError(
            f"checkpoint.keep_every_steps={checkpoint.keep_every_steps} must be a multiple of "
            f"checkpoint.every_steps={every}, since other steps are not saved; nearest legal value: {fix}"
        )
    if not checkpoint.keep_best:
        return
    if config.data.holdout_every == 0:
        raise ValueError(
            f"checkpoint.keep_best={checkpoint.keep_best} needs a held-out loss, and data.holdout_every=0 holds "
            "nothing out; set data.holdout_every, or checkpoint.keep_best=0"
        )
    both = math.lcm(every, evaluation.every_steps)
    if not both or both > config.train.num_steps:
        raise ValueError(
            f"checkpoint.keep_best={checkpoint.keep_best} needs steps that are evaluated and saved, and there are none "
            f"before the last with evaluation.every_steps={evaluation.every_steps} and checkpoint.every_steps={every}; "
            f"set both, for example to {every or evaluation.every_steps or 100}"
        )


def _16_bit(config: Config) -> str:
    return "bfloat16" if config.precision.compute == "float32" else config.precision.compute


def _check_divides(config: Config, sizes: Mapping[str, int]) -> None:
    model = config.model
    for axis, field in (("tensor", "num_heads"), ("tensor", "mlp_dim"), ("fsdp", "embed_dim")):
        value = getattr(model, field, None)
        if value is not None and value % sizes[axis]:
            legal = ", ".join(str(n) for n in range(1, value + 1) if value % n == 0)
            raise ValueError(f"parallel.{axis}={sizes[axis]} must divide model.{field}={value}; legal values: {legal}")
    shards = math.prod(sizes[axis] for axis in BATCH_AXES)
    split = " × ".join(f"{axis}={sizes[axis]}" for axis in BATCH_AXES if sizes[axis] > 1)
    number = config.train.microbatches
    for key, value, parts in (
        ("train.batch_size", config.train.batch_size, number),
        ("evaluation.batch_size", config.evaluation.batch_size or config.train.batch_size, 1),
    ):
        if value % (shards * parts):
            factors = [split] * (shards > 1) + [f"train.microbatches={parts}"] * (parts > 1)
            sharing = ", the devices that share the batch" * (parts == 1)
            raise ValueError(
                f"{key}={value} must divide by {' × '.join(factors)} = {shards * parts}{sharing}; "
                f"nearest legal values: {nearest_multiples(value, shards * parts)}"
            )
    length = config.data.sequence_length
    if config.parallel.sequence_parallel and length % sizes["tensor"]:
        raise ValueError(
            f"data.sequence_length={length} must divide by parallel.tensor={sizes['tensor']} with "
            f"parallel.sequence_parallel; nearest legal values: {nearest_multiples(length, sizes['tensor'])}"
        )
