"""The loop: data in, step, metrics out; evaluate, save, stop. No mathematics.

The metrics of a step are fetched after the next step is dispatched, so that the devices never wait for the host. All
metrics are written before anything is saved, so that a run which goes on from a checkpoint repeats no line of
`metrics.jsonl` and misses none.
"""

import json
import math
import time
import tomllib
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import jax
import numpy as np

from jaxpar.checkpoint import Checkpoints, write_whole
from jaxpar.config import Config, changed_keys, dump_toml, parse_config
from jaxpar.data import Corpus, Tokenizer, heldout_batches, train_batches
from jaxpar.metrics import Progress, Throughput, Writer, find_peak, make_writers, transformer_flops_per_token
from jaxpar.optim import make_schedule
from jaxpar.parallel.agreement import agreed
from jaxpar.parallel.feeding import from_own_rows, own_rows
from jaxpar.plan import Plan
from jaxpar.state import TrainState, abstract_state, init_state
from jaxpar.step import Step

__all__ = ["Start", "Trainer", "evaluate", "find_start"]

_MAY_CHANGE = ("parallel", "offload", "logging", "hardware", "runtime", "distributed", "checkpoint", "evaluation",
               "kernels", "remat", "run.dir", "train.num_steps", "train.microbatches", "train.max_skipped",
               "data.cache_dir", "data.prefetch", "loss.chunk_tokens")  # fmt: skip


@dataclass(frozen=True)
class Start:
    """The step that a run goes on from (0 for a new run), and what a user should know of it."""

    step: int
    messages: tuple[str, ...] = ()


def find_start(config: Config, tokenizer: Tokenizer, checkpoints: Checkpoints) -> Start:
    """Where the run in `run.dir` stands.

    Raises:
      ValueError: it was started with values that would make it another run, or is longer than this one.
    """
    step = checkpoints.newest_step
    if step is None:
        return Start(0)
    notes = checkpoints.notes(step)
    saved = f"run.dir={config.run.dir!r} holds a run, saved at step {step},"
    before = parse_config(tomllib.loads(notes["config"]), source=f"the configuration of the run in {config.run.dir}")
    changes = changed_keys(before, config)
    fixed = {key: values for key, values in changes.items() if not _may_change(key)}
    if fixed:
        lines = "\n".join(f"  {key}: {old!r} → {new!r}" for key, (old, new) in fixed.items())
        raise ValueError(
            f"{saved} that was started with other values:\n{lines}\n"
            "set them back to go on with it, or choose another run.dir"
        )
    if notes["tokenizer"] != tokenizer.digest:
        raise ValueError(
            f"{saved} whose tokenizer was another one, although [data.tokenizer] is the same: its file, or the text "
            "that it is trained on, has changed since. Put that back, or choose another run.dir"
        )
    if step > config.train.num_steps:
        raise ValueError(
            f"{saved} which is beyond train.num_steps={config.train.num_steps}; the nearest legal value is {step}"
        )
    shown = ", ".join(f"{key} {old!r} → {new!r}" for key, (old, new) in changes.items() if key != "run.dir")
    left = config.train.num_steps - step
    goes_on = f"continuing after step {step} of {config.train.num_steps}" if left else f"all {step} steps are made"
    return Start(step, (goes_on + (f"; changed: {shown}" if shown else ""), *_schedule_messages(before, config, step)))


def check_padding(plan: Plan, saved_size: int) -> None:
    """Raises ValueError if the saved arrays have another padded vocabulary than the plan's."""
    if plan.padded_vocab_size != saved_size:
        raise ValueError(
            f"run.dir={plan.config.run.dir!r} holds a run whose vocabulary is padded to {saved_size} entries; with "
            f"parallel.tensor={plan.mesh.shape['tensor']} it is padded to {plan.padded_vocab_size}. Go on with a "
            f"parallel.tensor that divides {saved_size}"
        )


