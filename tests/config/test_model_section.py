import enum
import re
import sys
from pathlib import Path
from typing import Annotated, Literal

import pytest
from pydantic import BaseModel, ConfigDict, Field

from jaxpar.config import ConfigError, dump_toml, parse_config


class Kind(enum.Enum):
    DENSE = "dense"
    SPARSE = "sparse"


class Attention(BaseModel):
    name: Literal["attention"] = "attention"
    heads: int = 4


class Convolution(BaseModel):
    name: Literal["convolution"] = "convolution"
    width: int = 3


class Block(BaseModel):
    width: int = 1


class Own(BaseModel):
    """A user's class: no field `name`, unknown keys ignored by pydantic's default, strict."""

    model_config = ConfigDict(strict=True)

    depth: int
    kind: Kind = Kind.DENSE
    shape: tuple[int, float] = (1, 2.0)
    weights: Path | None = None
    mixer: Annotated[Attention | Convolution, Field(discriminator="name")] = Attention()
    blocks: list[Block] = []
    scale: int | str = 1

    class Inner(BaseModel):
        size: int = 3


class Named(BaseModel):
    name: str = ""
    depth: int = 1


def make_own() -> Own:
    return Own(depth=7, mixer=Convolution(width=5))


def make_named() -> Named:
    return Named(name="something", depth=9)


def make_nothing() -> None:
    return None


def make_trouble() -> Own:
    raise RuntimeError("no weights")


class NotAModel:
    pass


HERE = __name__
CHOICES = 'presets: tiny, rotary; or your own "package.module:Class"'


def error_of(presets, model) -> str:
    with pytest.raises(ConfigError) as raised:
        parse_config({"model": model} if model is not None else {}, source="FILE", presets=presets)
    return str(raised.value)


def resolve(presets, **section):
    return parse_config({"model": section}, presets=presets).model


def test_keys_change_the_presets_fields(presets):
    model = resolve(presets, name="rotary", num_layers=3, windows=[0, 8], rope={"scaling": 2})
    assert model.model_dump() == {
        **presets["rotary"]().model_dump(),
        "num_layers": 3,
        "windows": (0, 8),
        "rope": {"theta": 5e5, "scaling": 2.0},
    }


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (None, f"the section [model] is missing; write model.name; {CHOICES}"),
        ("tiny", f'model="tiny" must be a table; write model.name; {CHOICES}'),
        ({"num_layers": 3}, f"model.name is missing; {CHOICES}"),
        ({"name": 3}, f"model.name=3 must be a string; {CHOICES}"),
        ({"name": "rotory"}, f'model.name="rotory" is not a preset (did you mean "rotary"?); {CHOICES}'),
        ({"name": "tiny", "num_layers": "x"}, 'model.num_layers="x" must be a whole number > 0'),
        ({"name": "tiny", "rope": {"theta": "x"}}, 'model.rope.theta="x" must be a number'),
        (
            {"name": "rotary", "rope": {"thetta": 1}},
            "unknown key model.rope.thetta (did you mean model.rope.theta?); keys of [model.rope]: theta, scaling",
        ),
        (
            {"name": "tiny", "num_layer": 3},
            "unknown key model.num_layer (did you mean model.num_layers?); keys of [model]: name, num_layers, "
            "num_heads, num_kv_heads, activation, rope, windows",
        ),
        ({"name": "tiny", "num_kv_heads": 3}, "[model] num_kv_heads=3 must divide num_heads=4"),
    ],
)
def test_what_is_wrong_with_a_preset(presets, model, message):
    assert error_of(presets, model) == f"FILE: {message}"


def test_a_check_over_several_keys_names_the_file_and_the_command_line(load, path):
    with pytest.raises(ConfigError, match=rf"^{re.escape(str(path))} with the command line: \[model\] num_kv_heads=3 "):
        load('[model]\nname = "tiny"\nnum_heads = 8', "model.num_kv_heads=3")


def test_naming_another_preset_for_a_resolved_file_is_refused(load, presets):
    resolved = dump_toml(load(""), presets=presets)
    # "tiny" has no rope, so that a key is left for the preset to decide.
    assert load(resolved, "model.name=rotary").model.rope == presets["rotary"]().rope
    resolved = dump_toml(load("", "model.name=rotary"), presets=presets)
    with pytest.raises(
        ConfigError, match=r'^on the command line: model.name="tiny" changes nothing, because the file '
    ):
        load(resolved, "model.name=tiny")
    assert load(resolved, "model={name='tiny'}").model == presets["tiny"]()


