"""`python -m jaxpar.checkpoints RUN [COMMAND]`: what is in a run's checkpoints, and whether they are what was saved.

RUN is a run's directory, or a directory or URL of checkpoints. Arrays are read a part at a time, on the CPU; a run that
goes on is not disturbed, and is left alone by `prune`.
"""

import argparse
import contextlib
import sys
import tempfile
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

from jaxpar.backend import prepare_host
from jaxpar.checkpoint_store import CheckpointStore, DamagedCheckpointError, Notes, Retention, brief
from jaxpar.command_line import UserError, user_errors, whole_number
from jaxpar.config import Config, changed_keys, parse_config
from jaxpar.digest import digest_blocks
from jaxpar.events import Events, read_events
from jaxpar.exit_status import FAULT, USER_ERROR
from jaxpar.export import export_parameters
from jaxpar.extent import Extent
from jaxpar.metrics import with_unit
from jaxpar.remote_store import open_store, store_of
from jaxpar.run_directory import run_directory

__all__ = ["main"]


@dataclass(frozen=True)
class _Run:
    """A run as it lies in its directory; checkpoints alone have no `directory` and no `config`."""

    store: CheckpointStore
    directory: Path | None = None
    config: Config | None = None

    @property
    def locked_apart(self) -> bool:
        """Whether the checkpoints are in a directory with a lock of its own."""
        is_shared = self.config is None or bool(self.config.checkpoint.directory)
        return is_shared and "://" not in str(self.store)

    @property
    def retention(self) -> Retention:
        if self.config is None:
            return Retention(3)
        checkpoint = self.config.checkpoint
        return Retention(checkpoint.keep, checkpoint.keep_every_steps, checkpoint.keep_best)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line; returns the exit status: 0, 1 for what is damaged or differs, 2 for a user's error."""
    given = _parser().parse_args(sys.argv[1:] if arguments is None else arguments)
    prepare_host()
    console = Console(width=None if sys.stdout.isatty() else 160, highlight=False, soft_wrap=False)
    commands = {"list": _list, "verify": _verify, "diff": _diff, "prune": _prune, "export": _export}
    try:
        with user_errors(), tempfile.TemporaryDirectory(prefix="jaxpar-") as staging:
            return commands[given.command](_open(given.run, Path(staging)), given, console)
    except UserError as error:
        print(error, file=sys.stderr)
        return USER_ERROR
    except DamagedCheckpointError as error:
        print(f"the checkpoint is damaged: {error}", file=sys.stderr)
        return FAULT


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m jaxpar.checkpoints",
        description=__doc__,
        epilog="Exit status: 0; 1 if something is damaged (verify) or differs (diff); 2 for a mistake in the command.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("run", metavar="RUN", help="a run's directory, or a directory or URL of checkpoints")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", help="list if left out")
    parser.set_defaults(command="list")
    commands.add_parser("list", help="every checkpoint: when, how large, held-out loss, why it is kept")
    verify = commands.add_parser("verify", help="compute every array's digest again; check events.jsonl")
    verify.add_argument("steps", metavar="STEP", nargs="*", type=int, help="all if left out")
    diff = commands.add_parser(
        "diff", help="which keys of the configuration and which arrays of two checkpoints differ"
    )
    diff.add_argument("steps", metavar="STEP", nargs=2, type=int)
    prune = commands.add_parser("prune", help="remove what [checkpoint] need not keep, and what killed saves left")
    for option, meaning in (("keep", "newest"), ("keep-every-steps", "regular"), ("keep-best", "best")):
        prune.add_argument(
            f"--{option}", type=whole_number, metavar="N", help=f"{meaning} ones to keep instead of the run's"
        )
    prune.add_argument("--damaged", action="store_true", help="remove what was set aside as damaged, too")
    prune.add_argument("--dry-run", action="store_true", help="only say what would be removed")
    export = commands.add_parser("export", help="write the parameters alone, without padding, as safetensors files")
    export.add_argument("directory", metavar="DIRECTORY", type=Path)
    export.add_argument("--step", type=int, help="the newest if left out")
    export.add_argument("--parameters", choices=("current", "ema"), default="current", help="or their moving average")
    export.add_argument("--file-bytes", type=whole_number, default=5 << 30, metavar="N", help="largest file (5 GiB)")
    return parser


def _open(name: str, staging: Path) -> _Run:
    directory = Path(name).expanduser()
    if directory.name == "checkpoints" and (directory.parent / "config.toml").is_file():
        directory = directory.parent
    if "://" in name or not (directory / "config.toml").is_file():
        store = open_store(name if "://" in name else str(directory.absolute()), staging)
        if "://" not in name and not directory.is_dir():
            raise ValueError(f"{store} is no directory; RUN is the run.dir of a run")
        if not store.steps():
            raise ValueError(f"{store} has neither a config.toml nor checkpoints; RUN is the run.dir of a run")
        return _Run(store)
    path = directory / "config.toml"
    config = parse_config(tomllib.loads(path.read_text(encoding="utf-8")), source=str(path))
    return _Run(store_of(config, directory, staging), directory, config)


