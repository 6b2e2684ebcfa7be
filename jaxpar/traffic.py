"""What a plan's step should send between devices, from formulas and shapes alone; `inspect` and the tests hold the
compiler to it.

With pipeline stages the numbers are those of the tasks of one rank that has embedding and head too; idle ranks of an
aligned schedule send as if they had a task, which is not counted.

Counted for a step without recomputation; scalars (losses, norms, token counts, float8 scales) are left out. Of native
float8 products the formulas know that layers' weights are gathered in float8. With sequence parallelism the compiler
also gathers gradients in it, and reduces others whole that it would scatter: that is not counted.
"""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import jax.numpy as jnp

from jaxpar.parallel.communication import (
    Traffic,
    data_parallel,
    expert_parallel,
    gathered_keys_and_values,
    gathered_parameters,
    pipeline_exchange,
    ring_attention,
    ring_bytes,
    scattered_gradients,
    sequence_parallel_layer,
    tensor_parallel_layer,
    ulysses_attention,
    vocabulary_parallel_cross_entropy,
    vocabulary_split_embedding,
    vocabulary_split_head,
)
from jaxpar.parallel.device_groups import IRREGULAR
from jaxpar.parallel.mesh import BATCH_AXES
from jaxpar.parallel.pipeline.tick_loops import num_transfers
from jaxpar.parallel.rules import Table, is_stacked, is_vector, resolve
from jaxpar.parallel.sequence_order import ZIGZAG_METHODS
from jaxpar.plan import Parameter, Plan

__all__ = ["ExpectedTraffic", "expected_traffic"]

_TOKEN_BYTES = 3 * 4 + 1
"""Of a token in the batch: itself, its target and its position in int32, and whether it counts."""


@dataclass(frozen=True)
class ExpectedTraffic:
    """One purpose's collectives in a step, over the mesh axes `axes`."""

    axes: tuple[str, ...]
    purpose: str
    traffic: Traffic


def expected_traffic(plan: Plan) -> list[ExpectedTraffic]:
    """Per step and device. A model that does not state its `dims` gets the data and FSDP parts only."""
    expected = [item for p in plan.parameters for part in (_gathered, _reduced) for item in part(plan, p)]
    expected += _pipeline(plan)
    if plan.mesh.shape["tensor"] > 1 and hasattr(plan.config.model, "dims"):
        expected += _tensor(plan)
    if plan.mesh.shape["context"] > 1 and hasattr(plan.config.model, "dims"):
        expected += _context(plan)
    if plan.mesh.shape["expert"] > 1:
        expected += _experts(plan)
    return [item for item in expected if item.axes and item.traffic.payload_bytes]


def _gathered(plan: Plan, parameter: Parameter) -> Iterator[ExpectedTraffic]:
    """The parameter where it is kept, or updated, in parts (ZeRO).

    In stage 3 in each microbatch: a layer's weights as they are used, forward and again backward, a table (embedding,
    output) once for each of its uses; XLA:CPU takes what is the same in all microbatches out of their loop. In stages 1
    and 2 the updated parameter is gathered at the end.
    """
    if _is_split(plan, parameter, plan.rules.params):
        times = 1 if _on_cpu(plan) and not _in_layers(parameter) else _passes(plan)
        times *= 2 if _in_layers(parameter) else _uses(plan, parameter)
        purpose, element_bytes = "weights gathered", _used_bytes(plan, parameter)
    elif _is_split(plan, parameter, plan.rules.optimizer):
        times, purpose, element_bytes = 1, "updated parameters gathered", parameter.dtype.itemsize
    else:
        return
    elements, size = _elements(plan, parameter, plan.rules.activations), plan.mesh.shape["fsdp"]
    yield from _over(("fsdp",), purpose, gathered_parameters(elements * times, size, element_bytes=element_bytes))


