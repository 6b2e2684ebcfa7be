"""Extents are the same for every layout of a run's state, and say where its layers lie."""

import re
from typing import Any

import jax
import pytest

from jaxpar.config import Config, parse_config
from jaxpar.extent import Extent
from jaxpar.plan import Plan, make_plan
from jaxpar.state import abstract_state, optimizer_of, state_extents

OPTIMIZERS: dict[str, dict[str, Any]] = {
    "8-bit moments, average": {"optimizer": {"name": "adamw8bit", "block_size": 8, "min_size": 1}},
    "factored": {"optimizer": {"name": "adafactor"}},
    "master weights": {"optimizer": {"name": "muon"}, "precision": {"parameters": "bfloat16"}},
}
LAYOUTS: dict[str, tuple[dict[str, dict[str, Any]], tuple[int, ...]]] = {
    "unpipelined": ({}, ()),
    "interleaved": (
        {"parallel": {"pipe": 2}, "pipeline": {"schedule": "interleaved_aligned", "chunks": 2}},
        (0, 2, 1, 3),
    ),
    "uneven, padded": (
        {"parallel": {"pipe": 2, "tensor": 4}, "pipeline": {"layers_per_stage": [1, 3]}},
        (0, -1, -1, 1, 2, 3),
    ),
}


def _plan(sections: dict[str, Any]) -> Plan:
    table: dict[str, Any] = {
        "model": {
            "name": "transformer", "num_layers": 4, "embed_dim": 32, "num_heads": 4, "mlp_dim": 64, "vocab_multiple": 1,
        },
        "data": {"sequence_length": 8},
        "train": {"batch_size": 4, "ema_decay": 0.5},
    }  # fmt: skip
    config: Config = parse_config(
        {name: table.get(name, {}) | sections.get(name, {}) for name in {**table, **sections}}
    )
    num_devices = config.parallel.pipe * config.parallel.tensor
    return make_plan(config, jax.devices()[:num_devices], 57)


@pytest.mark.parametrize("optimizer", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_every_layout_has_the_same_shapes_and_its_own_rows(optimizer: dict[str, Any]) -> None:
    shapes = []
    for sections, rows in LAYOUTS.values():
        plan = _plan({**sections, **optimizer})
        state = abstract_state(plan, optimizer_of(plan))
        extents = state_extents(plan, state)
        stacked = {path for path in extents if "blocks/" in path}
        assert len(stacked) > 2 * sum(path.startswith("params/blocks/") for path in stacked), "state of several kinds"
        assert {path: extent.rows for path, extent in extents.items() if extent.rows} == (
            dict.fromkeys(stacked, rows) if rows else {}
        )
        padded = {path for path, array in state.by_path().items() if any(extents[path].padding(array.shape))}
        assert all("embed" in path for path in padded)
        assert bool(padded) == ("tensor" in str(sections)), "60 places for 57 tokens"
        shapes.append({path: extent.shape for path, extent in extents.items()})
    assert shapes[0] == shapes[1] == shapes[2]


@pytest.mark.parametrize("rows", [(0, 1), (0, 1, 1), (0, 1, 3), (0, -1, 1)], ids=str)
def test_rows_that_are_not_all_layers_are_refused(rows: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=re.escape(f"rows {rows} do not have each layer of an array (3, 5) once")):
        Extent((3, 5), rows)
