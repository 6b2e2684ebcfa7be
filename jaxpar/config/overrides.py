"""Overrides on the command line: `dotted.key=VALUE`, the value in TOML's syntax, a bare word a string."""

import copy
import re
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from jaxpar.config.errors import Problem
from jaxpar.config.fields import Place, dotted

__all__ = ["Overridden", "apply_overrides", "parse_value"]

_KEY = re.compile(r"[A-Za-z0-9_-]+(\.[A-Za-z0-9_-]+)*")


@dataclass(frozen=True)
class Overridden:
    """A table after the overrides, the places that they set or made, and what was wrong with them."""

    table: dict[str, Any]
    places: frozenset[Place]
    problems: tuple[Problem, ...]


def apply_overrides(table: Mapping[str, Any], overrides: Iterable[str]) -> Overridden:
    """A copy of the table with the overrides applied in their order.

    >>> apply_overrides({"train": {"num_steps": 10}}, ["train.num_steps=20", "run.dir=runs/a b"]).table
    {'train': {'num_steps': 20}, 'run': {'dir': 'runs/a b'}}
    """
    result = copy.deepcopy(dict(table))
    places: set[Place] = set()
    seen: dict[tuple[str, ...], str] = {}
    problems: list[Problem] = []
    for override in overrides:
        try:
            parts, value = _parse(override)
            _check_order(parts, override, seen)
            seen[parts] = override
            places.add(_assign(result, parts, value))
        except ValueError as error:
            problems.append(Problem((), f"{override}: {error}", on_command_line=True))
    return Overridden(result, frozenset(places), tuple(problems))


def parse_value(text: str) -> Any:
    """A TOML value, or the text itself where it is a bare word.

    Raises:
        ValueError: broken TOML that starts like an array, a table or a quoted string.
    """
    try:
        parsed = tomllib.loads(f"value = {text}")
    except tomllib.TOMLDecodeError as error:
        if text[0] in "[{\"'":
            raise ValueError(f"the value is not valid TOML ({error})") from error
        return text
    if parsed.keys() != {"value"}:
        raise ValueError("one override sets one key")
    return parsed["value"]


def _parse(override: str) -> tuple[tuple[str, ...], Any]:
    key, equals, text = override.partition("=")
    key, text = key.strip(), text.strip()
    if not equals:
        raise ValueError("an override is KEY=VALUE, such as train.num_steps=100")
    if not _KEY.fullmatch(key):
        raise ValueError(f'"{key}" is not a key; a key is words joined by dots, such as train.num_steps')
    if not text:
        raise ValueError(f"the value is missing; an empty string is {key}='\"\"'")
    return tuple(key.split(".")), parse_value(text)


def _check_order(parts: tuple[str, ...], override: str, seen: Mapping[tuple[str, ...], str]) -> None:
    if parts in seen:
        raise ValueError(f"{'.'.join(parts)} was given before, as {seen[parts]}")
    for earlier, text in seen.items():
        if earlier[: len(parts)] == parts:
            raise ValueError(f"replaces the table that {text} was written into; write {override} first")


def _assign(table: dict[str, Any], parts: tuple[str, ...], value: Any) -> Place:
    """Write the value; the place of it, or of the outermost table that had to be made for it."""
    container: Any = table
    place: Place = ()
    made: Place | None = None
    for depth, part in enumerate(parts):
        last = depth == len(parts) - 1
        if isinstance(container, list):
            index = _index(container, part, place)
            place = (*place, index)
            if last:
                container[index] = value
            container = container[index]
        elif isinstance(container, dict):
            if part.isdecimal():
                raise ValueError(f"there is no array {dotted(place)} to take entry {part} of")
            place = (*place, part)
            if last:
                container[part] = value
            elif part not in container:
                container[part] = {}
                made = made or place
            container = container[part]
        else:
            raise ValueError(f"{dotted(place)} is no table, so it has no key {part}")
    return made or place


def _index(array: list[Any], part: str, place: Place) -> int:
    if not part.isdecimal() or int(part) >= len(array):
        entries = ", ".join(map(str, range(len(array)))) or "none"
        raise ValueError(f'{dotted(place)} has no entry "{part}"; its entries: {entries}')
    return int(part)
