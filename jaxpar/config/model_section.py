"""The `[model]` section: a preset's name or a user's `package.module:Class`, and the keys that change its fields."""

import datetime
import importlib
import json
from collections.abc import Callable, Mapping
from typing import Any, get_args

from pydantic import BaseModel, ValidationError
from pydantic_core import PydanticSerializationError

from jaxpar.config.errors import Origins, Problem, did_you_mean, problems_of, show_value, unknown_key
from jaxpar.config.fields import Key, Place, field_annotation, unwrap, variants, with_variant_names

__all__ = ["ModelError", "Presets", "load_presets", "model_table", "resolve_model"]

Presets = Mapping[str, Callable[[], BaseModel]]

_MODEL: Place = ("model",)
_NAME: Place = ("model", "name")


class ModelError(ValueError):
    """What is wrong with `[model]`, as problems to be reported with those of the other sections."""

    def __init__(self, *problems: Problem) -> None:
        super().__init__("\n".join(problem.text for problem in problems))
        self.problems = problems


def load_presets() -> Presets:
    """jaxpar's own presets; looked up at run time, so that `jaxpar.config` imports no model code."""
    presets: Presets = importlib.import_module("jaxpar.models").PRESETS
    return presets


def resolve_model(section: Any, presets: Presets, origins: Origins) -> BaseModel:
    """The model that `[model]` describes: the named preset or class, its fields changed by the section's other keys.

    A table within the section changes the keys that it names, unless it gives another `name`: then it replaces the
    whole table of the preset.

    Raises:
        ModelError: no name, an unknown one, a module that cannot be imported, or keys that the class refuses.
    """
    name = _name(section, presets)
    base = _from_reference(name) if ":" in name else _from_preset(name, presets)
    schema = base if isinstance(base, type) else type(base)
    values = {} if isinstance(base, type) else _plain(base)
    keys = {key: value for key, value in section.items() if key != "name"}
    if "name" in schema.model_fields:
        keys["name"] = name
    values = with_variant_names(schema, _merged(values, keys))
    unknown = _ignored_keys(schema, values, _MODEL)
    try:
        # JSON's rules let TOML's arrays and strings become tuples, paths and enums even in a strict class.
        model = schema.model_validate_json(json.dumps(values, default=_date))
    except ValidationError as error:
        raise ModelError(*unknown, *problems_of(error, schema, origins, _MODEL)) from error
    if unknown:
        raise ModelError(*unknown)
    if _renames_only(model, base, section, origins):
        reason = "changes nothing, because the file sets every key of [model]"
        fix = f"'model={{name=\"{name}\"}}' replaces the whole table"
        raise ModelError(Problem(_NAME, f'model.name="{name}" {reason}; {fix}'))
    return model


def model_table(model: BaseModel, presets: Presets) -> dict[str, Any]:
    """The `[model]` section that resolves to this model: every field, and the name that brings in its class.

    A field `name` that names nothing (a model that was put together in Python) gives way to the class's own reference.

    Raises:
        ValueError: the section would not give this model again, for instance because its class is a local one.
    """
    values = _without_none(_plain(model))
    reference = f"{type(model).__module__}:{type(model).__qualname__}"
    name = values.get("name", "")
    tables = [{**values, "name": name}] if name in presets or ":" in name else []
    tables.append({**values, "name": reference})
    reasons = []
    for table in tables:
        try:
            again = resolve_model(table, presets, Origins("the model"))
        except ModelError as error:
            reasons.append(str(error))
            continue
        given_name = {"name": getattr(model, "name", "")} if "name" in type(model).model_fields else {}
        if again == model or again.model_copy(update=given_name) == model:
            return {"name": table.pop("name"), **table}
        reasons.append(f'name = "{table["name"]}" gives a model that differs')
    raise ValueError(f"the model {model!r} cannot be written as a [model] section: {'; '.join(reasons)}")


def _name(section: Any, presets: Presets) -> str:
    choices = f'presets: {", ".join(presets)}; or your own "package.module:Class"'
    if section is None:
        raise ModelError(Problem(_NAME, f"the section [model] is missing; write model.name; {choices}"))
    if not isinstance(section, Mapping):
        raise ModelError(Problem(_MODEL, f"model={show_value(section)} must be a table; write model.name; {choices}"))
    if "name" not in section:
        raise ModelError(Problem(_NAME, f"model.name is missing; {choices}"))
    name = section["name"]
    if not isinstance(name, str):
        raise ModelError(Problem(_NAME, f"model.name={show_value(name)} must be a string; {choices}"))
    if ":" not in name and name not in presets:
        near = did_you_mean(name, presets)
        raise ModelError(Problem(_NAME, f'model.name="{name}" is not a preset{near}; {choices}'))
    return name


