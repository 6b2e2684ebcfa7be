"""The loop: what it does in which order, and that it goes on exactly where it stopped."""

import contextlib
import dataclasses
import errno
import functools
import json
import re
import tomllib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest
from flax import nnx

from jaxpar.checkpoint import SaveFailedError, open_checkpoints
from jaxpar.checkpoint_store import CheckpointStore, Notes, Retention
from jaxpar.config import Config, dump_toml, parse_config
from jaxpar.data import make_tokenizer, open_data
from jaxpar.events import Events
from jaxpar.metrics import JsonLinesWriter
from jaxpar.plan import Plan, make_plan
from jaxpar.run_directory import run_directory
from jaxpar.state import TrainState
from jaxpar.step import Step
from jaxpar.trainer import Trainer, evaluate

NUM_STEPS = 9
SEQUENCE = 16
END_OF_TEXT = 256
TIMING = {"step_seconds", "tokens_per_second", "mfu"}


@functools.cache
def _compiled(toml: str) -> tuple[Plan, Step]:
    """Plan and step for what decides them, compiled once for all tests."""
    config = parse_config(tomllib.loads(toml))
    plan = make_plan(config, jax.devices()[:2], END_OF_TEXT + 1)
    return plan, Step(plan)


def _plan_and_step(config: Config) -> tuple[Plan, Step]:
    other = Config(model=config.model)
    decides = {
        "run": other.run,
        "evaluation": other.evaluation.model_copy(update={"parameters": config.evaluation.parameters}),
        "checkpoint": other.checkpoint,
        "logging": other.logging,
    }
    plan, step = _compiled(dump_toml(config.model_copy(update=decides)))
    return dataclasses.replace(plan, config=config), step


class Screen:
    """A display that keeps what it is told, in the order of the other events."""

    def __init__(self, events: list[Any] | None = None) -> None:
        self.messages: list[str] = []
        self.events: list[Any] = [] if events is None else events

    def update(self, step: int, values: Mapping[str, Any]) -> None:
        self.events.append(("shown", step))

    def message(self, text: str) -> None:
        self.messages.append(text)


@contextlib.contextmanager
def opened(config: Config, train: Callable[..., Any] | None = None) -> Iterator[Trainer]:
    """A trainer whose `step.train` is `train(original, *arguments)`."""
    tokenizer = make_tokenizer(config.data, show_progress=False)
    plan, step = _plan_and_step(config)
    called: Any = step
    if train is not None:
        called = SimpleNamespace(
            train=functools.partial(train, step.train), evaluate=step.evaluate, optimizer=step.optimizer
        )
    corpus = open_data(config.data, tokenizer, show_progress=False)
    with (
        run_directory(config.run.dir, is_writer=True) as directory,
        Events(directory.path / "events.jsonl") as events,
        open_checkpoints(
            CheckpointStore(str(directory.path / "checkpoints")),
            Retention(config.checkpoint.keep),
            timeout_seconds=60,
            record=events.record,
        ) as checkpoints,
        Trainer(plan, called, tokenizer, corpus, checkpoints, directory.path, events) as trainer,
    ):
        yield trainer


def lines_of(config: Config) -> list[dict[str, Any]]:
    """`metrics.jsonl` without what a clock decides."""
    lines = (Path(config.run.dir) / "metrics.jsonl").read_text().splitlines()
    return [{key: value for key, value in json.loads(line).items() if key not in TIMING} for line in lines]


