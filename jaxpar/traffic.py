"""What a plan's step should send between devices, from formulas and shapes alone; `inspect` and the tests hold the
compiler to it.

Counted for a step without recomputation; scalars (losses, norms, token counts, float8 scales) are left out. Of native
float8 products the formulas know that layers' weights are gathered in float8. With sequence parallelism the compiler
also gathers gradients in it, and reduces others whole that it would scatter: that is not counted.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import jax.numpy as jnp

from jaxpar.parallel.communication import (
    Traffic,
    ring_bytes,
    sequence_parallel_layer,
    tensor_parallel_layer,
    vocabulary_parallel_cross_entropy,
)
from jaxpar.parallel.device_groups import IRREGULAR
from jaxpar.parallel.mesh import BATCH_AXES
from jaxpar.plan import Parameter, Plan

__all__ = ["ExpectedTraffic", "expected_traffic"]


@dataclass(frozen=True)
class ExpectedTraffic:
    """One purpose's collectives in a step, over the mesh axes `axes`."""

    axes: tuple[str, ...]
    purpose: str
    traffic: Traffic


def expected_traffic(plan: Plan) -> list[ExpectedTraffic]:
    """Per step and device. A model that does not state its `dims` gets the data and FSDP parts only."""
    expected = [*_weights(plan)]
    if plan.mesh.shape["tensor"] > 1 and hasattr(plan.config.model, "dims"):
        expected += _tensor(plan)
    return [item for item in expected if item.axes and item.traffic.payload_bytes]


