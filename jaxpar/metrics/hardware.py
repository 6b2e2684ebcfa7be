"""What accelerators can do at most: data-sheet peaks by JAX device kind, and a measured one for other machines."""

import functools
import math
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import jax

__all__ = ["ACCELERATORS", "Accelerator", "Peak", "find_accelerator", "find_peak", "measure_matmul_peak", "peak_tflops"]

_DTYPES = ("bfloat16", "float16", "float32")
_BEST_OF = 3
"""Fewest timed matrix products, however slow the machine."""


@dataclass(frozen=True)
class Accelerator:
    """A vendor's figures for dense matrix products (no sparsity) and memory."""

    name: str
    device_kind: str
    """Regular expression that the whole of JAX's `device.device_kind` matches."""
    bfloat16_tflops: float
    memory_gb: float

    @property
    def is_gpu(self) -> bool:
        """Whether float16 runs at the bfloat16 rate, and float32 as TF32 at half of it."""
        return self.device_kind.startswith("NVIDIA")


ACCELERATORS = (
    Accelerator("A100-40", r"NVIDIA A100-(SXM4|PCIE)-40GB", 312, 40),
    Accelerator("A100-80", r"NVIDIA A100(-SXM4-80GB| 80GB PCIe)", 312, 80),
    Accelerator("A800-80", r"NVIDIA A800(-SXM4-80GB| 80GB PCIe)", 312, 80),
    Accelerator("H100 SXM", r"NVIDIA H100 80GB HBM3", 989, 80),
    Accelerator("H100 PCIe", r"NVIDIA H100 PCIe", 756, 80),
    Accelerator("H800 SXM", r"NVIDIA H800", 989, 80),
    Accelerator("H200", r"NVIDIA H200", 989, 141),
    Accelerator("H20", r"NVIDIA H20", 148, 96),
    Accelerator("L20", r"NVIDIA L20", 119.5, 48),
    Accelerator("L2", r"NVIDIA L2", 96, 24),
    Accelerator("L40S", r"NVIDIA L40S", 362, 48),
    Accelerator("B200", r"NVIDIA B200", 2250, 180),
    Accelerator("TPU v4", r"TPU v4", 275, 32),
    Accelerator("TPU v5e", r"TPU v5( lite|e)", 197, 16),
    Accelerator("TPU v5p", r"TPU v5p?", 459, 95),
    Accelerator("TPU v6e", r"TPU v6( lite|e)", 918, 32),
)
"""Public data sheets' figures. Kinds that are not listed, MIG slices among them, are measured."""


@dataclass(frozen=True)
class Peak:
    """FLOP/s of all devices together, and where the figure comes from, in words for the log."""

    flops_per_second: float
    source: str


def find_accelerator(device_kind: str) -> Accelerator | None:
    """The entry for JAX's `device.device_kind`, or None."""
    return next((entry for entry in ACCELERATORS if re.fullmatch(entry.device_kind, device_kind)), None)


def peak_tflops(device_kind: str, dtype: str) -> float | None:
    """Data-sheet peak in TFLOP/s of one device for matrix products of `dtype` at JAX's default precision, or None.

    At default precision float32 products run as TF32 on NVIDIA GPUs (half the bfloat16 rate) and as one bfloat16 pass
    on TPUs (`jax.lax.Precision`). TPUs have no figure for float16.

    Raises:
        ValueError: `dtype` is not bfloat16, float16 or float32.

    >>> peak_tflops("NVIDIA H100 80GB HBM3", "bfloat16"), peak_tflops("NVIDIA H100 80GB HBM3", "float32")
    (989, 494.5)
    """
    _check_dtype(dtype)
    accelerator = find_accelerator(device_kind)
    if accelerator is None or (dtype == "float16" and not accelerator.is_gpu):
        return None
    return accelerator.bfloat16_tflops / 2 if accelerator.is_gpu and dtype == "float32" else accelerator.bfloat16_tflops