@contextlib.contextmanager
def _fetched(store: CheckpointStore, steps: Iterable[int]) -> Iterator[None]:
    """A block that may read arrays of these checkpoints."""
    with contextlib.ExitStack() as opened:
        for step in dict.fromkeys(steps):
            opened.callback(store.release, step)
            try:
                store.fetch(step)
            except Exception as error:
                raise DamagedCheckpointError(f"step {step} cannot be fetched: {brief(error)}") from error
        yield


def _steps(run: _Run, wanted: Iterable[int] = ()) -> list[int]:
    """The steps that are asked for, or all."""
    steps = run.store.steps()
    for step in wanted:
        if step not in steps:
            there = ", ".join(map(str, steps)) or "none"
            raise ValueError(f"{run.store} has no checkpoint of step {step}; there are: {there}")
    if not steps:
        raise ValueError(f"{run.store} has no checkpoints yet")
    return list(wanted) or steps


def _read_notes(run: _Run, steps: Iterable[int]) -> dict[int, Notes | str]:
    """Of each step its notes, or what is wrong with it."""
    found: dict[int, Notes | str] = {}
    for step in steps:
        try:
            found[step] = run.store.notes(step)
        except DamagedCheckpointError as error:
            found[step] = str(error)
    return found


def _list(run: _Run, given: argparse.Namespace, console: Console) -> int:
    table = Table(
        "step", "saved (UTC)", "size", "updates", "sequences", "held-out loss", "kept as", "state", title=str(run.store)
    )
    found = _read_notes(run, _steps(run))
    losses = {step: notes.loss for step, notes in found.items() if isinstance(notes, Notes)}
    for step, notes in found.items():
        size = with_unit(run.store.size_bytes(step))
        if isinstance(notes, str):
            table.add_row(str(step), "", size, "", "", "", "", f"[red]{notes}[/red]")
            continue
        loss = "" if notes.loss is None else f"{notes.loss:.4f}"
        kept = ", ".join(_reasons(step, losses, run.retention))
        table.add_row(
            str(step),
            notes.saved_at[:19],
            size,
            str(notes.num_updates),
            str(notes.next_sequence),
            loss,
            kept,
            "complete",
        )
    console.print(table)
    if aside := run.store.aside():
        console.print(f"set aside as damaged (prune --damaged removes them): {', '.join(aside)}")
    return 0


def _reasons(step: int, losses: Mapping[int, float | None], retention: Retention) -> Iterator[str]:
    if step in sorted(losses)[-retention.newest :]:
        yield "newest"
    if retention.every_steps and step % retention.every_steps == 0:
        yield f"every {retention.every_steps}"
    if step in Retention(1, 0, retention.best).kept(losses) - {max(losses)}:
        yield "best"


def _verify(run: _Run, given: argparse.Namespace, console: Console) -> int:
    table = Table("step", "arrays", "result", title=f"digests in {run.store}")
    found = _read_notes(run, _steps(run, given.steps))
    is_whole = True
    for step, notes in found.items():
        problems = [notes] if isinstance(notes, str) else _changed_arrays(run.store, notes)
        arrays = "" if isinstance(notes, str) else str(len(notes.arrays))
        table.add_row(str(step), arrays, f"[red]{'; '.join(problems)}[/red]" if problems else "as it was saved")
        is_whole &= not problems
    console.print(table)
    if run.directory is not None:
        problems = _event_problems(run.directory, found)
        lines = [f"[red]{problem}[/red]" for problem in problems] or ["every line follows on the one before"]
        console.print(f"{run.directory / 'events.jsonl'}: " + "\n  ".join(lines))
        is_whole &= not problems
    return 0 if is_whole else FAULT


def _changed_arrays(store: CheckpointStore, notes: Notes) -> list[str]:
    problems = []
    try:
        with _fetched(store, [notes.step]):
            for path, array in notes.arrays.items():
                try:
                    blocks = store.blocks(notes.step, path, array.extent, with_padding=True)
                    digest = digest_blocks(blocks, array.extent.shape)
                except DamagedCheckpointError as error:
                    problems.append(str(error))
                    continue
                if (digest.content, digest.padding) != (array.content, array.padding):
                    problems.append(f"{path} is not what was saved")
    except DamagedCheckpointError as error:
        problems.append(str(error))
    return problems


