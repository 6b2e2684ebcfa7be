"""What is set before JAX starts."""

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import jax
import pytest

from jaxpar import compiler_flags as flags_module
from jaxpar.backend import has_float8_products, matrix_product_forms, prepare
from jaxpar.compiler_flags import compiler_flags, expected_platform, without_combining
from jaxpar.config.operation import RuntimeConfig
from jaxpar.config.schema import ParallelConfig
from jaxpar.parallel.constrain import Execution

ROOT = Path(__file__).parents[1]

_PREPARED = """
import os
from jaxpar.backend import prepare
from jaxpar.compiler_flags import compiler_flags, expected_platform, without_combining
from jaxpar.config.operation import RuntimeConfig
from jaxpar.config.schema import ParallelConfig
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


_WITH_A_PLUGIN = """
import os
from jaxpar.backend import prepare
from jaxpar.config.operation import RuntimeConfig
from jaxpar.config.schema import ParallelConfig
parallel = ParallelConfig(bucket_bytes=1000)
print(*prepare(parallel, RuntimeConfig(xla_flags=("--xla_gpu_all_reduce_combine_threshold_bytes=3",))), sep="\\n")
print(os.environ["XLA_FLAGS"])
import jax
print(float(jax.jit(lambda x: x + 1)(1.0)), jax.default_backend())
"""


def test_flags_of_an_accelerator_that_is_not_there_end_no_run(tmp_path: Path) -> None:
    """A GPU plugin that is installed, without a GPU: XLA knows every flag, and the CPU computes as ever."""
    (tmp_path / "stub.dist-info").mkdir()
    (tmp_path / "stub.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: stub\nVersion: 1\n")
    (tmp_path / "stub.dist-info" / "entry_points.txt").write_text("[jax_plugins]\nxla_cuda12 = stub\n")
    (tmp_path / "stub.py").write_text("def initialize():\n    pass\n")
    own = "--xla_gpu_all_gather_combine_threshold_bytes=2"
    environment = os.environ | {"PYTHONPATH": f"{ROOT}:{tmp_path}", "XLA_FLAGS": own}
    environment.pop("JAX_PLATFORMS", None)
    done = subprocess.run(
        [sys.executable, "-c", _WITH_A_PLUGIN], cwd=tmp_path, env=environment, capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    ours, *_, flags, result = done.stdout.splitlines()
    expected = compiler_flags("gpu", ParallelConfig(bucket_bytes=1000))
    assert ours == f"XLA_FLAGS: {' '.join(expected)} (runtime.default_flags)"
    # The last of several wins: ours come first.
    assert flags.split() == [*expected, own, "--xla_gpu_all_reduce_combine_threshold_bytes=3"]
    assert result == "2.0 cpu"


def test_flags_are_those_of_the_platform(monkeypatch: pytest.MonkeyPatch) -> None:
    parallel = ParallelConfig(bucket_bytes=4096)
    assert "--xla_gpu_reduce_scatter_combine_threshold_bytes=4096" in compiler_flags("gpu", parallel)
    assert compiler_flags("tpu", parallel) == ["--xla_jf_crs_combiner_threshold_in_bytes=4096"]
    assert compiler_flags("cpu", parallel) == compiler_flags("rocm", parallel) == []
    off = [f"--{name}={value}" for name, value in without_combining("cuda").items()]
    assert [flag for flag in compiler_flags("gpu", ParallelConfig(bucket_bytes=0)) if flag in off] == off != []
    assert without_combining("cpu") == {}
    monkeypatch.setattr(jax.config, "update", lambda name, value: None)
    monkeypatch.setattr(flags_module, "jax", SimpleNamespace(config=SimpleNamespace(jax_platforms="tpu,cpu")))
    monkeypatch.setenv("LIBTPU_INIT_ARGS", "--mine")
    monkeypatch.setenv("XLA_FLAGS", "")
    quiet = {"compilation_cache": "", "default_flags": True}
    assert prepare(parallel, RuntimeConfig(**quiet | {"default_flags": False})) == []
    (line,) = prepare(parallel, RuntimeConfig(**quiet))
    assert line == "LIBTPU_INIT_ARGS: --xla_jf_crs_combiner_threshold_in_bytes=4096 (runtime.default_flags)"
    assert os.environ["LIBTPU_INIT_ARGS"] == "--xla_jf_crs_combiner_threshold_in_bytes=4096 --mine"
    assert os.environ["XLA_FLAGS"] == ""


@pytest.mark.parametrize(
    ("simulated", "asked", "plugins", "libtpu", "platform"),
    [
        (8, "cuda", ["xla_cuda12"], True, "cpu"),
        (0, "cuda,cpu", [], False, "gpu"),
        (0, "cpu", ["xla_cuda12"], True, "cpu"),
        (0, None, ["xla_cuda13"], False, "gpu"),
        (0, None, ["xla_cuda13"], True, "tpu"),
        (0, "", ["another"], False, "cpu"),
        (0, None, [], False, "cpu"),
    ],
)
def test_the_platform_is_known_before_jax_starts(
    monkeypatch: pytest.MonkeyPatch, simulated: int, asked: str | None, plugins: list[str], libtpu: bool, platform: str
) -> None:
    monkeypatch.setattr(flags_module, "jax", SimpleNamespace(config=SimpleNamespace(jax_platforms=asked)))
    found = [SimpleNamespace(name=name) for name in plugins]
    monkeypatch.setattr(flags_module.importlib.metadata, "entry_points", lambda group: found)
    monkeypatch.setattr(flags_module.importlib.util, "find_spec", lambda name: object() if libtpu else None)
    assert expected_platform(ParallelConfig(simulated_devices=simulated)) == platform


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
