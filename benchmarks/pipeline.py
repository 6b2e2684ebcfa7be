"""`python benchmarks/pipeline.py [--memory-only] [--rounds N] [--microbatches M ...] [--schedules A,B] [KEY=VALUE ...]`

jaxpar's pipeline schedules, and GPipe by autodiff through a scan (`scan_pipeline.py`): loss and gradients, without the
optimizer, of one model from the same weights on the same microbatches. All must agree before any figure is printed.

- Of each schedule: ticks, idle share, activations and predicted time from the table; compile seconds, the compiled
  program's temporary bytes a device, and the time of a step.
- The times of a forward, of an input's gradient and of weights' gradients (`tick_times.py`), as `pipeline.costs`.
- Memory, compile time and step time of the scan over those of jaxpar's schedules: above 1, jaxpar is better.

A microbatch has `train.batch_size` / `pipeline.microbatches` sequences, however many there are. Programs run turn by
turn in one process, A B C A B C ..., and ratios are of turns of one round. `--memory-only` times no step. Overrides
change `pipeline.toml`; `parallel.simulated_devices=0` takes the devices that there are. The last line is one JSON
object.
"""

import argparse
import itertools
import json
import statistics
import sys
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
from rich.console import Console
from rich.table import Table
from scan_pipeline import scan_gradients
from tick_times import TICKS, repeating

from jaxpar.backend import prepare
from jaxpar.command_line import UserError, user_errors
from jaxpar.config import Config, ConfigError, load_config
from jaxpar.exit_status import USER_ERROR
from jaxpar.parallel.layers import REMAT_POLICIES
from jaxpar.parallel.loss import LossSettings
from jaxpar.parallel.pipeline.catalogue import SCHEDULES, build_schedule
from jaxpar.parallel.pipeline.choice import measure
from jaxpar.parallel.pipeline.makespan import Costs, idle_share
from jaxpar.parallel.pipeline.schedule import Kind, PipelineSchedule
from jaxpar.parallel.program import memory_table
from jaxpar.plan import Plan, make_plan
from jaxpar.step import clipped, dropout_keys, examination, make_gradients, mean_over_tokens
from jaxpar.verify import TOLERANCE, differences, synthetic_batch

__all__ = ["COMPARED", "SCANS", "Case", "main", "planned", "table_figures"]

COMPARED = ("gpipe", "1f1b", "1f1b_aligned")
"""The schedules that are compared with the scan: those of one chunk a rank that do not split the backward."""
SCANS = {"scan": False, "scan_checkpointed": True}
"""What rows call the opponent → whether `jax.checkpoint` is around the stage."""
_REPEATS = 16
_TOLERANCE_OF_16_BITS = 2.0**-5
_SHARED_CORES = (
    "The devices are simulated and share this machine's cores: a step's time is that of all their work, one after the "
    "other. A rank without a task costs nothing where ranks branch (1f1b, interleaved, zb_*); in aligned tables and "
    "scans it computes and drops the result. Times show the executor's work, no bubbles."
)


@dataclass(frozen=True)
class Case:
    """What is compared: a schedule or a scan, by its name, with its plan."""

    name: str
    plan: Plan

    @property
    def remat(self) -> str:
        return self.plan.config.remat.policy

    @property
    def num_microbatches(self) -> int:
        return self.plan.config.pipeline.microbatches

    @property
    def schedule(self) -> PipelineSchedule:
        assert self.plan.pipeline is not None
        return self.plan.pipeline.schedule

    def __str__(self) -> str:
        return f"{self.name}, remat {self.remat}, {self.num_microbatches} microbatches"


