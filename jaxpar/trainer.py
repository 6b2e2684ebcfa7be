"""The loop: data in, step, metrics out; evaluate, save, stop. No mathematics.

The metrics of a step are fetched after the next step is dispatched, so that the devices never wait for the host. All
metrics are written before anything is saved, so that a run which goes on from a checkpoint repeats no line of
`metrics.jsonl` and misses none.
"""

import json
import math
import time
import tomllib
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import jax
import numpy as np

from jaxpar.checkpoint import Checkpoints, SaveFailedError
from jaxpar.checkpoint_store import Notes
from jaxpar.config import parse_config
from jaxpar.data import Corpus, Tokenizer, heldout_batches, train_batches
from jaxpar.events import Events
from jaxpar.metrics import Progress, Throughput, Writer, find_peak, make_writers, transformer_flops_per_token
from jaxpar.parallel.agreement import of_the_first
from jaxpar.parallel.dispatch import start_alone
from jaxpar.parallel.feeding import from_own_rows, from_whole, own_rows
from jaxpar.parallel.pipeline.table_file import dump_table
from jaxpar.plan import Plan
from jaxpar.resume import find_start, stored_config
from jaxpar.run_directory import write_whole
from jaxpar.state import TrainState, abstract_state, init_state, state_extents
from jaxpar.step import Step

__all__ = ["Trainer", "evaluate"]

_NO_CHECKPOINT = (
    "WARNING: no checkpoint was completed yet: starting from the beginning, what metrics.jsonl has is dropped"
)


