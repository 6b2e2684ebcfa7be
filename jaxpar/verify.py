"""`python -m jaxpar.verify CONFIG [KEY=VALUE ...]`: does the configured layout compute what one device computes?

Computes one batch's loss and every gradient, before clipping, on the configured mesh and on a single device (dropout
on, padding and packed documents included), and compares them parameter by parameter. With 16-bit or float8 formats an
array may differ by as much as rounding alone makes it: twice what one device with these formats differs from the same
device in float32, since both sides round, and what a sum over n devices in bfloat16 makes of n independent roundings,
√n of them, but no more than 3%. Float8 rounds relative to the largest entry of a microbatch: there the one device
computes the same microbatches, one after the other.

The model must fit one device; `--scaled-down` verifies a small copy with the same parts, kernels, layout and
divisibility instead. Exit status: 0 equal, 1 something differs, 2 the configuration is wrong.
"""

import math
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import jax
import numpy as np
from rich.console import Console
from rich.table import Table

from jaxpar.command_line import UserError, run_command, user_errors
from jaxpar.config import Config
from jaxpar.config.schema import PipelineConfig
from jaxpar.data import declared_vocab_size
from jaxpar.parallel.dispatch import one_at_a_time
from jaxpar.parallel.mesh import AXES, BATCH_AXES, axis_sizes
from jaxpar.pipeline_plan import is_path
from jaxpar.plan import Plan, make_plan
from jaxpar.state import guard_rules
from jaxpar.step import dropout_keys, examination, make_gradients

__all__ = ["Difference", "cut", "differences", "loss_and_gradients_of", "main", "synthetic_batch"]

TOLERANCE = 1e-4
_FLOOR = 1e-3
_BFLOAT16_ROUNDING = 2.0**-8
_LARGEST_OF_REDUCTION = 2.0**-5
_SCALED_DOWN = "--scaled-down"


