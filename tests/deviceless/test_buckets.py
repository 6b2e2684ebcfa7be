"""The compiler's flags combine small collectives, and only up to the size of a bucket."""

from collections.abc import Callable
from typing import Any

from jaxpar.compiler_flags import compiler_flags, without_combining
from jaxpar.config.schema import ParallelConfig

LAYOUT = {"data": 1, "fsdp": 8, "zero_stage": 3}


def test_gathers_are_combined_up_to_the_size_of_a_bucket(step: Callable[..., Any]) -> None:
    bucket_bytes = 1 << 20
    flags = compiler_flags("gpu", ParallelConfig(bucket_bytes=bucket_bytes))
    values = dict(flag.removeprefix("--").split("=") for flag in flags)
    options = {name: {"true": True}.get(value, value) for name, value in values.items()}
    joined, alone = (step(each, parallel=LAYOUT) for each in (options, without_combining("cuda")))
    counts = [sum(count for count, _ in found.collectives("fsdp")["all-gather"]) for found in (joined, alone)]
    assert counts[0] < counts[1]
    totals = [sum(n * size for n, size in found.collectives("fsdp")["all-gather"]) for found in (joined, alone)]
    assert totals[0] == totals[1]