def _reduced(plan: Plan, parameter: Parameter) -> Iterator[ExpectedTraffic]:
    """The sum of the parameter's gradient over the devices that share the batch and its sequences.

    Over `plan.deferred_axes` it is taken once, scattered in stage 1; over the others in each microbatch and for each
    use. In stages 2 and 3 that sum is scattered: of layers on GPU and TPU, where the compiler does it (on CPU it
    reduces the whole), of tables everywhere.
    """
    rules, deferred, times = plan.rules, plan.deferred_axes, _passes(plan) * _uses(plan, parameter)
    elements, whole = (_elements(plan, parameter, table) for table in (rules.gradients, rules.activations))
    whole *= _repeats(plan, parameter)
    # All tokens of an expert come to where it is.
    own = ("expert",) if "experts" in parameter.axes else ()
    soon = tuple(axis for axis in BATCH_AXES if axis not in deferred + own)
    # Of what norms and a table of positions meet, devices that share the sequence have their parts.
    on_parts = plan.config.parallel.sequence_parallel and not {"norm", "positions"}.isdisjoint(parameter.axes)
    sequence = ("context", "tensor") if on_parts else ("context",)
    if _is_table(parameter) or not (on_parts or _on_cpu(plan)):
        soon += sequence
    else:
        # XLA:CPU sums all gradients over the devices that share sequences, and then over those that share the batch.
        yield from _sum(plan, parameter, sequence, whole, times, "gradients", scatter=False)
    splits = _is_split(plan, parameter, rules.gradients) and not (_on_cpu(plan) and _in_layers(parameter))
    yield from _sum(plan, parameter, soon, whole, times, "gradients", scatter=splits)
    splits = _is_split(plan, parameter, rules.optimizer) and not _is_split(plan, parameter, rules.gradients)
    yield from _sum(plan, parameter, deferred, elements, 1, "gradients, once a step", scatter=splits)


def _sum(
    plan: Plan, parameter: Parameter, axes: tuple[str, ...], elements: int, times: int, purpose: str, *, scatter: bool
) -> Iterator[ExpectedTraffic]:
    """`times` sums of `elements` over `axes`; with `scatter` each device keeps its part of those over `fsdp`."""
    shape = plan.mesh.shape
    axes = tuple(axis for axis in axes if shape[axis] > 1)
    element_bytes = _reduction_bytes(plan, parameter)
    if scatter and "fsdp" in axes:
        traffic = scattered_gradients(elements * times, shape["fsdp"], element_bytes=element_bytes)
        yield from _over(("fsdp",), purpose, traffic)
        axes, elements = tuple(axis for axis in axes if axis != "fsdp"), elements // shape["fsdp"]
    size = math.prod(shape[axis] for axis in axes)
    yield from _over(axes, purpose, data_parallel(elements * times, size, element_bytes=element_bytes))


