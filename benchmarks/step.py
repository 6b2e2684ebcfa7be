"""`python benchmarks/step.py [--rounds N] [--compile] [KEY=VALUE ...]`: jaxpar's step against a hand-written loop.

Both train the same Llama-like model from the same weights on the same batch, in one process, turn by turn: A B A B ...
The opponent (`plain_loop.py`) first tries each of its forms and enters with its fastest. Printed are the ratio of each
pair with its spread, and the share of the machine's matrix-product peak, measured in the same process; the last line is
one JSON object. Overrides change `step.toml`, such as `precision.compute=bfloat16` or `train.batch_size=64`.

With several devices (`parallel.data=8`) there is no opponent: jaxpar's own speed is printed. `--compile` measures how
compile time grows with depth instead.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
from plain_loop import Settings, make_train_step

from jaxpar.backend import prepare
from jaxpar.config import Config, ConfigError, load_config
from jaxpar.inspect import compile_step
from jaxpar.metrics import find_peak, transformer_flops_per_token
from jaxpar.plan import Plan, make_plan
from jaxpar.state import init_state
from jaxpar.step import Step
from jaxpar.verify import synthetic_batch

_CHANGES: tuple[dict[str, Any], ...] = (
    {"transposed_weight_gradients": True},
    {"float32_products": True},
    {"attention_block": 128},
    {"unroll_layers": True},
)

Turn = Callable[[], float]
"""Runs one step to its end and returns the loss."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the benchmark; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7, help="pairs of turns")
    parser.add_argument("--steps", type=int, default=1, help="steps a turn")
    parser.add_argument("--compile", action="store_true", help="measure compile time against depth")
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE")
    options = parser.parse_args(arguments)
    try:
        config = load_config(Path(__file__).with_name("step.toml"), options.overrides)
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 2
    for line in prepare(config.parallel, config.runtime):
        print(line)
    result = _compile_times(config) if options.compile else _speed(config, options.rounds, options.steps)
    print(json.dumps({"benchmark": "step", "jax": jax.__version__, "compute": config.precision.compute} | result))
    return 0


def _speed(config: Config, rounds: int, steps: int) -> dict[str, Any]:
    plan = make_plan(config, jax.devices(), config.model.vocab_size)  # type: ignore[attr-defined]
    for note in plan.notes:
        print(note)
    # Every token counts, as in the opponent.
    batch = synthetic_batch(plan)
    batch |= {
        "positions": np.broadcast_to(np.arange(config.data.sequence_length, dtype=np.int32), batch["tokens"].shape),
        "loss_mask": np.ones_like(batch["loss_mask"]),
    }
    ours = _our_turn(plan, batch)
    first_loss = ours()
    peak = find_peak(list(plan.mesh.devices.flat), config.precision.compute, config.hardware.peak_tflops)
    print(f"peak: {peak.flops_per_second / 1e12:.3f} TFLOP/s ({peak.source})")
    dims = config.model.dims(plan.vocab_size)  # type: ignore[attr-defined]
    tokens = config.train.batch_size * config.data.sequence_length
    flops = tokens * transformer_flops_per_token(**dims, sequence_length=config.data.sequence_length).training
    if plan.mesh.size > 1:
        seconds = [_timed(ours, steps) for _ in range(rounds)]
        return {"devices": plan.mesh.size} | _figures(seconds, tokens, flops, peak.flops_per_second)
    settings, theirs = _fastest_opponent(plan, batch, first_loss)
    pairs = [(_timed(ours, steps), _timed(theirs, steps)) for _ in range(rounds)]
    ratios = [theirs_seconds / our_seconds for our_seconds, theirs_seconds in pairs]
    middle = statistics.median(ratios)
    print(f"speed over the hand-written loop: median {middle:.3f}, {min(ratios):.3f} to {max(ratios):.3f}")
    return {
        "ratio": statistics.median(ratios),
        "ratio_min": min(ratios),
        "ratio_max": max(ratios),
        "opponent": asdict(settings),
        "opponent_tokens_per_second": tokens / statistics.median(seconds for _, seconds in pairs),
    } | _figures([seconds for seconds, _ in pairs], tokens, flops, peak.flops_per_second)


