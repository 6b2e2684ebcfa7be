"""`[optimizer]`: one section a name, each with its own keys. The docstrings and descriptions are the `--help` text."""

from typing import Annotated, Literal

from pydantic import Field

from jaxpar.config.section import Positive, Section

__all__ = ["SGD", "SM3", "Adafactor", "AdamW", "AdamW8bit", "Lion", "Muon", "OptimizerConfig"]

LearningRate = Annotated[float, Field(gt=0, allow_inf_nan=False, description="Peak learning rate.")]
WeightDecay = Annotated[
    float,
    Field(
        ge=0,
        allow_inf_nan=False,
        description="Decay of matrices (parameters with two or more dims that are no biases), times the learning rate.",
    ),
]
NoDecay = Annotated[
    tuple[str, ...],
    Field(
        strict=False,
        description='Further parameters without decay: glob patterns over paths such as "embedding/*"; one that '
        "matches nothing is an error.",
    ),
]
LayerDecay = Annotated[
    float,
    Field(
        gt=0,
        le=1,
        description="The step of layer i of L, counted from 0, is multiplied by this to the power of L − i, an "
        "embedding table's to the power of L + 1 (Clark 2020); 1 is off.",
    ),
]
Beta = Annotated[float, Field(ge=0, lt=1)]
Epsilon = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class SGD(Section):
    """Stochastic gradient descent with momentum."""

    name: Literal["sgd"] = "sgd"
    learning_rate: LearningRate = 0.1
    momentum: Beta = 0.9
    """Share of the previous step that is added to the gradient; 0 keeps no state."""
    nesterov: bool = False
    """Look ahead by the momentum (Nesterov 1983)."""
    weight_decay: WeightDecay = 1e-4
    no_decay: NoDecay = ()
    layer_decay: LayerDecay = 1.0


class AdamW(Section):
    """Adam with decoupled weight decay (Loshchilov and Hutter 2019)."""

    name: Literal["adamw"] = "adamw"
    learning_rate: LearningRate = 3e-4
    beta1: Beta = 0.9
    """Decay of the first moment."""
    beta2: Beta = 0.95
    """Decay of the second moment."""
    epsilon: Epsilon = 1e-8
    """Added to the root of the second moment."""
    moments: Literal["float32", "bfloat16"] = "float32"
    """Format that both moments are kept in."""
    moment_rounding: Literal["stochastic", "nearest"] = "stochastic"
    """How bfloat16 moments are rounded; to nearest, changes of less than 1 part in 512 are lost."""
    weight_decay: WeightDecay = 0.1
    no_decay: NoDecay = ()
    layer_decay: LayerDecay = 1.0


class AdamW8bit(Section):
    """AdamW with moments in 8 bits, a scale for each block (Dettmers 2022)."""

    name: Literal["adamw8bit"] = "adamw8bit"
    learning_rate: LearningRate = 3e-4
    beta1: Beta = 0.9
    """Decay of the first moment."""
    beta2: Beta = 0.95
    """Decay of the second moment."""
    epsilon: Epsilon = 1e-8
    """Added to the root of the second moment."""
    block_size: Positive = 256
    """Neighbours along a parameter's last dim that share a scale."""
    min_size: Positive = 4096
    """Elements (of one layer) from which on a parameter's moments are kept in 8 bits; below, in float32."""
    weight_decay: WeightDecay = 0.1
    no_decay: NoDecay = ()
    layer_decay: LayerDecay = 1.0


class Adafactor(Section):
    """Adam's second moment from sums over rows and columns (Shazeer and Stern 2018)."""

    name: Literal["adafactor"] = "adafactor"
    learning_rate: LearningRate = 1e-2
    relative_step: bool = False
    """The learning rate of step t is at most 1/√t, as for T5; needs schedule.name="constant"."""
    parameter_scale: bool = True
    """Steps are relative to each matrix's or vector's root mean square; false makes the learning rate absolute."""
    min_parameter_scale: Epsilon = 1e-3
    """The least root mean square that a step is relative to."""
    clipping_threshold: Annotated[float, Field(gt=0)] = 1.0
    """A step is scaled down to this root mean square; `inf` switches clipping off."""
    decay_exponent: Annotated[float, Field(gt=0, le=1)] = 0.8
    """The second moment decays by 1 − t^−exponent at step t."""
    epsilon: Epsilon = 1e-30
    """Added to the squared gradient."""
    momentum: Beta = 0.0
    """Decay of an average of steps; 0 keeps none."""
    min_dim_size_to_factor: Positive = 128
    """Matrices whose rows or columns are fewer keep a whole second moment."""
    weight_decay: WeightDecay = 0.0
    no_decay: NoDecay = ()
    layer_decay: LayerDecay = 1.0


class SM3(Section):
    """AdaGrad with one statistic a row and column of each matrix (Anil 2019)."""

    name: Literal["sm3"] = "sm3"
    learning_rate: LearningRate = 0.1
    variant: Literal["I", "II"] = "II"
    """"II" bounds the sums of squared gradients more tightly than "I"."""
    momentum: Beta = 0.9
    """Decay of an average of steps; 0 keeps none."""
    weight_decay: WeightDecay = 0.0
    no_decay: NoDecay = ()
    layer_decay: LayerDecay = 1.0


class Lion(Section):
    """The sign of an interpolated momentum (Chen 2023)."""

    name: Literal["lion"] = "lion"
    learning_rate: LearningRate = 1e-4
    beta1: Beta = 0.9
    """Share of the momentum in the step."""
    beta2: Beta = 0.99
    """Decay of the momentum."""
    weight_decay: WeightDecay = 0.3
    no_decay: NoDecay = ()
    layer_decay: LayerDecay = 1.0


class Muon(Section):
    """Orthogonalised momentum for hidden matrices (Jordan 2024), AdamW for tables, output kernel and vectors.

    A matrix of n rows and m columns takes steps of root mean square about 0.2, as AdamW does, so that both share the
    learning rate (Liu 2025).
    """

    name: Literal["muon"] = "muon"
    learning_rate: LearningRate = 3e-4
    momentum: Beta = 0.95
    """Decay of the average gradient of matrices."""
    nesterov: bool = True
    """Mix the gradient into the average once more before it is orthogonalised."""
    ns_steps: Positive = 5
    """Newton-Schulz iterations."""
    adam_beta1: Beta = 0.9
    """AdamW's decay of the first moment."""
    adam_beta2: Beta = 0.95
    """AdamW's decay of the second moment."""
    adam_epsilon: Epsilon = 1e-8
    """AdamW's addition to the root of the second moment."""
    weight_decay: WeightDecay = 0.1
    no_decay: NoDecay = ()
    layer_decay: LayerDecay = 1.0


OptimizerConfig = Annotated[AdamW | AdamW8bit | SGD | Adafactor | SM3 | Lion | Muon, Field(discriminator="name")]