def test_a_users_class(presets):
    model = resolve(presets, name=f"{HERE}:Own", depth=2, kind="sparse", shape=[3, 4], weights="a/b")
    assert model == Own(depth=2, kind=Kind.SPARSE, shape=(3, 4.0), weights=Path("a/b"))
    assert resolve(presets, name=f"{HERE}:Own.Inner", size=4) == Own.Inner(size=4)


def test_a_users_function(presets):
    assert resolve(presets, name=f"{HERE}:make_own") == make_own()
    assert resolve(presets, name=f"{HERE}:make_own", depth=1).depth == 1


def test_nested_variants_of_a_users_class(presets):
    partly = resolve(presets, name=f"{HERE}:Own", depth=2, mixer={"heads": 8})
    assert partly.mixer == Attention(heads=8)
    other = resolve(presets, name=f"{HERE}:make_own", mixer={"name": "attention"})
    assert other.mixer == Attention()
    same = resolve(presets, name=f"{HERE}:make_own", mixer={"name": "convolution"})
    assert same.mixer == Convolution(width=5)


def test_a_field_called_name_holds_the_reference(presets):
    assert resolve(presets, name=f"{HERE}:make_named") == Named(name=f"{HERE}:make_named", depth=9)


@pytest.mark.parametrize(
    ("section", "message"),
    [
        (
            {"depth": 2, "dept": 3},
            r"unknown key model\.dept \(did you mean model\.depth\?\); keys of \[model\]: depth, ",
        ),
        (
            {"depth": 2, "blocks": [{}, {"widht": 3}]},
            r"unknown key model\.blocks\.1\.widht \(did you mean .*\.width\?\);",
        ),
        (
            {"depth": 2, "mixer": {"width": 3}},
            r'model\.mixer\.width belongs to model\.mixer\.name="convolution", but model\.mixer\.name is "attention"; ',
        ),
        ({}, r"model\.depth is missing; it must be a whole number$"),
        ({"depth": 2.5}, r"model\.depth=2\.5 must be a whole number$"),
        ({"depth": 2, "kind": "spars"}, r'model\.kind="spars" must be one of "dense", "sparse"$'),
        ({"depth": 2, "shape": [1]}, r"model\.shape\.1 is missing; it must be a number$"),
        ({"depth": 2, "scale": 1.5}, r"model\.scale=1\.5 must be a whole number or a string$"),
        ({"depth": 2, "mixer": {"name": "x"}}, r'model\.mixer\.name="x" must be one of "attention", "convolution"$'),
    ],
)
def test_what_is_wrong_with_a_users_class(presets, section, message):
    assert re.match(f"FILE: {message}", error_of(presets, {"name": f"{HERE}:Own", **section}))


WANTED = "must be a pydantic model class, or a function without arguments that returns an instance of one"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "no_such_package.model:X",
            "cannot be imported: ModuleNotFoundError: No module named 'no_such_package'; it is looked",
        ),
        (":X", 'must have the form "package.module:Class"'),
        (".relative:X", 'must have the form "package.module:Class"'),
        (f"{HERE}:", 'must have the form "package.module:Class"'),
        (f"{HERE}:Onw", "names nothing: "),
        (f"{HERE}:NotAModel", f"{WANTED}, not <class "),
        (f"{HERE}:HERE", f"{WANTED}, not '"),
        (f"{HERE}:make_nothing", f"{WANTED}; it returned None"),
        (f"{HERE}:make_trouble", "failed when called: RuntimeError: no weights"),
    ],
)
def test_references_that_lead_nowhere(presets, name, message):
    assert error_of(presets, {"name": name}).startswith(f'FILE: model.name="{name}" {message}')


def test_a_misspelt_class_is_answered_with_the_nearest(presets):
    assert error_of(presets, {"name": f"{HERE}:Nmaed"}).endswith('has no Nmaed (did you mean "Named"?)')


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("import no_such_package", "ModuleNotFoundError: No module named 'no_such_package'"),
        ("1 / 0", "ZeroDivisionError: division by zero"),
        ("x =", "SyntaxError: invalid syntax (broken_model.py, line 1)"),
    ],
)
def test_a_users_module_that_fails_is_quoted(presets, monkeypatch, tmp_path, source, message):
    (tmp_path / "broken_model.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "broken_model", raising=False)
    name = "broken_model:X"
    assert error_of(presets, {"name": name}) == f'FILE: model.name="{name}" cannot be imported: {message}'
