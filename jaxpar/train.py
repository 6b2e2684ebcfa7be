"""`python -m jaxpar.train CONFIG [KEY=VALUE ...]`: trains a model, or goes on with a run that was stopped.

`--print-config` prints the resolved configuration instead, `--help` every key. Ctrl-C or SIGTERM saves the state and
stops; a second Ctrl-C ends the process at once. Exit status: 0 done, 1 the loss is no longer finite or what must be
saved cannot be, 2 something in the configuration or the data is wrong, 75 stopped by a signal with nothing lost: the
same command goes on.
"""

import os
import sys
from collections.abc import Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress

import jax

from jaxpar.checkpoint import SaveFailedError, SaveTimeoutError, open_checkpoints
from jaxpar.checkpoint_store import Retention
from jaxpar.command_line import Stopped, StopSignals, run_command, user_errors
from jaxpar.config import Config
from jaxpar.data import Tokenizer, declared_vocab_size, make_tokenizer, open_data
from jaxpar.events import Events
from jaxpar.exit_status import FAULT, STOPPED
from jaxpar.metrics import make_progress, with_unit
from jaxpar.parallel.agreement import FailedElsewhereError, any_process, heartbeats, last_words
from jaxpar.plan import Plan, make_plan
from jaxpar.remote_store import store_of
from jaxpar.run_directory import run_directory
from jaxpar.sample import continue_tokens
from jaxpar.state import TrainState, abstract_state, local_bytes
from jaxpar.step import Step
from jaxpar.trainer import Trainer

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line; returns the exit status."""
    arguments = sys.argv[1:] if arguments is None else arguments
    return run_command("jaxpar.train", __doc__, _train, arguments, several_processes=True)


def _train(config: Config, flags: Collection[str]) -> int:
    with StopSignals() as signals:
        try:
            return _run(config, signals)
        except SaveTimeoutError as error:
            print(error, file=sys.stderr, flush=True)
            # Not by way of Python's own end, which waits for threads; one of them is at that save.
            os._exit(FAULT)
        except (FloatingPointError, SaveFailedError) as error:
            if jax.process_index() == 0:
                print(error, file=sys.stderr)
            return FAULT


def _run(config: Config, signals: StopSignals) -> int:
    is_writer = jax.process_index() == 0
    show_progress = is_writer and config.logging.progress in ("auto", "bar") and sys.stderr.isatty()
    with ExitStack() as opened:
        with user_errors():
            # What does not depend on the text is refused before it is read.
            vocab_size = declared_vocab_size(config.data)
            plan = make_plan(config, jax.devices(), vocab_size)
            step = Step(plan)
            directory = opened.enter_context(run_directory(config.run.dir, is_writer=is_writer))
            events = opened.enter_context(Events(directory.path / "events.jsonl" if is_writer else None))
            opened.enter_context(_ends_recorded(events))
            shared = config.checkpoint.directory
            if shared and "://" not in shared:
                opened.enter_context(run_directory(shared, is_writer=is_writer, key="checkpoint.directory"))
            if directory.left_by:
                events.record("stale lock", text=f"left by {directory.left_by}")
            tokenizer = make_tokenizer(config.data, show_progress=show_progress)
            assert tokenizer.vocab_size == vocab_size
            prompt = _prompt(config, tokenizer)
            corpus = open_data(config.data, tokenizer, show_progress=show_progress)
        # From here on the processes wait for each other, which they do in vain if one of them has failed above.
        with user_errors():
            checkpoints = opened.enter_context(
                open_checkpoints(
                    store_of(config, directory.path, directory.path / "staging"),
                    Retention(config.checkpoint.keep, config.checkpoint.keep_every_steps, config.checkpoint.keep_best),
                    timeout_seconds=config.checkpoint.timeout_seconds,
                    record=events.record,
                )
            )
            trainer = opened.enter_context(Trainer(plan, step, tokenizer, corpus, checkpoints, directory.path, events))
        if is_writer:
            print("\n".join(_description(plan, step)), flush=True)
        with user_errors():
            progress = make_progress(
                config.logging.progress if is_writer else "off",
                num_steps=config.train.num_steps,
                start_step=trainer.start.step,
                warns=is_writer,
            )
        if directory.left_by and is_writer:
            print(f"recovered the lock of a run that did not end by itself ({directory.left_by})", flush=True)
        with progress, signals.deferred(), heartbeats():
            state, stopped = trainer.run(progress, any_process(signals.stop))
    if stopped:
        if is_writer:
            print(f"the state is saved in {config.run.dir}; the same command goes on", file=sys.stderr)
        return STOPPED
    if prompt:
        text = _sample(plan, tokenizer, state, prompt)
        if is_writer:
            print(f"\nsample:\n{text}", flush=True)
    return 0


@contextmanager
def _ends_recorded(events: Events) -> Iterator[None]:
    """A block whose untimely end, by an error here or the loss of another process, is among the events."""

    def record(event: str, kind: str, text: str) -> None:
        with suppress(OSError):  # it would hide the fault itself
            events.record(event, kind=kind, text=text)

    try:
        with last_words(lambda why: record("fault", "process", why)):
            yield
    except (Stopped, KeyboardInterrupt) as stop:
        record("stopped", type(stop).__name__, str(stop))
        raise
    except FailedElsewhereError:
        record("fault", "process", "another process has failed; its output tells why")
        raise
    except BaseException as error:
        record("fault", type(error).__name__, str(error))
        raise


def _description(plan: Plan, step: Step) -> list[str]:
    config = plan.config
    sizes = " × ".join(f"{axis} {size}" for axis, size in plan.mesh.shape.items() if size > 1) or "1"
    device = plan.mesh.devices.flat[0]
    kind = "" if device.device_kind == device.platform else f" ({device.device_kind})"
    return [
        f"{getattr(config.model, 'name', 'model')}: {plan.num_parameters:,} parameters, vocabulary {plan.vocab_size:,}",
        f"{plan.mesh.size} {device.platform} device(s){kind}: {sizes}",
        _state_bytes(plan, step),
        *plan.notes,
    ]


def _state_bytes(plan: Plan, step: Step) -> str:
    state = abstract_state(plan, step.optimizer)
    device, host = (with_unit(local_bytes(state, on_host=on_host)) for on_host in (False, True))
    moved = plan.config.offload.optimizer_state == "host" or plan.config.offload.parameters == "host"
    return f"state: {device} on each device" + (f", {host} of each in its host's memory" if moved else "")


def _prompt(config: Config, tokenizer: Tokenizer) -> list[int]:
    """The tokens that a text sample starts from; none if no sample is asked for."""
    tokens = tokenizer.encode(config.evaluation.sample_prompt).tolist()
    if config.evaluation.sample_prompt and not tokens:
        raise ValueError(f"evaluation.sample_prompt={config.evaluation.sample_prompt!r} has no tokens")
    return tokens


def _sample(plan: Plan, tokenizer: Tokenizer, state: TrainState, prompt: Sequence[int]) -> str:
    evaluation = plan.config.evaluation
    tokens = continue_tokens(
        plan,
        state.evaluated(plan.config),
        prompt,
        num_tokens=evaluation.sample_tokens,
        temperature=evaluation.sample_temperature,
        vocab_size=tokenizer.vocab_size,
        end_of_text=tokenizer.end_of_text,
    )
    return f"{evaluation.sample_prompt}{tokenizer.decode(tokens)}"


if __name__ == "__main__":
    sys.exit(main())
