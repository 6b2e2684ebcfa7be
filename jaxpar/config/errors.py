"""What the user got wrong, one readable line a problem: where, which value, what is required, the nearest fix."""

import difflib
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from jaxpar.config.fields import Key, Place, describe, dotted, keys_named, locate, unwrap, variants
from jaxpar.config.toml_writer import write_value

__all__ = ["ConfigError", "Origins", "Problem", "did_you_mean", "problems_of", "report", "show_value", "unknown_key"]

_COMMAND_LINE = "on the command line"
_LONGEST_VALUE = 60
_BOUNDS = {"greater_than", "greater_than_equal", "less_than", "less_than_equal", "finite_number"}
_DESCRIBED = _BOUNDS | {"literal_error", "enum", "int_from_float", "too_short", "too_long"}


class ConfigError(ValueError):
    """Everything that a user got wrong in a configuration, one problem a line; to be shown without a traceback."""


@dataclass(frozen=True)
class Problem:
    """One line of a `ConfigError`; its place decides whether the file or the command line is named."""

    place: Place
    text: str
    on_command_line: bool = False


@dataclass(frozen=True)
class Origins:
    """Where values come from: a file (or what `source` names) and the places that the command line set."""

    source: str
    overridden: frozenset[Place] = frozenset()

    def is_overridden(self, place: Place) -> bool:
        return any(place[: len(setting)] == setting for setting in self.overridden)

    def describe(self, problem: Problem) -> str:
        if problem.on_command_line or self.is_overridden(problem.place):
            return _COMMAND_LINE
        within = any(setting[: len(problem.place)] == problem.place for setting in self.overridden)
        return f"{self.source} with the command line" if problem.place and within else self.source


def report(problems: Iterable[Problem], origins: Origins) -> ConfigError:
    """One error that names every problem once."""
    lines = [f"{origins.describe(problem)}: {problem.text}" for problem in problems]
    return ConfigError("\n".join(dict.fromkeys(lines)))


def did_you_mean(word: Any, options: Iterable[str], form: str = '"{}"') -> str:
    """` (did you mean "tensor"?)`, or nothing where no option is near."""
    near = difflib.get_close_matches(str(word).lower(), list(options), n=1)
    return f" (did you mean {form.format(near[0])}?)" if near else ""


def show_value(value: Any) -> str:
    """A value in TOML, cut where it is long."""
    try:
        text = write_value(value)
    except ValueError:
        text = repr(value)
    return text if len(text) <= _LONGEST_VALUE else text[: _LONGEST_VALUE - 3] + "..."


def problems_of(error: ValidationError, schema: type[BaseModel], origins: Origins, prefix: Place = ()) -> list[Problem]:
    """The problems of a section or a whole configuration (`prefix` is where it stands), in plain words."""
    problems: list[Problem] = []
    left_over: dict[Place, list[Key]] = {}
    for detail in error.errors(include_url=False):
        key = locate(schema, detail["loc"])
        place = prefix + key.place
        if detail["type"] == "extra_forbidden":
            if _is_left_over(key, place, origins):
                left_over.setdefault(place[:-1], []).append(key)
            else:
                problems.append(unknown_key(key, detail["input"], schema, prefix))
        elif detail["type"] in ("missing", "union_tag_not_found"):
            problems.append(_missing(key, detail, place, origins))
        elif detail["type"] == "union_tag_invalid":
            problems.append(_unknown_variant(detail, place))
        elif not _is_consequence(detail):
            problems.append(_wrong_value(key, detail, place, origins))
    return problems + [_changed_variant(table, keys) for table, keys in left_over.items()]


def unknown_key(key: Key, value: Any, schema: type[BaseModel], prefix: Place = ()) -> Problem:
    """A key that its section does not have: which variant, or which section, has it; else the nearest one."""
    assert key.owner is not None, "only a section can refuse a key"
    place = prefix + key.place
    *table, leaf = place
    legal = list(key.owner.model_fields)
    if not table:
        if not isinstance(value, Mapping):
            near = _named_elsewhere(schema, leaf) or did_you_mean(leaf, legal, "the section [{}]")
            return Problem(place, f"{leaf} stands outside of the sections{near}; sections: {', '.join(legal)}")
        return Problem(
            place, f"unknown section [{leaf}]{did_you_mean(leaf, legal, '[{}]')}; sections: {', '.join(legal)}"
        )
    section = dotted(tuple(table))
    name = next((name for name, variant in key.siblings.items() if variant is key.owner), None)
    if owners := _owners(key):
        known = f'{dotted(place)} belongs to {section}.name={owners}, but {section}.name is "{name}"'
    else:
        near = did_you_mean(leaf, legal, f"{section}.{{}}") or (_named_elsewhere(schema, leaf) if not prefix else "")
        known = f"unknown key {dotted(place)}{near}"
    keys_of = f'{section}.name="{name}"' if name and len(key.siblings) > 1 else f"[{section}]"
    return Problem(place, f"{known}; keys of {keys_of}: {', '.join(legal)}")


