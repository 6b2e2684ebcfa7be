import pytest
from pydantic import BaseModel

from jaxpar.config import Config, help_text
from jaxpar.config.fields import field_annotation, unwrap, variants


@pytest.fixture
def text(presets) -> str:
    return help_text(presets=presets)


def flat(text: str) -> str:
    """The text with every run of white space as one blank, so that wrapping does not matter."""
    return " ".join(text.split())


def described_keys(schema: type[BaseModel]):
    """(key, description) of every key, those of sections, variants and entries of arrays included."""
    for key, field in schema.model_fields.items():
        annotation, _ = unwrap(field_annotation(field))
        items = getattr(annotation, "__args__", ())
        inner = variants(annotation) or (variants(items[0]) if items else {})
        if inner:
            for variant in inner.values():
                yield from described_keys(variant)
        elif isinstance(annotation, type) and issubclass(annotation, BaseModel):
            yield from described_keys(annotation)
        elif key != "name":
            yield key, field.description


def test_every_key_is_described(text):
    keys = list(described_keys(Config))
    assert len(keys) > 50
    for key, description in keys:
        assert f"\n  {key} " in text or f"\n    {key} " in text
        assert description is None or flat(description) in flat(text)


def test_lines_fit_100_columns(text):
    assert max(map(len, text.splitlines())) <= 100


def test_types_and_defaults(text):
    assert "num_steps = 1000 whole number > 0. Optimizer steps." in flat(text)
    assert 'policy = "none" one of "none", "full", "dots". ' in flat(text)
    assert "paths (required) array of strings. Files or glob patterns." in flat(text)
    assert "label_smoothing = 0.0 number >= 0 and < 1. Share" in flat(text)
    assert "tensor = 1 whole number >= -1, not 0. Devices" in flat(text)


def test_variants_come_with_their_keys(text):
    schedule = text[text.index("[schedule]") : text.index("[parallel]")]
    assert 'name = "cosine" one of "constant", "cosine", "linear", "wsd". Each name has keys of its own' in flat(
        schedule
    )
    wsd = schedule[schedule.index('with name = "wsd"') :]
    assert "decay_steps = 100 " in wsd
    assert schedule.count("decay_steps") == 1
    assert "[data.tokenizer]" in text
    assert "[[data.sources]]" in text
    assert 'Default: [{name = "packaged", weight = 1.0}].' in flat(text)


def test_the_models_presets_and_fields(text):
    model = flat(text[text.index("[model]") : text.index("[data]")])
    assert "Presets: tiny, rotary." in model
    assert "num_layers = 2 whole number > 0. Layers." in model
    assert 'activation = "gelu" one of "gelu", "silu". Nonlinearity.' in model
    assert "rope (not set) table. Rotary positions; absent for none." in model
    assert "[model.rope] Rotary positions. theta = 10000.0 number. Base." in model
