"""From a TOML file and the command line's overrides to one frozen, checked `Config`."""

import difflib
import re
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError

from jaxpar.config.errors import ConfigError, Origins, Problem, problems_of, report
from jaxpar.config.fields import with_variant_names
from jaxpar.config.model_section import ModelError, Presets, load_presets, resolve_model
from jaxpar.config.overrides import apply_overrides
from jaxpar.config.schema import Config

__all__ = ["load_config", "parse_config"]


class _NoModel(BaseModel):
    """Stands in for a model that could not be resolved, so that the other sections are checked all the same."""


def load_config(path: str | Path, overrides: Sequence[str] = (), *, presets: Presets | None = None) -> Config:
    """The configuration in a TOML file, changed by overrides such as `parallel.tensor=2`.

    Args:
        path: The file.
        overrides: `dotted.key=VALUE` each, the value in TOML's syntax, a bare word a string; applied in order.
        presets: Models that `model.name` may name; None means `jaxpar.models.PRESETS`.

    Raises:
        ConfigError: everything that is wrong with the file and the overrides, one problem a line.
    """
    overridden = apply_overrides(_read(Path(path)), overrides)
    return _build(overridden.table, Origins(str(path), overridden.places), overridden.problems, presets)


def parse_config(
    table: Mapping[str, Any], *, source: str = "the configuration", presets: Presets | None = None
) -> Config:
    """The configuration in a table such as `tomllib` returns; `source` is what errors call it.

    Raises:
        ConfigError: everything that is wrong with it, one problem a line.
    """
    return _build(table, Origins(source), (), presets)


def _build(table: Mapping[str, Any], origins: Origins, problems: Sequence[Problem], presets: Presets | None) -> Config:
    found = list(problems)
    model: BaseModel = _NoModel()
    try:
        model = resolve_model(table.get("model"), load_presets() if presets is None else presets, origins)
    except ModelError as error:
        found += error.problems
    try:
        config = Config.model_validate(with_variant_names(Config, {**table, "model": model}))
    except ValidationError as error:
        found += problems_of(error, Config, origins)
    if found:
        raise report(found, origins)
    return config


def _read(path: Path) -> dict[str, Any]:
    try:
        text = path.read_bytes().decode("utf-8")
    except FileNotFoundError:
        raise ConfigError(f"{path} does not exist{_nearest_file(path)}") from None
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not a UTF-8 text file: {error.reason} at byte {error.start}") from error
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        found = re.search(r" \(at line (\d+), column \d+\)$", str(error))
        line = found[1] if found else str(max(1, len(text.splitlines())))
        reason = str(error)[: found.start()] if found else str(error)
        raise ConfigError(f"{path}, line {line}: not valid TOML: {reason}") from error


def _nearest_file(path: Path) -> str:
    """`; did you mean configs/quickstart.toml?`, or the directory's other TOML files."""
    if not path.parent.is_dir():
        return f"; neither does its directory {path.parent}"
    names = sorted(other.name for other in path.parent.glob("*.toml") if other.is_file())
    if near := difflib.get_close_matches(path.name, [*names, *(Path(name).stem for name in names)], n=1):
        return f"; did you mean {path.parent / near[0].removesuffix('.toml')}.toml?"
    return f"; TOML files there: {', '.join(names)}" if names else f"; {path.parent} holds no TOML file"
