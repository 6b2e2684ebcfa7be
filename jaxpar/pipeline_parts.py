"""A model in the parts of which stages are made: what it must be for that, and what each part costs and keeps."""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxpar.config.schema import Config
from jaxpar.parallel.constrain import Execution, recorded_calls
from jaxpar.parallel.layers import StageLayers, layers_left_out, stage_layers
from jaxpar.parallel.loss import FactoredLogits
from jaxpar.parallel.pipeline.backward import CutVjp, SplitBackward, passes_through, reads
from jaxpar.parallel.pipeline.choice import SlotSizes
from jaxpar.parallel.pipeline.partition import Work
from jaxpar.parallel.rules import LogicalAxes, is_stacked, keeps_format
from jaxpar.precision import cast_to_compute

__all__ = ["ModelParts"]


@dataclass(frozen=True, eq=False)
class ModelParts:
    """A model by its shapes; nothing is computed.

    `axes` are the logical axes of every parameter by path, in the order of `abstract_params`.
    """

    config: Config
    execution: Execution
    structure: Any
    abstract_params: Any
    axes: Mapping[str, LogicalAxes]

    def check(self) -> None:
        """Raises ValueError if the model cannot be cut into stages."""
        config, axes = self.config, self.axes
        name = f"model.name={config.model.name!r}"  # type: ignore[attr-defined]
        pipe = f"parallel.pipe={config.parallel.pipe}"
        if config.offload.parameters == "host" or config.offload.optimizer_state == "host":
            raise ValueError(
                f"{pipe} splits the layers over ranks, and [offload] goes through them one by one, which would wait "
                'for every rank at each; set offload.parameters="none" and offload.optimizer_state="none", or '
                "parallel.pipe=1"
            )
        model = nnx.merge(self.structure, self.abstract_params)
        missing = [part for part in ("embed", "layers", "head") if not callable(getattr(model, part, None))]
        if missing or not any(is_stacked(names) for names in axes.values()):
            what = (
                f"no method {missing[0]}" if missing else 'no stacked blocks (parameters whose first axis is "layers")'
            )
            raise ValueError(
                f"{pipe} needs a model in parts: embed(inputs, dropout_keys), layers(x, inputs, dropout_keys), which "
                f"runs its stacked blocks by jaxpar.parallel.layers.scan_layers, and head(x); {name} has {what}. Give "
                "it that, or set parallel.pipe=1"
            )
        params, inputs = self.abstract_params, self._inputs
        with replace(self.execution, attention="reference").active(), recorded_calls() as calls:
            x = jax.eval_shape(self._embed, params, inputs)
            logits = jax.eval_shape(self._head, params, x)
            read = {
                "embed": reads(self._embed, params, inputs),
                "layers": reads(self._layers, params, x, inputs),
                "head": reads(self._head, params, x),
            }
        if "scan_layers" not in calls:
            raise ValueError(
                f"{pipe}: the method layers of {name} must run its stacked blocks by jaxpar.parallel.layers.scan_layers"
            )
        with replace(self.execution, attention="reference").active():
            for keys in (None, self._keys):
                self._check_layers_alone(f"{pipe}: the method layers of {name}", x, keys)
        self._check_ends(f"{pipe} with {{split}}: the method {{part}} of {name}", read["embed"], calls, logits)
        for part, flags in read.items():
            for path, is_read in zip(axes, flags, strict=True):
                if is_read and is_stacked(axes[path]) != (part == "layers"):
                    where = "only the stacked blocks" if part == "layers" else "no stacked blocks"
                    raise ValueError(
                        f"{pipe}: the method {part} of {name} reads {path}, but it may read {where}, since the others "
                        "are not where it runs"
                    )

    def _check_ends(self, what: str, read_by_embed: Sequence[bool], calls: Collection[str], logits: Any) -> None:
        """One rank alone runs them, and what the compiler makes of other products and lookups in split tables may wait
        for others, or be more than it can partition."""

        def split(*names: str) -> list[str]:
            axes = {axis for name in names for axis in self.execution.params[name]}
            sizes = {} if self.execution.mesh is None else self.execution.mesh.shape
            return [f"parallel.{axis}={sizes[axis]}" for axis in sorted(axes) if sizes[axis] > 1]

        reads_table = any(
            is_read and "vocab" in names for is_read, names in zip(read_by_embed, self.axes.values(), strict=True)
        )
        if reads_table and "lookup" not in calls and (splitting := split("vocab", "embed")):
            raise ValueError(
                f"{what.format(split=' × '.join(splitting), part='embed')} must look tokens up by "
                "jaxpar.parallel.embedding.lookup, since the table is split"
            )
        if not isinstance(logits, FactoredLogits) and (splitting := split("vocab")):
            raise ValueError(
                f"{what.format(split=' × '.join(splitting), part='head')} must return "
                "jaxpar.parallel.loss.FactoredLogits, since the vocabulary is split"
            )

    def work_of_ends(self, num_layers: int) -> Work:
        """Embedding and head in layers, by multiplications and additions for a token: a layer's matrices count their
        elements, of experts those of the share that a token goes through, the head's product the table's; a lookup adds
        one row."""
        axes = self.axes
        sizes = {path: leaf.shape for path, leaf in self._by_path(self.abstract_params).items()}
        experts = getattr(self.config.model, "experts", None)
        share = 1.0 if experts is None else experts.choices / experts.num_experts
        matrices = (
            sum(
                math.prod(shape) * (share if "experts" in axes[path] else 1.0)
                for path, shape in sizes.items()
                if is_stacked(axes[path]) and len(axes[path]) > 2
            )
            / num_layers
        )
        tables = [shape for path, shape in sizes.items() if set(axes[path]) == {"vocab", "embed"}]
        if not matrices or not tables:
            return Work()
        return Work(embed=min(tables[0]) / matrices, head=math.prod(tables[0]) / matrices)

    def slot_sizes(self) -> SlotSizes:
        """What the layers keep for a backward pass in two parts, by the bytes of all arrays."""
        uncast = frozenset(path for path, names in self.axes.items() if keeps_format(path, names))
        params = jax.eval_shape(
            lambda params: cast_to_compute(params, self.config.precision.compute, uncast), self.abstract_params
        )
        with self.execution.active():
            x = jax.eval_shape(self._embed, params, self._inputs)
            whole, _ = self._kept_bytes(params, x, split=False)
            forward, backward = self._kept_bytes(params, x, split=True)
        # Layers that keep nothing have nothing to weigh against.
        return SlotSizes(forward / whole, backward / whole) if whole else SlotSizes()

    def _kept_bytes(self, params: Any, x: jax.Array, *, split: bool) -> tuple[int, int]:
        """Of what waits for the backward pass of all layers, and, if it is split, for its second part."""
        depth = next(leaf.shape[0] for path, leaf in self._by_path(params).items() if is_stacked(self.axes[path]))
        cut = CutVjp(self._layers)

        def kept(params: Any, x: jax.Array, inputs: Any) -> tuple[Sequence[jax.Array], Sequence[jax.Array]]:
            with stage_layers(StageLayers(jnp.int32(0), jnp.int32(depth), is_full=True)):
                y, residuals = cut.forward(params, x, inputs)
                if not split:
                    return residuals, ()
                return residuals, SplitBackward(cut.backward).inputs(params, inputs, residuals, y)[1]

        with replace(self.execution, split_backward=split).active():
            shapes = jax.eval_shape(kept, params, x, self._inputs)
        residuals, crossing = (sum(leaf.size * leaf.dtype.itemsize for leaf in part) for part in shapes)
        return residuals, crossing

    @property
    def _inputs(self) -> dict[str, jax.ShapeDtypeStruct]:
        shape = (self.config.train.batch_size, self.config.data.sequence_length)
        return {key: jax.ShapeDtypeStruct(shape, jnp.int32) for key in ("tokens", "positions", "segment_ids")}

    @property
    def _keys(self) -> Any:
        """A dropout key for each sequence."""
        number = self.config.train.batch_size
        return jax.eval_shape(lambda: jax.random.split(jax.random.key(0), number))

    def _embed(self, params: Any, inputs: Any) -> jax.Array:
        return nnx.merge(self.structure, params).embed(inputs, None)

    def _layers(self, params: Any, x: jax.Array, inputs: Any) -> jax.Array:
        return nnx.merge(self.structure, params).layers(x, inputs, None)

    def _head(self, params: Any, x: jax.Array) -> Any:
        return nnx.merge(self.structure, params).head(x)

    def _by_path(self, params: Any) -> dict[str, Any]:
        return dict(zip(self.axes, jax.tree.leaves(params), strict=True))

    def _check_layers_alone(self, what: str, x: Any, keys: Any) -> None:
        """Each stage runs all of `layers`: beside its layers there may be nothing that changes what passes through."""
        calls: list[tuple[int, Any]] = []

        def without_layers(params: Any, x: jax.Array, context: Any) -> tuple[jax.Array, Any]:
            calls.clear()
            with layers_left_out(lambda num_layers, extras: calls.append((num_layers, extras))):
                result = nnx.merge(self.structure, params).layers(x, *context)
            return result, [extras for _, extras in calls]

        is_x, extras_are_of_inputs = passes_through(without_layers, self.abstract_params, x, (self._inputs, keys))
        leaves = self._by_path(self.abstract_params)
        depths = {leaf.shape[0] for path, leaf in leaves.items() if is_stacked(self.axes[path])}
        if len(calls) != 1 or depths != {calls[0][0]}:
            raise ValueError(
                f"{what} must call scan_layers once, with all stacked blocks; it calls it {len(calls)} times, for "
                f"{' and '.join(str(number) for number, _ in calls)} layers, and there are stacks of "
                f"{', '.join(map(str, sorted(depths)))}"
            )
        if not is_x or not extras_are_of_inputs:
            must = "give what scan_layers returns" if not is_x else "give scan_layers extras that read inputs alone"
            raise ValueError(
                f"{what} runs on every stage, so that it must {must}; what else it does belongs to embed or head"
            )
