"""Every key of a run's configuration, with its type, default, unit and meaning.

The docstrings below are the `--help` text.

A section is a frozen pydantic model that forbids unknown keys. A variant (`[optimizer] name = "..."`) is a tagged union
whose members own their keys. Values that must agree across sections are checked in `jaxpar.plan.make_plan`, not here.
"""

from typing import Annotated, Literal

from pydantic import AfterValidator, BaseModel, Field, SerializeAsAny

from jaxpar.config.operation import CheckpointConfig, DistributedConfig, HardwareConfig, LoggingConfig, RuntimeConfig
from jaxpar.config.optimizers import AdamW, OptimizerConfig
from jaxpar.config.section import Fraction, NonNegative, Positive, Section

__all__ = ["Config", "DataConfig", "ScheduleConfig", "SourceConfig", "TokenizerConfig"]


def _not_zero(size: int) -> int:
    if size == 0:
        raise ValueError("must be a whole number > 0, or -1 for the devices that are left")
    return size


AxisSize = Annotated[int, AfterValidator(_not_zero), Field(ge=-1, json_schema_extra={"not": {"const": 0}})]


class RunConfig(Section):
    """Where a run lives and what makes it reproducible."""

    dir: str = "runs/default"
    """Directory of the run: resolved configuration, metrics, checkpoints. A run found there is continued."""
    seed: NonNegative = 0
    """Seed of initial weights, dropout and the order of the data."""


class PackagedSource(Section):
    """The corpus that ships with jaxpar: 233 State of the Union addresses, 10.8 MB of English."""

    name: Literal["packaged"] = "packaged"
    weight: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 1.0
    """Share of the mixture, relative to the other sources' weights."""


class TextSource(Section):
    """Text files: one document a .txt file, one a line of a .jsonl file, one a row of a .parquet file."""

    name: Literal["text"] = "text"
    paths: tuple[str, ...] = Field(strict=False)
    """Files or glob patterns; .txt, .jsonl and .parquet, the first two also as .gz, .xz or .zst."""
    text_key: str = "text"
    """Key (jsonl) or column (parquet) that holds a document's text."""
    weight: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 1.0
    """Share of the mixture, relative to the other sources' weights."""


class TokenFileSource(Section):
    """Pre-tokenised .bin files as nanoGPT (raw uint16) and llm.c (1024-byte header) write them."""

    name: Literal["token_files"] = "token_files"
    paths: tuple[str, ...] = Field(strict=False)
    """Files or glob patterns."""
    format: Literal["nanogpt", "llm.c"] = "nanogpt"
    """Layout of the files."""
    end_of_text: int = -1
    """Token id that ends a document; -1 means the tokenizer's."""
    weight: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 1.0
    """Share of the mixture, relative to the other sources' weights."""


class MegatronSource(Section):
    """Pre-tokenised pairs PREFIX.bin and PREFIX.idx as Megatron-LM writes them."""

    name: Literal["megatron"] = "megatron"
    prefixes: tuple[str, ...] = Field(strict=False)
    """Paths without the .bin and .idx endings."""
    weight: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 1.0
    """Share of the mixture, relative to the other sources' weights."""


SourceConfig = Annotated[PackagedSource | TextSource | TokenFileSource | MegatronSource, Field(discriminator="name")]


class ByteTokenizer(Section):
    """UTF-8 bytes: 256 tokens and an end of text."""

    name: Literal["bytes"] = "bytes"


class BpeTokenizer(Section):
    """Byte-level byte-pair encoding, trained once on the training documents and cached."""

    name: Literal["bpe"] = "bpe"
    vocab_size: Annotated[int, Field(ge=257)] = 4096
    """Number of entries, the 256 bytes and the end of text among them."""


class HuggingFaceTokenizer(Section):
    """A `tokenizer.json` file of the Hugging Face tokenizers library."""

    name: Literal["huggingface"] = "huggingface"
    path: str
    """The file."""
    end_of_text: str = ""
    """Token that ends a document; empty means the first of <|endoftext|>, </s>, <|end_of_text|>, <eos> that the file
    has."""


class TiktokenTokenizer(Section):
    """A tiktoken rank file (base64 token and rank on each line)."""

    name: Literal["tiktoken"] = "tiktoken"
    path: str
    """The file."""
    pattern: str = "gpt2"
    """How text is split before merging: "gpt2", "cl100k", or a regular expression."""


