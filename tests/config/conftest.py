"""A small model class, its presets, and a way to write and load a configuration file."""

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Literal, Self

import pytest
from pydantic import BaseModel, ConfigDict, Field, model_validator

from jaxpar.config import Config, load_config
from jaxpar.config.model_section import Presets


class Rope(BaseModel):
    """Rotary positions."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, use_attribute_docstrings=True)

    theta: float = 10_000.0
    """Base."""
    scaling: float = 1.0
    """Stretching."""


class Decoder(BaseModel):
    """A decoder."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, use_attribute_docstrings=True)

    name: str
    num_layers: Annotated[int, Field(gt=0)] = 2
    """Layers."""
    num_heads: Annotated[int, Field(gt=0)] = 4
    """Query heads."""
    num_kv_heads: Annotated[int, Field(gt=0)] = 4
    """Key and value heads."""
    activation: Literal["gelu", "silu"] = "gelu"
    """Nonlinearity."""
    rope: Rope | None = None
    """Rotary positions; absent for none."""
    windows: tuple[int, ...] = (0,)
    """Attention windows."""

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.num_heads % self.num_kv_heads:
            raise ValueError(f"num_kv_heads={self.num_kv_heads} must divide num_heads={self.num_heads}")
        return self


@pytest.fixture
def presets() -> Presets:
    return {
        "tiny": lambda: Decoder(name="tiny"),
        "rotary": lambda: Decoder(name="rotary", num_layers=8, rope=Rope(theta=5e5, scaling=8.0)),
    }


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "run.toml"


Load = Callable[..., Config]


@pytest.fixture
def load(path: Path, presets: Presets) -> Load:
    """Loads a configuration with the text (and the model "tiny" unless the text says otherwise) and the overrides."""

    def load_text(text: str, *overrides: str) -> Config:
        path.write_text(text if "[model]" in text else f'{text}\n[model]\nname = "tiny"\n')
        return load_config(path, overrides, presets=presets)

    return load_text