def check_same_start(steps: Sequence[int], config: Config) -> None:
    """Raises ValueError if the processes found checkpoints of different steps."""
    if len(set(steps)) > 1:
        found = ", ".join(f"process {process}: {step}" for process, step in enumerate(steps))
        raise ValueError(
            f"run.dir={config.run.dir!r} does not hold the same run for every process (newest step of {found}); name a "
            "directory on a file system that all hosts share"
        )


def _may_change(key: str) -> bool:
    return any(key == safe or key.startswith(f"{safe}.") for safe in _MAY_CHANGE)


def _schedule_messages(before: Config, config: Config, step: int) -> tuple[str, ...]:
    """A message if the steps that were made would have had other learning rates in a run of the new length."""
    old, new = (make_schedule(c.schedule, c.optimizer.learning_rate, c.train.num_steps) for c in (before, config))
    made, would, next_ = float(old(step - 1)), float(new(step - 1)), float(new(step))
    if math.isclose(made, would, rel_tol=1e-6):
        return ()
    return (
        f"note: the {config.schedule.name} schedule depends on train.num_steps. Step {step} was made at learning rate "
        f"{made:.4g}, a run of {config.train.num_steps} steps makes it at {would:.4g}; step {step + 1} is made at "
        f"{next_:.4g}. The result is not that of one run of {config.train.num_steps} steps",
    )


