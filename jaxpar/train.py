"""`python -m jaxpar.train CONFIG [KEY=VALUE ...]`: trains a model, or goes on with a run that was stopped.

`--print-config` prints the resolved configuration instead, `--help` every key. Exit status: 0 done, 2 something in the
configuration or the data is wrong, 75 stopped by a signal with the state saved.
"""

import sys
from collections.abc import Sequence
from pathlib import Path

import jax

from jaxpar.checkpoint import Checkpoints
from jaxpar.command_line import run_command, user_errors
from jaxpar.config import Config
from jaxpar.data import Tokenizer, make_tokenizer, open_data
from jaxpar.plan import Plan, make_plan
from jaxpar.sample import continue_tokens
from jaxpar.state import TrainState
from jaxpar.trainer import Trainer

__all__ = ["STOPPED", "main"]

STOPPED = 75


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line; returns the exit status."""
    return run_command("jaxpar.train", __doc__, _train, sys.argv[1:] if arguments is None else arguments)


def _train(config: Config) -> int:
    show_progress = config.logging.progress != "off"
    with user_errors():
        tokenizer = make_tokenizer(config.data, show_progress=show_progress)
        plan = make_plan(config, jax.devices(), tokenizer.vocab_size)
        corpus = open_data(config.data, tokenizer, show_progress=show_progress)
        checkpoints = Checkpoints(Path(config.run.dir) / "checkpoints", keep=config.checkpoint.keep)
    with checkpoints:
        with user_errors():
            trainer = Trainer(plan, tokenizer, corpus, checkpoints)
        _announce(plan)
        state, stopped = trainer.run()
    if stopped:
        print(f"the state is saved; the same command goes on with {config.run.dir}")
        return STOPPED
    if config.evaluation.sample_prompt:
        _print_sample(plan, tokenizer, state)
    return 0


def _announce(plan: Plan) -> None:
    config = plan.config
    num_parameters = sum(parameter.size for parameter in plan.parameters)
    sizes = " × ".join(f"{axis} {size}" for axis, size in plan.mesh.shape.items() if size > 1) or "1"
    device = plan.mesh.devices.flat[0]
    print(f"{config.model.name}: {num_parameters:,} parameters, vocabulary {plan.vocab_size:,}")  # type: ignore[attr-defined]
    print(f"{plan.mesh.size} {device.platform} device(s) ({device.device_kind}): {sizes}")
    for note in plan.notes:
        print(note)


def _print_sample(plan: Plan, tokenizer: Tokenizer, state: TrainState) -> None:
    evaluation = plan.config.evaluation
    prompt = tokenizer.encode(evaluation.sample_prompt).tolist()
    tokens = continue_tokens(
        plan, state.params, prompt, num_tokens=evaluation.sample_tokens, temperature=evaluation.sample_temperature,
        end_of_text=tokenizer.end_of_text,
    )  # fmt: skip
    print(f"\nsample:\n{evaluation.sample_prompt}{tokenizer.decode(tokens)}")


if __name__ == "__main__":
    sys.exit(main())
