"""Where a run goes on: the newest checkpoint that is whole, on whatever mesh there is now; or the beginning.

What changed in the configuration is named with what it means. What would corrupt the run is refused.
"""

import math
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from jaxpar.checkpoint import Checkpoints
from jaxpar.checkpoint_store import ASIDE, DamagedCheckpointError, Notes
from jaxpar.config import Config, changed_keys, dump_toml, parse_config
from jaxpar.config.credentials import masked
from jaxpar.config.toml_writer import write_toml
from jaxpar.extent import Extent
from jaxpar.optim import Optimizer, learning_rates, make_schedule
from jaxpar.parallel.agreement import of_the_first
from jaxpar.parallel.dispatch import one_at_a_time
from jaxpar.plan import Plan
from jaxpar.state import TrainState, abstract_state, init_state, state_extents

__all__ = ["Start", "check_run", "find_start", "stored_config"]

_LAYOUT = "the same mathematics, rounded otherwise"
_RECORDED = "not what is trained"
_MAY_CHANGE: dict[str, str] = {
    "parallel": _LAYOUT,
    "pipeline": _LAYOUT,
    "offload": _LAYOUT,
    "kernels": _LAYOUT,
    "remat": _LAYOUT,
    "train.microbatches": _LAYOUT,
    "loss.chunk_tokens": _LAYOUT,
    "runtime": _LAYOUT,
    "logging": _RECORDED,
    "hardware": _RECORDED,
    "distributed": _RECORDED,
    "evaluation": _RECORDED,
    "checkpoint": _RECORDED,
    "data.cache_dir": _RECORDED,
    "data.prefetch": _RECORDED,
    "run.dir": _RECORDED,
    "train.num_steps": "the run's length",
    "train.max_skipped": "when the run gives up",
}
"""Sections and keys that a run may change, and what that changes."""

_REFUSED: dict[str, str] = {
    "model": "the saved weights are those of another model",
    "data.tokenizer": "the saved weights know other tokens",
    "data": "the order of the data would be another: sequences would be repeated or left out",
    "run.seed": "the order of the data and the dropout masks would be another run's",
    "train.batch_size": "the place in the data would be another: sequences would be repeated or left out",
    "optimizer": "the saved moments are those of another update rule",
    "schedule": "the steps that are made had other learning rates",
    "precision": "the saved arrays have other formats",
}
"""Why the others may not; the longest key that fits counts."""


@dataclass(frozen=True)
class Start:
    """The step that a run goes on from (0 for a new run), its state there, and what a user should know of it."""

    step: int
    messages: tuple[str, ...] = ()
    state: TrainState | None = None


def find_start(
    plan: Plan,
    optimizer: Optimizer,
    tokenizer_digest: str,
    data_digest: str,
    checkpoints: Checkpoints,
    *,
    saved_before: bool,
    record: Callable[..., None],
) -> Start:
    """Where the run in `run.dir` stands, with its state restored.

    `saved_before` says that the run's events know of a checkpoint.

    Raises:
      ValueError: none of its checkpoints is whole, they are gone, or they are of a run with other values.
    """
    where = f"run.dir={plan.config.run.dir!r}"
    steps = checkpoints.steps()
    if not steps:
        if of_the_first(saved_before):
            raise ValueError(
                f"{where} holds a run that saved checkpoints, but there are none in {checkpoints.store}; set "
                "checkpoint.directory to where they are, or choose another run.dir"
            )
        return Start(0)
    messages: list[str] = []
    for step in steps:
        try:
            notes = checkpoints.notes(step)
            told, changes = check_run(plan.config, tokenizer_digest, data_digest, notes)
            state = _restored(plan, optimizer, checkpoints, notes)
        except DamagedCheckpointError as error:
            messages.append(f"WARNING: the checkpoint of step {step} in {checkpoints.store} is damaged: {error}")
            record("damaged checkpoint", step=step, directory=str(checkpoints.store), text=str(error))
            continue
        if messages:
            messages.append(
                f"WARNING: going back to the checkpoint of step {step}; later steps are made again, and what "
                f"could not be read is kept as STEP{ASIDE}"
            )
            record("fallback", step=step, directory=str(checkpoints.store))
        if changes:
            record("config change", step=step, changes={key: [str(v) for v in pair] for key, pair in changes.items()})
        checkpoints.goes_on_from(step)
        return Start(step, (*messages, *told), state)
    none = (
        f"{where} has no checkpoint that is whole; put one back, or choose another run.dir to start from the beginning"
    )
    raise ValueError("\n".join([*messages, none]))


