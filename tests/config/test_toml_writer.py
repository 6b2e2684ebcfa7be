import datetime
import math
import tomllib

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from jaxpar.config.toml_writer import write_toml, write_value

scalars = (
    st.booleans()
    | st.integers(-(2**80), 2**80)
    | st.floats(allow_nan=False)
    | st.text()
    | st.datetimes(allow_imaginary=False).map(lambda time: time.replace(fold=0))
    | st.dates()
    | st.times().map(lambda time: time.replace(fold=0))
)
values = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=12,
)


def typed(value):
    """The value with its types, so that 1, 1.0 and True differ, and so do 0.0 and -0.0."""
    if isinstance(value, dict):
        return {key: typed(item) for key, item in value.items()}
    return [typed(item) for item in value] if isinstance(value, list) else (type(value), repr(value))


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.dictionaries(st.text(max_size=4), values, max_size=4))
def test_what_is_written_reads_back_the_same(table):
    assert typed(tomllib.loads(write_toml(table))) == typed(table)


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(values)
def test_a_value_fits_on_one_line_and_reads_back_the_same(value):
    line = write_value(value)
    assert "\n" not in line
    assert typed(tomllib.loads(f"value = {line}")["value"]) == typed(value)


def test_layout():
    table = {
        "data": {"sources": [{"name": "a", "x": {"y": 1}}, {"name": "b"}], "empty": {}, "length": 5},
        "only": {"below": {"names": ("p", "q")}},
        "top": [[], [{"a": 1}, 2]],
    }
    assert write_toml(table) == (
        "top = [[], [{a = 1}, 2]]\n\n"
        "[data]\nlength = 5\n\n"
        '[[data.sources]]\nname = "a"\n\n[data.sources.x]\ny = 1\n\n[[data.sources]]\nname = "b"\n\n'
        "[data.empty]\n\n"
        '[only.below]\nnames = ["p", "q"]\n'
    )


def test_entries_that_hold_only_tables_stay_apart():
    table = {"a": [{"b": {"c": 1}}, {"b": {"c": 2}}]}
    assert write_toml(table) == "[[a]]\n\n[a.b]\nc = 1\n\n[[a]]\n\n[a.b]\nc = 2\n"
    assert tomllib.loads(write_toml(table)) == table


def test_numbers_without_a_size():
    assert write_toml({"a": math.inf, "b": -math.inf, "c": math.nan}) == "a = inf\nb = -inf\nc = nan\n"


def test_a_time_with_its_zone():
    moment = datetime.datetime(2024, 1, 2, 3, tzinfo=datetime.UTC)
    assert tomllib.loads(write_toml({"a": moment})) == {"a": moment}


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (None, "TOML cannot hold None, a NoneType"),
        (b"x", "TOML cannot hold b'x', a bytes"),
        ({1, 2}, r"TOML cannot hold \{1, 2\}, a set"),
        ("\ud800", r"TOML cannot hold the string '\\ud800': it is not valid Unicode"),
    ],
)
def test_what_toml_cannot_hold(value, message):
    with pytest.raises(ValueError, match=f"^{message}$"):
        write_toml({"a": [value]})