TokenizerConfig = Annotated[
    ByteTokenizer | BpeTokenizer | HuggingFaceTokenizer | TiktokenTokenizer, Field(discriminator="name")
]


class DataConfig(Section):
    """What the model reads."""

    sequence_length: Positive = 512
    """Tokens in one sequence of the batch."""
    sources: tuple[SourceConfig, ...] = Field(default=(PackagedSource(),), min_length=1, strict=False)
    """Where documents come from; several sources are mixed by their weights."""
    tokenizer: TokenizerConfig = BpeTokenizer()
    """How text becomes tokens."""
    document_boundaries: Literal["respect", "ignore"] = "respect"
    """"respect": attention stays within a document and positions restart; "ignore": a sequence is one stretch of
    text."""
    holdout_every: Annotated[int, Field(ge=0)] = 10
    """Documents 0, n, 2n, ... of each source are held out for evaluation; 0 holds out none."""
    cache_dir: str = ".cache/jaxpar"
    """Where trained tokenizers and tokenised text are kept, keyed by content."""
    prefetch: NonNegative = 2
    """Batches prepared ahead of the step."""


class TrainConfig(Section):
    """How long and how much at once."""

    num_steps: Positive = 1000
    """Optimizer steps."""
    batch_size: Positive = 32
    """Sequences in the global batch, over all devices."""
    microbatches: Positive = 1
    """Parts of the batch that are computed one after the other and whose gradients are summed before the update."""
    max_grad_norm: Annotated[float, Field(gt=0)] = 1.0
    """Gradients are scaled down to this global norm; `inf` switches clipping off."""
    on_nonfinite: Literal["halt", "skip"] = "halt"
    """What a loss or gradient that is not finite does without loss scaling: "halt" ends the run, "skip" leaves the
    parameters and the optimizer as they were and goes on. With loss scaling such a step is always skipped."""
    max_skipped: Positive = 20
    """Steps in a row that may be skipped before the run ends; with loss scaling, at the smallest scale."""
    ema_decay: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Decay of an exponential moving average of the parameters, kept in float32; 0 keeps none."""


class LossConfig(Section):
    """Cross-entropy over the vocabulary."""

    z_loss: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0
    """Weight of the squared log-partition function, which keeps logits near zero (PaLM, section 5)."""
    label_smoothing: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Share of the target's probability that is spread evenly over the vocabulary."""
    chunk_tokens: NonNegative = 1024
    """Tokens a device projects onto the vocabulary at once; 0 projects all of them at once."""


class ConstantSchedule(Section):
    """Warmup, then the peak learning rate."""

    name: Literal["constant"] = "constant"
    warmup_steps: NonNegative = 0
    """Steps over which the rate rises linearly from 0."""


class CosineSchedule(Section):
    """Warmup, then half a cosine down to the final rate at `train.num_steps`."""

    name: Literal["cosine"] = "cosine"
    warmup_steps: NonNegative = 100
    """Steps over which the rate rises linearly from 0."""
    final_fraction: Fraction = 0.1
    """Final rate as a fraction of the peak."""


class LinearSchedule(Section):
    """Warmup, then a straight line down to the final rate at `train.num_steps`."""

    name: Literal["linear"] = "linear"
    warmup_steps: NonNegative = 100
    """Steps over which the rate rises linearly from 0."""
    final_fraction: Fraction = 0.0
    """Final rate as a fraction of the peak."""


class WsdSchedule(Section):
    """Warmup, stable, decay (Hu 2024): the peak rate, then a straight line over the last steps."""

    name: Literal["wsd"] = "wsd"
    warmup_steps: NonNegative = 100
    """Steps over which the rate rises linearly from 0."""
    decay_steps: Positive = 100
    """Steps at the end over which the rate falls."""
    final_fraction: Fraction = 0.0
    """Final rate as a fraction of the peak."""


ScheduleConfig = Annotated[
    ConstantSchedule | CosineSchedule | LinearSchedule | WsdSchedule, Field(discriminator="name")
]