def check_run(
    config: Config, tokenizer_digest: str, data_digest: str, notes: Notes
) -> tuple[tuple[str, ...], dict[str, tuple[Any, Any]]]:
    """What a user should know of going on from a checkpoint with `config`, and the keys that have changed.

    Raises:
      ValueError: it is of a run with values that would make it another run, or is longer than this one.
    """
    saved = f"run.dir={config.run.dir!r} holds a run, saved at step {notes.step},"
    before = parse_config(tomllib.loads(notes.config), source=f"the configuration of the run in {config.run.dir}")
    changes = changed_keys(before, parse_config(tomllib.loads(stored_config(config))))
    fixed = {key: values for key, values in changes.items() if _meaning(key, _MAY_CHANGE) is None}
    if fixed:
        lines = "\n".join(
            f"  {key}: {old!r} → {new!r} ({_meaning(key, _REFUSED) or 'the steps that are made had another value'})"
            for key, (old, new) in fixed.items()
        )
        raise ValueError(
            f"{saved} that was started with other values:\n{lines}\n"
            "set them back to go on with it, or choose another run.dir"
        )
    if notes.tokenizer != tokenizer_digest:
        raise ValueError(
            f"{saved} whose tokenizer was another one, although [data.tokenizer] is the same: its file, or the text "
            "that it is trained on, has changed since. Put that back, or choose another run.dir"
        )
    if notes.data != data_digest:
        raise ValueError(
            f"{saved} whose data were others, although [data] is the same: files have changed, or a pattern matches "
            "others than then, so that sequences would be repeated or left out. Put them back, or choose another "
            "run.dir"
        )
    if notes.step > config.train.num_steps:
        raise ValueError(
            f"{saved} which is beyond train.num_steps={config.train.num_steps}; the nearest legal value is {notes.step}"
        )
    left = config.train.num_steps - notes.step
    goes_on = (
        f"continuing after step {notes.step} of {config.train.num_steps}"
        if left
        else f"all {notes.step} steps are made"
    )
    if not config.checkpoint.directory:
        # Otherwise its checkpoints were those of another directory's run, which a user must know.
        changes.pop("run.dir", None)
    return (goes_on, *_change_messages(changes), *_schedule_messages(before, config, notes)), changes


def stored_config(config: Config) -> str:
    """The resolved configuration as it is kept with the run: TOML, without credentials."""
    return write_toml(_without_credentials(tomllib.loads(dump_toml(config))))


def _without_credentials(value: Any) -> Any:
    """URLs in a table masked; other values are what the run needs to be the same again."""
    if isinstance(value, Mapping):
        return {key: _without_credentials(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_without_credentials(item) for item in value]
    return masked(value) if isinstance(value, str) and "://" in value else value


def _change_messages(changes: Mapping[str, tuple[Any, Any]]) -> list[str]:
    """One line for each meaning."""
    by_meaning: dict[str, list[str]] = {}
    for key, (old, new) in changes.items():
        by_meaning.setdefault(_meaning(key, _MAY_CHANGE) or "", []).append(f"{key} {old!r} → {new!r}")
    return [f"changed: {', '.join(shown)} ({meaning})" for meaning, shown in by_meaning.items()]


def _meaning(key: str, table: Mapping[str, str]) -> str | None:
    """The entry of the longest key of the table that is `key` or a section around it."""
    fitting = [other for other in table if key == other or key.startswith(f"{other}.")]
    return table[max(fitting, key=len)] if fitting else None


def _schedule_messages(before: Config, config: Config, notes: Notes) -> tuple[str, ...]:
    """A message if the updates that were made would have had other learning rates in a run of the new length."""
    num_updates = notes.num_updates
    if not num_updates:
        return ()
    old, new = (
        learning_rates(c.optimizer, make_schedule(c.schedule, c.optimizer.learning_rate, c.train.num_steps))
        for c in (before, config)
    )
    made, would, next_ = float(old(num_updates - 1)), float(new(num_updates - 1)), float(new(num_updates))
    if math.isclose(made, would, rel_tol=1e-6):
        return ()
    return (
        f"note: the {config.schedule.name} schedule depends on train.num_steps. Update {num_updates} was made at "
        f"learning rate {made:.4g}, a run of {config.train.num_steps} steps makes it at {would:.4g}; the next is made "
        f"at {next_:.4g}. The result is not that of one run of {config.train.num_steps} steps",
    )


def _restored(plan: Plan, optimizer: Optimizer, checkpoints: Checkpoints, notes: Notes) -> TrainState:
    abstract = abstract_state(plan, optimizer)
    extents = state_extents(plan, abstract)
    state = checkpoints.restore(notes, abstract, extents)
    if notes.padded_vocab_size == plan.padded_vocab_size:
        return state
    return _with_new_padding(plan, optimizer, state, extents)


def _with_new_padding(plan: Plan, optimizer: Optimizer, state: TrainState, extents: Mapping[str, Extent]) -> TrainState:
    """The state with a new run's values where the vocabulary is padded; those have no gradient and no logits."""
    restored, new = state.by_path(), init_state(plan, optimizer).by_path()
    padded = {path: array for path, array in restored.items() if any(extents[path].padding(array.shape))}
    return state.with_arrays(
        restored | {path: _merged(padded[path], new[path], extents[path].laid_out, plan.mesh) for path in padded}
    )


def _merged(restored: jax.Array, new: jax.Array, sizes: Sequence[int], mesh: Mesh) -> jax.Array:
    def merge(restored: jax.Array, new: jax.Array) -> jax.Array:
        places = jnp.indices(restored.shape, sparse=True)
        inside = [place < size for place, size in zip(places, sizes, strict=True)]
        within = inside[0]
        for each in inside[1:]:
            within = within & each
        return jnp.where(within, restored, new)

    sharding = restored.sharding
    on_device = sharding.with_memory_kind("device")
    moved = jax.device_put((restored, new), on_device)
    merged = one_at_a_time(jax.jit(merge, out_shardings=on_device), mesh)(*moved)
    return jax.device_put(merged, sharding)