def _event_problems(directory: Path, found: Mapping[int, Notes | str]) -> list[str]:
    path = directory / "events.jsonl"
    if not path.exists():
        return ["it is missing"]
    history = read_events(path)
    lost = [
        f"the line that was its last when step {step} was saved is missing: it was cut off or written anew"
        for step, notes in found.items()
        if isinstance(notes, Notes) and notes.events not in history.hashes
    ]
    return [*history.problems, *lost]


def _diff(run: _Run, given: argparse.Namespace, console: Console) -> int:
    first, second = (run.store.notes(step) for step in _steps(run, given.steps))
    before, after = (parse_config(tomllib.loads(notes.config)) for notes in (first, second))
    keys = Table("key", *map(str, given.steps), title="configuration")
    changes = changed_keys(before, after)
    for key, (old, new) in changes.items():
        keys.add_row(key, repr(old), repr(new))
    arrays = Table("array", "largest difference", "norm of the difference / norm", title="arrays that differ")
    num_equal = num_different = 0
    for path in dict.fromkeys([*first.arrays, *second.arrays]):
        a, b = first.arrays.get(path), second.arrays.get(path)
        if a is None or b is None:
            arrays.add_row(path, f"only in {given.steps[0] if b is None else given.steps[1]}", "")
        elif (a.extent.shape, a.dtype) != (b.extent.shape, b.dtype):
            arrays.add_row(path, f"{a.dtype}{list(a.extent.shape)} → {b.dtype}{list(b.extent.shape)}", "")
        elif a.content == b.content:
            num_equal += 1
            continue
        else:
            with _fetched(run.store, given.steps):
                arrays.add_row(path, *_difference(run.store, path, {first.step: a.extent, second.step: b.extent}))
        num_different += 1
    console.print(keys if changes else "the configurations are equal")
    if num_different:
        console.print(arrays)
    console.print(f"{num_equal} arrays are equal, {num_different} differ")
    return FAULT if changes or num_different else 0


def _difference(store: CheckpointStore, path: str, extents: Mapping[int, Extent]) -> tuple[str, str]:
    """Of an array of two steps, of one shape without padding."""
    largest = squares = reference = 0.0
    pairs = zip(*(store.blocks(step, path, extent) for step, extent in extents.items()), strict=True)
    for (_, a), (_, b) in pairs:
        difference = a.astype(np.float64) - b.astype(np.float64)
        largest = max(largest, float(np.abs(difference).max(initial=0.0)))
        squares += float(np.square(difference).sum())
        reference += float(np.square(a.astype(np.float64)).sum())
    return f"{largest:.3g}", f"{(squares / reference) ** 0.5:.3g}" if reference else "from 0"


def _prune(run: _Run, given: argparse.Namespace, console: Console) -> int:
    own = run.retention
    options = (given.keep, given.keep_every_steps, given.keep_best)
    retention = Retention(*(b if a is None else a for a, b in zip(options, (own.newest, own.every_steps, own.best))))  # noqa: B905
    if retention.newest < 1:
        raise ValueError("--keep=0 would leave nothing to go on from; the nearest legal value is 1")
    with contextlib.ExitStack() as opened:
        events = None
        if run.locked_apart:
            where = str(run.store.directory)
            opened.enter_context(run_directory(where, is_writer=True, key="checkpoint.directory"))
        if run.directory is not None:
            opened.enter_context(run_directory(str(run.directory), is_writer=True))
            events = opened.enter_context(Events(run.directory / "events.jsonl"))
        found = _read_notes(run, _steps(run))
        losses = {step: notes.loss for step, notes in found.items() if isinstance(notes, Notes)}
        if not losses:
            raise ValueError(f"{run.store} has no checkpoint that is whole; remove what is there by hand")
        kept = retention.kept(losses)
        for step in (step for step in found if step not in kept):
            console.print(f"{'would remove' if given.dry_run else 'removed'} step {step}")
            if not given.dry_run:
                run.store.remove(step)
                if events is not None:
                    events.record("prune", step=step, directory=str(run.store))
        for name in run.store.aside() if given.damaged else ():
            console.print(f"{'would remove' if given.dry_run else 'removed'} {name}")
            if not given.dry_run:
                run.store.remove_aside(name)
                if events is not None:
                    events.record("prune", name=name, directory=str(run.store))
        if not given.dry_run:
            for name in run.store.remove_leftovers():
                console.print(f"removed {name}")
        console.print(f"kept: {', '.join(map(str, sorted(kept)))}")
    return 0


def _export(run: _Run, given: argparse.Namespace, console: Console) -> int:
    step = given.step if given.step is not None else _steps(run)[-1]
    _steps(run, [step])
    notes = run.store.notes(step)
    average = given.parameters == "ema"
    with _fetched(run.store, [step]):
        written = export_parameters(run.store, notes, given.directory, average=average, file_bytes=given.file_bytes)
    for path in written:
        console.print(f"{path}: {with_unit(path.stat().st_size)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
