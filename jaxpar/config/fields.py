"""What the schema says about a key: its variants, the values it takes in plain words, and where a dotted path leads."""

import enum
import pathlib
import types
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import annotated_types
from pydantic import BaseModel
from pydantic.fields import FieldInfo

__all__ = [
    "Key",
    "Place",
    "describe",
    "dotted",
    "field_annotation",
    "keys_named",
    "locate",
    "unwrap",
    "variants",
    "with_variant_names",
]

Place = tuple[str | int, ...]
"""Where a value is: ("data", "sources", 0, "weight")."""

_NOUNS = {int: "whole number", float: "number", str: "string", pathlib.Path: "string"}


@dataclass(frozen=True)
class Key:
    """A place in a configuration, and what the schema says about it; `owner` is the class whose key it is."""

    place: Place
    annotation: Any
    owner: type[BaseModel] | None
    siblings: dict[str, type[BaseModel]]
    """The variants that `owner` is one of, by name."""


def dotted(place: Place) -> str:
    """`data.sources.0.weight`, as the command line writes it."""
    return ".".join(str(part) for part in place)


def unwrap(annotation: Any) -> tuple[Any, tuple[Any, ...]]:
    """An annotation without `Annotated` and `| None`, and the constraints that it carried."""
    constraints: tuple[Any, ...] = ()
    while True:
        if get_origin(annotation) is Annotated:
            annotation, *extras = get_args(annotation)
            for extra in extras:
                constraints += (extra, *extra.metadata) if isinstance(extra, FieldInfo) else (extra,)
        elif _is_union(annotation) and len(members := _members(annotation)) == 1:
            annotation = members[0]
        else:
            return annotation, constraints


def variants(annotation: Any) -> dict[str, type[BaseModel]]:
    """The classes of a tagged union by their names; a class with a fixed name is a union of one; {} otherwise."""
    bare, _ = unwrap(annotation)
    classes = _members(bare) if _is_union(bare) else (bare,)
    names = [_fixed_name(candidate) for candidate in classes]
    return {name: found for name, found in zip(names, classes, strict=True) if name} if all(names) else {}


def describe(field: Any) -> str:
    """The values that a field (or annotation) takes, such as "a whole number > 0"; "" where plain words are missing."""
    annotation = field_annotation(field) if isinstance(field, FieldInfo) else field
    bare, constraints = unwrap(annotation)
    if bare is bool:
        return "true or false"
    if choices := _choices(bare):
        return choices if len(get_args(bare)) == 1 else f"one of {choices}"
    if _is_union(bare) and not variants(bare):
        parts = [describe(member) for member in _members(bare)]
        return " or ".join(parts) if all(parts) else ""
    noun = _noun(bare, plural=False)
    if not noun:
        return ""
    article = "an" if noun[0] in "aeiou" else "a"
    return f"{article} {noun}{_limits(constraints)}"


def field_annotation(field: FieldInfo) -> Any:
    """A field's annotation with its constraints put back."""
    return Annotated[field.annotation, field]


def locate(schema: type[BaseModel], location: Sequence[str | int]) -> Key:
    """Where a pydantic error's location leads: the names of variants that pydantic puts in are taken out."""
    annotation: Any = schema
    place: Place = ()
    owner: type[BaseModel] | None = None
    siblings: dict[str, type[BaseModel]] = {}
    family: dict[str, type[BaseModel]] = {}
    for part in location:
        bare, _ = unwrap(annotation)
        if _is_union(bare):
            family = variants(bare)
            annotation = {**_by_class_name(bare), **family}.get(str(part), bare)
            continue
        place = (*place, part)
        if _is_model(bare):
            owner, siblings, family = bare, family or variants(bare), {}
            field = bare.model_fields.get(str(part))
            annotation = field_annotation(field) if field else Any
        else:
            owner, siblings = None, {}
            annotation = _item(bare)
    return Key(place, annotation, owner, siblings)


