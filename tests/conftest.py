"""Every test sees 8 simulated CPU devices, and compiled programs are kept between runs."""

import os
from pathlib import Path

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

jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_compilation_cache_dir", str(Path(__file__).parents[1] / ".cache" / "tests" / "jax"))
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.1)
