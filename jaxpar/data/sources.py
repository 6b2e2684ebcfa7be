"""Text files as iterators of documents: .txt, .jsonl and .parquet, the first two also packed with gz, xz or zst."""

import glob
import gzip
import hashlib
import importlib.resources
import io
import json
import lzma
import os
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jaxpar.config import schema
from jaxpar.data.progress import Advance

__all__ = ["TextFiles", "check_readable", "held_out", "match_files", "nothing_left", "text_files", "training_documents"]

_PACKINGS = (".gz", ".xz", ".zst")
_CHUNK_BYTES = 1 << 20


@dataclass(frozen=True)
class TextFiles:
    """The files of one text source, in order."""

    key: str
    """Where the source stands in the configuration, for messages: `data.sources[0]`."""
    paths: tuple[Path, ...]
    text_key: str

    @property
    def num_bytes(self) -> int:
        """Size of the files as they lie on the disk."""
        return sum(path.stat().st_size for path in self.paths)

    def documents(self, advance: Advance) -> Iterator[str]:
        """Yield the documents that are not empty, file by file; `advance` is told the bytes that were read.

        Raises:
          ValueError: a file cannot be read as its name promises, or no document is left.
        """
        num_documents = 0
        for path in self.paths:
            for text in _read_file(path, self, advance):
                if text:
                    num_documents += 1
                    yield text
        if num_documents == 0:
            raise ValueError(
                f"{self.key} is an empty corpus: no document in {_shown(self.paths)} holds any text; "
                "point it at files that do"
            )

    def digest(self, advance: Advance) -> str:
        """Return a hash of what decides the documents: contents, kinds and order of the files, and the key."""
        total = hashlib.blake2b(digest_size=16)
        total.update(json.dumps([self.text_key, len(self.paths)]).encode())
        for path in self.paths:
            content = hashlib.blake2b(digest_size=16)
            with path.open("rb") as file:
                while chunk := file.read(_CHUNK_BYTES):
                    content.update(chunk)
                    advance(len(chunk))
            total.update(json.dumps([*_kind(path, self.key), content.hexdigest()]).encode())
        return total.hexdigest()


def text_files(config: schema.DataConfig) -> dict[int, TextFiles]:
    """Return the text sources of a configuration by their index.

    Raises:
      ValueError: a path or pattern matches no file, or a file's ending is none that can be read.
    """
    found = {}
    for index, source in enumerate(config.sources):
        key = f"data.sources[{index}]"
        if isinstance(source, schema.PackagedSource):
            corpus = importlib.resources.files("jaxpar.data") / "corpus" / "sotu.jsonl.xz"
            found[index] = TextFiles(key, (Path(str(corpus)),), "text")
        elif isinstance(source, schema.TextSource):
            paths = match_files(source.paths, f"{key}.paths")
            for path in paths:
                _kind(path, key)
            found[index] = TextFiles(key, paths, source.text_key)
    return found


def match_files(patterns: Sequence[str], key: str) -> tuple[Path, ...]:
    """Return the files that paths and glob patterns name, each once: a pattern's in alphabetical order.

    Raises:
      ValueError: one names no file, or a directory.
    """
    if not patterns:
        raise ValueError(f"{key} is empty: name at least one file or pattern")
    found: dict[Path, None] = {}
    for pattern in patterns:
        path = Path(pattern).expanduser()
        if path.is_dir():
            raise ValueError(f"{key}: {pattern!r} is a directory; name the files in it, for example {pattern}/*.jsonl")
        if path.exists():
            found[path] = None
            continue
        if not glob.has_magic(pattern):
            raise ValueError(f"{key}: there is no file {pattern!r} (relative paths start at {os.getcwd()})")
        matched = [Path(name) for name in sorted(glob.glob(str(path), recursive=True))]
        if not any(name.is_file() for name in matched):
            raise ValueError(f"{key}: pattern {pattern!r} matches no file (relative paths start at {os.getcwd()})")
        found.update((name, None) for name in matched if name.is_file())
    for path in found:
        check_readable(path, key)
    return tuple(found)


def held_out(index: Any, holdout_every: int) -> Any:
    """Return whether document `index` (or each of an array) is held out: 0, n, 2n, ...; none if n = 0.

    >>> [held_out(index, 2) for index in range(4)]
    [True, False, True, False]
    """
    return index % holdout_every == 0 if holdout_every > 0 else index < 0


def check_readable(path: Path, key: str) -> None:
    """Raise a ValueError for a file that the user may not read."""
    if not os.access(path, os.R_OK):
        raise ValueError(f"{key}: {str(path)!r} cannot be read: permission denied")


def training_documents(source: TextFiles, holdout_every: int, advance: Advance) -> Iterator[str]:
    """Yield the documents of a source that are not held out.

    Raises:
      ValueError: there are none.
    """
    num_documents = num_yielded = 0
    for num_documents, text in enumerate(source.documents(advance), start=1):
        if not held_out(num_documents - 1, holdout_every):
            num_yielded += 1
            yield text
    if num_yielded == 0:
        raise ValueError(nothing_left(source.key, num_documents, holdout_every))


def nothing_left(key: str, num_documents: int, holdout_every: int) -> str:
    """Return the message for a source whose documents are all held out."""
    return (
        f"{key} has nothing to train on: data.holdout_every={holdout_every} holds out all of its {num_documents} "
        "document(s); set data.holdout_every=0 to hold out none, or split the text into more documents"
    )