def keys_named(schema: type[BaseModel], name: str, place: Place = ()) -> Iterator[str]:
    """Every dotted key of the schema, outside arrays and unions, that ends in `name`."""
    for key, field in schema.model_fields.items():
        bare, _ = unwrap(field_annotation(field))
        if _is_model(bare):
            yield from keys_named(bare, name, (*place, key))
        elif key == name:
            yield dotted((*place, key))


def with_variant_names(schema: type[BaseModel], table: Mapping[str, Any]) -> dict[str, Any]:
    """The table with the default's `name` in each tagged union's table that gives none, as for any key left out."""
    result = dict(table)
    for key, field in schema.model_fields.items():
        value = table.get(key)
        if not isinstance(value, Mapping):
            continue
        annotation, _ = unwrap(field_annotation(field))
        if variants(annotation) and isinstance(field.default, BaseModel) and "name" not in value:
            result[key] = {"name": field.default.model_dump()["name"], **value}
        elif _is_model(annotation):
            result[key] = with_variant_names(annotation, value)
    return result


def _is_model(annotation: Any) -> bool:
    return isinstance(annotation, type) and issubclass(annotation, BaseModel)


def _is_union(annotation: Any) -> bool:
    return get_origin(annotation) in (Union, types.UnionType)


def _members(union: Any) -> tuple[Any, ...]:
    return tuple(member for member in get_args(union) if member is not type(None))


def _by_class_name(union: Any) -> dict[str, Any]:
    return {member.__name__: member for member in _members(union) if _is_model(member)}


def _fixed_name(candidate: Any) -> str:
    """The one value of a class's literal field `name`; "" if it has none."""
    if not _is_model(candidate) or "name" not in candidate.model_fields:
        return ""
    bare, _ = unwrap(candidate.model_fields["name"].annotation)
    values = get_args(bare) if get_origin(bare) is Literal else ()
    return values[0] if len(values) == 1 else ""


def _item(annotation: Any) -> Any:
    """What an array or a table of free keys holds."""
    arguments = [argument for argument in get_args(annotation) if argument is not Ellipsis]
    return arguments[-1] if arguments else Any


def _choices(annotation: Any) -> str:
    if get_origin(annotation) is Literal:
        values = get_args(annotation)
    elif isinstance(annotation, type) and issubclass(annotation, enum.Enum):
        values = tuple(member.value for member in annotation)
    else:
        return ""
    return ", ".join(f'"{value}"' if isinstance(value, str) else str(value) for value in values)


def _noun(annotation: Any, *, plural: bool) -> str:
    """The noun of a type: "number", "array of strings", "table"; "" for a type that has no plain name."""
    if variants(annotation) or _is_model(annotation) or annotation is dict or get_origin(annotation) is dict:
        return "tables" if plural else "table"
    if get_origin(annotation) in (tuple, list, set, frozenset):
        item, constraints = unwrap(_item(annotation))
        items = _choices(item) or _noun(item, plural=True)
        return f"{'arrays' if plural else 'array'} of {items}{_limits(constraints)}" if items else ""
    noun = _NOUNS.get(annotation, "") if isinstance(annotation, type) else ""
    return noun + "s" if noun and plural else noun


def _limits(constraints: tuple[Any, ...]) -> str:
    """Bounds in plain words, such as " > 0", " from 0 to 1" or " with at least 1 entry"."""
    bounds: dict[str, Any] = {}
    words = ""
    for constraint in constraints:
        match constraint:
            case annotated_types.Gt(gt=bound):
                bounds[">"] = bound
            case annotated_types.Ge(ge=bound):
                bounds[">="] = bound
            case annotated_types.Lt(lt=bound):
                bounds["<"] = bound
            case annotated_types.Le(le=bound):
                bounds["<="] = bound
            case annotated_types.MinLen(min_length=length):
                words += f" with at least {length} {'entry' if length == 1 else 'entries'}"
            case FieldInfo(json_schema_extra={"not": {"const": excluded}}):
                words += f", not {excluded}"
    if bounds.keys() == {">=", "<="}:
        return f" from {bounds['>=']:g} to {bounds['<=']:g}{words}"
    return " and".join(f" {sign} {bound:g}" for sign, bound in bounds.items()) + words