def _from_preset(name: str, presets: Presets) -> BaseModel:
    return presets[name]()


def _from_reference(name: str) -> BaseModel | type[BaseModel]:
    """The class, or the instance that a function returns."""
    target = _import(name)
    if isinstance(target, type) and issubclass(target, BaseModel):
        return target
    wanted = "a pydantic model class, or a function without arguments that returns an instance of one"
    if isinstance(target, type) or not callable(target):
        raise _bad_reference(name, f"must be {wanted}, not {target!r}")
    try:
        model = target()
    except Exception as error:
        raise _bad_reference(name, f"failed when called: {type(error).__name__}: {error}") from error
    if not isinstance(model, BaseModel):
        raise _bad_reference(name, f"must be {wanted}; it returned {model!r}")
    return model


def _import(name: str) -> Any:
    module_name, _, attributes = name.partition(":")
    if not module_name or module_name.startswith(".") or not attributes:
        raise _bad_reference(name, 'must have the form "package.module:Class"')
    try:
        target: Any = importlib.import_module(module_name)
    except Exception as error:  # A user's module may fail in any way; the reason is what helps.
        missing = isinstance(error, ModuleNotFoundError) and f"{module_name}.".startswith(f"{error.name}.")
        where = "; it is looked for in the current directory and among the installed packages" if missing else ""
        raise _bad_reference(name, f"cannot be imported: {type(error).__name__}: {error}{where}") from error
    for attribute in attributes.split("."):
        if not hasattr(target, attribute):
            near = did_you_mean(attribute, [known for known in vars(target) if not known.startswith("_")])
            raise _bad_reference(name, f"names nothing: {target!r} has no {attribute}{near}")
        target = getattr(target, attribute)
    return target


def _bad_reference(name: str, reason: str) -> ModelError:
    return ModelError(Problem(_NAME, f'model.name="{name}" {reason}'))


def _plain(model: BaseModel) -> dict[str, Any]:
    """The model's fields as TOML's types (and None)."""
    try:
        return model.model_dump(mode="json", round_trip=True)
    except PydanticSerializationError as error:
        raise _bad_reference(type(model).__qualname__, f"has a field that no text can hold: {error}") from error


def _merged(values: Mapping[str, Any], keys: Mapping[str, Any]) -> dict[str, Any]:
    """`values` changed by `keys`, tables key by key unless their names differ."""
    result = dict(values)
    for key, value in keys.items():
        old = values.get(key)
        if (
            isinstance(old, Mapping)
            and isinstance(value, Mapping)
            and value.get("name", old.get("name")) == old.get("name")
        ):
            value = _merged(old, value)
        result[key] = value
    return result


def _renames_only(model: BaseModel, base: Any, section: Mapping[str, Any], origins: Origins) -> bool:
    """Whether the command line names another preset whose every field the file overrules, as a resolved file does."""
    fields = _without_none(_plain(model)).keys() - {"name"}
    from_file = {key for key in section if not origins.is_overridden((*_MODEL, key))}
    return isinstance(base, BaseModel) and _NAME in origins.overridden and bool(fields) and fields <= from_file


def _ignored_keys(annotation: Any, value: Any, place: Place) -> list[Problem]:
    """Keys that a class would drop in silence, because it neither forbids nor keeps keys that it does not know."""
    bare, _ = unwrap(annotation)
    if isinstance(value, list) and (items := get_args(bare)):
        return [p for index, item in enumerate(value) for p in _ignored_keys(items[0], item, (*place, index))]
    if not isinstance(value, Mapping):
        return []
    siblings = variants(bare)
    bare = siblings.get(str(value.get("name")), bare)
    if not (isinstance(bare, type) and issubclass(bare, BaseModel)):
        return []
    problems = []
    for key, item in value.items():
        if key in bare.model_fields:
            problems += _ignored_keys(field_annotation(bare.model_fields[key]), item, (*place, key))
        elif bare.model_config.get("extra", "ignore") == "ignore":
            problems.append(unknown_key(Key((key,), Any, bare, siblings), item, bare, place))
    return problems


def _without_none(value: Any) -> Any:
    """The tables without the keys that are None, which TOML cannot write: their absence stands for it."""
    if not isinstance(value, Mapping):
        return [_without_none(item) for item in value] if isinstance(value, list) else value
    return {key: _without_none(item) for key, item in value.items() if item is not None}


def _date(value: Any) -> str:
    assert isinstance(value, datetime.date | datetime.time), "TOML has no other type that JSON lacks"
    return value.isoformat()