def _kind(path: Path, key: str) -> tuple[str, str]:
    """Return the format and the packing that a file's name promises."""
    packing = path.suffix if path.suffix in _PACKINGS else ""
    ending = Path(path.stem).suffix if packing else path.suffix
    if ending in (".txt", ".jsonl") or (ending == ".parquet" and not packing):
        return ending, packing
    raise ValueError(
        f"{key}.paths: {str(path)!r} ends in none of .txt, .jsonl (either also with .gz, .xz, .zst) or .parquet; "
        "rename it"
    )


def _read_file(path: Path, source: TextFiles, advance: Advance) -> Iterator[str]:
    ending, packing = _kind(path, source.key)
    if ending == ".parquet":
        yield from _read_parquet(path, source, advance)
        return
    with path.open("rb") as raw, _unpacked(raw, packing, f"{source.key}.paths: {path}") as stream:
        if ending == ".txt":
            yield _decode(stream.read(), f"{source.key}.paths: {path}")
            advance(raw.tell())
            return
        done = 0
        for number, line in enumerate(stream, start=1):
            if raw.tell() > done:
                advance(raw.tell() - done)
                done = raw.tell()
            if line.strip():
                yield _jsonl_text(line, path, number, source)


def _jsonl_text(line: bytes, path: Path, number: int, source: TextFiles) -> str:
    place = f"{path}, line {number}"
    try:
        record = json.loads(line)
    except ValueError as error:
        raise ValueError(f"{source.key}.paths: {place} is not valid JSON: {error}") from error
    if not isinstance(record, dict):
        raise ValueError(f"{source.key}.paths: {place} is not a JSON object but {type(record).__name__}")
    if source.text_key not in record:
        raise ValueError(_missing_key(source, place, record))
    return _checked_text(record[source.text_key], source, place)


def _read_parquet(path: Path, source: TextFiles, advance: Advance) -> Iterator[str]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise ValueError(_missing_package(f"{source.key}.paths: {path}", "pyarrow")) from error
    size, row = path.stat().st_size, 0
    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            names = file.schema_arrow.names
            if source.text_key not in names:
                raise ValueError(_missing_key(source, str(path), names))
            for group in range(file.num_row_groups):
                for batch in file.iter_batches(row_groups=[group], columns=[source.text_key]):
                    for value in batch.column(0).to_pylist():
                        row += 1
                        yield _checked_text(value, source, f"{path}, row {row}")
                advance(size // file.num_row_groups)
    except (pyarrow.ArrowException, OSError) as error:
        raise ValueError(f"{source.key}.paths: {path} is not a readable .parquet file: {error}") from error


def _checked_text(value: Any, source: TextFiles, place: str) -> str:
    """Return a document's text; a missing value is an empty document."""
    if value is None:
        return ""
    if not isinstance(value, str):
        raise ValueError(f"{source.key}.text_key={source.text_key!r} is {type(value).__name__} and not text in {place}")
    if not value.isascii():
        try:
            value.encode()
        except UnicodeEncodeError as error:
            raise ValueError(f"{source.key}.paths: {place} holds text that is not Unicode: {error}") from error
    return value


@contextmanager
def _unpacked(raw: io.BufferedReader, packing: str, place: str) -> Iterator[io.BufferedIOBase]:
    """Yield the unpacked stream; a damaged file becomes a ValueError that names it."""
    try:
        yield _unpack(raw, packing, place)
    except (EOFError, OSError, zlib.error, lzma.LZMAError) as error:
        raise ValueError(f"{place} cannot be read: {error}") from error


def _unpack(raw: io.BufferedReader, packing: str, place: str) -> io.BufferedIOBase:
    if packing == ".gz":
        return gzip.GzipFile(fileobj=raw, mode="rb")
    if packing == ".xz":
        return lzma.LZMAFile(raw)
    if packing == ".zst":
        try:
            import zstandard
        except ImportError as error:
            raise ValueError(_missing_package(place, "zstandard")) from error
        return io.BufferedReader(_ZstdReader(raw, zstandard), _CHUNK_BYTES)
    return raw


class _ZstdReader(io.RawIOBase):
    """Unpacked bytes of zstd frames. The package's own reader takes a file that was cut short for its end."""

    def __init__(self, raw: io.BufferedReader, zstandard: Any) -> None:
        self._raw = raw
        self._error = zstandard.ZstdError
        self._new_frame = zstandard.ZstdDecompressor().decompressobj
        self._frame = self._new_frame()
        self._packed = b""
        self._unpacked = memoryview(b"")
        self._inside = False

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._unpacked:
            self._packed = self._packed or self._raw.read(_CHUNK_BYTES)
            if not self._packed:
                if self._inside:
                    raise EOFError("the last zstd frame was cut short")
                return 0
            try:
                self._unpacked = memoryview(self._frame.decompress(self._packed))
            except self._error as error:
                raise OSError(str(error)) from error
            self._inside = not self._frame.eof
            self._packed = self._frame.unused_data
            if self._frame.eof:
                self._frame = self._new_frame()
        size = min(len(buffer), len(self._unpacked))
        buffer[:size], self._unpacked = self._unpacked[:size], self._unpacked[size:]
        return size


def _decode(content: bytes, place: str) -> str:
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        raise ValueError(f"{place} is not UTF-8 text: {error}") from error


def _missing_key(source: TextFiles, place: str, present: Sequence[str] | dict[str, Any]) -> str:
    keys = ", ".join(sorted(present)) or "none"
    return f"{source.key}.text_key={source.text_key!r} is not in {place}; the keys there are: {keys}"


def _missing_package(place: str, package: str) -> str:
    return f'{place} needs the package {package}, which comes with the extra `datasets`: pip install "jaxpar[datasets]"'


def _shown(paths: Sequence[Path]) -> str:
    return str(paths[0]) if len(paths) == 1 else f"{paths[0]} and {len(paths) - 1} more"