class Program:
    """Loss and gradients of a case, compiled, with weights and a batch; `seconds` are of its turns."""

    def __init__(self, case: Case, params: Any):
        plan, gradients = case.plan, _gradients_of(case)

        def program(params: Any, batch: Mapping[str, jax.Array]) -> Any:
            return gradients(params, batch, dropout_keys(plan, 0), None)

        rows = synthetic_batch(plan)
        self.case, self.seconds, self._params = case, list[float](), params
        self._batch = {name: jax.device_put(array, plan.batch_sharding) for name, array in rows.items()}
        jitted = jax.jit(program, out_shardings=(plan.shardings(plan.rules.optimizer), plan.replicated))
        # Float32 products are float32 on GPUs too, which by default round their operands.
        precision = "highest" if plan.config.precision.compute == "float32" else "default"
        start = time.perf_counter()
        with plan.execution.active(), jax.default_matmul_precision(precision):
            self._compiled = jitted.lower(params, self._batch).compile()
        self.compile_seconds = time.perf_counter() - start
        self.temporary_bytes = memory_table(self._compiled)["temp_bytes"]
        if (examine := examination(plan)) is not None:
            examine(self._compiled)

    def results(self) -> dict[str, np.ndarray]:
        """The loss, and every gradient by path, its layers in the model's order."""
        plan = self.case.plan
        gradients, metrics = jax.device_get(self._compiled(self._params, self._batch))
        return {"loss": metrics["loss"], **plan.in_layer_order(plan.by_path(gradients))}

    def take_turn(self) -> None:
        """Runs a step and notes its time."""
        start = time.perf_counter()
        jax.block_until_ready(self._compiled(self._params, self._batch))
        self.seconds.append(time.perf_counter() - start)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the benchmark; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5, help="turns of every program")
    parser.add_argument("--microbatches", nargs="+", default=["4", "8", "16"], metavar="M")
    parser.add_argument("--schedules", default=",".join(SCHEDULES), help="names with commas between them")
    parser.add_argument("--scans", default=",".join(SCANS), help="the forms of the scan, with commas between them")
    parser.add_argument("--policies", default="none,full", help="remat policies under which scans are compared")
    parser.add_argument("--memory-only", action="store_true", help="time no step")
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE")
    options = parser.parse_args(arguments)
    # An option that takes several words takes the overrides behind it too.
    words = options.microbatches
    overrides = [*options.overrides, *(word for word in words if "=" in word)]
    try:
        with user_errors():
            numbers = _numbers([word for word in words if "=" not in word])
            config = load_config(Path(__file__).with_name("pipeline.toml"), overrides)
            for line in prepare(config.parallel, config.runtime):
                print(line)
            names, scans, policies = (text.split(",") for text in (options.schedules, options.scans, options.policies))
            cases = list(planned(config, names, scans, policies, numbers))
    except (ConfigError, UserError) as error:
        print(error, file=sys.stderr)
        return USER_ERROR
    result = {
        "benchmark": "pipeline",
        "jax": jax.__version__,
        "device": jax.devices()[0].device_kind,
        "simulated": bool(config.parallel.simulated_devices),
        "mesh": {axis: size for axis, size in cases[0].plan.mesh.shape.items() if size > 1},
        "compute": config.precision.compute,
    }
    console = Console(width=None if sys.stdout.isatty() else 160, emoji=False)
    result |= _compared(console, config, cases, 0 if options.memory_only else options.rounds)
    print(json.dumps(result))
    return 0


def planned(
    config: Config, names: Sequence[str], scans: Sequence[str], policies: Sequence[str], numbers: Sequence[int]
) -> Iterator[Case]:
    """The cases: for each number of microbatches the schedules that can be made for it, under the configured remat
    policy, and under each of `policies` those that are compared, and the scans.

    Raises:
      ValueError: something is wrong with the configuration or one of the arguments.
    """
    _check(config, names, numbers)
    _check_words("--scans", scans, SCANS)
    _check_words("--policies", policies, REMAT_POLICIES)
    for number in numbers:
        for name in names:
            chunks = _chunks(config, name) or SCHEDULES[name].legal_chunks[0]
            try:
                build_schedule(name, config.parallel.pipe, number, chunks)
            except ValueError as error:
                print(f"left out: {error}")
                continue
            for policy in dict.fromkeys([config.remat.policy, *(policies if name in COMPARED else ())]):
                yield Case(name, _plan(config, name, policy, number))
        for policy, name in itertools.product(policies, scans):
            yield Case(name, _plan(config, "gpipe", policy, number))


def _check(config: Config, names: Sequence[str], numbers: Sequence[int]) -> None:
    pipe, train = config.parallel.pipe, config.train
    if pipe < 2:
        raise ValueError(f"parallel.pipe={pipe} must be 2 or more: with one stage there is no pipeline")
    if train.microbatches > 1:
        raise ValueError(f"train.microbatches={train.microbatches} must be 1: gradients are not accumulated here")
    if not config.pipeline.microbatches or train.batch_size % config.pipeline.microbatches:
        raise ValueError(
            f"train.batch_size={train.batch_size} must be a multiple of pipeline.microbatches="
            f"{config.pipeline.microbatches}, which together say how large a microbatch is"
        )
    for name in names:
        if name not in SCHEDULES:
            build_schedule(name, pipe, pipe)
    for number in numbers:
        if number % pipe:
            raise ValueError(
                f"--microbatches {number} must be a multiple of parallel.pipe={pipe}: the scan has as many on each rank"
            )