@dataclass(frozen=True)
class Difference:
    """How far one array is from the reference: max |a − b| over the reference's largest entry."""

    name: str
    relative: float
    largest: float


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line; returns the exit status."""
    arguments = sys.argv[1:] if arguments is None else arguments
    return run_command("jaxpar.verify", __doc__, _verify, arguments, flags=[_SCALED_DOWN])


def _verify(config: Config, flags: Collection[str]) -> int:
    devices = jax.devices()
    with user_errors():
        sizes = axis_sizes({axis: getattr(config.parallel, axis) for axis in AXES}, len(devices))
        vocab_size = getattr(config.model, "vocab_size", 0) or declared_vocab_size(config.data)
        if _SCALED_DOWN in flags:
            whole = make_plan(config, devices, vocab_size)
            config, vocab_size = _scaled_down(whole, sizes, vocab_size)
        # Clipping would spread one wrong gradient over all of them.
        config = config.model_copy(update={"train": config.train.model_copy(update={"max_grad_norm": math.inf})})
        plan = make_plan(config, devices, vocab_size)
        single = on_one_device(config)
        order = None
        if config.precision.products == "float8":
            number, order = cut(plan)
            single = single.model_copy(update={"train": single.train.model_copy(update={"microbatches": number})})
        reference = make_plan(single, devices[:1], vocab_size)
    batch = synthetic_batch(plan)
    expected = loss_and_gradients_of(reference, batch, order)
    tolerances = dict.fromkeys(expected, TOLERANCE)
    exact = _in_float32(reference)
    if config.precision != exact.config.precision:
        for item in differences(loss_and_gradients_of(exact, batch, order), expected):
            tolerances[item.name] = max(TOLERANCE, 2 * item.relative)
            if item.name != "loss" and config.precision.reduction == "bfloat16":
                num_devices = math.prod(sizes[axis] for axis in BATCH_AXES)
                tolerances[item.name] += min(math.sqrt(num_devices) * _BFLOAT16_ROUNDING, _LARGEST_OF_REDUCTION)
    return _report(plan, differences(loss_and_gradients_of(plan, batch), expected), tolerances)


def cut(plan: Plan) -> tuple[int, np.ndarray]:
    """Into how many microbatches the layout cuts a batch, and the order in which its rows pass."""
    parts = np.arange(plan.config.train.batch_size)[None]
    num_shards = math.prod(plan.mesh.shape[axis] for axis in BATCH_AXES)
    for number in (plan.config.train.microbatches, plan.pipeline.num_microbatches if plan.pipeline else 1):
        own = parts.reshape(len(parts), num_shards, number, -1)
        parts = own.swapaxes(1, 2).reshape(len(parts) * number, -1)
    return len(parts), parts.reshape(-1)


def _in_float32(plan: Plan) -> Plan:
    """The same plan without rounding, in plain JAX: attention kernels of a GPU take 16-bit formats only."""
    config = plan.config
    precise = {
        "precision": type(config.precision)(),
        "kernels": config.kernels.model_copy(update={"attention": "auto"}),
    }
    exact = make_plan(config.model_copy(update=precise), list(plan.mesh.devices.flat), plan.vocab_size)
    return replace(exact, execution=replace(exact.execution, attention="blockwise"))


def on_one_device(config: Config) -> Config:
    """The same run without any splitting."""
    single = config.parallel.model_copy(update=dict.fromkeys(AXES, 1) | {"sequence_parallel": False})
    return config.model_copy(update={"parallel": single, "pipeline": type(config.pipeline)()})


def synthetic_batch(plan: Plan, seed: int = 0) -> dict[str, np.ndarray]:
    """Random tokens in packed documents of random lengths, about a tenth of them masked.

    A pure function of the shapes and the seed.
    """
    random = np.random.default_rng(seed)
    shape = (plan.config.train.batch_size, plan.config.data.sequence_length)
    starts = random.random(shape) < 4 / shape[1]
    starts[:, 0] = True
    index = np.broadcast_to(np.arange(shape[1]), shape)
    positions = index - np.maximum.accumulate(np.where(starts, index, 0), axis=1)
    tokens = random.integers(0, plan.vocab_size, (shape[0], shape[1] + 1))
    return {
        "tokens": tokens[:, :-1].astype(np.int32),
        "targets": tokens[:, 1:].astype(np.int32),
        "positions": positions.astype(np.int32),
        "segment_ids": np.cumsum(starts, axis=1).astype(np.int32),
        "loss_mask": random.random(shape) < 0.9,
    }


def loss_and_gradients_of(
    plan: Plan, batch: Mapping[str, np.ndarray], order: np.ndarray | None = None
) -> dict[str, np.ndarray]:
    """`loss`, each parameter's gradient by path, and `grad_norm`, on the plan's mesh at its initial parameters; of the
    batch's rows in `order`, each of which keeps its dropout."""
    program = _gradients_program(plan)
    # Float32 products are float32 on GPUs and TPUs too, which by default round their operands.
    with plan.execution.active(), jax.default_matmul_precision("highest"):
        params = jax.jit(plan.make_params, out_shardings=plan.param_shardings)()
        order = np.arange(plan.config.train.batch_size) if order is None else order
        on_device = {name: jax.device_put(rows[order], plan.batch_sharding) for name, rows in batch.items()}
        places = jax.device_put(order, plan.replicated)
        grads, metrics = jax.device_get(program(params, on_device, places))
    return {"loss": metrics["loss"], **plan.in_layer_order(plan.by_path(grads)), "grad_norm": metrics["grad_norm"]}


@lru_cache(maxsize=2)
def _gradients_program(plan: Plan) -> Callable[..., Any]:
    """The compiled gradients; cached so that they outlive their run, as `jaxpar.sample` says."""
    gradients = make_gradients(plan)
    rules = guard_rules(plan.config)
    scale = None if rules is None or rules.initial is None else rules.start().scale

    def program(params: Any, batch: Mapping[str, jax.Array], places: jax.Array) -> Any:
        return gradients(params, batch, dropout_keys(plan, 0)[places], scale)

    jitted = jax.jit(program, out_shardings=(plan.shardings(plan.rules.optimizer), plan.replicated))
    return one_at_a_time(jitted, plan.mesh, examination(plan))


def differences(found: Mapping[str, Any], reference: Mapping[str, Any]) -> list[Difference]:
    """One entry an array.

    Gradients are measured against at least a thousandth of the largest gradient entry of all, so that one that is
    mathematically zero (a key bias) is not judged by its rounding errors. Where a vocabulary is padded further for one
    layout than for the other, the padding counts as zeros.
    """
    gradients = [name for name in reference if name not in ("loss", "grad_norm")]
    floor = _FLOOR * max(float(np.abs(reference[name]).max()) for name in gradients)
    result = []
    for name, expected in reference.items():
        got, expected = _same_shape(np.asarray(found[name], np.float64), np.asarray(expected, np.float64))
        largest = float(np.abs(expected).max())
        scale = max(largest, floor) if name in gradients else largest
        error = float(np.abs(got - expected).max()) / scale if np.isfinite(got).all() else math.inf
        result.append(Difference(name, error, largest))
    return result


