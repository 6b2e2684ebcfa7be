import subprocess
import sys
import types
from pathlib import Path

import pytest
from pydantic import ValidationError

from jaxpar.config import Config, ConfigError, load_config, parse_config
from jaxpar.config.schema import (
    BpeTokenizer,
    CosineSchedule,
    DataConfig,
    PackagedSource,
    TextSource,
    TrainConfig,
    WsdSchedule,
)


def test_a_file_with_a_model_alone_takes_every_default(load, presets):
    assert load("") == Config(model=presets["tiny"]())


def test_tables_arrays_and_numbers_arrive(load):
    config = load(
        """
        [train]
        num_steps = 7
        max_grad_norm = inf
        [[data.sources]]
        name = "text"
        paths = ["a.txt", "b/*.txt"]
        weight = 2
        [[data.sources]]
        name = "packaged"
        [schedule]
        name = "wsd"
        decay_steps = 3
        """
    )
    assert config.train == TrainConfig(num_steps=7, max_grad_norm=float("inf"))
    assert config.data.sources == (TextSource(paths=("a.txt", "b/*.txt"), weight=2.0), PackagedSource())
    assert config.schedule == WsdSchedule(decay_steps=3)


def test_a_variant_without_a_name_is_the_default_one(load):
    config = load("schedule.warmup_steps = 5\ndata.tokenizer.vocab_size = 300")
    assert config.schedule == CosineSchedule(warmup_steps=5)
    assert config.data == DataConfig(tokenizer=BpeTokenizer(vocab_size=300))


def test_the_configuration_is_frozen(load):
    with pytest.raises(ValidationError, match="frozen"):
        load("").train.num_steps = 3


def test_parse_config_leaves_its_table_alone(presets):
    table = {"model": {"name": "tiny"}, "schedule": {"warmup_steps": 1}}
    parse_config(table, presets=presets)
    assert table == {"model": {"name": "tiny"}, "schedule": {"warmup_steps": 1}}


def test_parse_config_names_its_source(presets):
    with pytest.raises(ConfigError, match=r"^checkpoint 5: run\.seed=-1 must be a whole number >= 0$"):
        parse_config({"model": {"name": "tiny"}, "run": {"seed": -1}}, source="checkpoint 5", presets=presets)


def test_presets_come_from_jaxpar_models(monkeypatch, presets):
    models = types.ModuleType("jaxpar.models")
    models.PRESETS = presets
    monkeypatch.setitem(sys.modules, "jaxpar.models", models)
    assert parse_config({"model": {"name": "rotary"}}).model == presets["rotary"]()


def message_for(path: Path) -> str:
    with pytest.raises(ConfigError) as raised:
        load_config(path)
    return str(raised.value)


def test_a_missing_file_is_answered_with_the_nearest(tmp_path):
    (tmp_path / "quickstart.toml").touch()
    (tmp_path / "gpt2.toml").touch()
    wrong = tmp_path / "quikstart.toml"
    assert message_for(wrong) == f"{wrong} does not exist; did you mean {tmp_path}/quickstart.toml?"
    wrong = tmp_path / "gpt2"
    assert message_for(wrong) == f"{wrong} does not exist; did you mean {tmp_path}/gpt2.toml?"
    wrong = tmp_path / "zzz"
    assert message_for(wrong) == f"{wrong} does not exist; TOML files there: gpt2.toml, quickstart.toml"


def test_a_missing_file_in_an_empty_or_missing_directory(tmp_path):
    assert message_for(tmp_path / "a.toml") == f"{tmp_path}/a.toml does not exist; {tmp_path} holds no TOML file"
    wrong = tmp_path / "no" / "a.toml"
    assert message_for(wrong) == f"{wrong} does not exist; neither does its directory {tmp_path}/no"


def test_a_directory_and_a_binary_file(tmp_path):
    assert message_for(tmp_path) == f"{tmp_path} cannot be read: Is a directory"
    binary = tmp_path / "binary.toml"
    binary.write_bytes(b"a = 1\xff")
    assert message_for(binary) == f"{binary} is not a UTF-8 text file: invalid start byte at byte 5"


@pytest.mark.parametrize(
    ("text", "line"),
    [("[train]\nnum_steps 7\n[run]\n", 2), ("[run]\nseed = 1\nseed = 2\n", 3), ("[run]\ndir = [1,\n\n", 3), ("a", 1)],
)
def test_broken_toml_names_the_line(path, text, line):
    path.write_text(text)
    assert message_for(path).startswith(f"{path}, line {line}: not valid TOML: ")


def test_importing_the_configuration_does_not_import_jax():
    code = "import sys, jaxpar.config; sys.exit(sorted({'jax', 'flax', 'jaxpar.models'} & sys.modules.keys()) or 0)"
    root = Path(__file__).parents[2]
    finished = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True)
    assert (finished.returncode, finished.stderr) == (0, "")