class Trainer:
    """One run from its first or resumed step to its last, or to the moment when it is asked to stop.

    A context manager; inside it the run's data and writers are open.

    Raises:
      ValueError: `run.dir` holds another run, the data are too short, or a writer's package is missing.
    """

    def __init__(
        self, plan: Plan, step: Step, tokenizer: Tokenizer, corpus: Corpus, checkpoints: Checkpoints, run_dir: Path
    ):
        config = plan.config
        self.plan, self.step, self.corpus, self.checkpoints = plan, step, corpus, checkpoints
        self.start = find_start(config, tokenizer, checkpoints)
        self._byte_lengths = np.zeros(plan.padded_vocab_size, np.int32)
        self._byte_lengths[: tokenizer.vocab_size] = tokenizer.token_byte_lengths()
        self._notes = {
            "config": dump_toml(config),
            "tokenizer": tokenizer.digest,
            "padded_vocab_size": str(plan.padded_vocab_size),
        }
        if self.start.step:
            check_padding(plan, int(checkpoints.notes(self.start.step)["padded_vocab_size"]))
        check_same_start(agreed(self.start.step), config)
        self._evaluated = agreed(_has_evaluation(run_dir / "metrics.jsonl", self.start.step))[0]
        self._rows = own_rows(plan.batch_sharding, config.train.batch_size, config.data.sequence_length)
        self._writers: list[Writer] = []
        with ExitStack() as opened:
            self._batches = train_batches(
                corpus,
                config.data,
                batch_size=config.train.batch_size,
                seed=config.run.seed,
                start_step=self.start.step,
                rows=self._rows,
            )
            opened.callback(self._batches.close)
            if jax.process_index() == 0:
                write_whole(run_dir / "config.toml", self._notes["config"])
                self._writers = make_writers(
                    run_dir,
                    tensorboard=config.logging.tensorboard,
                    wandb_project=config.logging.wandb_project,
                    config=config.model_dump(mode="json"),
                    start_step=self.start.step,
                )
            for writer in self._writers:
                opened.callback(writer.close)
            self._opened = opened.pop_all()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._opened.close()

    def run(self, progress: Progress, stop: Callable[[], bool] = lambda: False) -> tuple[TrainState, bool]:
        """The state at the end, and whether `stop` ended the run early; either way the state is saved.

        Raises:
          FloatingPointError: the loss or the gradient is not finite, so that the parameters are lost.
        """
        config = self.plan.config
        num_steps, number = config.train.num_steps, self.start.step
        for message in self.start.messages:
            progress.message(message)
        if config.data.holdout_every == 0:
            progress.message("nothing is held out (data.holdout_every=0), so there is no evaluation")
        # Before the mesh is active: the peak is measured on one device.
        meter = self._meter(progress)
        with self.plan.execution.active():
            state = self._initial_state()
            if number and self._evaluation_is_due(number) and not self._evaluated:
                self._evaluated = self._evaluate(number, state, progress, stop)
            if number == num_steps:
                return state, stop()
            progress.message("compiling the step ...")
            return self._loop(state, progress, meter, stop)

    def _loop(
        self, state: TrainState, progress: Progress, meter: Throughput, stop: Callable[[], bool]
    ) -> tuple[TrainState, bool]:
        checkpoint, num_steps, number = self.plan.config.checkpoint, self.plan.config.train.num_steps, self.start.step
        pending: tuple[int, Mapping[str, jax.Array]] | None = None
        batch = self._next_batch()
        guard = "allow"
        while True:
            number += 1
            last = number == num_steps
            with jax.transfer_guard(guard):
                state, metrics = self.step.train(state, batch)
                if not last:
                    batch = self._next_batch()
                self._report(pending, progress, meter)
            pending, guard = (number, metrics), "disallow"
            stopping = stop()
            save = checkpoint.every_steps > 0 and number % checkpoint.every_steps == 0
            if not (stopping or save or self._evaluation_is_due(number)):
                continue
            self._report(pending, progress, meter)
            pending = None
            meter.pause(number, time.monotonic())
            # Evaluated before it is saved: a run that goes on from here has the line already.
            complete = not self._evaluation_is_due(number) or self._evaluate(number, state, progress, stop)
            stopping = stop()
            if stopping or save or last:
                self.checkpoints.save(number, state, self._notes)
            if stopping:
                progress.message(f"stopped after step {number} of {num_steps}")
            if stopping or last:
                return state, not (last and complete)
            meter.resume(time.monotonic())

    def _next_batch(self) -> dict[str, jax.Array]:
        return from_own_rows(
            self._rows, next(self._batches), self.plan.batch_sharding, self.plan.config.train.batch_size
        )

    def _evaluation_is_due(self, step: int) -> bool:
        every = self.plan.config.evaluation.every_steps
        return step == self.plan.config.train.num_steps or (every > 0 and step % every == 0)

    def _initial_state(self) -> TrainState:
        if self.start.step == 0:
            return init_state(self.plan, self.step.optimizer)
        return self.checkpoints.restore(self.start.step, abstract_state(self.plan, self.step.optimizer))

    def _meter(self, progress: Progress) -> Throughput:
        config = self.plan.config
        tokens_per_step = config.train.batch_size * config.data.sequence_length
        if not hasattr(config.model, "dims"):
            return Throughput(tokens_per_step)
        flops = transformer_flops_per_token(
            **config.model.dims(self.plan.vocab_size), sequence_length=config.data.sequence_length
        )
        peak = find_peak(self.plan.mesh.devices.ravel().tolist(), config.precision.compute, config.hardware.peak_tflops)
        progress.message(f"peak for MFU: {peak.flops_per_second / 1e12:.4g} TFLOP/s ({peak.source})")
        return Throughput(tokens_per_step, flops.training, peak.flops_per_second)

    def _report(
        self, pending: tuple[int, Mapping[str, jax.Array]] | None, progress: Progress, meter: Throughput
    ) -> None:
        """Fetches the metrics of a dispatched step and, where due, shows and writes them."""
        if pending is None:
            return
        step, on_device = pending
        config = self.plan.config
        values: dict[str, Any] = {name: value.item() for name, value in jax.device_get(on_device).items()}
        failed, in_a_row = values.pop("nonfinite"), values.pop("skipped_in_a_row", None)
        meter.synchronised(step, time.monotonic())
        values["tokens"] = step * config.train.batch_size * config.data.sequence_length
        ends = failed >= 0 and (in_a_row is None or in_a_row >= config.train.max_skipped)
        if step % config.logging.every_steps == 0 or step == config.train.num_steps or ends:
            rates = meter.take()
            if rates is not None:
                values |= rates.values()
                if rates.warning:
                    progress.message(f"warning: {rates.warning}")
            for writer in self._writers:
                writer.write(step, values)
            progress.update(step, values)
        if ends:
            raise FloatingPointError(self._why_it_ends(step, values, failed))
        if failed >= 0:
            progress.message(f"step {step} is skipped: {self._what_failed(failed)} is not finite{_scale_of(values)}")

    def _what_failed(self, index: int) -> str:
        parameters = self.plan.parameters
        return "the loss" if index == len(parameters) else f"the gradient of {parameters[index].path}"

    def _why_it_ends(self, step: int, values: Mapping[str, Any], failed: int) -> str:
        saved = self.checkpoints.newest_step
        newest = "there is no checkpoint" if saved is None else f"the newest checkpoint is of step {saved}"
        what = (
            f"step {step}: {self._what_failed(failed)} is not finite (loss {values['loss']:g}, norm of the gradient "
            f"{values['grad_norm']:g}{_scale_of(values)})"
        )
        if "skipped" in values:
            at = " at the smallest loss scale" if "loss_scale" in values else ""
            what += f", nor was one of the last train.max_skipped={self.plan.config.train.max_skipped} steps{at}"
        else:
            what += ", so the parameters are lost and not saved"
        return (
            f"{what}; {newest}. A lower optimizer.learning_rate, more schedule.warmup_steps or "
            "precision.compute=float32 may help, in another run.dir"
        )

    def _evaluate(self, step: int, state: TrainState, progress: Progress, stop: Callable[[], bool]) -> bool:
        """Evaluates, shows and writes; False if `stop` came first."""
        values = evaluate(
            self.plan, self.step, state.evaluated(self.plan.config), self.corpus, self._byte_lengths, stop
        )
        if values is None:
            return False
        if values:
            for writer in self._writers:
                writer.write(step, values)
            shown = [f"{values['eval/loss']:.4f} nats per token"]
            if "eval/bits_per_byte" in values:
                shown.append(f"{values['eval/bits_per_byte']:.4f} bits per byte")
            progress.message(f"step {step}: held-out loss {', '.join(shown)}")
        return True


