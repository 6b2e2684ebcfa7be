"""The text of `--help`: every key with its type, default, unit and meaning, as plain text for 100 columns."""

import textwrap
from collections.abc import Iterator
from typing import Any, get_args

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from jaxpar.config.fields import describe, field_annotation, unwrap, variants
from jaxpar.config.model_section import Presets, load_presets
from jaxpar.config.schema import Config
from jaxpar.config.toml_writer import write_value

__all__ = ["help_text"]

_COLUMNS = 100
_LEFT = 36
_INTRODUCTION = (
    "A configuration file is TOML. KEY=VALUE on the command line changes one key: train.num_steps=100, "
    "schedule.name=wsd, data.sources.0.weight=2.0, 'schedule={name=\"wsd\", decay_steps=50}'. The value is TOML; "
    "a bare word is a string. Below: KEY = DEFAULT, the values that it takes, and what it means."
)


def help_text(*, presets: Presets | None = None) -> str:
    """Every section, key and variant of `Config`, and the presets of `[model]` with the fields of their class."""
    presets = load_presets() if presets is None else presets
    blocks = [textwrap.fill(_INTRODUCTION, _COLUMNS)]
    for name, field in Config.model_fields.items():
        blocks += _model_sections(presets) if name == "model" else _sections(name, field)
    return "\n\n".join(blocks) + "\n"


def _sections(path: str, field: FieldInfo) -> Iterator[str]:
    """The section at `path`, then the sections within it."""
    annotation, _ = unwrap(field_annotation(field))
    if classes := variants(annotation):
        default = getattr(field.default, "name", "")
        yield "\n".join([_header(f"[{path}]", field.description), *_variants(classes, default)])
    elif isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield _section(path, annotation)
        for name, inner in annotation.model_fields.items():
            if _is_section(inner):
                yield from _sections(f"{path}.{name}", inner)
    else:
        default = field.get_default(call_default_factory=True, validated_data={})
        tables = f" Default: {write_value([_plain(table) for table in default])}." if default else ""
        heading = _header(f"[[{path}]]", f"{field.description or ''}{tables}")
        yield "\n".join([heading, *_variants(_item_variants(field), default="")])


def _model_sections(presets: Presets) -> Iterator[str]:
    """`[model]`: its presets and the keys of their class, then the tables within it."""
    schema = type(next(iter(presets.values()))())
    own = 'a pydantic class (or function) of your own as "package.module:Class"'
    name = f"string. A preset, or {own}. Presets: {', '.join(presets)}."
    lines = [_header("[model]", _summary(schema)), *_row("  name (required)", name)]
    for key, field in schema.model_fields.items():
        if key != "name":
            lines += _row(f"  {_key(key, field, required='the preset sets it')}", _meaning(field))
    yield "\n".join(lines)
    for key, field in schema.model_fields.items():
        if _is_section(field):
            yield from _sections(f"model.{key}", field)


def _section(path: str, schema: type[BaseModel]) -> str:
    rows = [
        line
        for key, field in schema.model_fields.items()
        if not _is_section(field)
        for line in _row(f"  {_key(key, field)}", _meaning(field))
    ]
    return "\n".join([_header(f"[{path}]", _summary(schema)), *rows])


def _variants(classes: dict[str, type[BaseModel]], default: str) -> Iterator[str]:
    """The name, then each variant with the keys that it owns."""
    names = ", ".join(f'"{name}"' for name in classes)
    left = f'  name = "{default}"' if default else "  name (required)"
    yield from _row(left, f"{'one of ' if len(classes) > 1 else ''}{names}. Each name has keys of its own, as follows.")
    for name, schema in classes.items():
        yield from _row(f'  with name = "{name}"', _summary(schema))
        for key, field in schema.model_fields.items():
            if key != "name":
                yield from _row(f"    {_key(key, field)}", _meaning(field))


def _is_section(field: FieldInfo) -> bool:
    annotation, _ = unwrap(field_annotation(field))
    is_table = isinstance(annotation, type) and issubclass(annotation, BaseModel)
    return is_table or bool(variants(annotation)) or bool(_item_variants(field))


def _item_variants(field: FieldInfo) -> dict[str, type[BaseModel]]:
    annotation, _ = unwrap(field_annotation(field))
    items = get_args(annotation)
    return variants(items[0]) if items else {}


def _key(key: str, field: FieldInfo, required: str = "required") -> str:
    if field.is_required():
        return f"{key} ({required})"
    default: Any = field.get_default(call_default_factory=True, validated_data={})
    return f"{key} = {write_value(_plain(default))}" if default is not None else f"{key} (not set)"


def _plain(value: Any) -> Any:
    return value.model_dump(mode="json", exclude_none=True) if isinstance(value, BaseModel) else value


def _meaning(field: FieldInfo) -> str:
    kind = describe(field) or str(getattr(field.annotation, "__name__", field.annotation))
    kind = kind.removeprefix("an ").removeprefix("a ")
    return f"{kind}. {' '.join(field.description.split())}" if field.description else kind


def _summary(schema: type[BaseModel]) -> str:
    """The first paragraph of the class's docstring on one line."""
    return " ".join((schema.__doc__ or "").strip().split("\n\n")[0].split())


def _header(name: str, meaning: str | None) -> str:
    return textwrap.fill(f"{name}  {meaning or ''}".rstrip(), _COLUMNS, subsequent_indent=" " * (len(name) + 2))


def _row(left: str, right: str) -> list[str]:
    """`left`, and `right` wrapped in the second column; on the next line where `left` is too long."""
    lines = textwrap.wrap(right, _COLUMNS - _LEFT, break_on_hyphens=False)
    if len(left) > _LEFT - 2 or not lines:
        return [left, *(" " * _LEFT + line for line in lines)]
    return [left.ljust(_LEFT) + lines[0], *(" " * _LEFT + line for line in lines[1:])]
