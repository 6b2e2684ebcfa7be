"""Each line of a `ConfigError`, word for word: FILE stands for the file's path."""

import pytest

from jaxpar.config import ConfigError

SCHEDULES = '"constant", "cosine", "linear", "wsd"'
OPTIMIZERS = '"adamw", "adamw8bit", "sgd", "adafactor", "sm3", "lion", "muon"'
SOURCES = '"packaged", "text", "token_files", "megatron"'
PARALLEL = (
    "pipe, data, fsdp, expert, context, tensor, zero_stage, sequence_parallel, context_method, bucket_bytes, "
    "simulated_devices"
)


def lines(load, path, text: str, *overrides: str) -> list[str]:
    with pytest.raises(ConfigError) as raised:
        load(text, *overrides)
    return str(raised.value).replace(str(path), "FILE").split("\n")


WRONG_FILES = {
    "unknown key": (
        "parallel.tensr = 2",
        f"FILE: unknown key parallel.tensr (did you mean parallel.tensor?); keys of [parallel]: {PARALLEL}",
    ),
    "key of another section": (
        "parallel.num_steps = 2",
        f"FILE: unknown key parallel.num_steps (did you mean train.num_steps?); keys of [parallel]: {PARALLEL}",
    ),
    "key that is like no other": (
        "checkpoint.zzz = 2",
        "FILE: unknown key checkpoint.zzz; keys of [checkpoint]: every_steps, directory, keep, keep_every_steps, "
        "keep_best, timeout_seconds",
    ),
    "whole number": ("train.num_steps = true", "FILE: train.num_steps=true must be a whole number > 0"),
    "fraction for a whole number": (
        "train.num_steps = 1e3",
        "FILE: train.num_steps=1000.0 must be a whole number > 0; write 1000",
    ),
    "quoted number": (
        'train.num_steps = "100"',
        'FILE: train.num_steps="100" must be a whole number > 0; write 100 without quotes',
    ),
    "number": ('loss.z_loss = "a"', 'FILE: loss.z_loss="a" must be a number >= 0'),
    "not a number": ("loss.z_loss = nan", "FILE: loss.z_loss=nan must be a number >= 0"),
    "boolean": ("logging.tensorboard = 1", "FILE: logging.tensorboard=1 must be true or false"),
    "string": ("run.dir = 5", 'FILE: run.dir=5 must be a string; write "5"'),
    "date": ("run.dir = 2024-01-02", 'FILE: run.dir=2024-01-02 must be a string; write "2024-01-02"'),
    "array": (
        'runtime.xla_flags = "auto"',
        'FILE: runtime.xla_flags="auto" must be an array of strings; write ["auto"]',
    ),
    "entry of an array": ('runtime.xla_flags = ["a", 1]', 'FILE: runtime.xla_flags.1=1 must be a string; write "1"'),
    "section": ("run = 3", "FILE: run=3 must be a table"),
    "variant without a table": ('schedule = "wsd"', 'FILE: schedule="wsd" must be a table; write schedule.name="wsd"'),
    "long value": (
        f'train.num_steps = "{"x" * 99}"',
        f'FILE: train.num_steps="{"x" * 56}... must be a whole number > 0',
    ),
    "bound": ("train.batch_size = 0", "FILE: train.batch_size=0 must be a whole number > 0"),
    "range": ("schedule.final_fraction = 1.5", "FILE: schedule.final_fraction=1.5 must be a number from 0 to 1"),
    "half-open range": ("optimizer.beta1 = 1.0", "FILE: optimizer.beta1=1.0 must be a number >= 0 and < 1"),
    "axis of size 0": (
        "parallel.tensor = 0",
        "FILE: parallel.tensor=0 must be a whole number > 0, or -1 for the devices that are left",
    ),
    "axis of negative size": ("parallel.data = -2", "FILE: parallel.data=-2 must be a whole number >= -1, not 0"),
    "choice": (
        'remat.policy = "ful"',
        'FILE: remat.policy="ful" must be one of "none", "full", "dots" (did you mean "full"?)',
    ),
    "empty array": ("data.sources = []", "FILE: data.sources=[] must be an array of tables with at least 1 entry"),
    "variant": (
        'schedule.name = "cosin"',
        f'FILE: schedule.name="cosin" must be one of {SCHEDULES} (did you mean "cosine"?)',
    ),
    "variant that is no string": ("schedule.name = [1]", f"FILE: schedule.name=[1] must be one of {SCHEDULES}"),
    "optimizer": (
        'optimizer.name = "adam"',
        f'FILE: optimizer.name="adam" must be one of {OPTIMIZERS} (did you mean "adamw"?)',
    ),
    "key of another optimizer": (
        'optimizer = {name = "sm3", beta1 = 0.9}',
        'FILE: optimizer.beta1 belongs to optimizer.name="adamw" or "adamw8bit" or "lion", but optimizer.name is '
        '"sm3"; keys of optimizer.name="sm3": name, learning_rate, variant, momentum, weight_decay, no_decay, '
        "layer_decay",
    ),
    "key of no optimizer": (
        'optimizer = {name = "muon", ns_step = 3}',
        "FILE: unknown key optimizer.ns_step (did you mean optimizer.ns_steps?); "
        'keys of optimizer.name="muon": name, learning_rate, momentum, nesterov, ns_steps, adam_beta1, adam_beta2, '
        "adam_epsilon, weight_decay, no_decay, layer_decay",
    ),
    "variant in an array": ("[[data.sources]]", f"FILE: data.sources.0.name is missing; it must be one of {SOURCES}"),
    "wrong variant in an array": (
        '[[data.sources]]\nname = "packaged"\n[[data.sources]]\nname = "txt"',
        f'FILE: data.sources.1.name="txt" must be one of {SOURCES} (did you mean "text"?)',
    ),
    "key of another variant": (
        'schedule = {name = "cosine", decay_steps = 3}',
        'FILE: schedule.decay_steps belongs to schedule.name="wsd", but schedule.name is "cosine"; '
        'keys of schedule.name="cosine": name, warmup_steps, final_fraction',
    ),
    "key of several other variants": (
        'schedule = {name = "constant", final_fraction = 0.1}',
        'FILE: schedule.final_fraction belongs to schedule.name="cosine" or "linear" or "wsd", but schedule.name is '
        '"constant"; keys of schedule.name="constant": name, warmup_steps',
    ),
    "key of another than the default variant": (
        "schedule.decay_steps = 3",
        'FILE: schedule.decay_steps belongs to schedule.name="wsd", but schedule.name is "cosine"; '
        'keys of schedule.name="cosine": name, warmup_steps, final_fraction',
    ),
    "key of no variant": (
        'schedule = {name = "wsd", decay_step = 3}',
        "FILE: unknown key schedule.decay_step (did you mean schedule.decay_steps?); "
        'keys of schedule.name="wsd": name, warmup_steps, decay_steps, final_fraction',
    ),
    "missing key": ('data.tokenizer.name = "huggingface"', "FILE: data.tokenizer.path is missing; it must be a string"),
}


