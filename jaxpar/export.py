"""Parameters of a checkpoint as safetensors files, written block by block, so that no array has to fit in memory."""

import json
import math
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from jaxpar.checkpoint_store import ArrayNotes, CheckpointStore, Notes

__all__ = ["export_parameters"]

_FORMATS = {
    "float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16", "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2", "int64": "I64", "int32": "I32", "int16": "I16", "int8": "I8", "uint8": "U8",
    "bool": "BOOL",
}  # fmt: skip
_ITEM_BYTES = {"F64": 8, "I64": 8, "F32": 4, "I32": 4, "F16": 2, "BF16": 2, "I16": 2}


def export_parameters(
    store: CheckpointStore, notes: Notes, directory: Path, *, average: bool, file_bytes: int
) -> list[Path]:
    """Writes the parameters, or their moving average, without the vocabulary's padding; returns the files.

    Each file has at most `file_bytes` of arrays, or one array. Several files come with `model.safetensors.index.json`,
    which says where each array is. The resolved configuration is beside them.

    Raises:
      ValueError: there is no moving average, or the directory is not empty or cannot be made.
      DamagedCheckpointError: the checkpoint cannot be read.
    """
    sources = _sources(notes, average=average)
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"{directory} cannot be made: {error.strerror}; name another directory") from error
    if any(directory.iterdir()):
        raise ValueError(f"{directory} is not empty; name another directory")
    (directory / "config.toml").write_text(notes.config, encoding="utf-8")
    groups = _grouped({name: _num_bytes(notes.arrays[path]) for name, path in sources.items()}, file_bytes)
    written: list[Path] = []
    index: dict[str, str] = {}
    for number, names in enumerate(groups, start=1):
        part = f"-{number:05}-of-{len(groups):05}" if len(groups) > 1 else ""
        path = directory / f"model{part}.safetensors"
        _write(path, store, notes, {name: sources[name] for name in names})
        written.append(path)
        index |= dict.fromkeys(names, path.name)
    if len(groups) > 1:
        total = sum(_num_bytes(notes.arrays[path]) for path in sources.values())
        table = {"metadata": {"total_size": total}, "weight_map": index}
        (directory / "model.safetensors.index.json").write_text(json.dumps(table, indent=2), encoding="utf-8")
    return written


def _sources(notes: Notes, *, average: bool) -> dict[str, str]:
    """Parameter's path → path of the array in the state."""
    names = [path.removeprefix("params/") for path in notes.arrays if path.startswith("params/")]
    if not average:
        return {name: f"params/{name}" for name in names}
    sources = {name: f"optimizer/arrays/{name}/average" for name in names}
    if any(path not in notes.arrays for path in sources.values()):
        raise ValueError(
            f"the checkpoint of step {notes.step} has no moving average, which train.ema_decay keeps; leave out "
            "--parameters ema"
        )
    return sources


def _num_bytes(array: ArrayNotes) -> int:
    return math.prod(array.extent.shape) * _ITEM_BYTES.get(_FORMATS[array.dtype], 1)


def _grouped(sizes: Mapping[str, int], limit: int) -> list[list[str]]:
    groups: list[list[str]] = [[]]
    filled = 0
    for name, size in sizes.items():
        if groups[-1] and filled + size > limit:
            groups.append([])
            filled = 0
        groups[-1].append(name)
        filled += size
    return groups


def _write(path: Path, store: CheckpointStore, notes: Notes, sources: Mapping[str, str]) -> None:
    """One file: the header's length (8 bytes), the header in JSON, the arrays one after the other."""
    header: dict[str, object] = {"__metadata__": {"format": "jaxpar", "step": str(notes.step)}}
    offset = 0
    for name, source in sources.items():
        array = notes.arrays[source]
        end = offset + _num_bytes(array)
        header[name] = {"dtype": _FORMATS[array.dtype], "shape": array.extent.shape, "data_offsets": [offset, end]}
        offset = end
    encoded = json.dumps(header).encode()
    encoded += b" " * (-len(encoded) % 8)
    temporary = path.with_name(f"{path.name}.tmp")
    with temporary.open("wb") as file:
        file.write(len(encoded).to_bytes(8, "little") + encoded)
        for source in sources.values():
            for _, block in store.blocks(notes.step, source, notes.arrays[source].extent):
                file.write(np.ascontiguousarray(block).tobytes())
    temporary.replace(path)
