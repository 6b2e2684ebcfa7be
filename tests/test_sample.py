"""Continued texts: which tokens, how many, and the same on every mesh."""

import dataclasses
import functools
from collections.abc import Callable, Sequence

import jax
import numpy as np
import pytest
from flax import nnx

from jaxpar.config import Config, parse_config
from jaxpar.plan import Plan, make_plan
from jaxpar.sample import continue_tokens

VOCAB_SIZE = 50
END_OF_TEXT = 49
LENGTH = 8
PROMPT = [3, 1, 4]


def _config(seed: int = 0, **parallel: int) -> Config:
    return parse_config(
        {
            "run": {"seed": seed},
            "model": {
                "name": "transformer", "num_layers": 1, "embed_dim": 16, "num_heads": 2, "mlp_dim": 16, "init_std": 0.3,
                "vocab_multiple": 64,
            },
            "data": {"sequence_length": LENGTH},
            "parallel": {"data": 1} | parallel,
        }
    )  # fmt: skip


@pytest.fixture(scope="module")
def one_device() -> Plan:
    return make_plan(_config(), jax.devices()[:1], VOCAB_SIZE)


@pytest.fixture(scope="module")
def params(one_device: Plan) -> dict:
    """Initial weights; logits that differ by more than rounding."""
    return jax.device_get(jax.jit(one_device.make_params)())


def _continue(plan: Plan, params: dict, prompt: Sequence[int] = PROMPT, **changes: float) -> list[int]:
    arguments = {"num_tokens": 12, "temperature": 0.0, "vocab_size": VOCAB_SIZE, "end_of_text": END_OF_TEXT} | changes
    return continue_tokens(plan, jax.device_put(params, plan.param_shardings), prompt, **arguments)  # type: ignore[arg-type]


def _likeliest(plan: Plan, params: dict, tokens: Sequence[int]) -> int:
    """The next token from a pass over the last `LENGTH` tokens, without a mesh."""
    window = np.zeros((1, LENGTH), np.int32)
    size = len(tokens[-LENGTH:])
    window[0, :size] = tokens[-LENGTH:]
    return int(_logits(plan)(params, window)[0, size - 1, :VOCAB_SIZE].argmax())


@functools.cache
def _logits(plan: Plan) -> Callable[..., jax.Array]:
    positions = np.arange(LENGTH, dtype=np.int32)[None]

    def logits(params: dict, tokens: jax.Array) -> jax.Array:
        inputs = {"tokens": tokens, "positions": positions, "segment_ids": None}
        return nnx.merge(plan.structure, params)(inputs).logits()

    return jax.jit(logits)


def test_temperature_0_takes_the_likeliest_token_after_the_last_ones(one_device: Plan, params: dict) -> None:
    """Also once the text is longer than a sequence, and for a prompt that is longer to begin with."""
    for prompt in (PROMPT, [*range(20)]):
        found = _continue(one_device, params, prompt)
        assert len(found) == 12
        for count in (0, 5, 11):
            assert found[count] == _likeliest(one_device, params, [*prompt, *found[:count]])


def test_draws_depend_on_seed_and_temperature_alone(one_device: Plan, params: dict) -> None:
    found = _continue(one_device, params, temperature=1.5)
    assert found == _continue(one_device, params, temperature=1.5)
    assert found != _continue(one_device, params)
    other = dataclasses.replace(one_device, config=_config(seed=1))
    assert found != _continue(other, params, temperature=1.5)
    assert _continue(one_device, params, temperature=1e-4) == _continue(one_device, params)


def test_a_text_ends_before_its_end_of_text(one_device: Plan, params: dict) -> None:
    found = _continue(one_device, params)
    end = found[4]
    assert _continue(one_device, params, end_of_text=end) == found[: found.index(end)]


def test_entries_that_the_tokenizer_lacks_are_never_drawn(one_device: Plan, params: dict) -> None:
    """The padding of the vocabulary, and what a declared `model.vocab_size` adds to the tokenizer's."""
    biased = {**params, "embedding": {"table": params["embedding"]["table"].copy()}}
    biased["embedding"]["table"][20:] *= 100.0
    assert max(_continue(one_device, biased, temperature=2.0, num_tokens=40)) >= 20
    assert max(_continue(one_device, biased, temperature=2.0, num_tokens=40, vocab_size=20)) < 20


@pytest.mark.parametrize("layout", [{"data": 2, "fsdp": 2, "tensor": 2}, {"data": 8}], ids=str)
def test_8_devices_write_the_same_text(one_device: Plan, params: dict, layout: dict[str, int]) -> None:
    plan = make_plan(_config(**layout), jax.devices(), VOCAB_SIZE)
    assert _continue(plan, params, temperature=1.0) == _continue(one_device, params, temperature=1.0)


def test_a_prompt_without_tokens_is_refused(one_device: Plan, params: dict) -> None:
    with pytest.raises(ValueError, match="the prompt has no tokens"):
        _continue(one_device, params, [])
