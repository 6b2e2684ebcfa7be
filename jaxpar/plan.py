"""The plan of a run: mesh, sharding tables, how the model is executed, and every parameter's place. Nothing is
compiled here.

`make_plan` refuses what cannot work, in the words of the configuration.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import partial
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxpar.backend import matrix_product_forms
from jaxpar.config.schema import Config
from jaxpar.execution_choices import VOCAB_MULTIPLE, attention_of, products_of, rules_of, vocabulary_of
from jaxpar.optim import check_optimizer
from jaxpar.parallel.auxiliary import LayerSums, parted
from jaxpar.parallel.constrain import Execution, recorded_calls
from jaxpar.parallel.layers import REMAT_POLICIES
from jaxpar.parallel.mesh import AXES, BATCH_AXES, axis_sizes, make_mesh
from jaxpar.parallel.offload import host_sharding, in_host_memory, readable
from jaxpar.parallel.pipeline.partition import EMPTY, in_rows
from jaxpar.parallel.rules import LogicalAxes, Resolved, ShardingRules, Table, is_stacked, keeps_format, resolve
from jaxpar.pipeline_parts import ModelParts
from jaxpar.pipeline_plan import PipelinePlan, check_schedule_name, plan_pipeline
from jaxpar.requirements import (
    check_calls,
    check_checkpoints,
    check_idle_keys,
    check_layout,
    check_offload,
    check_precision,
)

__all__ = ["ModelConfig", "Parameter", "Plan", "make_plan"]


class ModelConfig(Protocol):
    """What `[model]` must offer: a name, and a model. One that declares `vocab_size` fixes it; 0 takes the
    tokenizer's."""

    name: str

    def make(self, *, vocab_size: int, padded_vocab_size: int, sequence_length: int, rngs: nnx.Rngs) -> nnx.Module:
        """The model with initial weights."""


@dataclass(frozen=True)
class Parameter:
    """One parameter and where it lives."""

    path: str
    shape: tuple[int, ...]
    dtype: jnp.dtype
    axes: LogicalAxes
    layout: Resolved
    balance_rate: float = 0.0

    @property
    def size(self) -> int:
        """Elements, over all devices."""
        return math.prod(self.shape)

    @property
    def local_bytes(self) -> int:
        """Bytes on each device."""
        return math.prod(self.layout.local_shape) * self.dtype.itemsize