class ParallelConfig(Section):
    """How many devices each mesh axis has; the product is the number of devices."""

    pipe: AxisSize = 1
    """Pipeline stages."""
    data: AxisSize = -1
    """Replicas of the model, each with its part of the batch; -1 on one axis takes the devices that are left."""
    fsdp: AxisSize = 1
    """Devices that share one replica's state as `parallel.zero_stage` says, each with its part of the batch."""
    expert: AxisSize = 1
    """Devices that share the experts."""
    context: AxisSize = 1
    """Devices that share a sequence, each with its part of the tokens."""
    tensor: AxisSize = 1
    """Devices that share each layer's heads, feed-forward width and vocabulary (Megatron)."""
    zero_stage: Literal[0, 1, 2, 3] = 3
    """What is split over `fsdp` (ZeRO, Rajbhandari 2020): 0 nothing, 1 the optimizer's state, 2 gradients too, 3
    parameters too, which are gathered a layer at a time."""
    sequence_parallel: bool = False
    """Split the residual stream's sequence over `tensor` too, so that norms and dropout are not repeated (Korthikanti
    2022)."""
    context_method: Literal["ring", "all_gather", "ulysses"] = "ring"
    """How attention works over `context`: "ring" sends keys and values around while it computes (Liu 2023),
    "all_gather" has them all come at once, "ulysses" exchanges tokens for heads, of which there must be enough (Jacobs
    2023)."""
    bucket_bytes: NonNegative = 33554432
    """Gradients that are summed after the last microbatch are sent together up to this many bytes, and on accelerators
    other small arrays too; 0 sends each alone."""
    simulated_devices: NonNegative = 0
    """Simulate this many devices on the CPU, all processes of the run together; 0 uses the devices there are."""


class PipelineConfig(Section):
    """How microbatches pass through the stages of `parallel.pipe`."""

    schedule: str = "auto"
    """Which task each rank runs in each tick: "naive", "gpipe", "1f1b", "1f1b_aligned", "interleaved",
    "interleaved_aligned", "zb_h1", "zb_h2", "zb_v", or the path (with a dot or slash in it) of a file with a table of
    your own. "auto" takes the one with the least predicted time; `python -m jaxpar.plot_pipeline` draws each."""
    microbatches: NonNegative = 0
    """Parts into which the batch (or, with train.microbatches, each of its parts) is cut, so that stages work at the
    same time; 0 takes up to 4 for each stage."""
    chunks: NonNegative = 0
    """Stages on each rank: more idle less and send more; 0 takes what the schedule needs (2, or 1)."""
    layers_per_stage: tuple[Positive, ...] = Field(default=(), strict=False)
    """Layers of each stage, in the model's order; empty balances them, embedding and head counted as work."""
    costs: tuple[Annotated[float, Field(gt=0, allow_inf_nan=False)], ...] = Field(default=(), strict=False)
    """Relative time of a stage's forward, its input's gradient and its weights' gradients, for the predicted time;
    empty takes 1, 1, 1, with the recomputation of a remat policy in the second."""
    max_in_flight: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0
    """Most activations that a rank may keep, in microbatches of the layers that it has; "auto" looks for a schedule
    that keeps to it, others are refused if they do not. 0 sets no bound."""
    overlap: bool = False
    """Send a tick's result while the next tick computes; it arrives a tick later, so that filling the pipeline takes up
    to twice as many ticks."""


class PrecisionConfig(Section):
    """Number formats. Norms, softmax and loss are computed in float32, products are summed in it."""

    parameters: Literal["float32", "bfloat16", "float16"] = "float32"
    """Format in which parameters are kept; "float16" needs `precision.master_weights`."""
    compute: Literal["float32", "bfloat16", "float16"] = "float32"
    """Format of activations and of the weights that meet them; "float16" comes with loss scaling."""
    products: Literal["compute", "float8"] = "compute"
    """Format of the operands where a layer's weights meet activations: "compute", or "float8" (e4m3, gradients e5m2;
    each tensor is scaled by its largest entry), which needs an NVIDIA GPU of compute capability 8.9 or a TPU v7."""
    emulate_float8: bool = False
    """Where the device has no float8 products, round their operands to float8 and multiply them in the compute format:
    the same results, slower."""
    reduction: Literal["float32", "bfloat16"] = "float32"
    """Format in which gradients of matrices are summed over devices."""
    master_weights: bool = False
    """Keep a float32 copy of 16-bit parameters with the optimizer's state, and update that (Micikevicius 2018)."""
    rounding: Literal["nearest", "stochastic"] = "nearest"
    """How an updated parameter is rounded to bfloat16; "stochastic" rounds up or down at random so that small updates
    count on average."""
    loss_scale: Literal["auto", "dynamic"] | Annotated[float, Field(gt=0, allow_inf_nan=False)] = "auto"
    """What the loss is multiplied by before its gradients are taken, which are divided by it after: "dynamic" finds the
    largest that works, a number is fixed, "auto" is "dynamic" for float16 and none otherwise."""
    scale_initial: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 65536.0
    """First value of a dynamic loss scale."""
    scale_growth_steps: Positive = 2000
    """Finite steps after which a dynamic loss scale doubles; it halves at one that is not finite."""
    scale_min: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 1.0
    """Smallest value of a dynamic loss scale."""
    scale_max: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 16777216.0
    """Largest value of a dynamic loss scale."""

    @property
    def scaling(self) -> Literal["none", "fixed", "dynamic"]:
        """How the loss is scaled."""
        if isinstance(self.loss_scale, float):
            return "fixed"
        return "dynamic" if self.loss_scale == "dynamic" or self.compute == "float16" else "none"


