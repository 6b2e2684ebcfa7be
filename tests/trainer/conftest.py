"""A tiny run, of texts that are written for it: its configuration, and the run itself, stopped or killed."""

import dataclasses
import functools
import json
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest

from jaxpar.checkpoint import open_checkpoints
from jaxpar.checkpoint_store import CheckpointStore, Retention
from jaxpar.config import Config, dump_toml, parse_config
from jaxpar.data import make_tokenizer, open_data
from jaxpar.events import Events
from jaxpar.plan import Plan, make_plan
from jaxpar.run_directory import run_directory
from jaxpar.state import TrainState
from jaxpar.step import Step
from jaxpar.trainer import Trainer

DOCUMENTS = [" ".join(f"{(7 * i + j) % 13} fish" for j in range(8 + 3 * i)) for i in range(11)]


@pytest.fixture(scope="session")
def documents() -> list[str]:
    """Eleven texts of different lengths."""
    return DOCUMENTS


@pytest.fixture(scope="session")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("texts")
    for number, text in enumerate(DOCUMENTS):
        (directory / f"{number:02}.txt").write_text(text)
    return directory


@pytest.fixture
def config_of(texts: Path, tmp_path: Path) -> Callable[..., Config]:
    """A tiny run on two devices; a section changes the keys that it names."""

    def make(**sections: dict[str, Any]) -> Config:
        table: dict[str, dict[str, Any]] = {
            "run": {"dir": str(tmp_path / "run")},
            "model": {
                "name": "transformer", "num_layers": 1, "embed_dim": 8, "num_heads": 2, "mlp_dim": 16, "dropout": 0.2,
                "vocab_multiple": 2,
            },
            "data": {
                "sequence_length": 16, "sources": [{"name": "text", "paths": [f"{texts}/*.txt"]}],
                "tokenizer": {"name": "bytes"}, "cache_dir": str(texts / "cache"), "holdout_every": 4,
            },
            "train": {"num_steps": 9, "batch_size": 4},
            "optimizer": {"name": "adamw", "learning_rate": 1e-2},
            "schedule": {"name": "linear", "warmup_steps": 2},
            "parallel": {"fsdp": 2},
            "evaluation": {"every_steps": 3, "batch_size": 6},
            "checkpoint": {"every_steps": 4},
            "logging": {"every_steps": 2, "progress": "off"},
            "hardware": {"peak_tflops": 1.0},
        }  # fmt: skip
        return parse_config({name: table.get(name, {}) | sections.get(name, {}) for name in {**table, **sections}})

    return make


class KilledError(Exception):
    """Stands in for a signal that ends the process."""


@dataclass(frozen=True)
class Ran:
    """What a run left: last state, lines without what a clock decides, messages, the tokens of each step, events."""

    state: TrainState | None
    lines: list[dict[str, Any]]
    messages: list[str]
    tokens: dict[int, np.ndarray]
    events: list[dict[str, Any]]


@functools.cache
def _compiled(toml: str) -> tuple[Plan, Step]:
    config = parse_config(tomllib.loads(toml))
    parallel = config.parallel
    num_devices = max(parallel.data, 1) * parallel.pipe * parallel.fsdp * parallel.tensor
    plan = make_plan(config, jax.devices()[:num_devices], 257)
    return plan, Step(plan)


def _plan_and_step(config: Config) -> tuple[Plan, Step]:
    """Compiled once for all runs that compute the same."""
    other = Config(model=config.model)
    decides_nothing = {name: getattr(other, name) for name in ("run", "checkpoint", "logging")}
    plan, step = _compiled(dump_toml(config.model_copy(update=decides_nothing)))
    return dataclasses.replace(plan, config=config), step


def _clockless(directory: Path) -> list[dict[str, Any]]:
    timing = {"step_seconds", "tokens_per_second", "mfu"}
    lines = (directory / "metrics.jsonl").read_text().splitlines()
    return [{key: value for key, value in json.loads(line).items() if key not in timing} for line in lines]


def run_once(config: Config, *, stop_after: int = 0, kill_after: int = 0) -> Ran:
    """Opens the run and trains on: to its end, or until it is asked to stop or is killed after a step."""
    plan, step = _plan_and_step(config)
    messages: list[str] = []
    tokens: dict[int, np.ndarray] = {}
    screen = SimpleNamespace(message=messages.append, update=lambda step, values: None)

    def train(state: TrainState, batch: Mapping[str, jax.Array]) -> Any:
        number = int(jax.device_get(state.step)) + 1
        if kill_after and number > kill_after:
            raise KilledError
        tokens[number] = jax.device_get(batch["tokens"])
        return step.train(state, batch)

    called: Any = SimpleNamespace(train=train, evaluate=step.evaluate, optimizer=step.optimizer)
    tokenizer = make_tokenizer(config.data, show_progress=False)
    corpus = open_data(config.data, tokenizer, show_progress=False)
    state = None
    with (
        run_directory(config.run.dir, is_writer=True) as directory,
        Events(directory.path / "events.jsonl") as events,
        open_checkpoints(
            CheckpointStore(str(directory.path / "checkpoints")),
            Retention(config.checkpoint.keep, config.checkpoint.keep_every_steps, config.checkpoint.keep_best),
            timeout_seconds=60, record=events.record,
        ) as checkpoints,
        Trainer(plan, called, tokenizer, corpus, checkpoints, directory.path, events) as trainer,
    ):  # fmt: skip
        try:
            state, _ = trainer.run(screen, lambda: bool(stop_after) and stop_after in tokens)
        except KilledError:
            assert kill_after
    path = Path(config.run.dir)
    recorded = [json.loads(line) for line in (path / "events.jsonl").read_text().splitlines()]
    return Ran(state, _clockless(path), messages, tokens, recorded)


@pytest.fixture
def run_of() -> Callable[..., Ran]:
    """`run_once`."""
    return run_once


def same_bits(found: TrainState, expected: TrainState) -> None:
    """Asserts that two states are equal, bit by bit."""
    for (path, a), b in zip(jax.tree.leaves_with_path(found), jax.tree.leaves(expected), strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b), err_msg=jax.tree_util.keystr(path))


@pytest.fixture
def assert_same_bits() -> Callable[[TrainState, TrainState], None]:
    """`same_bits`."""
    return same_bits
