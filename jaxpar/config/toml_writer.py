"""Writes the tables that `tomllib` reads: strings, numbers (inf and nan too), booleans, dates, arrays and tables."""

import datetime
import re
from collections.abc import Mapping, Sequence
from typing import Any

__all__ = ["write_key", "write_toml", "write_value"]

_BARE_KEY = re.compile(r"[A-Za-z0-9_-]+")
_ESCAPES = {'"': '\\"', "\\": "\\\\", "\b": "\\b", "\t": "\\t", "\n": "\\n", "\f": "\\f", "\r": "\\r"}


def write_toml(table: Mapping[str, Any]) -> str:
    """A TOML document: tables become `[headers]`, arrays that hold nothing but tables `[[headers]]`.

    Raises:
        ValueError: a value that TOML cannot hold, such as None.

    >>> print(write_toml({"train": {"max_grad_norm": float("inf")}}), end="")
    [train]
    max_grad_norm = inf
    """
    return "\n\n".join(_blocks(table, header="", path=())) + "\n"


def write_value(value: Any) -> str:
    """A value on one line; a table becomes an inline table.

    >>> write_value({"name": "text", "paths": ("a", "b")})
    '{name = "text", paths = ["a", "b"]}'
    """
    match value:
        case bool():
            return "true" if value else "false"
        case str():
            return _write_string(value)
        case int():
            return int.__repr__(value)
        case float():
            return float.__repr__(value)
        case datetime.datetime() | datetime.date() | datetime.time():
            return value.isoformat()
        case Mapping():
            return "{" + ", ".join(f"{write_key(key)} = {write_value(item)}" for key, item in value.items()) + "}"
        case Sequence() if not isinstance(value, bytes | bytearray):
            return "[" + ", ".join(map(write_value, value)) + "]"
        case _:
            raise ValueError(f"TOML cannot hold {value!r}, a {type(value).__name__}")


def write_key(key: str) -> str:
    return key if _BARE_KEY.fullmatch(key) else _write_string(key)


def _blocks(table: Mapping[str, Any], header: str, path: tuple[str, ...]) -> list[str]:
    """The table's own lines under its header, then one block for each table below it."""
    below = {key: value for key, value in table.items() if isinstance(value, Mapping) or _is_array_of_tables(value)}
    lines = [f"{write_key(key)} = {write_value(value)}" for key, value in table.items() if key not in below]
    if header and (lines or not below or header.startswith("[[")):
        lines.insert(0, header)
    blocks = ["\n".join(lines)] if lines else []
    for key, value in below.items():
        inner = (*path, write_key(key))
        if isinstance(value, Mapping):
            blocks += _blocks(value, f"[{'.'.join(inner)}]", inner)
        else:
            for item in value:
                blocks += _blocks(item, f"[[{'.'.join(inner)}]]", inner)
    return blocks


def _is_array_of_tables(value: Any) -> bool:
    return isinstance(value, list | tuple) and bool(value) and all(isinstance(item, Mapping) for item in value)


def _write_string(text: str) -> str:
    if any(0xD800 <= ord(character) <= 0xDFFF for character in text):
        raise ValueError(f"TOML cannot hold the string {text!r}: it is not valid Unicode")
    return '"' + "".join(map(_escape, text)) + '"'


def _escape(character: str) -> str:
    if character in _ESCAPES:
        return _ESCAPES[character]
    return f"\\u{ord(character):04X}" if character < " " or character == "\x7f" else character
