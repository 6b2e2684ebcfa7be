"""The loop: data in, step, metrics out; evaluate, save, stop. No mathematics.

The metrics of a step are fetched after the next step is dispatched, so that the devices never wait for the host.
"""

import math
import signal
import time
from collections import deque
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, Self

import jax
import numpy as np

from jaxpar.checkpoint import Checkpoints
from jaxpar.config import changed_keys, dump_toml, load_config
from jaxpar.data import Corpus, Tokenizer, heldout_batches, train_batches
from jaxpar.metrics import Progress, Throughput, Writer, find_peak, make_progress, make_writers, transformer_flops_per_token
from jaxpar.plan import Plan
from jaxpar.state import TrainState, abstract_state, init_state
from jaxpar.step import Step

__all__ = ["StopSignals", "Trainer", "evaluate", "resumable_step"]

_MAY_CHANGE = ("parallel", "logging", "hardware", "runtime", "checkpoint", "evaluation", "kernels", "remat", "run.dir",
               "train.num_steps", "data.cache_dir", "data.prefetch")  # fmt: skip


class StopSignals:
    """Notes SIGINT (Ctrl-C) and SIGTERM while it is entered, so that the loop can stop at a step's end; a second one kills."""

    def __init__(self) -> None:
        self.received: int | None = None

    def __enter__(self) -> Self:
        self._previous = {number: signal.signal(number, self._note) for number in (signal.SIGINT, signal.SIGTERM)}
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.received = number
        signal.signal(number, self._previous[number])


def resumable_step(plan: Plan, checkpoints: Checkpoints) -> int | None:
    """The step of the checkpoint that the run goes on from; None for a new run.

    Raises:
      ValueError: the run in `run.dir` was started with values that would make it another run.
    """
    step = checkpoints.newest_step
    if step is None:
        return None
    path = Path(plan.config.run.dir) / "config.toml"
    changes = changed_keys(load_config(path), plan.config)
    fixed = {key: values for key, values in changes.items() if not _may_change(key)}
    if fixed:
        lines = "\n".join(f"  {key}: {old!r} → {new!r}" for key, (old, new) in fixed.items())
        raise ValueError(
            f"run.dir={plan.config.run.dir!r} holds a run (saved at step {step}) that was started with other values:\n{lines}\n"
            "set them back to go on with it, or choose another run.dir"
        )
    return step


def _may_change(key: str) -> bool:
    return any(key == safe or key.startswith(f"{safe}.") for safe in _MAY_CHANGE)