def _weights(plan: Plan) -> Iterator[ExpectedTraffic]:
    """FSDP's gathers, and the reduction of gradients over the axes that share the batch.

    Tables (embedding, output) are gathered once and their gradients are scattered where they are summed; layers'
    weights are gathered again in the backward pass, and their gradients are reduced where the compiler puts it:
    scattered on GPU and TPU, whole on CPU.
    """
    compute_bytes = jnp.dtype(plan.config.precision.compute).itemsize
    layer_bytes = 1 if plan.execution.products == "float8" else compute_bytes
    shape = plan.mesh.shape
    batch_axes = tuple(axis for axis in BATCH_AXES if shape[axis] > 1)
    uses = 2 if getattr(plan.config.model, "tied", False) else 1
    in_layers = [p for p in plan.parameters if "layers" in p.axes]
    split_layers = _unsplit(sum(_local(p) for p in in_layers if _is_split(p, "fsdp")), shape)
    tables = [p for p in plan.parameters if "layers" not in p.axes and _is_split(p, "fsdp")]
    table_uses = [(p, uses if "vocab" in p.axes else 1) for p in tables]
    if shape["fsdp"] > 1:
        tables_gathered = sum(_unsplit(_local(p), shape) * times for p, times in table_uses)
        gathered_bytes = 2 * split_layers * layer_bytes + tables_gathered * compute_bytes
        yield _expected(("fsdp",), "weights gathered", "all-gather", gathered_bytes, shape)
    for parameter, times in table_uses:
        elements = _unsplit(_local(parameter), shape) * times
        yield _expected(("fsdp",), f"gradient of {parameter.path}", "reduce-scatter", elements * 4, shape)
        rest = tuple(axis for axis in _summed_axes(plan, parameter) if axis != "fsdp")
        if rest:
            yield _expected(rest, f"gradient of {parameter.path}", "all-reduce", _local(parameter) * times * 4, shape)
    if plan.mesh.devices.flat[0].platform != "cpu":
        yield _expected(("fsdp",), "gradients", "reduce-scatter", split_layers * 4, shape)
        replicas = tuple(axis for axis in batch_axes if axis != "fsdp")
        yield _expected(replicas, "gradients", "all-reduce", split_layers // shape["fsdp"] * 4, shape)
    else:
        yield _expected(batch_axes, "gradients", "all-reduce", split_layers * 4, shape)
    for parameter in plan.parameters:
        if not _is_split(parameter, "fsdp"):
            times = uses if "vocab" in parameter.axes else 1
            axes = _summed_axes(plan, parameter)
            yield _expected(axes, "gradients", "all-reduce", _local(parameter) * times * 4, shape)


def _summed_axes(plan: Plan, parameter: Parameter) -> tuple[str, ...]:
    """Mesh axes over which a gradient is summed at once: those of the batch, and of the sequence for a position
    table."""
    shape = plan.mesh.shape
    axes = BATCH_AXES + ("tensor",) * (plan.config.parallel.sequence_parallel and "positions" in parameter.axes)
    return tuple(axis for axis in axes if shape[axis] > 1)


def _tensor(plan: Plan) -> Iterator[ExpectedTraffic]:
    """Megatron's reductions in each layer, around the embedding and in the loss."""
    config, shape = plan.config, plan.mesh.shape
    dims = config.model.dims(plan.vocab_size)  # type: ignore[attr-defined]
    sequences = config.train.batch_size // math.prod(shape[axis] for axis in BATCH_AXES)
    length, hidden, size = config.data.sequence_length, dims["embed_dim"], shape["tensor"]
    element_bytes = jnp.dtype(config.precision.compute).itemsize
    tokens_bytes = sequences * length * hidden
    axes = ("tensor",)
    scatter = plan.mesh.devices.flat[0].platform != "cpu"
    if config.parallel.sequence_parallel:
        layer = sequence_parallel_layer(
            sequences, length, hidden, size, element_bytes=element_bytes, reduce_scatter=scatter
        )
        yield _expected(axes, "embedding", "reduce-scatter", tokens_bytes * element_bytes, shape)
        yield _expected(axes, "embedding's gradient", "all-gather", tokens_bytes * element_bytes, shape)
        yield _expected(axes, "hidden states for the head", "all-gather", tokens_bytes * element_bytes, shape)
        yield _expected(axes, "their gradient", "reduce-scatter", tokens_bytes * 4, shape)
        norms = sum(_local(p) for p in plan.parameters if "norm" in p.axes)
        yield _expected(axes, "norms' gradients", "all-reduce", norms * 4, shape)
    else:
        layer = tensor_parallel_layer(sequences, length, hidden, size, element_bytes=element_bytes)
        yield _expected(axes, "embedding", "all-reduce", tokens_bytes * element_bytes, shape)
        yield _expected(axes, "gradient of the head's input", "all-reduce", tokens_bytes * 4, shape)
    yield from _shared_heads(plan)
    for traffic in layer:
        yield ExpectedTraffic(axes, f"{dims['num_layers']} layers", traffic.times(dims["num_layers"]))
    for traffic in vocabulary_parallel_cross_entropy(sequences, length, size, packed=True):
        yield ExpectedTraffic(axes, "cross-entropy", traffic)
    if config.loss.label_smoothing:
        yield _expected(axes, "label smoothing", "all-reduce", sequences * length * 4, shape)


def _shared_heads(plan: Plan) -> Iterator[ExpectedTraffic]:
    """Gradients of key/value heads that several `tensor` devices share: summed among those, then gathered from all.

    Stated where each head has equally many devices; the groups of devices are parts of the axis.
    """
    size = plan.mesh.shape["tensor"]
    shared = [p for p in plan.parameters if "kv_heads" in p.axes and p.shape[p.axes.index("kv_heads")] < size]
    if not shared:
        return
    num_heads = shared[0].shape[shared[0].axes.index("kv_heads")]
    if size % num_heads:
        return
    whole_bytes = sum(_local(p) for p in shared) * 4
    groups = (("all-reduce", whole_bytes // num_heads, size // num_heads), ("all-gather", whole_bytes, num_heads))
    for kind, payload_bytes, group in groups:
        traffic = Traffic(kind, None, payload_bytes, ring_bytes(kind, payload_bytes, group))
        yield ExpectedTraffic((IRREGULAR, "tensor"), "gradients of shared key/value heads", traffic)


def _expected(
    axes: tuple[str, ...], purpose: str, kind: str, payload_bytes: int, shape: Mapping[str, int]
) -> ExpectedTraffic:
    group = math.prod(shape[axis] for axis in axes)
    return ExpectedTraffic(axes, purpose, Traffic(kind, None, payload_bytes, ring_bytes(kind, payload_bytes, group)))


def _is_split(parameter: Parameter, axis: str) -> bool:
    entries = [entry if isinstance(entry, tuple) else (entry,) for entry in parameter.layout.spec]
    return any(axis in entry for entry in entries)


def _local(parameter: Parameter) -> int:
    return math.prod(parameter.layout.local_shape)


def _unsplit(elements: int, shape: Mapping[str, int]) -> int:
    """Elements on a device if `fsdp` did not split them."""
    return elements * shape["fsdp"]