class OffloadConfig(Section):
    """What lives in the host's memory instead of the device's, and comes to the device a layer at a time."""

    optimizer_state: Literal["none", "host"] = "none"
    """"host": the optimizer's state (with master weights and moving average) is moved to the device for the update of
    its layer, while the next layer's is on its way (ZeRO-Offload, Ren 2021)."""
    parameters: Literal["none", "host"] = "none"
    """"host": the layers' parameters are moved to the device when their layer runs, forward and again backward; needs
    `remat.policy` "full" or "dots"."""
    update_on_host: bool = False
    """Compute the update itself on the host, so that only gradients and parameters travel; for optimizers that treat
    each element for itself ("adamw" with float32 moments, "sgd", "lion")."""


class RematConfig(Section):
    """What is recomputed in the backward pass instead of kept."""

    policy: Literal["none", "full", "dots"] = "none"
    """"none" keeps every activation, "full" only each layer's input, "dots" the results of matrix products."""


class KernelsConfig(Section):
    """Which implementations run."""

    attention: Literal["auto", "reference", "blockwise", "cudnn", "pallas", "splash"] = "auto"
    """"auto" takes the fastest for the backend and says which; "reference" holds all scores, "blockwise" one block of
    them; "cudnn" and "pallas" need a GPU, "splash" a TPU."""
    attention_block: NonNegative = 0
    """Tokens a block of "blockwise", the most of "splash" and "pallas"; 0 takes 128 on a CPU, 512 elsewhere."""
    unroll_layers: bool = False
    """Compile each layer for itself instead of one loop over layers: a little faster to run, slower to compile with
    depth."""


class EvaluationConfig(Section):
    """Loss on held-out documents, and a text sample."""

    every_steps: NonNegative = 100
    """Steps between evaluations; 0 evaluates only at the end."""
    batch_size: NonNegative = 0
    """Sequences evaluated at once, over all devices; 0 takes `train.batch_size`."""
    parameters: Literal["current", "ema"] = "current"
    """Which are evaluated and sampled from: those of the last step, or their moving average (`train.ema_decay`)."""
    sample_prompt: str = ""
    """Start of a text that the model continues at the end of the run; empty writes none."""
    sample_tokens: Positive = 100
    """Tokens of the continuation."""
    sample_temperature: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.8
    """0 takes the likeliest token, 1 draws from the model's distribution."""


class Config(Section):
    """The whole configuration of a run."""

    run: RunConfig = RunConfig()
    model: SerializeAsAny[BaseModel]
    data: DataConfig = DataConfig()
    train: TrainConfig = TrainConfig()
    loss: LossConfig = LossConfig()
    optimizer: OptimizerConfig = AdamW()
    """How parameters are updated."""
    schedule: ScheduleConfig = CosineSchedule()
    """The learning rate over the run."""
    parallel: ParallelConfig = ParallelConfig()
    pipeline: PipelineConfig = PipelineConfig()
    precision: PrecisionConfig = PrecisionConfig()
    offload: OffloadConfig = OffloadConfig()
    remat: RematConfig = RematConfig()
    kernels: KernelsConfig = KernelsConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    logging: LoggingConfig = LoggingConfig()
    hardware: HardwareConfig = HardwareConfig()
    distributed: DistributedConfig = DistributedConfig()
    runtime: RuntimeConfig = RuntimeConfig()
