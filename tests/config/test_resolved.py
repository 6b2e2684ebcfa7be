import tomllib

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pydantic import BaseModel

from jaxpar.config import Config, changed_keys, dump_toml, parse_config
from jaxpar.config import optimizers as o
from jaxpar.config import schema as s


class Own(BaseModel):
    depth: int | None = 3
    rate: float = 0.5
    labels: dict[str, tuple[float, ...]] = {}


class Named(BaseModel):
    name: str
    depth: int = 1


PRESETS = {"small": lambda: Named(name="small", depth=4)}

texts = st.text(max_size=8)
positive = st.integers(1, 10**6)
positive_floats = st.floats(min_value=0, exclude_min=True, allow_infinity=False)
sources = st.one_of(
    st.builds(s.PackagedSource, weight=positive_floats),
    st.builds(s.TextSource, paths=st.lists(texts, max_size=3).map(tuple), text_key=texts, weight=positive_floats),
    st.builds(s.TokenFileSource, paths=st.just(("a.bin",)), format=st.sampled_from(["nanogpt", "llm.c"])),
    st.builds(s.MegatronSource, prefixes=st.lists(texts, max_size=2).map(tuple), weight=positive_floats),
)
tokenizers = st.one_of(
    st.builds(s.ByteTokenizer),
    st.builds(s.BpeTokenizer, vocab_size=st.integers(257, 10**6)),
    st.builds(s.HuggingFaceTokenizer, path=texts, end_of_text=texts),
    st.builds(s.TiktokenTokenizer, path=texts, pattern=texts),
)
schedules = st.one_of(
    st.builds(s.ConstantSchedule, warmup_steps=st.integers(0, 99)),
    st.builds(s.CosineSchedule, final_fraction=st.floats(0, 1)),
    st.builds(s.LinearSchedule, final_fraction=st.floats(0, 1)),
    st.builds(s.WsdSchedule, decay_steps=positive),
)
optimizers = st.one_of(
    st.builds(o.AdamW, learning_rate=positive_floats, no_decay=st.lists(texts, max_size=2).map(tuple)),
    st.builds(o.AdamW8bit, block_size=positive, beta2=st.floats(0, 1, exclude_max=True)),
    st.builds(o.SGD, nesterov=st.booleans(), layer_decay=st.floats(0, 1, exclude_min=True)),
    st.builds(o.Adafactor, clipping_threshold=positive_floats | st.just(float("inf")), relative_step=st.booleans()),
    st.builds(o.SM3, variant=st.sampled_from(["I", "II"])),
    st.builds(o.Lion, weight_decay=st.floats(0, allow_infinity=False)),
    st.builds(o.Muon, ns_steps=positive),
)
models = st.one_of(
    st.builds(
        Own,
        depth=st.integers(),
        rate=st.floats(allow_nan=False),
        labels=st.dictionaries(texts, st.lists(st.floats(allow_nan=False), max_size=2).map(tuple), max_size=2),
    ),
    st.builds(Named, name=st.just("small"), depth=st.integers()),
)
configs = st.builds(
    Config,
    run=st.builds(s.RunConfig, dir=texts, seed=st.integers(0, 2**70)),
    model=models,
    data=st.builds(
        s.DataConfig,
        sources=st.lists(sources, min_size=1, max_size=3).map(tuple),
        tokenizer=tokenizers,
        prefetch=positive,
    ),
    train=st.builds(s.TrainConfig, max_grad_norm=positive_floats | st.just(float("inf"))),
    optimizer=optimizers,
    schedule=schedules,
    parallel=st.builds(s.ParallelConfig, tensor=st.just(-1) | positive, sequence_parallel=st.booleans()),
    runtime=st.builds(s.RuntimeConfig, xla_flags=st.lists(texts, max_size=2).map(tuple)),
)


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(configs)
def test_a_dumped_configuration_loads_again(config):
    table = tomllib.loads(dump_toml(config, presets=PRESETS))
    assert parse_config(table, presets=PRESETS) == config


def keys_of(schema: type[BaseModel]) -> set[str]:
    return set(schema.model_fields)


def test_every_key_is_written(load, presets):
    table = tomllib.loads(dump_toml(load(""), presets=presets))
    assert list(table) == list(Config.model_fields)
    for name, section in table.items():
        if name != "model":
            assert section.keys() == keys_of(type(getattr(load(""), name)))
    assert table["model"] == {
        "name": "tiny", "num_layers": 2, "num_heads": 4, "num_kv_heads": 4, "activation": "gelu", "windows": [0],
    }  # fmt: skip


def test_a_users_class_is_written_as_a_reference():
    table = tomllib.loads(dump_toml(Config(model=Own()), presets=PRESETS))
    assert table["model"] == {"name": f"{__name__}:Own", "depth": 3, "rate": 0.5, "labels": {}}


def test_a_model_put_together_in_python_keeps_its_fields_under_its_class():
    config = Config(model=Named(name="mine", depth=12))
    table = tomllib.loads(dump_toml(config, presets=PRESETS))
    assert table["model"] == {"name": f"{__name__}:Named", "depth": 12}
    assert parse_config(table, presets=PRESETS).model.depth == 12


def test_a_model_that_would_not_load_again_is_refused():
    with pytest.raises(
        ValueError, match=r"cannot be written as a \[model\] section: name = .*:Own\" gives a model that differs"
    ):
        dump_toml(Config(model=Own(depth=None)), presets=PRESETS)

    class Local(BaseModel):
        pass

    with pytest.raises(ValueError, match=r"cannot be written as a \[model\] section: .*Local\" names nothing"):
        dump_toml(Config(model=Local()), presets=PRESETS)


def test_equal_configurations_have_no_changed_keys(load):
    assert changed_keys(load(""), load("")) == {}


def test_changed_keys_have_their_old_and_new_values(load):
    old = load("")
    new = load(
        'optimizer.no_decay = ["a"]', "run.seed=3", "model.num_layers=5", "model.windows=[1]", "parallel.tensor=2"
    )
    assert changed_keys(old, new) == {
        "run.seed": (0, 3),
        "model.num_layers": (2, 5),
        "model.windows": ((0,), (1,)),
        "optimizer.no_decay": ((), ("a",)),
        "parallel.tensor": (1, 2),
    }


def test_a_changed_variant_changes_the_keys_that_only_one_has(load):
    assert changed_keys(load(""), load("", "schedule.name=wsd", "schedule.final_fraction=0.1")) == {
        "schedule.name": ("cosine", "wsd"),
        "schedule.decay_steps": (None, 100),
    }
    assert changed_keys(load("", "model.name=rotary", "model.num_layers=2"), load("")) == {
        "model.name": ("rotary", "tiny"),
        "model.rope.theta": (5e5, None),
        "model.rope.scaling": (8.0, None),
    }


def test_added_entries_of_an_array_of_tables(load):
    two = load('[[data.sources]]\nname = "packaged"\n[[data.sources]]\nname = "packaged"\nweight = 2.0')
    assert changed_keys(load(""), two) == {
        "data.sources.1.name": (None, "packaged"),
        "data.sources.1.weight": (None, 2.0),
    }
