"""Which runs go on with which changes, what a user is told of them, and which are refused."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from jaxpar.checkpoint_store import Notes
from jaxpar.config import Config
from jaxpar.resume import check_run, find_start, stored_config

CONSTANT = {"name": "constant", "warmup_steps": 2}


def _messages(
    old: Config, new: Config, tokenizer: str = "bytes", data: str = "texts", num_updates: int = 5
) -> tuple[str, ...]:
    """Of a run that was saved after step 5."""
    notes = Notes(
        step=5, config=stored_config(old), tokenizer="bytes", data="texts", padded_vocab_size=258,
        num_updates=num_updates, next_sequence=20, loss=None, saved_at="", events="", arrays={},
    )  # fmt: skip
    return check_run(new, tokenizer, data, notes)[0]


def test_a_run_goes_on_with_another_layout_length_and_log(config_of: Callable[..., Config]) -> None:
    old = config_of(schedule=CONSTANT)
    assert _messages(old, old) == ("continuing after step 5 of 9",)
    changed = config_of(
        schedule=CONSTANT,
        parallel={"fsdp": 1, "tensor": 2},
        train={"num_steps": 20, "batch_size": 4},
        logging={"every_steps": 7},
    )
    assert _messages(old, changed) == (
        "continuing after step 5 of 20",
        "changed: train.num_steps 9 → 20 (the run's length)",
        "changed: parallel.fsdp 2 → 1, parallel.tensor 1 → 2 (the same mathematics, rounded otherwise)",
        "changed: logging.every_steps 2 → 7 (not what is trained)",
    )


def test_a_run_goes_on_through_other_stages(config_of: Callable[..., Config]) -> None:
    old = config_of(schedule=CONSTANT)
    changed = config_of(
        schedule=CONSTANT,
        parallel={"fsdp": 1, "pipe": 2},
        pipeline={"schedule": "interleaved_aligned", "chunks": 2},
    )
    assert _messages(old, changed)[1:] == (
        "changed: parallel.pipe 1 → 2, parallel.fsdp 2 → 1, pipeline.schedule 'auto' → 'interleaved_aligned', "
        "pipeline.chunks 0 → 2 (the same mathematics, rounded otherwise)",
    )


def test_a_run_of_another_length_whose_past_would_have_been_another_is_told(config_of: Callable[..., Config]) -> None:
    """Linear from 0.01 at step 2 to 0: the fifth update of 9 is made at 5/7 of the peak, of 16 at 12/14."""
    longer = {"num_steps": 16, "batch_size": 4}
    note = _messages(config_of(), config_of(train=longer))[-1]
    assert "Update 5 was made at learning rate 0.007143, a run of 16 steps makes it at 0.008571" in note
    assert "the next is made at 0.007857" in note
    # Skipped steps make no update: the fourth is made at 6/7 of the peak, or 13/14.
    note = _messages(config_of(), config_of(train=longer), num_updates=4)[-1]
    assert "Update 4 was made at learning rate 0.008571, a run of 16 steps makes it at 0.009286" in note
    wsd = {"name": "wsd", "warmup_steps": 2, "decay_steps": 4}
    told = _messages(config_of(schedule=wsd), config_of(schedule=wsd, train=longer))
    assert not any("note" in each for each in told), "the decay had not begun: nothing differs"
    assert not any("note" in each for each in _messages(config_of(), config_of(train=longer), num_updates=0))


def test_the_note_knows_the_rates_that_adafactor_makes_of_a_schedule(config_of: Callable[..., Config]) -> None:
    """Its relative step is a function of the number of updates alone, whatever `learning_rate` says."""
    adafactor = {"name": "adafactor", "relative_step": True}
    old = config_of(optimizer=adafactor, schedule=CONSTANT)
    longer = config_of(optimizer=adafactor, schedule=CONSTANT, train={"num_steps": 16, "batch_size": 4})
    assert _messages(old, longer) == (
        "continuing after step 5 of 16",
        "changed: train.num_steps 9 → 16 (the run's length)",
    )


@pytest.mark.parametrize(
    ("sections", "lines"),
    [
        ({"run": {"dir": "runs/x", "seed": 1}},
         ["run.seed: 0 → 1 (the order of the data and the dropout masks would be another run's)"]),
        ({"model": {"embed_dim": 16, "num_heads": 4}},
         ["model.embed_dim: 8 → 16 (the saved weights are those of another model)",
          "model.num_heads: 2 → 4 (the saved weights are those of another model)"]),
        ({"data": {"sequence_length": 32}},
         ["data.sequence_length: 16 → 32 (the order of the data would be another: sequences would be repeated or left "
          "out)"]),
        ({"data": {"tokenizer": {"name": "bpe", "vocab_size": 300}}},
         ["data.tokenizer.name: 'bytes' → 'bpe' (the saved weights know other tokens)",
          "data.tokenizer.vocab_size: None → 300 (the saved weights know other tokens)"]),
        ({"optimizer": {"name": "adamw", "learning_rate": 2e-2}, "train": {"max_grad_norm": 2.0}},
         ["train.max_grad_norm: 1.0 → 2.0 (the steps that are made had another value)",
          "optimizer.learning_rate: 0.01 → 0.02 (the saved moments are those of another update rule)"]),
    ],
    ids=["seed", "model", "sequence", "tokenizer", "clipping and rate"],
)  # fmt: skip
def test_another_run_is_refused_with_the_keys_and_what_they_would_do(
    config_of: Callable[..., Config], sections: dict[str, Any], lines: list[str]
) -> None:
    with pytest.raises(ValueError, match="that was started with other values:") as caught:
        _messages(config_of(), config_of(**sections))
    assert [line.strip() for line in str(caught.value).splitlines()[1:-1]] == lines


def test_a_tokenizer_that_changed_behind_its_name_is_refused(config_of: Callable[..., Config]) -> None:
    with pytest.raises(ValueError, match=r"whose tokenizer was another one, although \[data.tokenizer\] is the same"):
        _messages(config_of(), config_of(), tokenizer="other")


def test_data_that_changed_behind_their_names_are_refused(config_of: Callable[..., Config]) -> None:
    with pytest.raises(ValueError, match=r"whose data were others, although \[data\] is the same: files have changed"):
        _messages(config_of(), config_of(), data="other texts")


def test_checkpoints_of_another_directorys_run_are_said_to_be(config_of: Callable[..., Config]) -> None:
    shared = {"directory": "/data/checkpoints"}
    old, new = (config_of(run={"dir": name}, checkpoint=shared) for name in ("a", "b"))
    assert _messages(old, new)[1] == "changed: run.dir 'a' → 'b' (not what is trained)"


def test_fewer_steps_than_are_made_are_refused(config_of: Callable[..., Config]) -> None:
    shorter = config_of(train={"num_steps": 4, "batch_size": 4})
    with pytest.raises(ValueError, match=r"beyond train.num_steps=4; the nearest legal value is 5"):
        _messages(config_of(), shorter)


def test_a_run_whose_checkpoints_are_gone_is_not_started_again(config_of: Callable[..., Config]) -> None:
    checkpoints: Any = SimpleNamespace(steps=list, store="/data/checkpoints")
    plan: Any = SimpleNamespace(config=config_of())
    nothing: Any = None
    start = find_start(plan, nothing, "", "", checkpoints, saved_before=False, record=nothing)
    assert (start.step, start.state, start.messages) == (0, None, ())
    with pytest.raises(ValueError, match=r"saved checkpoints, but there are none in /data/checkpoints; set checkpoint"):
        find_start(plan, nothing, "", "", checkpoints, saved_before=True, record=nothing)


def test_credentials_are_not_stored(config_of: Callable[..., Config]) -> None:
    config = config_of(data={"sources": [{"name": "text", "paths": ["s3://me:hidden@bucket/*.txt?token=abc"]}]})
    assert "s3://***@bucket/*.txt?token=***" in stored_config(config)
    assert not {"hidden", "abc"} & set(stored_config(config).replace("/", " ").replace("=", " ").split())
    assert _messages(config, config) == ("continuing after step 5 of 9",)
    config = config_of(evaluation={"sample_prompt": "Password: the"})
    assert 'sample_prompt = "Password: the"' in stored_config(config), "what is no URL is what the run needs again"
