"""A tiny run on two devices, of texts that are written for it."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from jaxpar.config import Config, parse_config

DOCUMENTS = [" ".join(f"{(7 * i + j) % 13} fish" for j in range(8 + 3 * i)) for i in range(11)]


@pytest.fixture(scope="session")
def documents() -> list[str]:
    """Eleven texts of different lengths."""
    return DOCUMENTS


@pytest.fixture(scope="session")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("texts")
    for number, text in enumerate(DOCUMENTS):
        (directory / f"{number:02}.txt").write_text(text)
    return directory


@pytest.fixture
def config_of(texts: Path, tmp_path: Path) -> Callable[..., Config]:
    """A tiny run on two devices; a section changes the keys that it names."""

    def make(**sections: dict[str, Any]) -> Config:
        table: dict[str, dict[str, Any]] = {
            "run": {"dir": str(tmp_path / "run")},
            "model": {
                "name": "transformer", "num_layers": 1, "embed_dim": 8, "num_heads": 2, "mlp_dim": 16, "dropout": 0.2,
                "vocab_multiple": 2,
            },
            "data": {
                "sequence_length": 16, "sources": [{"name": "text", "paths": [f"{texts}/*.txt"]}],
                "tokenizer": {"name": "bytes"}, "cache_dir": str(texts / "cache"), "holdout_every": 4,
            },
            "train": {"num_steps": 9, "batch_size": 4},
            "optimizer": {"name": "adamw", "learning_rate": 1e-2},
            "schedule": {"name": "linear", "warmup_steps": 2},
            "parallel": {"fsdp": 2},
            "evaluation": {"every_steps": 3, "batch_size": 6},
            "checkpoint": {"every_steps": 4},
            "logging": {"every_steps": 2, "progress": "off"},
            "hardware": {"peak_tflops": 1.0},
        }  # fmt: skip
        return parse_config({name: table.get(name, {}) | sections.get(name, {}) for name in {**table, **sections}})

    return make