def _tensor(plan: Plan) -> Iterator[ExpectedTraffic]:
    """Megatron's reductions in each layer, around the embedding and in the loss, for each microbatch."""
    config, shape = plan.config, plan.mesh.shape
    dims = config.model.dims(plan.vocab_size)  # type: ignore[attr-defined]
    times = _passes(plan)
    sequences, length = _tokens(plan)
    hidden, size = dims["embed_dim"], shape["tensor"]
    element_bytes = jnp.dtype(config.precision.compute).itemsize
    of_states = (sequences, length, hidden, size)
    split = config.parallel.sequence_parallel
    if split:
        layer = sequence_parallel_layer(*of_states, element_bytes=element_bytes, reduce_scatter=not _on_cpu(plan))
    else:
        layer = tensor_parallel_layer(*of_states, element_bytes=element_bytes)
    embedding, head = (
        formula(*of_states, element_bytes=element_bytes, sequence_parallel=split)
        for formula in (vocabulary_split_embedding, vocabulary_split_head)
    )
    loss = vocabulary_parallel_cross_entropy(
        sequences, length, size, packed=True, label_smoothing=config.loss.label_smoothing > 0
    )
    yield from _over(("tensor",), "embedding", embedding, times)
    num_layers = _num_layers(plan)
    yield from _over(("tensor",), f"{num_layers} layers", layer, times * num_layers)
    yield from _over(("tensor",), "head's input", head, times)
    yield from _over(("tensor",), "cross-entropy", loss, times)
    yield from _shared_heads(plan)


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
    whole_bytes = sum(_elements(plan, p, plan.rules.gradients) * _reduction_bytes(plan, p) for p in shared)
    groups = (("all-reduce", whole_bytes // num_heads, size // num_heads), ("all-gather", whole_bytes, num_heads))
    for kind, payload_bytes, group in groups:
        traffic = Traffic(kind, None, payload_bytes, ring_bytes(kind, payload_bytes, group))
        purpose = "gradients of shared key/value heads"
        yield from _over((IRREGULAR, "tensor"), purpose, [traffic], _passes(plan))


def _pipeline(plan: Plan) -> Iterator[ExpectedTraffic]:
    """What stages send each other, and the sum of the gradients of weights that lie on every rank."""
    if plan.pipeline is None:
        return
    config, shape = plan.config, plan.mesh.shape
    embed_dim = next((p.shape[p.axes.index("embed")] for p in plan.parameters if "embed" in p.axes), 0)
    sequences, length = _tokens(plan)
    length //= shape["tensor"] if config.parallel.sequence_parallel else 1
    exchange = pipeline_exchange(
        sequences, length, embed_dim, num_transfers(plan.pipeline.routed),
        element_bytes=jnp.dtype(config.precision.compute).itemsize,
    )  # fmt: skip
    yield from _over(("pipe",), "between stages", [exchange], config.train.microbatches)
    shared = sum(_elements(plan, p, plan.rules.gradients) for p in plan.parameters if not _in_layers(p))
    sums = data_parallel(shared, shape["pipe"], element_bytes=4)
    yield from _over(("pipe",), "gradients of embedding and head", sums, config.train.microbatches)


def _context(plan: Plan) -> Iterator[ExpectedTraffic]:
    """What brings queries and keys of a shared sequence together in each layer; and once a step the batch's columns
    are put in order, and the segment ids gathered (by compilers that take what all layers share out of their loop; in a
    pipeline's forward and again in its backward tasks)."""
    config, shape = plan.config, plan.mesh.shape
    dims = config.model.dims(plan.vocab_size)  # type: ignore[attr-defined]
    sequences, length = _tokens(plan)
    size, method = shape["context"], config.parallel.context_method
    groups = math.lcm(dims["num_kv_heads"], math.prod(shape[a] for a in plan.rules.activations["attention_heads"]))
    q_width, kv_width = (heads // shape["tensor"] * dims["head_dim"] for heads in (dims["num_heads"], groups))
    whole, element_bytes = (sequences, length * size), jnp.dtype(config.precision.compute).itemsize
    layer = {
        "ring": ring_attention(*whole, kv_width, size, element_bytes=element_bytes),
        "all_gather": gathered_keys_and_values(*whole, kv_width, size, element_bytes=element_bytes),
        "ulysses": ulysses_attention(*whole, q_width, kv_width, size, element_bytes=element_bytes),
    }[method]
    num_layers = _num_layers(plan)
    yield from _over(("context",), f"attention ({method}) of {num_layers} layers", layer, _passes(plan) * num_layers)
    tokens = sequences * _passes(plan) * length * size
    segment_bytes = 4 if config.data.document_boundaries == "respect" else 0
    token_bytes = {"segment ids": segment_bytes * (1 if plan.pipeline is None else 2)}
    if method in ZIGZAG_METHODS:
        token_bytes["the batch in order"] = _TOKEN_BYTES + segment_bytes
    for purpose, num_bytes in token_bytes.items():
        gathered = gathered_parameters(tokens, size, element_bytes=num_bytes)
        yield from _over(("context",), purpose, gathered)


def _experts(plan: Plan) -> Iterator[ExpectedTraffic]:
    """Tokens on their way to experts and back."""
    config, shape = plan.config, plan.mesh.shape
    model = config.model
    experts = model.experts  # type: ignore[attr-defined]
    sequences, length = _tokens(plan)
    size = experts.group_tokens or length
    places = sequences * (length // size) * experts.num_experts * experts.capacity(size)
    element_bytes = jnp.dtype(config.precision.compute).itemsize
    layer = expert_parallel(places, model.embed_dim, shape["expert"], element_bytes=element_bytes)  # type: ignore[attr-defined]
    num_layers = _num_layers(plan) // experts.every
    yield from _over(("expert",), f"{num_layers} layers of experts", layer, _passes(plan) * num_layers)


def _tokens(plan: Plan) -> tuple[int, int]:
    """Sequences of a microbatch on a device, and the tokens that it has of each."""
    config, shape = plan.config, plan.mesh.shape
    sequences = config.train.batch_size // math.prod(shape[axis] for axis in BATCH_AXES) // _passes(plan)
    return sequences, config.data.sequence_length // shape["context"]


def _num_layers(plan: Plan) -> int:
    """Of the model, or of one rank, empty ones included."""
    if plan.pipeline is not None:
        return len(plan.pipeline.partition.rows) // plan.mesh.shape["pipe"]
    return plan.config.model.dims(plan.vocab_size)["num_layers"]  # type: ignore[attr-defined]


def _passes(plan: Plan) -> int:
    """How often a layer runs in a step, forward and back."""
    return plan.config.train.microbatches * (1 if plan.pipeline is None else plan.pipeline.num_microbatches)


def _over(axes: tuple[str, ...], purpose: str, traffic: Iterable[Traffic], times: int = 1) -> Iterator[ExpectedTraffic]:
    return (ExpectedTraffic(axes, purpose, each.times(times)) for each in traffic)


def _on_cpu(plan: Plan) -> bool:
    return plan.mesh.devices.flat[0].platform == "cpu"


def _in_layers(parameter: Parameter) -> bool:
    return is_stacked(parameter.axes)


def _is_matrix(parameter: Parameter) -> bool:
    return not is_vector(parameter.path, parameter.axes)


def _is_table(parameter: Parameter) -> bool:
    return not _in_layers(parameter) and any(axis in parameter.axes for axis in ("vocab", "positions"))


def _repeats(plan: Plan, parameter: Parameter) -> int:
    """How often a key/value head is computed so that Ulysses has heads for all devices; its gradients are summed over
    devices before they are added up. Stated where `tensor` alone repeats none."""
    if "kv_heads" not in parameter.axes or not plan.rules.params["kv_heads"]:
        return 1
    num_heads = parameter.shape[parameter.axes.index("kv_heads")]
    shares = math.prod(plan.mesh.shape[axis] for axis in plan.rules.activations["attention_heads"])
    return math.lcm(num_heads, shares) // num_heads


def _uses(plan: Plan, parameter: Parameter) -> int:
    """How often a step uses the parameter: a tied table as embedding and as output."""
    return 2 if "vocab" in parameter.axes and getattr(plan.config.model, "tied", False) else 1


def _used_bytes(plan: Plan, parameter: Parameter) -> int:
    """Bytes of an element where the parameter meets activations."""
    if _in_layers(parameter) and plan.execution.products == "float8":
        return 1
    return jnp.dtype(plan.config.precision.compute).itemsize if _is_matrix(parameter) else parameter.dtype.itemsize


def _reduction_bytes(plan: Plan, parameter: Parameter) -> int:
    """Bytes of an element of the gradient while it is summed."""
    return jnp.dtype(plan.config.precision.reduction).itemsize if _is_matrix(parameter) else 4


def _is_split(plan: Plan, parameter: Parameter, table: Table) -> bool:
    """Whether `table` splits the parameter over `fsdp`."""
    return plan.mesh.shape["fsdp"] > 1 and any("fsdp" in table[axis] for axis in parameter.axes if axis is not None)


def _elements(plan: Plan, parameter: Parameter, table: Table) -> int:
    """Elements on a device if the parameter is laid out by `table`; by that of activations, `fsdp` splits nothing."""
    return math.prod(resolve(parameter.path, parameter.shape, parameter.axes, table, plan.mesh.shape).local_shape)