def _check_words(option: str, words: Sequence[str], legal: Collection[str]) -> None:
    if not set(words) <= set(legal):
        raise ValueError(f"{option} {','.join(words)}: legal values are {', '.join(legal)}")


def _plan(config: Config, schedule: str, policy: str, number: int) -> Plan:
    """`config` with this schedule, remat policy and number of microbatches of the configured size."""
    size = config.train.batch_size // config.pipeline.microbatches
    pipeline = {"schedule": schedule, "microbatches": number, "chunks": _chunks(config, schedule)}
    changed = {
        "train": config.train.model_copy(update={"batch_size": size * number}),
        "pipeline": config.pipeline.model_copy(update=pipeline),
        "remat": config.remat.model_copy(update={"policy": policy}),
    }
    return make_plan(config.model_copy(update=changed), jax.devices(), config.model.vocab_size)  # type: ignore[attr-defined]


def _chunks(config: Config, schedule: str) -> int:
    """`pipeline.chunks` if the schedule can have more than one."""
    return 0 if SCHEDULES[schedule].legal_chunks == (1, 1) else config.pipeline.chunks


def _numbers(words: Sequence[str]) -> list[int]:
    if not words or not all(word.isdecimal() and int(word) for word in words):
        raise ValueError(f"--microbatches {' '.join(words)}: it takes whole numbers, 1 or more")
    return list(dict.fromkeys(map(int, words)))


def _gradients_of(case: Case) -> Callable:
    config = case.plan.config
    if case.name not in SCANS:
        return make_gradients(case.plan)
    settings = LossSettings(config.loss.z_loss, config.loss.label_smoothing, config.loss.chunk_tokens)
    weighted = scan_gradients(case.plan, settings, checkpoint_stage=SCANS[case.name])
    return clipped(mean_over_tokens(weighted, case.plan), config.train.max_grad_norm)


def _compared(console: Console, config: Config, cases: Sequence[Case], rounds: int) -> dict[str, Any]:
    """Compiles, checks, times and prints; returns the figures."""
    programs = _compiled(cases)
    largest = _largest_difference(programs)
    seconds = _tick_seconds(config, cases, rounds)
    for number, _ in itertools.product(dict.fromkeys(case.num_microbatches for case in cases), range(rounds)):
        for program in programs:
            if program.case.num_microbatches == number:
                program.take_turn()
    costs = config.pipeline.costs or (1.0, 1.0, 1.0)
    rows = [_figures(program, costs) for program in programs]
    against = list(_against_scans(programs))
    console.print(f"loss and gradients of all differ by {largest:.1e} at most", highlight=False)
    if rounds and config.parallel.simulated_devices:
        console.print(_SHARED_CORES, highlight=False)
    ratio = ":".join(f"{cost:g}" for cost in costs)
    titles = f"Programs (predicted time: in lockstep, F:B:W = {ratio})", "Scans over jaxpar's schedules"
    for title, found in zip(titles, (rows, against), strict=True):
        console.print(_table(title, found))
    result = {"largest_difference": largest, "programs": rows, "against_scans": against, "tick_seconds": seconds}
    if seconds:
        console.print(_table("Seconds of a tick in which all ranks run it", [seconds]))
        forward, *others = (seconds[name] for name in ("forward, split", "input's gradient", "weights' gradients"))
        result["costs"] = [1.0, *(round(other / forward, 2) for other in others)]
        console.print(f"pipeline.costs={result['costs']}", highlight=False)
    return result


def _compiled(cases: Sequence[Case]) -> list[Program]:
    programs: list[Program] = []
    weights: dict[tuple[int, ...], Any] = {}
    for case in cases:
        print(f"compiling {case}", flush=True)
        programs.append(Program(case, _weights(case.plan, weights)))
    return programs


def _weights(plan: Plan, made: dict[tuple[int, ...], Any]) -> Any:
    """The initial parameters, of which plans whose layers lie alike share one copy."""
    assert plan.pipeline is not None
    rows = plan.pipeline.partition.rows
    if rows not in made:
        with plan.execution.active():
            made[rows] = jax.jit(plan.make_params, out_shardings=plan.param_shardings)()
    return made[rows]


def _largest_difference(programs: Sequence[Program]) -> float:
    """How far losses and gradients are from the first scan's of as many microbatches, relative to the largest entry."""
    largest = 0.0
    for number, group in itertools.groupby(programs, key=lambda program: program.case.num_microbatches):
        found = [(program.case, program.results()) for program in group]
        reference = next(results for case, results in found if case.name in SCANS)
        for case, results in found:
            worst = max(differences(results, reference), key=lambda item: item.relative)
            is_exact = case.plan.config.precision.compute == "float32"
            tolerance = TOLERANCE if is_exact else _TOLERANCE_OF_16_BITS
            assert worst.relative <= tolerance, f"{case}: {worst} from the scan of {number} microbatches"
            largest = max(largest, worst.relative)
    return largest


