"""What a configuration must satisfy across its sections; `make_plan` asks before anything is compiled."""

import json
import math
from collections.abc import Callable, Collection, Mapping
from typing import Any

from jaxpar.config.credentials import has_credentials, masked
from jaxpar.config.schema import Config
from jaxpar.config.section import Section
from jaxpar.multiples import nearest_multiples
from jaxpar.optim import PROPERTIES
from jaxpar.parallel.mesh import BATCH_AXES
from jaxpar.parallel.rules import LogicalAxes, is_stacked
from jaxpar.parallel.sequence_order import ZIGZAG_METHODS

__all__ = ["check_calls", "check_checkpoints", "check_idle_keys", "check_layout", "check_offload", "check_precision"]

_FUNCTIONS = {
    "scan_layers": "jaxpar.parallel.layers.scan_layers",
    "contract": "jaxpar.parallel.contract.contract",
    "attention": "jaxpar.parallel.attention.attention",
}
_OPTIMIZER_REFINEMENTS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "moment_rounding": (lambda c: c.moments != "float32", 'moments in 16 bits: set optimizer.moments="bfloat16"'),
    "nesterov": (lambda c: c.momentum > 0, "a momentum: set optimizer.momentum, for example to 0.9"),
    "min_parameter_scale": (lambda c: c.parameter_scale, "relative steps: set optimizer.parameter_scale=true"),
}
"""A key of an optimizer → whether what it refines is on, and what that is."""
_SMALLEST_SCALE, _LARGEST_SCALE = 2.0**-126, 2.0**126
"""Normal float32 numbers, and twice each."""


def check_layout(config: Config, sizes: Mapping[str, int]) -> None:
    """Raises ValueError if the mesh of `sizes` cannot split what the configuration asks for."""
    _check_experts(config, sizes)
    _check_divides(config, sizes)
    _check_sequence(config, sizes)
    if sizes["context"] > 1:
        _check_context_method(config, sizes)


def _check_experts(config: Config, sizes: Mapping[str, int]) -> None:
    experts, size = getattr(config.model, "experts", None), sizes["expert"]
    if experts is not None and sizes["context"] > 1:
        raise ValueError(
            f"parallel.context={sizes['context']}: this version of jaxpar routes tokens to model.experts within whole "
            "sequences only; set parallel.context=1"
        )
    if experts is not None and experts.every > 1 and config.optimizer.layer_decay != 1.0:
        raise ValueError(
            f"optimizer.layer_decay={config.optimizer.layer_decay} counts layers, which model.experts.every="
            f"{experts.every} puts into several stacks; set optimizer.layer_decay=1.0, or model.experts.every=1"
        )
    if size == 1:
        return
    if experts is None:
        name = config.model.name  # type: ignore[attr-defined]
        raise ValueError(
            f"parallel.expert={size} splits experts, of which model.name={name!r} has none; set parallel.expert=1, or "
            "model.experts"
        )
    if experts.num_experts % size:
        legal = ", ".join(str(n) for n in range(1, experts.num_experts + 1) if experts.num_experts % n == 0)
        raise ValueError(
            f"parallel.expert={size} must divide model.experts.num_experts={experts.num_experts}; legal values: {legal}"
        )


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
    if offload.parameters == "host" and not any(is_stacked(names) for names in axes.values()):
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


def check_calls(config: Config, calls: Collection[str], context: int) -> None:
    """Raises ValueError for a key that acts in a function which the model does not call; `calls` are those it does,
    `context` is how many devices share a sequence."""
    acting = {
        "remat.policy": (config.remat.policy, "none", "scan_layers"),
        "kernels.unroll_layers": (config.kernels.unroll_layers, False, "scan_layers"),
        "offload.parameters": (config.offload.parameters, "none", "scan_layers"),
        "precision.products": (config.precision.products, "compute", "contract"),
        "kernels.attention": (config.kernels.attention, "auto", "attention"),
        "parallel.context": (context, 1, "attention"),
    }
    for key, (value, off, function) in acting.items():
        if value != off and function not in calls:
            raise ValueError(
                f"{key}={json.dumps(value)} acts in {_FUNCTIONS[function]}, which the model "
                f"{config.model.name!r} does not call; call it in the model, or set {key}={json.dumps(off)}"  # type: ignore[attr-defined]
            )