def _same_shape(*arrays: np.ndarray) -> list[np.ndarray]:
    """The arrays, the smaller filled up with zeros at its ends."""
    shape = [max(sizes) for sizes in zip(*(array.shape for array in arrays), strict=True)]
    filled = [np.zeros(shape) for _ in arrays]
    for zeros, array in zip(filled, arrays, strict=True):
        zeros[tuple(map(slice, array.shape))] = array
    return filled


def _report(plan: Plan, found: Sequence[Difference], tolerances: Mapping[str, float]) -> int:
    products = {"compute": "", "float8": ", float8 products"}[plan.config.precision.products]
    formats = plan.config.precision.compute + products
    console = Console(width=None if sys.stdout.isatty() else 120)
    table = Table("what", title=f"Against one device ({formats})", title_justify="left")
    for name in ("largest entry", "relative difference", "allowed", ""):
        table.add_column(name, justify="right")
    differing = [item for item in found if not item.relative <= tolerances[item.name]]
    for item in found:
        mark = "DIFFERS" if item in differing else ""
        allowed = f"{tolerances[item.name]:.1e}"
        table.add_row(item.name, f"{item.largest:.3e}", f"{item.relative:.1e}", allowed, mark)
    console.print(table)
    if differing:
        console.print(f"{len(differing)} of {len(found)} differ; the first is {differing[0].name}", highlight=False)
        return 1
    layout = ", ".join(f"{axis}={size}" for axis, size in plan.mesh.shape.items() if size > 1)
    console.print(f"all {len(found)} agree: {layout or 'one device, so nothing was split'}", highlight=False)
    return 0


def _scaled_down(whole: Plan, sizes: Mapping[str, int], vocab_size: int) -> tuple[Config, int]:
    """A small copy of the run with the same parts, kernels and layout, in which blocks and chunks still are several."""
    config, model = whole.config, whole.config.model
    if not hasattr(model, "scaled_down"):
        raise UserError(
            f"--scaled-down: {type(model).__name__} has no method scaled_down(tensor=..., fsdp=..., stages=...)"
        )
    attention = whole.execution.attention if "attention" in whole.calls else "auto"
    length = 16 * sizes["tensor"] * sizes["context"]
    block = 8 * sizes["tensor"] // (2 if sizes["context"] > 1 else 1)
    microbatches = min(config.train.microbatches, 2)
    stages, rows, pipeline = 1, 2, config.pipeline
    if whole.pipeline is not None:
        geometry = whole.pipeline.schedule.geometry
        stages, rows, pipeline = geometry.num_stages, _microbatches(whole), _same_schedule(whole)
        rows *= microbatches
    for axis in BATCH_AXES:
        rows *= sizes[axis]
    small = config.model_copy(
        update={
            "model": model.scaled_down(tensor=sizes["tensor"], fsdp=sizes["fsdp"], stages=stages),
            "pipeline": pipeline,
            "data": config.data.model_copy(update={"sequence_length": length}),
            "train": config.train.model_copy(update={"batch_size": rows, "microbatches": microbatches}),
            "evaluation": config.evaluation.model_copy(update={"batch_size": 0}),
            "kernels": config.kernels.model_copy(update={"attention": attention, "attention_block": block}),
            "loss": config.loss.model_copy(update={"chunk_tokens": min(config.loss.chunk_tokens, block)}),
        }
    )
    return small, min(vocab_size, 1000)


def _microbatches(whole: Plan) -> int:
    """As many as fill and drain the pipeline; a table of the user's own has what it has."""
    assert whole.pipeline is not None
    geometry = whole.pipeline.schedule.geometry
    own = is_path(whole.config.pipeline.schedule)
    return geometry.num_microbatches if own else min(geometry.num_microbatches, 2 * geometry.num_ranks)


def _same_schedule(whole: Plan) -> PipelineConfig:
    """What makes the whole run's schedule again, for few microbatches and other layers."""
    assert whole.pipeline is not None
    schedule, keys = whole.pipeline.schedule, whole.config.pipeline
    named = {} if is_path(keys.schedule) else {"schedule": schedule.name, "chunks": schedule.geometry.num_chunks}
    return keys.model_copy(update={"microbatches": _microbatches(whole), "layers_per_stage": (), **named})


if __name__ == "__main__":
    sys.exit(main())
