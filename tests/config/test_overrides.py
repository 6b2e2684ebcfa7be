import datetime

import pytest

from jaxpar.config.overrides import apply_overrides, parse_value

TABLE = {"run": {"seed": 1}, "data": {"sources": [{"name": "a", "weight": 1.0}, {"name": "b"}]}}


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("3", 3),
        ("3.0", 3.0),
        ("1e-3", 1e-3),
        ("inf", float("inf")),
        ("true", True),
        ('"3"', "3"),
        ('""', ""),
        ("'a b'", "a b"),
        ("[1, 2]", [1, 2]),
        ('{name = "x", a.b = 1}', {"name": "x", "a": {"b": 1}}),
        ("2024-01-02", datetime.date(2024, 1, 2)),
        ("adafactor", "adafactor"),
        ("runs/a b", "runs/a b"),
        ("True", "True"),
        ("my.module:Class", "my.module:Class"),
        ("a=b", "a=b"),
        ("#1", "#1"),
    ],
)
def test_values_are_toml_or_bare_words(text, value):
    parsed = parse_value(text)
    assert (parsed, type(parsed)) == (value, type(value))


def test_overrides_change_a_copy():
    overridden = apply_overrides(
        TABLE,
        ["run.seed=2", "run.dir = x", "data.sources.1.weight=2.5", "a.b.c=1", "data.sources.0={name='c'}", "a.d=e=f"],
    )
    assert overridden.problems == ()
    assert overridden.table == {
        "run": {"seed": 2, "dir": "x"},
        "data": {"sources": [{"name": "c"}, {"name": "b", "weight": 2.5}]},
        "a": {"b": {"c": 1}, "d": "e=f"},
    }
    assert TABLE["run"] == {"seed": 1}
    assert TABLE["data"]["sources"][1] == {"name": "b"}


def test_the_places_that_were_set_or_made_are_known():
    overridden = apply_overrides(TABLE, ["run.seed=2", "data.sources.1.weight=2.5", "a.b.c=1"])
    assert overridden.places == {("run", "seed"), ("data", "sources", 1, "weight"), ("a",)}


@pytest.mark.parametrize(
    ("overrides", "problem"),
    [
        (["run.seed"], "run.seed: an override is KEY=VALUE, such as train.num_steps=100"),
        (["--verbose"], "--verbose: an override is KEY=VALUE, such as train.num_steps=100"),
        (["run.dir="], "run.dir=: the value is missing; an empty string is run.dir='\"\"'"),
        (["run.dir= "], "run.dir= : the value is missing; an empty string is run.dir='\"\"'"),
        (["=3"], '=3: "" is not a key; a key is words joined by dots, such as train.num_steps'),
        (
            ["run..seed=3"],
            'run..seed=3: "run..seed" is not a key; a key is words joined by dots, such as train.num_steps',
        ),
        (["run.seed=2", "run.seed=3"], "run.seed=3: run.seed was given before, as run.seed=2"),
        (
            ["run.seed=2", "run={dir='x'}"],
            "run={dir='x'}: replaces the table that run.seed=2 was written into; write run={dir='x'} first",
        ),
        (["run.dir=1\ny=1"], "run.dir=1\ny=1: one override sets one key"),
        (["data.sources.2.weight=1"], 'data.sources.2.weight=1: data.sources has no entry "2"; its entries: 0, 1'),
        (["data.sources.first=1"], 'data.sources.first=1: data.sources has no entry "first"; its entries: 0, 1'),
        (["data.files.0.weight=1"], "data.files.0.weight=1: there is no array data.files to take entry 0 of"),
        (["run.seed.x=1"], "run.seed.x=1: run.seed is no table, so it has no key x"),
    ],
)
def test_what_is_wrong_with_an_override(overrides, problem):
    found = apply_overrides(TABLE, overrides).problems
    assert [(each.text, each.on_command_line) for each in found] == [(problem, True)]


@pytest.mark.parametrize("text", ["[1, 2", "{name = 1", '"a', "'a"])
def test_broken_toml_is_not_taken_for_a_word(text):
    [problem] = apply_overrides({}, [f"a={text}"]).problems
    assert problem.text.startswith(f"a={text}: the value is not valid TOML (")


def test_a_table_and_then_a_key_of_it():
    table = {"schedule": {"name": "wsd", "decay_steps": 1}}
    overridden = apply_overrides(table, ['schedule={name="cosine"}', "schedule.warmup_steps=3"])
    assert overridden.table == {"schedule": {"name": "cosine", "warmup_steps": 3}}