@pytest.mark.parametrize(("text", "expected"), WRONG_FILES.values(), ids=WRONG_FILES.keys())
def test_what_is_wrong_in_a_file(load, path, text, expected):
    assert lines(load, path, text) == [expected]


def test_unknown_sections_and_keys_outside_of_sections(load, path):
    [section] = lines(load, path, "[optmizer]\nbeta1 = 0.5")
    assert section.startswith(
        "FILE: unknown section [optmizer] (did you mean [optimizer]?); sections: run, model, data"
    )
    [key] = lines(load, path, "seed = 3")
    assert key.startswith("FILE: seed stands outside of the sections (did you mean run.seed?); sections: run, model")


def test_every_problem_is_reported_at_once(load, path):
    assert lines(
        load,
        path,
        'run.sed = 1\nremat.policy = "x"\n[model]\nname = "tiny"\nnum_layers = 0',
        "train.num_steps=none",
        "train.batch_size",
        "model.activation=relu",
    ) == [
        "on the command line: train.batch_size: an override is KEY=VALUE, such as train.num_steps=100",
        "FILE: model.num_layers=0 must be a whole number > 0",
        'on the command line: model.activation="relu" must be one of "gelu", "silu" (did you mean "gelu"?)',
        "FILE: unknown key run.sed (did you mean run.seed?); keys of [run]: dir, seed",
        'on the command line: train.num_steps="none" must be a whole number > 0',
        'FILE: remat.policy="x" must be one of "none", "full", "dots"',
    ]


def test_one_bad_entry_does_not_make_an_array_too_short(load, path):
    assert lines(load, path, '[[data.sources]]\nname = "packaged"\nweight = 0') == [
        "FILE: data.sources.0.weight=0 must be a number > 0"
    ]


COMMAND_LINE = {
    "value": ("run.seed=-1", "run.seed=-1 must be a whole number >= 0"),
    "unknown key": ("run.sed=1", "unknown key run.sed (did you mean run.seed?); keys of [run]: dir, seed"),
    "string that the shell unquoted": ("run.dir=5", "run.dir=5 must be a string; write run.dir='\"5\"'"),
    "Python's boolean": (
        "logging.tensorboard=True",
        'logging.tensorboard="True" must be true or false; write true without quotes',
    ),
    "table": ("run={seed = -1}", "run.seed=-1 must be a whole number >= 0"),
    "missing key of a new variant": (
        "data.tokenizer.name=huggingface",
        "data.tokenizer.path is missing; it must be a string",
    ),
    "key below a key": ("run.dir.x=1", "run.dir={x = 1} must be a string"),
}


@pytest.mark.parametrize(("override", "expected"), COMMAND_LINE.values(), ids=COMMAND_LINE.keys())
def test_what_is_wrong_on_the_command_line(load, path, override, expected):
    assert lines(load, path, "", override) == [f"on the command line: {expected}"]


def test_a_key_that_the_command_lines_name_asks_for_is_missing_there(load, path):
    assert lines(load, path, 'data.tokenizer.name = "bytes"', "data.tokenizer.name=huggingface") == [
        "on the command line: data.tokenizer.path is missing; it must be a string"
    ]


def test_the_file_is_named_for_its_own_keys_in_a_section_that_the_command_line_changes(load, path):
    assert lines(load, path, "run.seed = -1", "run.dir=x") == ["FILE: run.seed=-1 must be a whole number >= 0"]


def test_changing_a_variant_does_not_drop_the_keys_of_the_old_one(load, path):
    text = 'schedule = {name = "wsd", warmup_steps = 1, decay_steps = 3, final_fraction = 0.5}'
    assert lines(load, path, text, "schedule.name=constant") == [
        'on the command line: schedule.name="constant" does not go with keys that the file sets for another name: '
        'schedule.decay_steps (of "wsd"), schedule.final_fraction (of "cosine" or "linear" or "wsd"); '
        "'schedule={name=\"constant\"}' replaces the whole table"
    ]
    assert load(text, 'schedule={name="constant"}').schedule.model_dump() == {"name": "constant", "warmup_steps": 0}


def test_a_key_of_another_variant_given_with_the_new_name_on_the_command_line(load, path):
    text = 'schedule = {name = "cosine"}'
    [line] = lines(load, path, text, "schedule.name=linear", "schedule.decay_steps=1")
    assert line.startswith('on the command line: schedule.decay_steps belongs to schedule.name="wsd", but')