def check_idle_keys(config: Config) -> None:
    """Raises ValueError for a key that refines something which is off, unless it has its default value.

    Keys that depend on the sizes of mesh axes are free, so that one file serves several layouts.
    """
    precision, train, optimizer = config.precision, config.train, config.optimizer
    dynamic = precision.scaling == "dynamic"
    skips = train.on_nonfinite == "skip" or precision.scaling != "none"
    refines: list[tuple[str, Section, str, bool, str]] = [
        ("precision", precision, key, dynamic, "a dynamic loss scale, which precision.compute=\"float16\" with "
         'precision.loss_scale="auto" has')
        for key in ("scale_initial", "scale_growth_steps", "scale_min", "scale_max")
    ]  # fmt: skip
    refines += [("train", train, "max_skipped", skips, 'steps that are skipped: set train.on_nonfinite="skip"')]
    for key, (on, what) in _OPTIMIZER_REFINEMENTS.items():
        if hasattr(optimizer, key):
            refines.append(("optimizer", optimizer, key, on(optimizer), what))
    for section, values, key, is_on, what in refines:
        value, default = getattr(values, key), type(values).model_fields[key].default
        if value != default and not is_on:
            raise ValueError(
                f"{section}.{key}={json.dumps(value)} changes nothing here; it is for {what}; or leave it at its "
                f"default, {json.dumps(default)}"
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
    splits = [("tensor", "num_heads"), ("tensor", "mlp_dim")]
    splits += [("fsdp", "embed_dim")] * (config.parallel.zero_stage > 0)
    for axis, field in splits:
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


def _check_sequence(config: Config, sizes: Mapping[str, int]) -> None:
    parallel, length = config.parallel, config.data.sequence_length
    context, tensor = sizes["context"], sizes["tensor"] if parallel.sequence_parallel else 1
    parts, why = context * tensor, []
    if context > 1:
        why.append(f"parallel.context={context}")
        if parallel.context_method in ZIGZAG_METHODS:
            parts = math.lcm(parts, 2 * context)
            why.append(f'two chunks for each device, with which parallel.context_method="{parallel.context_method}" '
                       "makes their work equal")  # fmt: skip
    if tensor > 1:
        why.append(f"parallel.tensor={tensor} with parallel.sequence_parallel")
    if length % parts:
        of_all = f"{parts}, for " if context > 1 else ""
        raise ValueError(
            f"data.sequence_length={length} must divide by {of_all}{' and '.join(why)}; nearest legal values: "
            f"{nearest_multiples(length, parts)}"
        )


def _check_context_method(config: Config, sizes: Mapping[str, int]) -> None:
    method, kernel = config.parallel.context_method, config.kernels.attention
    what = f'parallel.context_method="{method}"'
    if method in ZIGZAG_METHODS:
        if kernel not in ("auto", "blockwise"):
            raise ValueError(
                f'kernels.attention="{kernel}" works on whole sequences, and {what} with parallel.context='
                f'{sizes["context"]} on tiles of them; set kernels.attention="auto", or '
                'parallel.context_method="ulysses"'
            )
        return
    num_heads, shards = getattr(config.model, "num_heads", None), sizes["context"] * sizes["tensor"]
    if num_heads is not None and num_heads % shards:
        legal = [n for n in range(1, num_heads + 1) if num_heads % (n * sizes["tensor"]) == 0]
        raise ValueError(
            f"{what} gives each device whole heads: parallel.context={sizes['context']} × parallel.tensor="
            f"{sizes['tensor']} = {shards} must divide model.num_heads={num_heads}; legal values of parallel.context: "
            f'{", ".join(map(str, legal))}; or set parallel.context_method="ring", which does not split heads'
        )
