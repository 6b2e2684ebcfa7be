"""The resolved configuration: written as TOML that gives the same run again, and compared at resume."""

from collections.abc import Iterator, Mapping
from typing import Any

from jaxpar.config.model_section import Presets, load_presets, model_table
from jaxpar.config.schema import Config
from jaxpar.config.toml_writer import write_toml

__all__ = ["changed_keys", "dump_toml"]


def dump_toml(config: Config, *, presets: Presets | None = None) -> str:
    """Every key of the configuration with its value, as TOML that loads again to an equal `Config`.

    Raises:
        ValueError: the model is of a class that no `model.name` can bring in.
    """
    presets = load_presets() if presets is None else presets
    sections = config.model_dump(exclude={"model"}, round_trip=True)
    table = {
        key: model_table(config.model, presets) if key == "model" else sections[key] for key in Config.model_fields
    }
    return write_toml(table)


def changed_keys(old: Config, new: Config) -> dict[str, tuple[Any, Any]]:
    """Dotted keys whose values differ, with the old and the new value; None where a key is absent.

    A changed variant changes its `name` and every key that the two variants do not share.
    """
    before, after = (dict(_flat(config.model_dump(mode="python", round_trip=True))) for config in (old, new))
    keys = dict.fromkeys([*before, *after])
    return {key: (before.get(key), after.get(key)) for key in keys if before.get(key) != after.get(key)}


def _flat(value: Any, key: str = "") -> Iterator[tuple[str, Any]]:
    """(dotted key, value) for everything that is neither a table nor an array of tables."""
    if isinstance(value, Mapping):
        items: Any = value.items()
    elif isinstance(value, list | tuple) and value and all(isinstance(item, Mapping) for item in value):
        items = enumerate(value)
    else:
        yield key, value
        return
    for name, item in items:
        yield from _flat(item, f"{key}.{name}" if key else str(name))
