"""Float8 operands reach the GPU's matrix products."""

import re
from collections import Counter
from collections.abc import Callable
from typing import Any


def operands(text: str) -> Counter[tuple[str, ...]]:
    """The formats of the two operands of each matrix product."""
    formats = dict(re.findall(r"%?([\w.\-]+)(?: =|:) (\w+)\[", text))
    pairs = re.findall(r" dot\(%?([\w.\-]+), %?([\w.\-]+)\)", text)
    return Counter(tuple(sorted(formats[operand] for operand in pair)) for pair in pairs)


def test_layers_products_are_float8(step: Callable[..., Any]) -> None:
    """Four of a layer (queries, keys and values; output; up; down), and two for each of them backward."""
    found = operands(step(parallel={"data": 8}, precision={"products": "float8"}, model={"num_layers": 1}).text)
    assert found["f8e4m3fn", "f8e4m3fn"] == 4
    assert found["f8e4m3fn", "f8e5m2"] == 8


def test_without_it_none_are(step: Callable[..., Any]) -> None:
    found = operands(step(parallel={"data": 8}, model={"num_layers": 1}).text)
    assert found["bf16", "bf16"] >= 12
    assert not any("f8" in name for pair in found for name in pair)