@dataclass(frozen=True, eq=False)
class Plan:
    """Where everything lives and how the step runs.

    `calls` are the functions that follow the plan, among those that a model may do without, which this one calls
    ("attention", "contract", "scan_layers"). `pipeline` is None with one stage; with several, the first dim of
    parameters whose first axis is "layers" has a place for each layer in the order of `pipeline.partition.rows`, and
    where the stages differ in size, empty ones. `notes` are the decisions that a user should know of.
    """

    config: Config
    mesh: Mesh
    rules: ShardingRules
    execution: Execution
    vocab_size: int
    padded_vocab_size: int
    structure: Any
    abstract_params: Any
    parameters: tuple[Parameter, ...]
    calls: frozenset[str]
    layer_sums: LayerSums | None
    pipeline: PipelinePlan | None
    notes: tuple[str, ...]

    def make_params(self) -> Any:
        """A function's body for jit: the initial parameters, a pure function of `run.seed`."""
        params = _make_params(self.config, self.vocab_size, self.padded_vocab_size)
        if self.pipeline is None:
            return params
        rows, leaves = self.pipeline.rows_of_stack, self.by_path(params)
        return self.as_params(
            {
                path: in_rows(leaf, rows(leaf.shape[0])) if is_stacked(self.axes[path]) else leaf
                for path, leaf in leaves.items()
            }
        )

    def by_path(self, tree: Any) -> dict[str, Any]:
        """Path → leaf of a pytree that is built like the parameters."""
        return {parameter.path: leaf for parameter, leaf in zip(self.parameters, jax.tree.leaves(tree), strict=True)}

    def as_params(self, leaves: Mapping[str, Any]) -> Any:
        """The pytree that is built like the parameters, from path → leaf."""
        return jax.tree.unflatten(jax.tree.structure(self.abstract_params), [leaves[p.path] for p in self.parameters])

    def in_layer_order(self, leaves: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Path → array on the host, built like the parameter, its layers in the model's order and no empty places."""
        if self.pipeline is None:
            return dict(leaves)
        pipeline = self.pipeline

        def ordered(array: np.ndarray) -> np.ndarray:
            rows = np.asarray(pipeline.rows_as_laid_out(len(array)))
            return np.asarray(array)[np.argsort(rows)[np.sum(rows == EMPTY) :]]

        return {path: ordered(array) if is_stacked(self.axes[path]) else array for path, array in leaves.items()}

    def constrained(self, tree: Any, table: Table) -> Any:
        """A traced pytree that is built like the parameters, laid out as `table` says; what is on the host stays."""
        return jax.tree.map(
            lambda x, sharding: x if in_host_memory(x) else jax.lax.with_sharding_constraint(x, sharding),
            tree,
            self.shardings(table),
        )

    @property
    def num_parameters(self) -> int:
        """Elements of all parameters, without the empty places of a pipeline."""
        if self.pipeline is None:
            return sum(p.size for p in self.parameters)
        rows_per_layer = Fraction(len(self.pipeline.partition.rows), self.pipeline.num_layers)
        return int(sum(p.size / rows_per_layer if is_stacked(p.axes) else p.size for p in self.parameters))

    @property
    def deferred_axes(self) -> tuple[str, ...]:
        """Mesh axes that share the batch and over which gradients are summed once, after the last microbatch.

        Those are the axes that split no gradient, where there are several microbatches, and where ZeRO 1 scatters the
        sum. Elsewhere a gradient is summed as soon as the backward pass has it, which overlaps with the rest of it.
        """
        parallel = self.config.parallel
        if self.config.train.microbatches == 1 and not (parallel.zero_stage == 1 and self.mesh.shape["fsdp"] > 1):
            return ()
        splitting = {axis for mesh_axes in self.rules.gradients.values() for axis in mesh_axes}
        return tuple(axis for axis in BATCH_AXES if self.mesh.shape[axis] > 1 and axis not in splitting)

    @property
    def axes(self) -> dict[str, LogicalAxes]:
        """Path → logical axes of every parameter."""
        return {parameter.path: parameter.axes for parameter in self.parameters}

    @property
    def uncast(self) -> frozenset[str]:
        """Paths of the parameters that no compute format rounds: vectors, and routers' kernels."""
        return frozenset(p.path for p in self.parameters if keeps_format(p.path, p.axes))

    def shardings(self, table: Table) -> Any:
        """The pytree of parameters with the sharding that `table` gives to each one's axes."""
        leaves = [
            NamedSharding(self.mesh, resolve(p.path, p.shape, p.axes, table, self.mesh.shape).spec)
            for p in self.parameters
        ]
        return jax.tree.unflatten(jax.tree.structure(self.abstract_params), leaves)

    @property
    def param_shardings(self) -> Any:
        """The pytree of parameters with each one's sharding, and the memory that it is kept in."""
        host = self.config.offload.parameters == "host"
        return self.as_params(
            {p.path: self.sharding(p.layout.spec, on_host=host and is_stacked(p.axes)) for p in self.parameters}
        )

    def readable(self, params: Any, table: Table, proxies: Any = None) -> Any:
        """Traced parameters, laid out by `table`, as the model reads them; see `jaxpar.parallel.offload.readable`."""
        by_path = self.by_path(params)
        stand_ins = dict.fromkeys(by_path) if proxies is None else self.by_path(proxies)
        leaves = {}
        for p in self.parameters:
            spec = resolve(p.path, p.shape, p.axes, table, self.mesh.shape).spec
            leaves[p.path] = readable(by_path[p.path], stand_ins[p.path], spec, stacked=is_stacked(p.axes))
        return self.as_params(leaves)

    @property
    def evaluated_table(self) -> Table:
        """The table that lays out what `evaluation.parameters` names."""
        return self.rules.optimizer if self.config.evaluation.parameters == "ema" else self.rules.params

    def param_spec(self, path: str) -> PartitionSpec:
        """The layout of the parameter `path`."""
        return next(p.layout.spec for p in self.parameters if p.path == path)

    def sharding(self, spec: PartitionSpec, *, on_host: bool = False) -> NamedSharding:
        """`spec` on the mesh, in the device's memory or the host's."""
        return host_sharding(self.mesh, spec) if on_host else NamedSharding(self.mesh, spec)

    @property
    def batch_sharding(self) -> NamedSharding:
        """Of the [batch, sequence] arrays that the step reads."""
        table = self.rules.activations
        return NamedSharding(self.mesh, PartitionSpec(table["batch"], table["sequence"]))

    @property
    def replicated(self) -> NamedSharding:
        """Of what every device has whole."""
        return NamedSharding(self.mesh, PartitionSpec())


def make_plan(config: Config, devices: Sequence[jax.Device], vocab_size: int) -> Plan:
    """The plan for `config` on `devices` with a tokenizer of `vocab_size` entries.

    Raises:
      ValueError: the layout is impossible; the message names the keys, the values and the nearest legal ones.
    """
    if not callable(getattr(config.model, "make", None)):
        raise ValueError(
            f"model.name: {type(config.model).__name__} has no method make(*, vocab_size, padded_vocab_size, "
            "sequence_length, rngs) that returns the model"
        )
    sizes = axis_sizes({axis: getattr(config.parallel, axis) for axis in AXES}, len(devices))
    check_layout(config, sizes)
    check_precision(config)
    check_idle_keys(config)
    check_checkpoints(config)
    vocab_size, note = vocabulary_of(config, vocab_size)
    multiple = math.lcm(getattr(config.model, "vocab_multiple", VOCAB_MULTIPLE), sizes["tensor"])
    padded_vocab_size = math.ceil(vocab_size / multiple) * multiple
    mesh = make_mesh(sizes, devices)
    rules, rule_notes = rules_of(config, sizes)
    attention, attention_note = attention_of(config, sizes, devices[0].platform)
    products, products_notes = products_of(config, devices[0])
    execution = Execution(
        mesh=mesh,
        params=rules.params,
        activations=rules.activations,
        gradients=rules.gradients,
        remat=REMAT_POLICIES[config.remat.policy],
        unroll_layers=config.kernels.unroll_layers,
        reduction=config.precision.reduction,
        attention=attention,
        attention_block=config.kernels.attention_block or (128 if devices[0].platform == "cpu" else 512),
        context_method=config.parallel.context_method,
        products=products,
        **matrix_product_forms(devices[0].platform, config.precision.compute),
    )
    structure, abstract_params, axes, rates = _abstract_model(config, vocab_size, padded_vocab_size)
    check_optimizer(config.optimizer, config.schedule, axes)
    check_offload(config, axes)
    calls, layer_sums = _calls(config, execution, structure, abstract_params)
    check_calls(config, calls, sizes["context"])
    check_schedule_name(config)
    pipeline = None
    if sizes["pipe"] > 1:
        parts = ModelParts(config, execution, structure, abstract_params, axes)
        parts.check()
        num_layers, period = calls["scan_layers"]
        pipeline = plan_pipeline(config, sizes, num_layers, period, parts.work_of_ends(num_layers), parts.slot_sizes)
        execution = replace(execution, split_backward=pipeline.schedule.geometry.split)
        abstract_params = _in_rows(abstract_params, axes, pipeline)
    parameters = _place(abstract_params, axes, rules, sizes)
    parameters = tuple(replace(parameter, balance_rate=rates[parameter.path]) for parameter in parameters)
    return Plan(
        config=config,
        mesh=mesh,
        rules=rules,
        execution=execution,
        vocab_size=vocab_size,
        padded_vocab_size=padded_vocab_size,
        structure=structure,
        abstract_params=abstract_params,
        parameters=parameters,
        calls=frozenset(calls),
        layer_sums=layer_sums,
        pipeline=pipeline,
        notes=(
            *note,
            *rule_notes,
            *([attention_note] if "attention" in calls else []),
            *products_notes,
            *([] if pipeline is None else pipeline.notes),
        ),
    )


def _make_params(config: Config, vocab_size: int, padded_vocab_size: int) -> Any:
    params = nnx.to_pure_dict(nnx.state(_make_model(config, vocab_size, padded_vocab_size), nnx.Param))
    return jax.tree.map(lambda parameter: parameter.astype(config.precision.parameters), params)


def _make_model(config: Config, vocab_size: int, padded_vocab_size: int) -> nnx.Module:
    make = config.model.make  # type: ignore[attr-defined]
    with nnx.use_eager_sharding(False):
        return make(
            vocab_size=vocab_size,
            padded_vocab_size=padded_vocab_size,
            sequence_length=config.data.sequence_length,
            rngs=nnx.Rngs(config.run.seed),
        )


def _abstract_model(
    config: Config, vocab_size: int, padded_vocab_size: int
) -> tuple[Any, Any, dict[str, LogicalAxes], dict[str, float]]:
    """The model's structure, its parameters as shapes, and each one's logical axes and balance rate, without computing
    anything."""
    model = nnx.eval_shape(partial(_make_model, config, vocab_size, padded_vocab_size))
    structure, params, other = nnx.split(model, nnx.Param, ...)
    stateful = ["/".join(map(str, path)) for path, _ in nnx.to_flat_state(other)]
    if stateful:
        name = config.model.name  # type: ignore[attr-defined]
        raise ValueError(
            f"model.name={name!r} keeps state that is not an nnx.Param ({', '.join(stateful)}); take randomness from "
            "the dropout_keys argument and keep no counters, so that a step is a function of its inputs"
        )
    axes, rates = {}, {}
    for path, variable in nnx.to_flat_state(params):
        names = variable.get_metadata().get("out_sharding")
        name = "/".join(map(str, path))
        if names is None:
            raise ValueError(
                f"parameter {name} {variable.shape} has no logical axes; "
                "annotate it: nnx.Param(value, out_sharding=(...))"
            )
        axes[name], rates[name] = tuple(names), variable.get_metadata().get("balance_rate", 0.0)
    stored = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, config.precision.parameters), nnx.to_pure_dict(params)
    )
    return structure, stored, axes, rates