class Trainer:
    """One run from its first or resumed step to its last, or to a signal."""

    def __init__(self, plan: Plan, tokenizer: Tokenizer, corpus: Corpus, checkpoints: Checkpoints):
        self.plan, self.config, self.checkpoints, self.corpus = plan, plan.config, checkpoints, corpus
        self.step = Step(plan)
        self.byte_lengths = np.zeros(plan.padded_vocab_size, np.int32)
        self.byte_lengths[: tokenizer.vocab_size] = tokenizer.token_byte_lengths()
        self.start_step = resumable_step(plan, checkpoints) or 0
        self.run_dir = Path(self.config.run.dir)
        self.run_dir.mkdir(parents=True, exist_ok=True)
        (self.run_dir / "config.toml").write_text(dump_toml(self.config), encoding="utf-8")
        self.progress: Progress
        self.writers: list[Writer]

    def run(self) -> tuple[TrainState, bool]:
        """The final state, and whether a signal ended the run early; either way the state is saved."""
        config = self.config
        self.writers = make_writers(
            self.run_dir,
            tensorboard=config.logging.tensorboard,
            wandb_project=config.logging.wandb_project,
            config=config.model_dump(mode="json"),
            start_step=self.start_step,
        )
        self.progress = make_progress(config.logging.progress, num_steps=config.train.num_steps, start_step=self.start_step)
        try:
            with self.progress, StopSignals() as signals:
                meter = self._meter()
                with self.plan.execution.active():
                    return self._run(signals, meter)
        finally:
            for writer in self.writers:
                writer.close()

    def _run(self, signals: StopSignals, meter: Throughput) -> tuple[TrainState, bool]:
        config, num_steps = self.config, self.config.train.num_steps
        state = self._initial_state()
        batches = train_batches(
            self.corpus, config.data, batch_size=config.train.batch_size, seed=config.run.seed, start_step=self.start_step,
            process_index=jax.process_index(), process_count=jax.process_count(),
        )  # fmt: skip
        pending: tuple[int, dict[str, jax.Array]] | None = None
        if self.start_step < num_steps:
            self.progress.message("compiling the step ...")
        try:
            on_device = _prefetched(batches, self.plan)
            for number in range(self.start_step + 1, num_steps + 1):
                state, metrics = self.step.train(state, next(on_device))
                self._report(pending, meter)
                pending = (number, metrics)
                stop = signals.received is not None
                evaluate_now = config.evaluation.every_steps and number % config.evaluation.every_steps == 0
                save_now = config.checkpoint.every_steps and number % config.checkpoint.every_steps == 0
                if stop or evaluate_now or save_now or number == num_steps:
                    self._report(pending, meter)
                    pending = None
                    meter.pause(number, time.monotonic())
                    if (evaluate_now or number == num_steps) and not stop:
                        self._evaluate(number, state)
                    if stop or save_now or number == num_steps:
                        self.checkpoints.save(number, state, dump_toml(config))
                    meter.resume(time.monotonic())
                if stop:
                    self.progress.message(f"stopped by {signal.Signals(signals.received).name} at step {number}")
                    return state, number < num_steps
        finally:
            batches.close()
        return state, False

    def _initial_state(self) -> TrainState:
        if self.start_step:
            self.progress.message(f"continuing from step {self.start_step}, saved in {self.run_dir}")
            return self.checkpoints.restore(self.start_step, abstract_state(self.plan, self.step.optimizer))
        return init_state(self.plan, self.step.optimizer)

    def _meter(self) -> Throughput:
        config = self.config
        tokens_per_step = config.train.batch_size * config.data.sequence_length
        if not hasattr(config.model, "dims"):
            return Throughput(tokens_per_step)
        flops = transformer_flops_per_token(
            **config.model.dims(self.plan.vocab_size), sequence_length=config.data.sequence_length
        )
        peak = find_peak(self.plan.mesh.devices.ravel().tolist(), config.precision.compute, config.hardware.peak_tflops)
        self.progress.message(f"peak for MFU: {peak.flops_per_second / 1e12:.4g} TFLOP/s ({peak.source})")
        return Throughput(tokens_per_step, flops.training, peak.flops_per_second)

    def _report(self, pending: tuple[int, dict[str, jax.Array]] | None, meter: Throughput) -> None:
        """Fetches the metrics of a dispatched step and, where due, shows and writes them."""
        if pending is None:
            return
        step, on_device = pending
        values: dict[str, Any] = {name: value.item() for name, value in jax.device_get(on_device).items()}
        meter.synchronised(step, time.monotonic())
        if not math.isfinite(values["loss"]):
            self.progress.message(f"step {step}: the loss is {values['loss']}")
        values["tokens"] = step * self.config.train.batch_size * self.config.data.sequence_length
        if step % self.config.logging.every_steps == 0 or step == self.config.train.num_steps:
            rates = meter.take()
            if rates is not None:
                values |= rates.values()
                if rates.warning:
                    self.progress.message(f"warning: {rates.warning}")
            for writer in self.writers:
                writer.write(step, values)
            self.progress.update(step, values)

    def _evaluate(self, step: int, state: TrainState) -> None:
        values = evaluate(self.plan, self.step, state.params, self.corpus, self.byte_lengths)
        if not values:
            return
        for writer in self.writers:
            writer.write(step, values)
        shown = f"held-out loss {values['eval/loss']:.4f} nats per token, {values['eval/bits_per_byte']:.4f} bits per byte"
        self.progress.message(f"step {step}: {shown}")


def evaluate(plan: Plan, step: Step, params: Any, corpus: Corpus, byte_lengths: np.ndarray) -> dict[str, float]:
    """`eval/loss` in nats per token and `eval/bits_per_byte` over the whole held-out set; nothing if none is held out."""
    config = plan.config
    batches = heldout_batches(
        corpus, config.data, batch_size=config.evaluation.batch_size or config.train.batch_size,
        process_index=jax.process_index(), process_count=jax.process_count(),
    )  # fmt: skip
    lengths = jax.device_put(byte_lengths, plan.replicated)
    totals = {"nats": 0.0, "tokens": 0, "bytes": 0}
    for batch in _prefetched(batches, plan):
        for name, value in jax.device_get(step.evaluate(params, batch, lengths)).items():
            totals[name] += value.item()
    if not totals["tokens"]:
        return {}
    values = {"eval/loss": totals["nats"] / totals["tokens"]}
    return values | {"eval/bits_per_byte": totals["nats"] / math.log(2) / totals["bytes"]} if totals["bytes"] else values


def _prefetched(batches: Iterable[dict[str, np.ndarray]], plan: Plan) -> Iterator[dict[str, jax.Array]]:
    """Global arrays, put on the devices one batch ahead of use."""
    waiting: deque[dict[str, jax.Array]] = deque()
    for batch in batches:
        waiting.append(
            {name: jax.make_array_from_process_local_data(plan.batch_sharding, rows) for name, rows in batch.items()}
        )
        if len(waiting) > 1:
            yield waiting.popleft()
    yield from waiting
