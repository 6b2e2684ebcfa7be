"""What each optimizer keeps for a parameter, and what it is good at: one row each.

The arrays are computed from shapes alone, without tracing the optimizer, for reports and plans.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from jaxpar.config.optimizers import SGD, SM3, Adafactor, AdamW, AdamW8bit, Lion, Muon, OptimizerConfig
from jaxpar.optim.adafactor import factored_view
from jaxpar.optim.matrices import matrix_shape, matrix_view
from jaxpar.optim.muon import is_hidden_matrix
from jaxpar.optim.quantization import num_blocks
from jaxpar.parallel.rules import LogicalAxes, of_one_matrix

__all__ = ["PROPERTIES", "Properties", "StateArray", "state_arrays", "state_bytes"]

Shape = tuple[int, ...]


@dataclass(frozen=True)
class StateArray:
    """One array of a parameter's state."""

    shape: Shape
    itemsize: int = 4

    @property
    def num_bytes(self) -> int:
        """Bytes, over all devices."""
        return math.prod(self.shape) * self.itemsize


Kept = dict[str, StateArray]


@dataclass(frozen=True)
class Properties:
    """One optimizer.

    `matrix_bytes` is the formula of its state's bytes for an n × m matrix with the default keys; `uses_matrices` says
    whether it matters which elements share a row or column, `elementwise` whether every element is updated for itself.
    `arrays(config, path, axes, shape)` are those of one layer.
    """

    reference: str
    good_at: str
    matrix_bytes: str
    uses_matrices: bool
    elementwise: bool
    arrays: Callable[[Any, str, LogicalAxes, Shape], Kept]


def state_arrays(
    config: OptimizerConfig, path: str, axes: LogicalAxes, shape: Shape, *, master_weights: bool = False
) -> Kept:
    """A parameter's state by role; `master_weights` says that it has 16 bits and a float32 copy in the state."""
    of_one = of_one_matrix(axes)
    stack, shape = shape[: len(axes) - len(of_one)], shape[len(axes) - len(of_one) :]
    kept = PROPERTIES[type(config)].arrays(config, path, of_one, shape)
    master = {"master": StateArray(shape)} if master_weights else {}
    return {role: StateArray((*stack, *array.shape), array.itemsize) for role, array in (kept | master).items()}


def state_bytes(
    config: OptimizerConfig,
    shapes: Mapping[str, Shape],
    axes: Mapping[str, LogicalAxes],
    *,
    master_weights: bool = False,
) -> int:
    """Bytes of the whole state, over all devices: every parameter's arrays and the count of updates.

    >>> from jaxpar.config.optimizers import AdamW, SM3
    >>> kernel, names = {"kernel": (1000, 500)}, {"kernel": ("embed", "mlp")}
    >>> state_bytes(AdamW(), kernel, names), state_bytes(SM3(momentum=0.0), kernel, names)
    (4000004, 6004)
    """
    arrays = (
        array
        for path, shape in shapes.items()
        for array in state_arrays(config, path, axes[path], shape, master_weights=master_weights).values()
    )
    return 4 + sum(array.num_bytes for array in arrays)


def _moments(shape: Shape, itemsize: int = 4) -> Kept:
    return {"first": StateArray(shape, itemsize), "second": StateArray(shape, itemsize)}


def _momentum(momentum: float, shape: Shape) -> Kept:
    return {"first": StateArray(shape)} if momentum else {}


def _adamw(config: AdamW, path: str, axes: LogicalAxes, shape: Shape) -> Kept:
    return _moments(shape, 2 if config.moments == "bfloat16" else 4)


def _adamw8bit(config: AdamW8bit, path: str, axes: LogicalAxes, shape: Shape) -> Kept:
    if math.prod(shape) < config.min_size:
        return _moments(shape)
    scales = StateArray((*shape[:-1], num_blocks(shape[-1], config.block_size)))
    codes = StateArray(shape, 1)
    return {"first_codes": codes, "first_scales": scales, "second_codes": codes, "second_scales": scales}