def _in_rows(abstract_params: Any, axes: Mapping[str, LogicalAxes], pipeline: PipelinePlan) -> Any:
    def stacked(keys: tuple, leaf: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        path = jax.tree_util.keystr(keys, simple=True, separator="/")
        if not is_stacked(axes[path]):
            return leaf
        return jax.ShapeDtypeStruct((len(pipeline.rows_of_stack(leaf.shape[0])), *leaf.shape[1:]), leaf.dtype)

    return jax.tree_util.tree_map_with_path(stacked, abstract_params)


def _calls(
    config: Config, execution: Execution, structure: Any, abstract_params: Any
) -> tuple[dict[str, Any], LayerSums | None]:
    """The functions that follow the plan which the model calls, and the shapes of what its layers add up, found by
    tracing it; nothing is computed."""
    shape = (config.train.batch_size, config.data.sequence_length)
    inputs = {name: jax.ShapeDtypeStruct(shape, jnp.int32) for name in ("tokens", "positions", "segment_ids")}

    def call(params: Any, inputs: dict[str, jax.Array]) -> LayerSums | None:
        return parted(nnx.merge(structure, params)(inputs))[1]

    # Attention by tiles lists them, which takes long for a sequence that is far too long: what is called is the same.
    with replace(execution, attention="reference").active(), recorded_calls() as calls:
        layer_sums = jax.eval_shape(call, abstract_params, inputs)
    return calls, layer_sums


def _place(
    abstract_params: Any, axes: Mapping[str, LogicalAxes], rules: ShardingRules, sizes: Mapping[str, int]
) -> tuple[Parameter, ...]:
    def place(keys: tuple, leaf: jax.ShapeDtypeStruct) -> Parameter:
        path = jax.tree_util.keystr(keys, simple=True, separator="/")
        layout = resolve(path, leaf.shape, axes[path], rules.params, sizes)
        if "kv_heads" in axes[path] and sizes["tensor"] > 1 and not rules.params["kv_heads"]:
            whole = f"kv_heads whole: they do not divide by tensor={sizes['tensor']}"
            layout = replace(layout, reason=f"{layout.reason}; {whole}")
        return Parameter(path, tuple(leaf.shape), jnp.dtype(leaf.dtype), axes[path], layout)

    placed = jax.tree_util.tree_map_with_path(place, abstract_params)
    return tuple(jax.tree.leaves(placed, is_leaf=lambda leaf: isinstance(leaf, Parameter)))
