"""What each backend and JAX version wants: flags before JAX starts, and the forms of matrix products that are fast on
it.

The entry points call `prepare` before the first device is touched; importing jaxpar changes nothing.
"""

import os
from collections.abc import Sequence

import jax

from jaxpar.config.schema import ParallelConfig, RuntimeConfig

__all__ = ["matrix_product_forms", "prepare"]


def prepare(parallel: ParallelConfig, runtime: RuntimeConfig) -> list[str]:
    """Sets simulated devices, XLA flags and the compilation cache; returns a line for each thing set.

    Must run before JAX starts its backend.
    """
    lines = []
    if parallel.simulated_devices:
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", parallel.simulated_devices)
        lines.append(f"simulating {parallel.simulated_devices} devices on the CPU")
    flags = _xla_flags(runtime.xla_flags)
    if flags:
        os.environ["XLA_FLAGS"] = " ".join([os.environ.get("XLA_FLAGS", ""), *flags]).strip()
        lines.append(f"XLA_FLAGS: {' '.join(flags)}")
    if runtime.compilation_cache:
        jax.config.update("jax_compilation_cache_dir", os.path.abspath(runtime.compilation_cache))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.5)
        lines.append(f"compiled programs are kept in {runtime.compilation_cache}")
    return lines


def _xla_flags(requested: Sequence[str]) -> list[str]:
    return [flag for flag in requested if flag != "auto"]


def matrix_product_forms(platform: str, compute_dtype: str) -> dict[str, bool]:
    """`Execution`'s `float32_products` and `transposed_weight_gradients` for the backend; they never change the
    mathematics."""
    return {"float32_products": False, "transposed_weight_gradients": False}
