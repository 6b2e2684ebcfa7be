"""Where metrics go: `metrics.jsonl`, TensorBoard events, Weights & Biases. Used by one process of a run only."""

import importlib
import json
import math
import numbers
import os
import uuid
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol

import numpy as np

__all__ = ["JsonLinesWriter", "TensorBoardWriter", "Value", "WandbWriter", "Writer", "heat_map", "make_writers"]

Number = float | int | bool
Value = Number | np.ndarray
"""A number, or a table of them [rows, columns]."""


class Writer(Protocol):
    """Something that records a step's metrics."""

    def write(self, step: int, values: Mapping[str, Value]) -> None:
        """Records `values` under `step`. Raises TypeError for a value that is not a host number."""
        ...

    def close(self) -> None:
        """Finishes writing; a second call does nothing."""
        ...


def make_writers(
    run_dir: str | os.PathLike[str],
    *,
    tensorboard: bool,
    wandb_project: str,
    config: Mapping[str, Any],
    start_step: int,
) -> list[Writer]:
    """The writers of a run that goes on after `start_step` (0: from the beginning), metrics.jsonl first.

    Raises:
        ValueError: a package is missing for a writer that is asked for, or an existing metrics.jsonl is damaged.
    """
    run_dir = Path(run_dir)
    run_dir.mkdir(parents=True, exist_ok=True)
    with ExitStack() as opened:
        writers: list[Writer] = []

        def add(make: Callable[[], Writer]) -> None:
            writer = make()
            opened.callback(writer.close)
            writers.append(writer)

        add(lambda: JsonLinesWriter(run_dir / "metrics.jsonl", start_step=start_step))
        if tensorboard:
            add(lambda: TensorBoardWriter(run_dir / "tensorboard", start_step=start_step))
        if wandb_project:
            add(lambda: WandbWriter(run_dir, project=wandb_project, config=config))
        opened.pop_all()
    return writers


class JsonLinesWriter:
    """One JSON object a line, each flushed: `{"step": 10, "loss": 3.2}`.

    The lines are strict JSON; a value that is not finite becomes the string "NaN", "Infinity" or "-Infinity", which
    `float()` reads back. An existing file is continued: lines of steps after `start_step`, which are about to be done
    again, are dropped, and so is a last line that a crash cut off. The file is replaced in one go.

    Raises:
        ValueError: a line other than the last is not a JSON object with a step.
    """

    def __init__(self, path: str | os.PathLike[str], *, start_step: int = 0) -> None:
        path = Path(path)
        if path.exists():
            _drop_later_lines(path, start_step)
        self._file = path.open("a", encoding="utf-8")

    def write(self, step: int, values: Mapping[str, Value]) -> None:
        """Appends a line. Raises TypeError for a value that is not a host number."""
        line: dict[str, Any] = {"step": step}
        for key, value in _host_numbers(values).items():
            line[key] = value if math.isfinite(value) else _not_finite(value)
        for key, table in _tables(values).items():
            line[key] = [[round(entry, 6) for entry in row] for row in table.tolist()]
        self._file.write(json.dumps(line, allow_nan=False) + "\n")
        self._file.flush()

    def close(self) -> None:
        """Closes the file."""
        self._file.close()


class TensorBoardWriter:
    """TensorBoard scalars (package tensorboardX), one a key. Events after `start_step` are marked as superseded.

    Raises:
        ValueError: tensorboardX is missing.
    """

    def __init__(self, log_dir: str | os.PathLike[str], *, start_step: int = 0) -> None:
        module = _tracker("tensorboardX", "logging.tensorboard=true")
        self._events = module.SummaryWriter(os.fspath(log_dir), purge_step=start_step + 1, flush_secs=10)

    def write(self, step: int, values: Mapping[str, Value]) -> None:
        """Adds one scalar a key. Raises TypeError for a value that is not a host number."""
        for key, value in _host_numbers(values).items():
            self._events.add_scalar(key, value, step)
        for key, table in _tables(values).items():
            self._events.add_image(key, heat_map(table), step, dataformats="HWC")

    def close(self) -> None:
        """Writes what is queued and closes the event file."""
        self._events.close()


