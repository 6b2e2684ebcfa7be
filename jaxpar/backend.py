"""What each backend and JAX version wants: settings before JAX starts, and the fast forms of matrix products.

The entry points call `prepare` before the first device is touched; importing jaxpar changes nothing.
"""

import os
import re
from dataclasses import dataclass

import jax

from jaxpar.compiler_flags import VARIABLES, compiler_flags, expected_platform
from jaxpar.config.operation import RuntimeConfig
from jaxpar.config.schema import ParallelConfig

__all__ = ["Scheduler", "has_float8_products", "matrix_product_forms", "prepare", "prepare_host", "scheduler"]


@dataclass(frozen=True)
class Scheduler:
    """What started this process as one of several; `knows_address` if JAX can find process 0 through it."""

    name: str
    num_processes: int
    process_id: int
    knows_address: bool


def scheduler() -> Scheduler | None:
    """SLURM (in a step: `srun`) or Open MPI (`mpirun`), if one of them started this process.

    Open MPI 5 does not say where process 0 is. JAX asks mpi4py then, from 0.12 on.
    """
    found = os.environ
    if all(f"SLURM_{name}" in found for name in ("JOB_ID", "STEP_NODELIST", "NTASKS", "PROCID", "LOCALID")):
        return Scheduler("slurm", int(found["SLURM_NTASKS"]), int(found["SLURM_PROCID"]), True)
    if "OMPI_COMM_WORLD_SIZE" in found and "OMPI_COMM_WORLD_RANK" in found:
        size, rank = int(found["OMPI_COMM_WORLD_SIZE"]), int(found["OMPI_COMM_WORLD_RANK"])
        return Scheduler("ompi", size, rank, "OMPI_MCA_orte_hnp_uri" in found)
    return None


def prepare(parallel: ParallelConfig, runtime: RuntimeConfig) -> list[str]:
    """Sets simulated devices, XLA flags and the compilation cache; returns a line for each thing set.

    Must run before JAX starts its backend.

    Raises:
      ValueError: the cache's directory cannot be made.
    """
    lines = []
    if parallel.simulated_devices:
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", parallel.simulated_devices)
        # XLA:CPU sizes its thread pool by this variable. With as many threads as cores, collectives that wait for each
        # other can hold all of them, and the process ends after 40 seconds.
        os.environ.setdefault("NPROC", str(8 * parallel.simulated_devices))
        lines.append(f"simulating {parallel.simulated_devices} devices on the CPU")
        lines.append(f"NPROC: {os.environ['NPROC']} threads for XLA")
    platform = expected_platform(parallel)
    if runtime.default_flags and (flags := compiler_flags(platform, parallel)):
        # The last of several wins: the user's come after.
        variable = VARIABLES[platform]
        os.environ[variable] = " ".join([*flags, os.environ.get(variable, "")]).strip()
        lines.append(f"{variable}: {' '.join(flags)} (runtime.default_flags)")
    if runtime.xla_flags:
        os.environ["XLA_FLAGS"] = " ".join([os.environ.get("XLA_FLAGS", ""), *runtime.xla_flags]).strip()
        lines.append(f"XLA_FLAGS: {' '.join(runtime.xla_flags)}")
    if runtime.compilation_cache:
        directory = os.path.abspath(runtime.compilation_cache)
        try:
            os.makedirs(directory, exist_ok=True)
        except OSError as error:
            raise ValueError(f"runtime.compilation_cache={runtime.compilation_cache!r}: {error.strerror}") from error
        jax.config.update("jax_compilation_cache_dir", directory)
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.5)
        lines.append(f"compiled programs are kept in {runtime.compilation_cache}")
    return lines


def prepare_host() -> None:
    """For commands that only read files: JAX leaves accelerators alone, which a run may be using."""
    jax.config.update("jax_platforms", "cpu")


def matrix_product_forms(platform: str, compute_dtype: str) -> dict[str, bool]:
    """`Execution`'s `float32_products` and `transposed_weight_gradients` that are fast on the backend.

    They never change the mathematics. On CPUs with a matrix unit, 16-bit products reach it with float32 results only;
    on one without nothing is lost, and jax 0.10.2 gains a tenth. XLA:CPU of jax 0.10.2 does not care how a weight
    gradient is written; later versions can use the unit only for transposed operands. XLA's oneDNN flags are not set
    here: with jax 0.12 they gave wrong results for a batched product that is scaled and added to.
    """
    if platform != "cpu":
        return {"float32_products": False, "transposed_weight_gradients": False}
    newer = jax.__version_info__ >= (0, 11)
    return {"float32_products": compute_dtype == "bfloat16", "transposed_weight_gradients": newer}


def has_float8_products(device: jax.Device) -> bool:
    """Whether the device multiplies float8 e4m3 and e5m2 operands without converting them first.

    NVIDIA GPUs do from compute capability 8.9 (Ada, Hopper, Blackwell), also those of a topology without devices. Of
    TPUs, v7 is the first for which Google (TPU7x, "Low-precision training with FP8") and JAX's table of TPUs give
    float8 products a speed of their own; v6e does them at the speed of bfloat16. AMD's capabilities read "gfx942", and
    the float8 formats of that one are others.
    """
    if device.platform == "tpu":
        return device.device_kind in ("TPU7", "TPU7x")
    capability = re.fullmatch(r"(\d+)\.(\d+)", getattr(device, "compute_capability", ""))
    return capability is not None and (int(capability[1]), int(capability[2])) >= (8, 9)
