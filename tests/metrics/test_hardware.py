"""Peaks: the data sheet's by JAX device kind, the configured one, and the measured one under a false clock."""

import itertools
from dataclasses import dataclass

import jax
import pytest

from jaxpar.metrics import find_accelerator, find_peak, hardware, measure_matmul_peak, peak_tflops


@dataclass
class FakeDevice:
    device_kind: str
    platform: str = "gpu"
    process_index: int = 0


@pytest.mark.parametrize(
    ("device_kind", "tflops", "memory_gb"),
    [
        ("NVIDIA A100-SXM4-40GB", 312, 40),
        ("NVIDIA A100-SXM4-80GB", 312, 80),
        ("NVIDIA A100 80GB PCIe", 312, 80),
        ("NVIDIA A800-SXM4-80GB", 312, 80),
        ("NVIDIA H100 80GB HBM3", 989, 80),
        ("NVIDIA H100 PCIe", 756, 80),
        ("NVIDIA H800", 989, 80),
        ("NVIDIA H200", 989, 141),
        ("NVIDIA H20", 148, 96),
        ("NVIDIA L20", 119.5, 48),
        ("NVIDIA L2", 96, 24),
        ("NVIDIA L40S", 362, 48),
        ("NVIDIA B200", 2250, 180),
        ("TPU v4", 275, 32),
        ("TPU v5 lite", 197, 16),
        ("TPU v5e", 197, 16),
        ("TPU v5", 459, 95),
        ("TPU v5p", 459, 95),
        ("TPU v6 lite", 918, 32),
        ("TPU v6e", 918, 32),
    ],
)
def test_data_sheet(device_kind, tflops, memory_gb):
    assert peak_tflops(device_kind, "bfloat16") == tflops
    assert find_accelerator(device_kind).memory_gb == memory_gb


@pytest.mark.parametrize(
    "device_kind",
    ["cpu", "NVIDIA H100 NVL", "NVIDIA H100 80GB HBM3 MIG 1g.10gb", "NVIDIA H800 PCIe", "NVIDIA L4", "TPU v4 lite"],
)
def test_kinds_without_a_figure_have_no_peak(device_kind):
    assert peak_tflops(device_kind, "bfloat16") is None


def test_float32_is_tf32_on_gpus_and_bfloat16_on_tpus():
    assert peak_tflops("NVIDIA H200", "float32") == 494.5
    assert peak_tflops("NVIDIA H200", "float16") == 989
    assert peak_tflops("TPU v5p", "float32") == 459
    assert peak_tflops("TPU v5p", "float16") is None


def test_unknown_dtype_is_refused():
    with pytest.raises(ValueError, match="dtype='int8' has no peak; known: bfloat16, float16, float32"):
        peak_tflops("TPU v5p", "int8")
    with pytest.raises(ValueError, match="dtype='float64' has no peak"):
        measure_matmul_peak("float64")


def test_peak_of_all_devices_is_the_configured_or_the_data_sheets():
    devices = [FakeDevice("NVIDIA H200")] * 4
    configured = find_peak(devices, "bfloat16", 700.0)
    assert configured.flops_per_second == pytest.approx(4 * 700e12)
    assert configured.source == "hardware.peak_tflops = 700 x 4 devices"
    sheet = find_peak(devices, "float32")
    assert sheet.flops_per_second == pytest.approx(4 * 494.5e12)
    assert sheet.source == "data sheet of NVIDIA H200: 494.5 TFLOP/s for float32 as TF32 x 4 devices"
    assert "for float32 as bfloat16 x 1 device" in find_peak([FakeDevice("TPU v5p", "tpu")], "float32").source


def test_float32_peak_is_measured_when_another_precision_is_asked_for(monkeypatch):
    monkeypatch.setattr(hardware, "measure_matmul_peak", lambda dtype: 50.0)
    devices = [FakeDevice("NVIDIA H200")] * 2
    with jax.default_matmul_precision("float32"):
        assert find_peak(devices, "float32").flops_per_second == pytest.approx(100e12)
        assert find_peak(devices, "bfloat16").flops_per_second == pytest.approx(2 * 989e12)


def test_simulated_cpu_devices_share_the_measured_machine(monkeypatch):
    monkeypatch.setattr(hardware, "measure_matmul_peak", lambda dtype: 0.5)
    peak = find_peak([FakeDevice("cpu", "cpu")] * 8, "float32")
    assert peak.flops_per_second == pytest.approx(0.5e12)
    assert peak.source == "measured: 0.5 TFLOP/s for float32, the whole machine, shared by 8 CPU devices"
    two = find_peak([FakeDevice("cpu", "cpu", index) for index in (0, 0, 1, 1)], "float32")
    assert two.flops_per_second == pytest.approx(1e12)
    assert "2 processes, each counted as a machine" in two.source
    unlisted = find_peak([FakeDevice("NVIDIA L4")] * 8, "bfloat16")
    assert unlisted.flops_per_second == pytest.approx(8 * 0.5e12)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_measured_peak_is_that_of_the_fastest_product(dtype):
    """The first three products take 7, 2 and 7 ms, with 1 ms between them, all others 3 ms."""
    ticks = itertools.accumulate(itertools.chain([5, 1, 7, 1, 2, 1, 7], itertools.repeat(3)))
    measured = measure_matmul_peak(dtype, seconds=0.08, clock=lambda: next(ticks) / 1000)
    assert measured == pytest.approx(2 * 1024**3 / 2e-3 / 1e12)


def test_slow_machine_is_measured_a_few_times_and_no_more():
    """Each look at the clock costs 100 s: three products, each between two looks, for the one output format."""
    looks = itertools.count(0, 100)
    measure_matmul_peak("float32", seconds=0.5, clock=lambda: next(looks))
    assert next(looks) == 100 * (1 + 2 * 3 + 1)