def evaluate(
    plan: Plan,
    step: Step,
    params: Any,
    corpus: Corpus,
    byte_lengths: np.ndarray,
    stop: Callable[[], bool] = lambda: False,
) -> dict[str, float] | None:
    """`eval/loss` in nats per token and `eval/bits_per_byte` over the whole held-out set; nothing if none is held out.

    None if `stop` said so before the end. `byte_lengths` has the bytes that each entry of the padded vocabulary stands
    for.
    """
    config = plan.config
    batch_size = config.evaluation.batch_size or config.train.batch_size
    rows = own_rows(plan.batch_sharding, batch_size, config.data.sequence_length)
    lengths = jax.device_put(byte_lengths, plan.replicated)
    totals = {"nats": 0.0, "tokens": 0, "bytes": 0}
    pending: Mapping[str, jax.Array] = {}
    for arrays in heldout_batches(corpus, config.data, batch_size=batch_size, rows=rows):
        if stop():
            return None
        batch = from_own_rows(rows, arrays, plan.batch_sharding, batch_size)
        sums = step.evaluate(params, batch, lengths)
        _add(totals, pending)
        pending = sums
    _add(totals, pending)
    if not totals["tokens"]:
        return {}
    values = {"eval/loss": totals["nats"] / totals["tokens"]}
    return (
        values | {"eval/bits_per_byte": totals["nats"] / math.log(2) / totals["bytes"]} if totals["bytes"] else values
    )


def _add(totals: dict[str, Any], sums: Mapping[str, jax.Array]) -> None:
    for name, value in jax.device_get(dict(sums)).items():
        totals[name] += value.item()


def _scale_of(values: Mapping[str, Any]) -> str:
    return f", loss scale {values['loss_scale']:g}" if "loss_scale" in values else ""


def _has_evaluation(path: Path, step: int) -> bool:
    """Whether `metrics.jsonl` has the evaluation of a step: a run that was stopped may owe its last one."""
    if not path.exists():
        return False
    for line in path.read_bytes().splitlines():
        try:
            entry = json.loads(line)
        except ValueError:
            continue
        if isinstance(entry, dict) and entry.get("step") == step and "eval/loss" in entry:
            return True
    return False
