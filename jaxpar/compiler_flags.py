"""The compiler's flags that jaxpar sets, by platform: the one place where they are written down.

On NVIDIA GPUs (`XLA_FLAGS`):

- `xla_gpu_{all_reduce,all_gather,reduce_scatter}_combine_threshold_bytes` = `parallel.bucket_bytes`: collectives of one
  kind and group that are ready together become one, up to this size; 0 leaves each alone (ZeRO-R's constant-size
  buffers, Rajbhandari 2020, section 5.2).
- `xla_gpu_enable_latency_hiding_scheduler` = true: collectives run beside computation. Both versions of JAX do so by
  default, and 0.12 waits for every collective without it: stated, because combining relies on it.

On TPUs (`LIBTPU_INIT_ARGS`): `xla_jf_crs_combiner_threshold_in_bytes` = `parallel.bucket_bytes`, the same for
all-reduces alone.

The CPU has no such flags: there, `parallel.bucket_bytes` is the size of jaxpar's own buckets only
(`parallel/reduction.py`).

XLA ends the process at a flag that it does not know. All of these are known to jax 0.10.2, 0.11 and 0.12, and change
the program that 0.10.2 and 0.12 compile for 8 H100 or 8 TPU v5p. Left out are flags that did not, that one of the
versions has not (`xla_gpu_enable_pipelined_all_gather` and its like), or that brought no more overlap
(`xla_gpu_enable_while_loop_double_buffering`). Collectives are asynchronous on GPUs without a flag.
"""

import importlib.metadata
import importlib.util

import jax

from jaxpar.config.schema import ParallelConfig

__all__ = ["VARIABLES", "compiler_flags", "expected_platform", "without_combining"]

VARIABLES = {"gpu": "XLA_FLAGS", "tpu": "LIBTPU_INIT_ARGS"}
"""Platform → the environment variable in which its compiler looks for flags; the CPU's gets none."""

_COMBINE = {
    "gpu": tuple(f"xla_gpu_{kind}_combine_threshold_bytes" for kind in ("all_reduce", "all_gather", "reduce_scatter")),
    "tpu": ("xla_jf_crs_combiner_threshold_in_bytes",),
}
_ALWAYS = {"gpu": {"xla_gpu_enable_latency_hiding_scheduler": "true"}}


def compiler_flags(platform: str, parallel: ParallelConfig) -> list[str]:
    """The flags for a platform ("cpu", "gpu", "tpu"), as they stand in its variable.

    >>> compiler_flags("tpu", ParallelConfig(bucket_bytes=4096))
    ['--xla_jf_crs_combiner_threshold_in_bytes=4096']
    """
    flags = dict.fromkeys(_COMBINE.get(platform, ()), str(parallel.bucket_bytes)) | _ALWAYS.get(platform, {})
    return [f"--{name}={value}" for name, value in flags.items()]


def without_combining(platform: str) -> dict[str, str | bool]:
    """Compiler options of a single program (`lowered.compile`) under which no collectives are combined."""
    return dict.fromkeys(_COMBINE.get("gpu" if platform == "cuda" else platform, ()), "0")


def expected_platform(parallel: ParallelConfig) -> str:
    """The platform that JAX will use, before it starts: "cpu", "gpu" (NVIDIA), "tpu", or another one's name.

    What is asked for counts (simulated devices, `JAX_PLATFORMS`), then what is installed. If an installed plugin finds
    no device, JAX takes the CPU, which ignores the other platforms' flags.
    """
    if parallel.simulated_devices:
        return "cpu"
    if asked := jax.config.jax_platforms:  # type: ignore[attr-defined]
        first = asked.split(",")[0]
        return "gpu" if first == "cuda" else first
    if importlib.util.find_spec("libtpu") is not None:
        return "tpu"
    plugins = importlib.metadata.entry_points(group="jax_plugins")
    return "gpu" if any(plugin.name.startswith("xla_cuda") for plugin in plugins) else "cpu"
