"""What is set before JAX starts."""

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import jax
import pytest

from jaxpar.backend import has_float8_products, matrix_product_forms, prepare
from jaxpar.config.schema import ParallelConfig, RuntimeConfig
from jaxpar.parallel.constrain import Execution

ROOT = Path(__file__).parents[1]

_PREPARED = """
import os
from jaxpar.backend import prepare
from jaxpar.config.schema import ParallelConfig, RuntimeConfig
runtime = RuntimeConfig(xla_flags=("--xla_cpu_multi_thread_eigen=false",), compilation_cache="programs")
print(*prepare(ParallelConfig(simulated_devices=3), runtime), sep="\\n")
import jax
assert len(jax.devices()) == 3
assert jax.config.jax_compilation_cache_dir == os.path.abspath("programs")
assert jax.config.jax_persistent_cache_min_compile_time_secs <= 1
print(os.environ["XLA_FLAGS"])
"""


def test_devices_flags_and_cache_are_set_and_said(tmp_path: Path) -> None:
    """Flags of the environment stay; the run's come after them, and win."""
    environment = os.environ | {"PYTHONPATH": str(ROOT), "XLA_FLAGS": "--xla_cpu_multi_thread_eigen=true"}
    del environment["NPROC"]
    done = subprocess.run(
        [sys.executable, "-c", _PREPARED], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    *lines, flags = done.stdout.splitlines()
    assert lines[:2] == ["simulating 3 devices on the CPU", "NPROC: 24 threads for XLA"]
    assert lines[-1] == "compiled programs are kept in programs"
    (said,) = [line for line in lines if line.startswith("XLA_FLAGS: ")]
    given = flags.split()
    assert given[0] == "--xla_cpu_multi_thread_eigen=true"
    assert given[-1] == "--xla_cpu_multi_thread_eigen=false"
    assert given[1:] == said.removeprefix("XLA_FLAGS: ").split()


def test_a_cache_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match=r"^runtime.compilation_cache='.*file/cache': "):
        prepare(ParallelConfig(), RuntimeConfig(compilation_cache=str(tmp_path / "file" / "cache")))


def test_nothing_asked_for_is_nothing_set(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(name: str, value: object) -> None:
        raise AssertionError(f"{name} was set to {value}")

    before = dict(os.environ)
    monkeypatch.setattr(jax.config, "update", never)
    assert prepare(ParallelConfig(), RuntimeConfig(xla_flags=(), compilation_cache="")) == []
    assert dict(os.environ) == before


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_forms_of_products_are_for_the_cpu_and_float32_ones_for_16_bits(dtype: str) -> None:
    on_cpu = Execution(**matrix_product_forms("cpu", dtype))
    assert on_cpu.float32_products is (dtype == "bfloat16")
    assert on_cpu.transposed_weight_gradients is (jax.__version_info__ >= (0, 11))
    for platform in ("gpu", "cuda", "tpu"):
        form = Execution(**matrix_product_forms(platform, dtype))
        assert not form.float32_products
        assert not form.transposed_weight_gradients


@pytest.mark.parametrize(
    ("device", "has"),
    [
        ({"platform": "gpu", "device_kind": "NVIDIA A100-SXM4-80GB", "compute_capability": "8.0"}, False),
        ({"platform": "gpu", "device_kind": "NVIDIA GeForce RTX 3090", "compute_capability": "8.6"}, False),
        ({"platform": "gpu", "device_kind": "NVIDIA L4", "compute_capability": "8.9"}, True),
        ({"platform": "gpu", "device_kind": "NVIDIA H100 80GB HBM3", "compute_capability": "9.0"}, True),
        ({"platform": "gpu", "device_kind": "NVIDIA B200", "compute_capability": "10.0"}, True),
        ({"platform": "gpu", "device_kind": "AMD Instinct MI300X", "compute_capability": "gfx942"}, False),
        ({"platform": "tpu", "device_kind": "TPU v5"}, False),
        ({"platform": "tpu", "device_kind": "TPU v6 lite"}, False),
        ({"platform": "tpu", "device_kind": "TPU7x"}, True),
        ({"platform": "cpu", "device_kind": "cpu"}, False),
    ],
    ids=lambda value: value["device_kind"] if isinstance(value, dict) else "",
)
def test_devices_with_float8_products(device: dict, has: bool) -> None:
    assert has_float8_products(SimpleNamespace(**device)) is has