def assert_same(found: TrainState, expected: TrainState) -> None:
    for (path, a), b in zip(jax.tree.leaves_with_path(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_array_equal(a, b, err_msg=jax.tree_util.keystr(path))


def test_a_run_that_was_stopped_twice_and_crashed_is_the_straight_run(
    config_of: Callable[..., Config], tmp_path: Path
) -> None:
    """Bit by bit: parameters, moments, metrics. The stops come at an evaluation, which is made up for."""
    logging = {"every_steps": 2, "progress": "off", "tensorboard": True}
    straight = config_of(run={"dir": str(tmp_path / "straight")}, logging=logging)
    with opened(straight) as trainer:
        expected, stopped = trainer.run(Screen())
    assert not stopped
    assert [line["step"] for line in lines_of(straight)] == [2, 3, 4, 6, 6, 8, 9, 9]
    assert list((tmp_path / "straight" / "tensorboard").glob("events.*"))

    config = config_of(logging=logging)
    made: list[int] = []

    def count(train: Callable[..., Any], state: TrainState, batch: Any) -> Any:
        made.append(int(state.step) + 1)
        return train(state, batch)

    with opened(config, count) as trainer:
        state, stopped = trainer.run(Screen(), lambda: len(made) >= 3)
    assert (stopped, made, int(state.step)) == (True, [1, 2, 3], 3)
    assert [line["step"] for line in lines_of(config)] == [2]

    def crash(train: Callable[..., Any], state: TrainState, batch: Any) -> Any:
        if len(made) == 7:
            raise RuntimeError("a cosmic ray")
        return count(train, state, batch)

    screen = Screen()
    with pytest.raises(RuntimeError, match="cosmic ray"), opened(config, crash) as trainer:
        trainer.run(screen)
    assert screen.messages[0] == "continuing after step 3 of 9"
    assert [line["step"] for line in lines_of(config)] == [2, 3, 4, 6, 6]

    with opened(config, count) as trainer:
        _, stopped = trainer.run(Screen(), lambda: made[-1] == NUM_STEPS)
    assert stopped, "the last evaluation is still to be made"
    assert made == [1, 2, 3, 4, 5, 6, 7, 5, 6, 7, 8, 9]
    assert lines_of(config) == lines_of(straight)[:-1]
    for _ in range(2):
        screen = Screen()
        with opened(config, count) as trainer:
            state, stopped = trainer.run(screen)
        assert screen.messages[0] == "all 9 steps are made"
        assert not stopped
        assert lines_of(config) == lines_of(straight)
    assert made[-1] == NUM_STEPS
    assert_same(state, expected)


def test_metrics_are_fetched_one_step_late_and_written_before_a_checkpoint(config_of: Callable[..., Config]) -> None:
    config = config_of(logging={"every_steps": 1, "progress": "off"}, evaluation={"every_steps": 0})
    events: list[Any] = []

    def record(train: Callable[..., Any], state: TrainState, batch: Any) -> Any:
        events.append(("dispatched", len([e for e in events if e[0] == "dispatched"]) + 1))
        return train(state, batch)

    with opened(config, record) as trainer:
        save = trainer.checkpoints.save

        def saving(state: TrainState, notes: Notes, *arguments: Any) -> None:
            events.append(("saved", notes.step, [line["step"] for line in lines_of(config)][-1]))
            save(state, notes, *arguments)

        trainer.checkpoints.save = saving  # type: ignore[method-assign]
        trainer.run(Screen(events))
    expected: list[Any] = []
    for step in range(1, NUM_STEPS + 1):
        expected.append(("dispatched", step))
        if step not in (5, 9):  # the step before was reported early, to be written before it was saved
            expected += [("shown", step - 1)] if step > 1 else []
        if step in (4, 8):
            expected += [("shown", step), ("saved", step, step)]
    expected += [("shown", NUM_STEPS), ("saved", NUM_STEPS, NUM_STEPS)]
    assert events == expected


def test_a_transfer_that_nobody_asked_for_is_an_error(config_of: Callable[..., Config]) -> None:
    def from_host(train: Callable[..., Any], state: TrainState, batch: Any) -> Any:
        return train(state, {name: np.zeros(rows.shape, rows.dtype) for name, rows in batch.items()})

    with (
        pytest.raises(Exception, match="Disallowed host-to-device transfer"),
        opened(config_of(), from_host) as trainer,
    ):
        trainer.run(Screen())


def test_a_loss_that_is_not_finite_ends_the_run_before_it_is_saved(config_of: Callable[..., Config]) -> None:
    config = config_of(logging={"every_steps": 100, "progress": "off"})

    def spoil(train: Callable[..., Any], state: TrainState, batch: Any) -> Any:
        state, metrics = train(state, batch)
        failed = {"loss": np.float32(np.nan), "nonfinite": np.int32(len(trainer.plan.parameters))}
        return state, metrics | (jax.device_put(failed) if int(state.step) == 8 else {})

    with (
        pytest.raises(
            FloatingPointError, match=r"step 8: the loss is not finite \(loss nan, .* newest checkpoint is of step 4"
        ),
        opened(config, spoil) as trainer,
    ):
        trainer.run(Screen())
    assert [line["loss"] for line in lines_of(config) if line["step"] == 8] == ["NaN"]
    with opened(config) as trainer:
        assert trainer.start.step == 4


def test_metrics_that_a_full_disk_refuses_end_the_run_with_its_checkpoint_left(
    config_of: Callable[..., Config], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = config_of(logging={"every_steps": 1, "progress": "off"})

    def full(writer: Any, step: int, values: Any) -> None:
        if step == 6:
            raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(JsonLinesWriter, "write", full)
    message = (
        r"^the metrics of step 6 cannot be written \(.*No space left on device\); the same command goes on from the"
    )
    with pytest.raises(SaveFailedError, match=message), opened(config) as trainer:
        trainer.run(Screen())
    monkeypatch.undo()
    with opened(config) as trainer:
        assert trainer.start.step == 4


def test_evaluation_counts_every_held_out_token_once(config_of: Callable[..., Config], documents: list[str]) -> None:
    """Against log-probabilities of one document's part of one window at a time, in float64."""
    config = config_of(parallel={"data": 2, "fsdp": 1})
    plan, step = _plan_and_step(config)
    tokenizer = make_tokenizer(config.data, show_progress=False)
    corpus = open_data(config.data, tokenizer, show_progress=False)
    params = jax.jit(plan.make_params, out_shardings=plan.param_shardings)()
    byte_lengths = np.zeros(plan.padded_vocab_size, np.int32)
    byte_lengths[: tokenizer.vocab_size] = tokenizer.token_byte_lengths()
    with plan.execution.active():
        found = evaluate(plan, step, params, corpus, byte_lengths)

    held_out = [[*text.encode(), END_OF_TEXT] for text in documents[::4]]
    tokens = np.concatenate(held_out)
    document = np.repeat(np.arange(len(held_out)), [len(part) for part in held_out])
    model = nnx.merge(plan.structure, jax.device_get(params))
    positions = np.arange(SEQUENCE, dtype=np.int32)[None]

    @jax.jit
    def logits_of(padded: jax.Array) -> jax.Array:
        return model({"tokens": padded[None], "positions": positions, "segment_ids": None}).logits()[0]

    nats = num_tokens = num_bytes = 0.0
    for first in range(0, len(tokens) - 1, SEQUENCE):
        window = np.arange(first, min(first + SEQUENCE, len(tokens) - 1))
        for number in np.unique(document[window]):
            part = window[document[window] == number]
            padded = np.zeros(SEQUENCE, np.int32)
            padded[: part.size] = tokens[part]
            logits = np.asarray(logits_of(padded), np.float64)[:, : tokenizer.vocab_size]
            log_probabilities = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
            for place, at in enumerate(part):
                if document[at + 1] == number:
                    nats -= log_probabilities[place, tokens[at + 1]]
                    num_tokens += 1
                    num_bytes += tokens[at + 1] != END_OF_TEXT
    assert num_tokens == len(tokens) - len(held_out)
    assert -(-(len(tokens) - 1) // SEQUENCE) % 6, "the last batch must be padded"
    assert found == pytest.approx(
        {"eval/loss": nats / num_tokens, "eval/bits_per_byte": nats / np.log(2) / num_bytes}, rel=2e-6
    )
    with plan.execution.active():
        assert evaluate(plan, step, params, corpus, byte_lengths, stop=lambda: True) is None


def test_without_held_out_documents_a_run_says_so_and_evaluates_nothing(config_of: Callable[..., Config]) -> None:
    config = config_of()
    config = config.model_copy(update={"data": config.data.model_copy(update={"holdout_every": 0})})
    screen = Screen()
    with opened(config) as trainer:
        trainer.run(screen)
    assert "nothing is held out (data.holdout_every=0), so there is no evaluation" in screen.messages
    assert not [line for line in lines_of(config) if "eval/loss" in line]


def test_of_several_processes_the_first_alone_writes(
    config_of: Callable[..., Config], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = config_of()
    plan, step = _plan_and_step(config)
    tokenizer = make_tokenizer(config.data, show_progress=False)
    corpus = open_data(config.data, tokenizer, show_progress=False)
    with (
        run_directory(config.run.dir, is_writer=True) as directory,
        open_checkpoints(
            CheckpointStore(str(directory.path / "checkpoints")), Retention(1), timeout_seconds=60
        ) as checkpoints,
    ):
        for index, names in ((1, []), (0, ["config.toml", "metrics.jsonl"])):
            monkeypatch.setattr(jax, "process_index", lambda index=index: index)
            with Trainer(plan, step, tokenizer, corpus, checkpoints, directory.path, Events(None)):
                pass
            monkeypatch.undo()
            assert sorted(path.name for path in directory.path.iterdir() if path.is_file()) == [".lock", *names]


FLOAT16 = {"compute": "float16", "scale_initial": 32.0, "scale_min": 16.0, "scale_growth_steps": 2}
FIRST = "blocks/attention/key"


def spoiled(steps: set[int]) -> Callable[..., Any]:
    """A step whose parameters have a NaN while the steps of these numbers are made; given back as they were."""

    def train(original: Callable[..., Any], state: TrainState, batch: Any) -> Any:
        def with_scale(state: TrainState, values: np.ndarray) -> TrainState:
            norm = {"scale": jax.device_put(values, state.params["final_norm"]["scale"].sharding)}
            return dataclasses.replace(state, params=state.params | {"final_norm": norm})

        if int(state.step) + 1 not in steps:
            return original(state, batch)
        kept = np.asarray(state.params["final_norm"]["scale"])
        state, metrics = original(with_scale(state, kept * np.nan), batch)
        assert np.isnan(state.params["final_norm"]["scale"]).all(), "a skipped step gives back what it was given"
        return with_scale(state, kept), metrics

    return train


def float16_config(config_of: Callable[..., Config], **sections: Any) -> Config:
    return config_of(
        precision=FLOAT16,
        train={"num_steps": NUM_STEPS, "batch_size": 4, "ema_decay": 0.5, "max_skipped": 2},
        evaluation={"every_steps": 0, "batch_size": 6, "parameters": "ema"},
        logging={"every_steps": 1, "progress": "off"},
        **sections,
    )


def test_a_float16_run_goes_on_with_its_scale_and_its_average(config_of: Callable[..., Config], tmp_path: Path) -> None:
    """Stopped after step 5, of which the fourth was skipped; bit by bit the run that was not stopped."""
    straight = float16_config(config_of, run={"dir": str(tmp_path / "straight")})
    screen = Screen()
    with opened(straight, spoiled({4})) as trainer:
        expected, _ = trainer.run(screen)
    lines = lines_of(straight)
    assert [line["loss_scale"] for line in lines[:-1]] == [32, 32, 64, 64, 32, 32, 64, 64, 128]
    assert [line["skipped"] for line in lines[:-1]] == [0] * 3 + [1] * 6
    skipped = [message for message in screen.messages if "skipped" in message]
    assert skipped == [f"step 4 is skipped: the gradient of {FIRST} is not finite, loss scale 64"]

    config = float16_config(config_of)
    for stop in (lambda: len(lines_of(config)) >= 4, lambda: False):
        with opened(config, spoiled({4})) as trainer:
            state, stopped = trainer.run(Screen(), stop)
            assert stopped == (int(state.step) < NUM_STEPS)
    assert_same(state, expected)
    assert (float(state.guard.scale), int(state.guard.skipped)) == (128.0, 1)
    assert lines_of(config) == lines


def test_the_average_is_evaluated_where_that_is_asked_for(config_of: Callable[..., Config]) -> None:
    config = float16_config(config_of)
    with opened(config) as trainer:
        state, _ = trainer.run(Screen())
        plan, losses = trainer.plan, []
        for params in (state.ema, state.params):
            with plan.execution.active():
                lengths = np.zeros(plan.padded_vocab_size, np.int32)
                losses.append(evaluate(plan, trainer.step, params, trainer.corpus, lengths)["eval/loss"])
    assert lines_of(config)[-1]["eval/loss"] == losses[0]
    assert abs(losses[0] - losses[1]) > 1e-3


@dataclasses.dataclass(frozen=True)
class Ending:
    """A run whose `steps` are not finite, the last of which ends it: what it says, and which keys its lines have."""

    sections: dict[str, dict[str, Any]]
    steps: set[int]
    scale: str
    reason: str
    keys: set[str]


ENDINGS = {
    "at the smallest scale": Ending(
        {"precision": FLOAT16, "train": {"max_skipped": 2}}, {2, 3, 4}, ", loss scale 16",
        "nor was one of the last train.max_skipped=2 steps at the smallest loss scale; there is no checkpoint",
        {"skipped", "loss_scale"},
    ),
    "skipping": Ending(
        {"train": {"on_nonfinite": "skip", "max_skipped": 2}}, {2, 4, 5}, "",
        "nor was one of the last train.max_skipped=2 steps; the newest checkpoint is of step 4", {"skipped"},
    ),
    "halting": Ending(
        {"precision": {"compute": "bfloat16"}}, {3}, "",
        "so the parameters are lost and not saved; there is no checkpoint", set(),
    ),
}  # fmt: skip


@pytest.mark.parametrize("ending", ENDINGS.values(), ids=ENDINGS)
def test_steps_that_are_not_finite_end_a_run_at_last(config_of: Callable[..., Config], ending: Ending) -> None:
    train = {"num_steps": NUM_STEPS, "batch_size": 4} | ending.sections.get("train", {})
    logging = {"every_steps": 1, "progress": "off"}
    config = config_of(**(ending.sections | {"train": train, "logging": logging, "evaluation": {"every_steps": 0}}))
    screen, last = Screen(), max(ending.steps)
    what = f"the gradient of {FIRST} is not finite"
    message = f"step {last}: {what} (loss nan, norm of the gradient nan{ending.scale}), {ending.reason}. A lower "
    with (
        pytest.raises(FloatingPointError, match=f"^{re.escape(message)}"),
        opened(config, spoiled(ending.steps)) as run,
    ):
        run.run(screen)
    lines = lines_of(config)
    assert (lines[-1]["step"], lines[-1]["loss"]) == (last, "NaN")
    assert {key for line in lines for key in line} & {"skipped", "loss_scale"} == ending.keys
    skipped = [message for message in screen.messages if "skipped" in message]
    begins = [f"step {step} is skipped: {what}" for step in sorted(ending.steps - {last})]
    assert [message.partition(", loss scale ")[0] for message in skipped] == begins
    assert all((", loss scale " in message) == bool(ending.scale) for message in skipped)