def _tick_seconds(config: Config, cases: Sequence[Case], rounds: int) -> dict[str, float]:
    """The time of a tick of each kind in which all ranks run it: the median of the rounds."""
    if not rounds:
        return {}
    plan = _plan(config, "gpipe", config.remat.policy, cases[0].num_microbatches)
    weights: dict[tuple[int, ...], Any] = {}

    def program(name: str, kind: Kind | None, split: bool) -> Program:
        print(f"compiling a table that repeats {name}", flush=True)
        return Program(Case(name, repeating(plan, kind, _REPEATS, split=split)), _weights(plan, weights))

    plain = {split: program("nothing", None, split) for split in (False, True)}
    longer = {name: program(name, kind, split) for name, (kind, split) in TICKS.items()}
    for _, turn in itertools.product(range(rounds + 1), [*plain.values(), *longer.values()]):
        turn.take_turn()
    differences_of = {
        name: [long - short for long, short in zip(longer[name].seconds[1:], plain[split].seconds[1:], strict=True)]
        for name, (_, split) in TICKS.items()
    }
    return {name: statistics.median(found) / _REPEATS for name, found in differences_of.items()}


def table_figures(schedule: PipelineSchedule, costs: Sequence[float]) -> dict[str, Any]:
    """What a schedule's table says of itself: ticks, the share of cells that are idle, activations of whole stages that
    the busiest rank keeps and for which there is room, slots for what travels, and the makespan over the ideal time."""
    found = measure(schedule, Costs(*costs))
    return {
        "ticks": schedule.num_ticks,
        "idle": idle_share(schedule),
        "in_flight": found.in_flight,
        "room": found.held,
        "receive_slots": found.num_receive_slots,
        "predicted": found.slowdown,
    }


def _figures(program: Program, costs: Sequence[float]) -> dict[str, Any]:
    case = program.case
    figures: dict[str, Any] = {"name": case.name, "remat": case.remat, "microbatches": case.num_microbatches}
    if case.name not in SCANS:
        figures |= table_figures(case.schedule, costs)
    figures |= {"compile_seconds": program.compile_seconds, "temporary_bytes": program.temporary_bytes}
    if program.seconds:
        figures |= {"step_seconds": statistics.median(program.seconds), "seconds": program.seconds}
    return figures


def _against_scans(programs: Sequence[Program]) -> Iterator[dict[str, Any]]:
    by_case = {(p.case.name, p.case.remat, p.case.num_microbatches): p for p in programs}
    for (name, policy, number), ours in by_case.items():
        for scan in SCANS if name in COMPARED else ():
            theirs = by_case.get((scan, policy, number))
            if theirs is None:
                continue
            figures = {
                "name": name, "scan": scan, "remat": policy, "microbatches": number,
                "memory": theirs.temporary_bytes / ours.temporary_bytes,
                "compile": theirs.compile_seconds / ours.compile_seconds,
            }  # fmt: skip
            ratios = [their / our for their, our in zip(theirs.seconds, ours.seconds, strict=True)]
            if ratios:
                figures |= {"time": statistics.median(ratios), "time_min": min(ratios), "time_max": max(ratios)}
            yield figures


def _table(title: str, rows: Sequence[Mapping[str, Any]]) -> Table:
    """A column for each key that has plain numbers or words."""
    columns = [key for key in dict.fromkeys(itertools.chain(*rows)) if key != "seconds"]
    table = Table(title=title, title_justify="left")
    for column in columns:
        table.add_column(
            _HEADERS.get(column, column), justify="left" if column in ("name", "scan", "remat") else "right"
        )
    for row in rows:
        table.add_row(*(_cell(column, row[column]) if column in row else "" for column in columns))
    return table


_HEADERS = {
    "microbatches": "m",
    "temporary_bytes": "temporary MB",
    "compile_seconds": "compile s",
    "step_seconds": "step s",
}


def _cell(column: str, value: Any) -> str:
    if column == "idle":
        return f"{value:.1%}"
    if column == "temporary_bytes":
        return f"{value / 1e6:.1f}"
    if isinstance(value, float):
        return f"{value:.4g}" if column in TICKS else f"{value:.2f}"
    return str(value)


if __name__ == "__main__":
    sys.exit(main())
