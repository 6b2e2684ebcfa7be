"""Every test sees 8 simulated CPU devices, and compiled programs are kept between runs."""

import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

# Before JAX starts: of XLA's passes on CPU, all-reduce-promotion crashes on bfloat16 reductions in partly manual
# shard_maps, and cse_barrier_expander (jax 0.10.2) deletes the barriers that make unrolled layers recompute.
# Tests compile much and run little, so that code is generated fast rather than to be fast.
os.environ["XLA_FLAGS"] = " ".join(
    [
        os.environ.get("XLA_FLAGS", ""),
        "--xla_disable_hlo_passes=all-reduce-promotion,cse_barrier_expander",
        "--xla_backend_optimization_level=0",
    ]
).strip()

# XLA:CPU's thread pool: with as many threads as cores, collectives of 8 devices can wait for each other for ever.
os.environ["NPROC"] = "64"

import jax
import pytest

jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_compilation_cache_dir", str(Path(__file__).parents[1] / ".cache" / "tests" / "jax"))
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.1)


@pytest.fixture(scope="session")
def s3_server() -> Iterator[str]:
    """The address of an S3 server."""
    from moto.server import ThreadedMotoServer

    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    yield f"http://{host}:{port}"
    server.stop()


@pytest.fixture
def bucket(s3_server: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The files of an empty bucket, which credentials of the environment open."""
    for name, value in (
        ("AWS_ACCESS_KEY_ID", "testing"),
        ("AWS_SECRET_ACCESS_KEY", "testing"),
        ("AWS_DEFAULT_REGION", "us-east-1"),
        ("AWS_ENDPOINT_URL", s3_server),
    ):
        monkeypatch.setenv(name, value)
    import s3fs

    s3fs.S3FileSystem.clear_instance_cache()
    files = s3fs.S3FileSystem(use_listings_cache=False)
    files.mkdir("bucket")
    yield files
    files.rm("bucket", recursive=True)
    s3fs.S3FileSystem.clear_instance_cache()
