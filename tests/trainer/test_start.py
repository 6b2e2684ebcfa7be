"""Where a run goes on that is found in its directory, and which runs are refused."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from jaxpar.config import Config, dump_toml
from jaxpar.trainer import Start, check_padding, find_start


class Saved:
    """Checkpoints of which only the notes are read."""

    def __init__(self, config: Config, step: int | None = 5, tokenizer: str = "bytes") -> None:
        self.newest_step = step
        self._notes = {"config": dump_toml(config), "tokenizer": tokenizer}

    def notes(self, step: int) -> dict[str, str]:
        assert step == self.newest_step
        return self._notes


def _start(old: Config, new: Config, tokenizer: str = "bytes", **saved: Any) -> Start:
    return find_start(new, SimpleNamespace(digest=tokenizer), Saved(old, **saved))  # type: ignore[arg-type]


def test_a_run_whose_vocabulary_is_padded_otherwise_is_refused(config_of: Callable[..., Config]) -> None:
    mesh = SimpleNamespace(shape={"tensor": 3})
    plan = SimpleNamespace(padded_vocab_size=768, mesh=mesh, config=config_of())
    check_padding(plan, 768)  # type: ignore[arg-type]
    message = r"padded to 512 .* with parallel.tensor=3 it is padded to 768. .* a parallel.tensor that divides 512"
    with pytest.raises(ValueError, match=message):
        check_padding(plan, 512)  # type: ignore[arg-type]


def test_a_run_goes_on_with_another_layout_length_and_log(config_of: Callable[..., Config]) -> None:
    old = config_of(schedule={"name": "constant", "warmup_steps": 2})
    assert _start(old, old, step=None) == Start(0)
    assert _start(old, old) == Start(5, ("continuing after step 5 of 9",))
    changed = config_of(
        schedule={"name": "constant", "warmup_steps": 2},
        parallel={"fsdp": 1, "tensor": 2},
        train={"num_steps": 20, "batch_size": 4},
        logging={"every_steps": 7},
    )
    (message,) = _start(old, changed).messages
    assert message.startswith("continuing after step 5 of 20; changed: train.num_steps 9 → 20, ")
    for change in ("parallel.fsdp 2 → 1", "parallel.tensor 1 → 2", "logging.every_steps 2 → 7"):
        assert change in message


def test_a_run_of_another_length_whose_past_would_have_been_another_is_told(config_of: Callable[..., Config]) -> None:
    """Linear from 0.01 at step 2 to 0: the fifth update of 9 is made at 5/7 of the peak, of 16 at 12/14."""
    _, note = _start(config_of(), config_of(train={"num_steps": 16, "batch_size": 4})).messages
    assert "Step 5 was made at learning rate 0.007143, a run of 16 steps makes it at 0.008571" in note
    assert "step 6 is made at 0.007857" in note
    wsd = {"name": "wsd", "warmup_steps": 2, "decay_steps": 4}
    longer = config_of(schedule=wsd, train={"num_steps": 16, "batch_size": 4})
    assert len(_start(config_of(schedule=wsd), longer).messages) == 1, "the decay had not begun: nothing differs"


@pytest.mark.parametrize(
    ("sections", "lines"),
    [
        ({"run": {"dir": "runs/x", "seed": 1}}, ["run.seed: 0 → 1"]),
        ({"model": {"embed_dim": 16, "num_heads": 4}}, ["model.embed_dim: 8 → 16", "model.num_heads: 2 → 4"]),
        ({"data": {"sequence_length": 32}}, ["data.sequence_length: 16 → 32"]),
        ({"data": {"tokenizer": {"name": "bpe", "vocab_size": 300}}},
         ["data.tokenizer.name: 'bytes' → 'bpe'", "data.tokenizer.vocab_size: None → 300"]),
        ({"optimizer": {"name": "adamw", "learning_rate": 2e-2}, "train": {"batch_size": 8}},
         ["train.batch_size: 4 → 8", "optimizer.learning_rate: 0.01 → 0.02"]),
    ],
    ids=["seed", "model", "sequence", "tokenizer", "batch and rate"],
)  # fmt: skip
def test_another_run_is_refused_with_the_keys(
    config_of: Callable[..., Config], sections: dict[str, Any], lines: list[str]
) -> None:
    with pytest.raises(ValueError, match="that was started with other values:") as caught:
        _start(config_of(), config_of(**sections))
    assert [line.strip() for line in str(caught.value).splitlines()[1:-1]] == lines


def test_a_tokenizer_that_changed_behind_its_name_is_refused(config_of: Callable[..., Config]) -> None:
    with pytest.raises(ValueError, match=r"whose tokenizer was another one, although \[data.tokenizer\] is the same"):
        _start(config_of(), config_of(), tokenizer="other")


def test_fewer_steps_than_are_made_are_refused(config_of: Callable[..., Config]) -> None:
    shorter = config_of(train={"num_steps": 4, "batch_size": 4})
    with pytest.raises(ValueError, match=r"beyond train.num_steps=4; the nearest legal value is 5"):
        _start(config_of(), shorter)
