"""The compiled step's memory is linear in the part of a sequence that a device has: no array has two dims of it, in
whatever shape, such as the masks of all tiles."""

import math
import re
from functools import cache
from typing import Any

import jax
import pytest

from jaxpar.config import parse_config
from jaxpar.inspect import compile_step
from jaxpar.plan import make_plan

MODEL = {
    "name": "transformer", "num_layers": 2, "embed_dim": 16, "num_heads": 4, "num_kv_heads": 2, "mlp_dim": 16,
    "vocab_size": 128,
}  # fmt: skip
LENGTH = 1024


@cache
def compiled(length: int, context: int, method: str, remat: str, attention: str) -> Any:
    config = parse_config(
        {
            "model": MODEL,
            "data": {"sequence_length": length},
            "train": {"batch_size": 1},
            "loss": {"chunk_tokens": 64},
            "parallel": {"data": 1, "context": context, "context_method": method},
            "remat": {"policy": remat},
            "kernels": {"attention": attention, "attention_block": 32},
        }
    )
    return compile_step(make_plan(config, jax.devices()[:context], 128))


def growth(*case: Any) -> tuple[float, float]:
    """Of the largest array and of temporary bytes, from one length to its double."""
    programs = [compiled(length, *case) for length in (LENGTH, 2 * LENGTH)]
    largest = []
    for program in programs:
        shapes = re.findall(r"\b(?:f32|s32|u32|pred)\[([\d,]+)\]", program.as_text())
        largest.append(max(math.prod(map(int, shape.split(","))) for shape in shapes))
    temporary = [program.memory_analysis().temp_size_in_bytes for program in programs]
    return largest[1] / largest[0], temporary[1] / temporary[0]


@pytest.mark.parametrize(
    ("context", "method", "remat"),
    [(1, "ring", "none"), (4, "ring", "none"), (4, "all_gather", "none"), (4, "ulysses", "none"), (4, "ring", "full")],
)
def test_twice_the_sequence_takes_twice_the_memory(context: int, method: str, remat: str) -> None:
    largest, temporary = growth(context, method, remat, "blockwise")
    assert largest <= 2
    assert temporary <= 2.02


def test_all_scores_take_four_times_the_memory() -> None:
    largest, temporary = growth(1, "ring", "none", "reference")
    assert largest == 4
    assert temporary > 3


def test_devices_divide_it() -> None:
    """Twice the sequence on twice the devices takes what the sequence took; keys and values that are gathered apart."""
    one, two = (
        compiled(length, context, "ring", "none", "blockwise").memory_analysis().temp_size_in_bytes
        for length, context in ((2 * LENGTH, 4), (4 * LENGTH, 8))
    )
    assert two <= 1.1 * one
