"""Sections for how a run is operated: what it keeps and shows, and the machines that it runs on.

The docstrings are the `--help` text, as in `jaxpar.config.schema`.
"""

from typing import Annotated, Literal

from pydantic import Field

from jaxpar.config.section import NonNegative, Positive, Section

__all__ = ["CheckpointConfig", "DistributedConfig", "HardwareConfig", "LoggingConfig", "RuntimeConfig"]


class CheckpointConfig(Section):
    """When the state is saved, where, and what is kept. A checkpoint that any of the `keep` keys names stays."""

    every_steps: NonNegative = 0
    """Steps between checkpoints; 0 saves only at the end and when stopped."""
    directory: str = ""
    """Where checkpoints go: a directory or a URL (`gs://`, `s3://`); empty means `checkpoints` in `run.dir`.
    Credentials come from the environment."""
    keep: Positive = 3
    """Newest checkpoints that are kept."""
    keep_every_steps: NonNegative = 0
    """Keep all checkpoints of steps that this divides; 0 keeps none for that."""
    keep_best: NonNegative = 0
    """Keep as many checkpoints with the lowest held-out loss, of those that are evaluated when they are saved."""
    timeout_seconds: Positive = 1800
    """Longest that a save may take; then the run ends with exit status 1, as one process may wait for ever."""


class LoggingConfig(Section):
    """What a run shows and records."""

    every_steps: Positive = 10
    """Steps between lines of `metrics.jsonl`."""
    progress: Literal["auto", "bar", "lines", "off"] = "auto"
    """"auto" draws a bar on a terminal and prints lines elsewhere."""
    tensorboard: bool = False
    """Write TensorBoard events into the run's directory (extra `trackers`)."""
    wandb_project: str = ""
    """Send metrics to this Weights & Biases project (extra `trackers`); empty sends none."""


class HardwareConfig(Section):
    """What the machine can do, for utilisation figures."""

    peak_tflops: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0
    """Peak of one device in TFLOP/s at the compute format; 0 takes the data sheet's, or measures. Counted for each
    device."""


class DistributedConfig(Section):
    """How the processes of one run find each other. `python -m jaxpar.launch` sets what it must, SLURM and Open MPI are
    recognised; which process has which place (all keys but the timeouts) is not stored with the run."""

    detect: Literal["auto", "off", "slurm", "ompi", "mpi4py", "k8s", "tpu"] = "auto"
    """Where the keys that are not set come from, found by JAX: "auto" asks SLURM or Open MPI if one of them started the
    process; "k8s" needs the package kubernetes and the right to read pods; "off" asks nobody."""
    coordinator_address: str = ""
    """HOST:PORT at which process 0 waits for the others; empty takes what is detected."""
    num_processes: NonNegative = 0
    """Processes of the run; 0 takes what is detected."""
    process_id: Annotated[int, Field(ge=-1)] = -1
    """Number of this process, from 0; -1 takes what is detected."""
    local_device_ids: tuple[NonNegative, ...] = Field(default=(), strict=False)
    """GPUs of the host that are this process's; empty takes what is detected, else all."""
    initialization_timeout_seconds: Positive = 300
    """How long the processes wait for each other at the start; then the missing ones are named, and the run ends."""
    heartbeat_timeout_seconds: Positive = 600
    """A process whose loop gives no sign of life for so long hangs: it is named, and the run ends. Must be longer than
    the longest step and evaluation."""
    start_timeout_seconds: Positive = 3600
    """A process whose loop has not dispatched a first step so long after all have met hangs too. Must be longer than
    restoring a checkpoint, reading the data and compiling take together."""


class RuntimeConfig(Section):
    """What must be set before JAX starts; printed by the command line, ignored when jaxpar is used as a library."""

    default_flags: bool = True
    """Set the compiler flags that jaxpar knows for the accelerator (`jaxpar/compiler_flags.py`), before those of the
    environment, which win."""
    xla_flags: tuple[str, ...] = Field(default=(), strict=False)
    """Flags for XLA, after the environment's XLA_FLAGS, so that they win; XLA itself ends the process at one that it
    does not know."""
    compilation_cache: str = ".cache/jaxpar/compiled"
    """Where compiled programs are kept between runs; empty keeps none."""