def _is_left_over(key: Key, place: Place, origins: Origins) -> bool:
    """Whether the file's key belongs to the variant that an override of `name` replaced."""
    renamed = origins.is_overridden((*place[:-1], "name"))
    return bool(_owners(key)) and renamed and not origins.is_overridden(place)


def _changed_variant(table: Place, keys: list[Key]) -> Problem:
    section = dotted(table)
    name = next(name for name, variant in keys[0].siblings.items() if variant is keys[0].owner)
    left = ", ".join(f"{section}.{key.place[-1]} (of {_owners(key)})" for key in keys)
    text = (
        f'{section}.name="{name}" does not go with keys that the file sets for another name: {left}; '
        f"'{section}={{name=\"{name}\"}}' replaces the whole table"
    )
    return Problem((*table, "name"), text)


def _owners(key: Key) -> str:
    """The names of the other variants that have this key: `"cosine" or "linear"`."""
    owners = [name for name, variant in key.siblings.items() if key.place[-1] in variant.model_fields]
    return " or ".join(f'"{name}"' for name in owners)


def _named_elsewhere(schema: type[BaseModel], name: Any) -> str:
    found = list(keys_named(schema, str(name)))
    return f" (did you mean {' or '.join(found)}?)" if found else ""


def _missing(key: Key, detail: ErrorDetails, place: Place, origins: Origins) -> Problem:
    if detail["type"] == "union_tag_not_found":
        place = (*place, detail["ctx"]["discriminator"].strip("'"))
        words = _one_of(names) if (names := variants(key.annotation)) else ""
    else:
        words = describe(key.annotation)
    # A key goes missing where its table, or the name that asks for the key, was written.
    blame = origins.is_overridden((*place[:-1], "name")) or origins.is_overridden(place[:-1])
    needed = f"; it must be {words}" if words else ""
    return Problem(place, f"{dotted(place)} is missing{needed}", on_command_line=blame)


def _unknown_variant(detail: ErrorDetails, place: Place) -> Problem:
    discriminator = detail["ctx"]["discriminator"].strip("'")
    names = [name.strip("'") for name in detail["ctx"]["expected_tags"].split(", ")]
    name = detail["input"][discriminator]
    place = (*place, discriminator)
    return Problem(place, f"{dotted(place)}={show_value(name)} must be {_one_of(names)}{did_you_mean(name, names)}")


def _wrong_value(key: Key, detail: ErrorDetails, place: Place, origins: Origins) -> Problem:
    value, kind = detail["input"], detail["type"]
    shown = f"{dotted(place)}={show_value(value)}"
    if kind in _DESCRIBED or kind.endswith(("_type", "_parsing")):
        words = describe(key.annotation)
        if words:
            return Problem(place, f"{shown} must be {words}{_fix(key, value, place, origins)}")
    if kind in ("value_error", "assertion_error"):
        reason = str(detail["ctx"]["error"])
        whole = isinstance(value, Mapping)
        shown = f"[{dotted(place)}]" if whole else shown
        return Problem(place, f"{shown} {reason}" if whole or reason.startswith("must") else f"{shown}: {reason}")
    return Problem(place, f"{shown}: {detail['msg'][0].lower()}{detail['msg'][1:]}")


def _is_consequence(detail: ErrorDetails) -> bool:
    """Pydantic counts only the good entries of an array: too few of those is not what the user got wrong."""
    return detail["type"] == "too_short" and len(detail["input"]) >= detail["ctx"]["min_length"]


def _fix(key: Key, value: Any, place: Place, origins: Origins) -> str:
    """`; write 1000`: the value that was meant, where it can be told."""
    bare, _ = unwrap(key.annotation)
    if isinstance(value, str):
        if names := variants(key.annotation):
            near = difflib.get_close_matches(value, list(names), n=1)
            return f'; write {dotted(place)}.name="{near[0]}"' if near else ""
        if bare in (int, float, bool):
            return _without_quotes(value, bare)
        if get_origin(bare) in (tuple, list):
            return f"; write {_quoted(place, [value], origins)}"
        return did_you_mean(value, [option for option in get_args(bare) if isinstance(option, str)])
    if bare is int and isinstance(value, float) and value.is_integer():
        return f"; write {int(value)}"
    if bare is str and not isinstance(value, list | Mapping):
        return f"; write {_quoted(place, write_value(value), origins)}"
    return ""


def _without_quotes(text: str, kind: type) -> str:
    try:
        value = tomllib.loads(f"value = {text.lower()}").get("value")
    except tomllib.TOMLDecodeError:
        return ""
    return f"; write {write_value(value)} without quotes" if type(value) is kind else ""


def _quoted(place: Place, value: Any, origins: Origins) -> str:
    """The value in TOML; on the command line with the quotes that keep a shell from taking TOML's away."""
    return f"{dotted(place)}='{write_value(value)}'" if origins.is_overridden(place) else write_value(value)


def _one_of(names: Iterable[str]) -> str:
    quoted = [f'"{name}"' for name in names]
    return ("one of " if len(quoted) > 1 else "") + ", ".join(quoted)