def _sgd(config: SGD, path: str, axes: LogicalAxes, shape: Shape) -> Kept:
    return _momentum(config.momentum, shape)


def _adafactor(config: Adafactor, path: str, axes: LogicalAxes, shape: Shape) -> Kept:
    view = factored_view(config, path, axes, shape)
    statistics = {"second": StateArray(shape)} if view is None else _rows_and_columns(matrix_shape(shape, view))
    return _momentum(config.momentum, shape) | statistics


def _sm3(config: SM3, path: str, axes: LogicalAxes, shape: Shape) -> Kept:
    view = matrix_view(path, axes)
    statistics = {"second": StateArray(shape)} if view is None else _rows_and_columns(matrix_shape(shape, view))
    return _momentum(config.momentum, shape) | statistics


def _rows_and_columns(shape: tuple[int, int]) -> Kept:
    return {"rows": StateArray(shape[:1]), "columns": StateArray(shape[1:])}


def _lion(config: Lion, path: str, axes: LogicalAxes, shape: Shape) -> Kept:
    return {"first": StateArray(shape)}


def _muon(config: Muon, path: str, axes: LogicalAxes, shape: Shape) -> Kept:
    return {"first": StateArray(shape)} if is_hidden_matrix(path, axes) else _moments(shape)


PROPERTIES: dict[type, Properties] = {
    AdamW: Properties(
        "Loshchilov and Hutter, Decoupled Weight Decay Regularization, arXiv:1711.05101, 2019",
        'the usual choice; with moments = "bfloat16" half its state for nearly the same curve',
        "8·n·m",
        uses_matrices=False,
        elementwise=True,
        arrays=_adamw,
    ),
    AdamW8bit: Properties(
        "Dettmers et al., 8-bit Optimizers via Block-wise Quantization, arXiv:2110.02861, 2022",
        "AdamW's curve with a quarter of its state; parameters of fewer than 4,096 elements a layer stay in float32",
        "2·n·m + 8·n·⌈m/256⌉",
        uses_matrices=False,
        elementwise=False,
        arrays=_adamw8bit,
    ),
    SGD: Properties(
        "Sutskever et al., On the Importance of Initialization and Momentum in Deep Learning, 2013",
        "a baseline; without momentum no state at all",
        "4·n·m",
        uses_matrices=False,
        elementwise=True,
        arrays=_sgd,
    ),
    Adafactor: Properties(
        "Shazeer and Stern, Adafactor: Adaptive Learning Rates with Sublinear Memory Cost, arXiv:1804.04235, 2018",
        "large models in little memory, as T5; matrices with fewer than 128 rows or columns keep a whole second moment",
        "4·(n + m)",
        uses_matrices=True,
        elementwise=False,
        arrays=_adafactor,
    ),
    SM3: Properties(
        "Anil et al., Memory-Efficient Adaptive Optimization, arXiv:1901.11150, 2019",
        "sparse gradients and large batches; without momentum as little state as Adafactor, for matrices of any size",
        "4·n·m + 4·(n + m)",
        uses_matrices=True,
        elementwise=False,
        arrays=_sm3,
    ),
    Lion: Properties(
        "Chen et al., Symbolic Discovery of Optimization Algorithms, arXiv:2302.06675, 2023",
        "half of AdamW's state, at a learning rate of about a third and three times the weight decay",
        "4·n·m",
        uses_matrices=False,
        elementwise=True,
        arrays=_lion,
    ),
    Muon: Properties(
        "Jordan et al., Muon: An Optimizer for Hidden Layers in Neural Networks, 2024; Liu et al., arXiv:2502.16982",
        "fewer steps than AdamW to the same loss, each with 15 matrix products more for every matrix",
        "4·n·m",
        uses_matrices=True,
        elementwise=False,
        arrays=_muon,
    ),
}