class Trainer:
    """One run from its first or resumed step to its last, or to the moment when it is asked to stop.

    A context manager; inside it the run's data and writers are open.

    Raises:
      ValueError: `run.dir` holds another run, the data are too short, or a writer's package is missing.
    """

    def __init__(
        self,
        plan: Plan,
        step: Step,
        tokenizer: Tokenizer,
        corpus: Corpus,
        checkpoints: Checkpoints,
        run_dir: Path,
        events: Events,
    ):
        config = plan.config
        self.plan, self.step, self.corpus, self.checkpoints, self.events = plan, step, corpus, checkpoints, events
        self.start = find_start(
            plan,
            step.optimizer,
            tokenizer.digest,
            corpus.digest,
            checkpoints,
            saved_before=bool(events.before & {"saved", "restore"}),
            record=events.record,
        )
        self._extents = state_extents(plan, abstract_state(plan, step.optimizer))
        self._byte_lengths = np.zeros(plan.padded_vocab_size, np.int32)
        self._byte_lengths[: tokenizer.vocab_size] = tokenizer.token_byte_lengths()
        self._config, self._tokenizer_digest = stored_config(config), tokenizer.digest
        lost = of_the_first((run_dir / "metrics.jsonl").exists()) and not self.start.step
        self._messages = (*self.start.messages, *([_NO_CHECKPOINT] if lost else []))
        self._evaluated = of_the_first(_has_evaluation(run_dir / "metrics.jsonl", self.start.step))
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
                write_whole(run_dir / "config.toml", self._config)
                _write_schedule(plan, run_dir / "pipeline_schedule.txt")
                self._writers = make_writers(
                    run_dir,
                    tensorboard=config.logging.tensorboard,
                    wandb_project=config.logging.wandb_project,
                    config=parse_config(tomllib.loads(self._config)).model_dump(mode="json"),
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
          FloatingPointError: the loss or a gradient is not finite, so that the parameters are lost; or so many steps in
            a row were skipped for that (`train.max_skipped`) that the run cannot go on.
          SaveFailedError: the last state, or the metrics, could not be saved.
        """
        config = self.plan.config
        num_steps, number = config.train.num_steps, self.start.step
        self._record_start()
        for message in self._messages:
            progress.message(message)
        if config.data.holdout_every == 0:
            progress.message("nothing is held out (data.holdout_every=0), so there is no evaluation")
        # Before the mesh is active: the peak is measured on one device.
        meter = self._meter(progress)
        with self.plan.execution.active():
            state = self._initial_state()
            if number and self._evaluation_is_due(number) and not self._evaluated:
                self._evaluated = self._evaluate(number, state, progress, stop) is not None
            if number < num_steps:
                # `stop` is a sign of life, and who has given one is watched: it comes after compiling.
                progress.message("compiling the step ...")
                state, stopped = self._loop(state, progress, meter, stop)
            else:
                stopped = stop()
        self.events.record("end", step=int(state.step), stopped=stopped)
        return state, stopped

    def _record_start(self) -> None:
        self.events.record(
            "resume" if self.start.step else "start",
            step=self.start.step,
            num_steps=self.plan.config.train.num_steps,
            processes=jax.process_count(),
            mesh={axis: size for axis, size in self.plan.mesh.shape.items() if size > 1},
            version=metadata.version("jaxpar"),
        )

    def _loop(
        self, state: TrainState, progress: Progress, meter: Throughput, stop: Callable[[], bool]
    ) -> tuple[TrainState, bool]:
        checkpoint, num_steps, number = self.plan.config.checkpoint, self.plan.config.train.num_steps, self.start.step
        pending: tuple[int, Mapping[str, jax.Array]] | None = None
        batch = self._next_batch()
        guard, waits = "allow", start_alone(self.plan.mesh)
        while True:
            number += 1
            last = number == num_steps
            with jax.transfer_guard(guard):
                if waits:
                    # A step that is waited for ends before the next: one step late its time would be the next one's.
                    self._report(pending, progress, meter)
                    pending = None
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
            due = self._evaluation_is_due(number)
            values = self._evaluate(number, state, progress, stop) if due else {}
            stopping = stop()
            if stopping or save or last:
                self._save(number, state, values)
            if stopping or last:
                self._finish_saving(progress)
            if stopping:
                progress.message(f"stopped after step {number} of {num_steps}")
            if stopping or last:
                return state, not last or values is None
            meter.resume(time.monotonic())

    def _next_batch(self) -> dict[str, jax.Array]:
        return from_own_rows(
            self._rows, next(self._batches), self.plan.batch_sharding, self.plan.config.train.batch_size
        )

    def _evaluation_is_due(self, step: int) -> bool:
        every = self.plan.config.evaluation.every_steps
        return step == self.plan.config.train.num_steps or (every > 0 and step % every == 0)

    def _initial_state(self) -> TrainState:
        state = self.start.state
        # The step donates it: nobody may hold it.
        self.start = replace(self.start, state=None)
        return init_state(self.plan, self.step.optimizer) if state is None else state

    def _save(self, step: int, state: TrainState, evaluation: Mapping[str, float] | None) -> None:
        config = self.plan.config
        loss = (evaluation or {}).get("eval/loss")
        notes = Notes(
            step=step,
            config=self._config,
            tokenizer=self._tokenizer_digest,
            data=self.corpus.digest,
            padded_vocab_size=self.plan.padded_vocab_size,
            num_updates=int(jax.device_get(state.num_updates)),
            next_sequence=step * config.train.batch_size,
            loss=loss if loss is not None and math.isfinite(loss) else None,
            saved_at="",
            events=self.events.head,
            arrays={},
        )
        self.checkpoints.save(state, notes, self._extents)

    def _finish_saving(self, progress: Progress) -> None:
        try:
            self.checkpoints.finish()
        finally:
            self._tell(progress)

    def _tell(self, progress: Progress) -> None:
        """Shows what there is to tell of saves that go on in the background."""
        for message in self.checkpoints.messages():
            progress.message(message)

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
        self._tell(progress)
        fetched = jax.device_get(on_device)
        values: dict[str, Any] = {name: value.item() if value.ndim == 0 else value for name, value in fetched.items()}
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
            self._write(step, values)
            progress.update(step, values)
        if ends:
            raise FloatingPointError(self._why_it_ends(step, values, failed))
        if failed >= 0:
            progress.message(f"step {step} is skipped: {self._what_failed(failed)} is not finite{_scale_of(values)}")

    def _write(self, step: int, values: Mapping[str, Any]) -> None:
        try:
            for writer in self._writers:
                writer.write(step, values)
        except OSError as error:
            raise SaveFailedError(
                f"the metrics of step {step} cannot be written ({error}); the same command goes on from the newest "
                "checkpoint once they can"
            ) from error

    def _what_failed(self, index: int) -> str:
        parameters = self.plan.parameters
        return "the loss" if index == len(parameters) else f"the gradient of {parameters[index].path}"

    def _why_it_ends(self, step: int, values: Mapping[str, Any], failed: int) -> str:
        self.checkpoints.wait()
        saved = self.checkpoints.newest_step
        newest = "there is no checkpoint" if saved is None else f"the newest checkpoint is of step {saved}"
        what = (
            f"step {step}: {self._what_failed(failed)} is not finite (loss {values['loss']:g}, norm of the gradient "
            f"{values['grad_norm']:g}{_scale_of(values)})"
        )
        precision = self.plan.config.precision
        if "skipped" in values:
            at = {"none": "", "fixed": " at this fixed loss scale", "dynamic": " at the smallest loss scale"}
            skipped = f"train.max_skipped={self.plan.config.train.max_skipped} steps{at[precision.scaling]}"
            what += f", nor was one of the last {skipped}"
        else:
            what += ", so the parameters are lost and not saved"
        remedies = ["a lower optimizer.learning_rate", "more schedule.warmup_steps"]
        remedies += ["precision.loss_scale=dynamic"] * (precision.scaling == "fixed")
        remedies += ["precision.compute=float32"] * (precision.compute != "float32")
        last = f" or {remedies.pop()} may help, in another run.dir"
        return f"{what}; {newest}. {', '.join(remedies).capitalize()}{last}"

    def _evaluate(
        self, step: int, state: TrainState, progress: Progress, stop: Callable[[], bool]
    ) -> Mapping[str, float] | None:
        """Evaluates, shows and writes; None if `stop` came first."""
        values = evaluate(
            self.plan, self.step, state.evaluated(self.plan.config), self.corpus, self._byte_lengths, stop
        )
        if values:
            self._write(step, values)
            shown = [f"{values['eval/loss']:.4f} nats per token"]
            if "eval/bits_per_byte" in values:
                shown.append(f"{values['eval/bits_per_byte']:.4f} bits per byte")
            progress.message(f"step {step}: held-out loss {', '.join(shown)}")
        return values


def _write_schedule(plan: Plan, path: Path) -> None:
    """The table of the run's stages, for one of the user's own is but a path in the configuration."""
    if path.resolve() == Path(plan.config.pipeline.schedule).expanduser().resolve():
        return  # it is what was read
    if plan.pipeline is not None:
        write_whole(path, dump_table(plan.pipeline.schedule))
    else:
        path.unlink(missing_ok=True)


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
    lengths = from_whole(byte_lengths, plan.replicated)
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