def _figures(seconds: list[float], tokens: int, flops: float, peak: float) -> dict[str, Any]:
    median = statistics.median(seconds)
    print(f"{tokens / median:,.0f} tokens/s, {flops / median / peak:.1%} of the peak")
    return {"tokens_per_second": tokens / median, "share_of_peak": flops / median / peak, "seconds": seconds}


def _our_turn(plan: Plan, batch: dict[str, np.ndarray]) -> Turn:
    step = Step(plan)
    with plan.execution.active():
        state = [init_state(plan, step.optimizer)]
        on_device = {name: jax.device_put(rows, plan.batch_sharding) for name, rows in batch.items()}

    def turn() -> float:
        with plan.execution.active():
            state[0], metrics = step.train(state[0], on_device)
            jax.block_until_ready(state[0])
        return float(metrics["loss"])

    return turn


def _fastest_opponent(plan: Plan, batch: dict[str, np.ndarray], first_loss: float) -> tuple[Settings, Turn]:
    """The form with the fastest of three turns, and that turn. All must start at jaxpar's loss."""
    tolerance = 2e-2 if plan.config.precision.compute == "bfloat16" else 1e-4

    def tried(settings: Settings) -> tuple[float, Settings, Turn]:
        turn = _their_turn(plan, batch, settings)
        loss = turn()
        assert abs(loss - first_loss) <= tolerance, f"{settings}: the loss is {loss}, jaxpar's {first_loss}"
        seconds = min(_timed(turn, 1) for _ in range(3))
        print(f"hand-written, {settings}: {seconds:.2f} s a step")
        return seconds, settings, turn

    best = tried(Settings())
    # One form after the other, each kept if it is faster.
    for change in _CHANGES:
        best = min(best, tried(replace(best[1], **change)), key=lambda trial: trial[0])
    return best[1], best[2]


def _their_turn(plan: Plan, batch: dict[str, np.ndarray], settings: Settings) -> Turn:
    config = plan.config
    model = config.model
    optimizer, step = make_train_step(
        model.num_heads,  # type: ignore[attr-defined]
        config.precision.compute,
        config.optimizer.learning_rate,
        config.train.max_grad_norm,
        settings,
    )
    params = _their_params(plan)
    state = [params, jax.jit(optimizer.init)(params)]
    tokens, targets = jax.numpy.asarray(batch["tokens"]), jax.numpy.asarray(batch["targets"])

    def turn() -> float:
        state[0], state[1], loss = step(state[0], state[1], tokens, targets)
        jax.block_until_ready(state)
        return float(loss)

    return turn


def _their_params(plan: Plan) -> Any:
    """jaxpar's initial weights, every one as a matrix (with the layers in front)."""
    ours = jax.jit(plan.make_params)()
    blocks = ours["blocks"]
    attention, mlp = blocks["attention"], blocks["mlp"]
    layers, dim = blocks["attention_norm"]["scale"].shape
    return {
        "embedding": ours["embedding"]["table"],
        "head": ours["output"],
        "final_norm": ours["final_norm"]["scale"],
        "layers": {
            "attention_norm": blocks["attention_norm"]["scale"],
            "mlp_norm": blocks["mlp_norm"]["scale"],
            **{name: attention[name].reshape(layers, dim, -1) for name in ("query", "key", "value")},
            "output": attention["output"].reshape(layers, -1, dim),
            **{name: mlp[name] for name in ("gate", "up", "down")},
        },
    }


def _timed(turn: Turn, steps: int) -> float:
    start = time.perf_counter()
    for _ in range(steps):
        turn()
    return (time.perf_counter() - start) / steps


def _compile_times(config: Config) -> dict[str, Any]:
    jax.config.update("jax_enable_compilation_cache", False)
    seconds = {}
    for num_layers in (2, 8, 32):
        model = config.model.model_copy(update={"num_layers": num_layers})
        plan = make_plan(config.model_copy(update={"model": model}), jax.devices(), model.vocab_size)  # type: ignore[attr-defined]
        start = time.perf_counter()
        compile_step(plan)
        seconds[num_layers] = time.perf_counter() - start
        print(f"{num_layers} layers: compiled in {seconds[num_layers]:.1f} s")
    return {"compile_seconds": seconds, "growth": seconds[32] / seconds[2]}


if __name__ == "__main__":
    sys.exit(main())