class WandbWriter:
    """Weights & Biases; the run's id is kept in `wandb_run_id` of the run's directory, so that a resumed run goes on.

    Steps are the metric "step" and the x-axis of all charts, not W&B's own counter: that one drops what is logged for
    a step that it has passed, as after resuming from a checkpoint. WANDB_MODE=offline and the other variables of W&B
    hold.

    Raises:
        ValueError: wandb is missing.
    """

    def __init__(self, run_dir: str | os.PathLike[str], *, project: str, config: Mapping[str, Any]) -> None:
        module = _tracker("wandb", f'logging.wandb_project="{project}"')
        id_path = Path(run_dir) / "wandb_run_id"
        if not id_path.exists():
            id_path.write_text(uuid.uuid4().hex + "\n", encoding="utf-8")
        run_id = id_path.read_text(encoding="utf-8").strip()
        self._run = module.init(project=project, id=run_id, resume="allow", dir=os.fspath(run_dir), config=dict(config))
        self._module = module
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def write(self, step: int, values: Mapping[str, Value]) -> None:
        """Logs the values with their step. Raises TypeError for a value that is not a host number."""
        pictures = {key: self._module.Image(heat_map(table)) for key, table in _tables(values).items()}
        self._run.log({"step": step, **_host_numbers(values), **pictures})

    def close(self) -> None:
        """Uploads what is left and ends the W&B run."""
        self._run.finish()


def heat_map(table: np.ndarray, cell_pixels: int = 12) -> np.ndarray:
    """A picture [height, width, 3] of uint8: a square for each entry, from white (0) through orange (the mean) to dark
    red (twice the mean and more).

    >>> heat_map(np.array([[0.0, 1.0]]), cell_pixels=1).tolist()
    [[[255, 255, 255], [103, 0, 13]]]
    """
    colours = np.array([[255, 255, 255], [252, 146, 114], [103, 0, 13]], np.float64)
    place = np.clip(table / max(table.mean(), 1e-12), 0.0, 2.0)
    picture = np.stack([np.interp(place, [0.0, 1.0, 2.0], colours[:, channel]) for channel in range(3)], axis=-1)
    return picture.round().astype(np.uint8).repeat(cell_pixels, axis=0).repeat(cell_pixels, axis=1)


def _tracker(package: str, setting: str) -> ModuleType:
    try:
        return importlib.import_module(package)
    except ModuleNotFoundError as error:
        if error.name != package:
            raise
        raise ValueError(
            f'{setting} needs {package}, which is not installed: pip install "jaxpar[trackers]"'
        ) from error


def _host_numbers(values: Mapping[str, Value]) -> dict[str, Number]:
    """Plain bool, int and float for Python's and NumPy's numbers; tables are left out.

    A device array is refused: to convert it would wait for the step that computes it.
    """
    return {key: _host_number(key, value) for key, value in values.items() if not _is_table(value)}


def _tables(values: Mapping[str, Value]) -> dict[str, np.ndarray]:
    return {key: np.asarray(value) for key, value in values.items() if _is_table(value)}


def _is_table(value: Any) -> bool:
    return isinstance(value, np.ndarray) and value.ndim == 2


def _host_number(key: str, value: Any) -> Number:
    if key == "step":
        raise ValueError('values must not have the key "step"; it is an argument of write()')
    if isinstance(value, bool | np.bool_):
        return bool(value)
    if isinstance(value, numbers.Integral):
        return int(value)
    if isinstance(value, numbers.Real):
        return float(value)
    raise TypeError(
        f"metric {key!r} is of type {type(value).__name__}; fetch it to a host number (float, int, bool) first"
    )


def _not_finite(value: float) -> str:
    return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"


def _drop_later_lines(path: Path, start_step: int) -> None:
    """Rewrites the file without lines after `start_step` and without a damaged last line."""
    old = path.read_bytes()
    lines = old.splitlines(keepends=True)
    kept = []
    for number, line in enumerate(lines, start=1):
        step = _step_of(line)
        if step is None and number < len(lines):
            raise ValueError(
                f"{path}, line {number}, is not a JSON object with a step: {line[:60]!r}; correct or remove that "
                "line, or move the file away"
            )
        if step is not None and step <= start_step:
            kept.append(line if line.endswith(b"\n") else line + b"\n")
    new = b"".join(kept)
    if new == old:
        return
    temporary = path.with_name(path.name + ".tmp")
    with temporary.open("wb") as file:
        file.write(new)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


def _step_of(line: bytes) -> int | None:
    try:
        entry = json.loads(line)
    except ValueError:
        return None
    step = entry.get("step") if isinstance(entry, dict) else None
    return step if isinstance(step, int) else None