def find_peak(devices: Sequence["jax.Device"], dtype: str, configured_tflops: float = 0.0) -> Peak:
    """Peak of `devices` together: the configured one, else the data sheet's, else a measured one.

    `configured_tflops` is for one device (`hardware.peak_tflops`; 0 means none). CPU devices share the machine, so its
    measured peak counts once for each process, however many devices are simulated. A float32 peak from a data sheet
    holds for JAX's default precision only; when `jax_default_matmul_precision` asks for another, it is measured.

    Raises:
        ValueError: `dtype` is not bfloat16, float16 or float32.
    """
    import jax

    _check_dtype(dtype)
    count = len(devices)
    plural = "device" if count == 1 else "devices"
    if configured_tflops > 0:
        return Peak(
            configured_tflops * 1e12 * count, f"hardware.peak_tflops = {configured_tflops:g} x {count} {plural}"
        )
    kind = devices[0].device_kind
    precision = jax.config.jax_default_matmul_precision  # type: ignore[attr-defined]
    default_precision = precision in (None, "default", "fastest")
    if (sheet := peak_tflops(kind, dtype)) is not None and (default_precision or dtype != "float32"):
        run_as = "" if dtype != "float32" else " as TF32" if kind.startswith("NVIDIA") else " as bfloat16"
        return Peak(
            sheet * 1e12 * count, f"data sheet of {kind}: {sheet:g} TFLOP/s for {dtype}{run_as} x {count} {plural}"
        )
    measured = measure_matmul_peak(dtype)
    if devices[0].platform == "cpu":
        processes = len({device.process_index for device in devices})
        shared = f"the whole machine, shared by {count} CPU {plural}"
        shared += f" of {processes} processes, each counted as a machine" if processes > 1 else ""
        return Peak(measured * 1e12 * processes, f"measured: {measured:.3g} TFLOP/s for {dtype}, {shared}")
    return Peak(measured * 1e12 * count, f"measured on {kind}: {measured:.3g} TFLOP/s for {dtype} x {count} {plural}")


def measure_matmul_peak(dtype: str, *, seconds: float = 0.5, clock: Callable[[], float] = time.perf_counter) -> float:
    """Fastest rate, in TFLOP/s, of a square matrix product of `dtype` on this process's first device.

    Takes the best of the products that fit into `seconds`, with outputs in `dtype` and in float32, since a CPU may
    have its matrix unit behind only one of them. CPU devices use all cores, so simulated ones share this figure.

    Raises:
        ValueError: `dtype` is not bfloat16, float16 or float32.
    """
    import jax
    import jax.numpy as jnp
    import numpy as np

    _check_dtype(dtype)
    device = jax.local_devices()[0]
    size = 1024 if device.platform == "cpu" else 8192  # a larger one hides the dispatch of a fast device
    values = np.random.default_rng(0).standard_normal((size, size), dtype=np.float32)
    operand = jax.device_put(values.astype(jnp.dtype(dtype)), device)
    outputs = dict.fromkeys((dtype, "float32"))
    fastest = math.inf
    for output in outputs:
        product = _matrix_product(output)
        jax.block_until_ready(product(operand, operand))
        began, repeats = clock(), 0
        while repeats < _BEST_OF or clock() - began < seconds / len(outputs):
            start = clock()
            jax.block_until_ready(product(operand, operand))
            fastest = min(fastest, clock() - start)
            repeats += 1
    return 2 * size**3 / fastest / 1e12


@functools.cache
def _matrix_product(output: str) -> Callable[["jax.Array", "jax.Array"], "jax.Array"]:
    """A compiled product with outputs of dtype `output`.

    Cached so that it outlives its last run: XLA:CPU with oneDNN aborts the process ("Check failed: available_.size()
    == num_created_") if a program is freed in the moment in which its threads return their resources.
    """
    import jax
    import jax.numpy as jnp

    return jax.jit(lambda x, y: jnp.matmul(x, y, preferred_element_type=output))


def _check_dtype(dtype: str) -> None:
    if dtype not in _DTYPES:
        raise ValueError(f"dtype={dtype!r} has no peak; known: {', '.join(_DTYPES)}")
