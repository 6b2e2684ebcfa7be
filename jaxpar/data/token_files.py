"""Pre-tokenised files, memory-mapped where they lie: nanoGPT and llm.c `.bin`, Megatron-LM `.bin` with `.idx`."""

import struct
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from jaxpar.config import schema
from jaxpar.data.progress import progress_bar
from jaxpar.data.sources import check_readable, match_files
from jaxpar.data.streams import Documents, TokenArrays

__all__ = ["megatron_documents", "token_file_documents"]

_SCAN_TOKENS = 1 << 22
_LLMC_HEADER_BYTES = 1024
# magic number → (version, dtype): the gpt-2 and llama-3 files of llm.c, dev/data/data_common.py.
_LLMC_KINDS: dict[int, tuple[int, DTypeLike]] = {20240520: (1, np.uint16), 20240801: (7, np.uint32)}
_MEGATRON_MAGIC = b"MMIDIDX\x00\x00"
# megatron/core/datasets/indexed_dataset.py: DType. Floating-point codes (6, 7) hold no tokens.
_MEGATRON_DTYPES: dict[int, DTypeLike] = {
    1: np.uint8,
    2: np.int8,
    3: np.int16,
    4: np.int32,
    5: np.int64,
    8: np.uint16,
}


def token_file_documents(
    source: schema.TokenFileSource,
    key: str,
    *,
    vocab_size: int,
    end_of_text: int,
    holdout_every: int,
    show_progress: bool,
) -> Documents:
    """Return the documents of `.bin` files, which are read as one stream in their order.

    A document reaches up to and including its end-of-text token. One that holds nothing else is skipped, so that files
    that put the token first (llm.c) and files that put it last (nanoGPT) give the same documents. The last document may
    lack the token; none is added. If the token occurs nowhere, the stream is two documents, and the second, its last
    1/n with n = `holdout_every`, comes first here, so that it is document 0 and held out.

    Every token is read once to find the documents and to check that it is below `vocab_size`.

    Raises:
      ValueError: a file is missing, empty, not of the format, or holds a token that the tokenizer does not have.
    """
    end_of_text = end_of_text if source.end_of_text == -1 else source.end_of_text
    if not 0 <= end_of_text < vocab_size:
        raise ValueError(
            f"{key}.end_of_text={end_of_text} must be -1 or one of the tokenizer's ids, 0 to {vocab_size - 1}"
        )
    opener = {"nanogpt": _open_nanogpt, "llm.c": _open_llmc}[source.format]
    paths = match_files(source.paths, f"{key}.paths")
    tokens = TokenArrays([opener(path, f"{key}.paths: {path}") for path in paths])
    places = _scan(tokens, paths, f"{key}.paths", vocab_size, end_of_text, show_progress)
    if places.size == 0:
        cut = len(tokens) - (-(-len(tokens) // holdout_every) if holdout_every else 0)
        starts, ends = np.array([cut, 0], np.int64), np.array([len(tokens), cut], np.int64)
        return _without_empty(Documents(tokens, starts, ends))
    ends = places + 1
    if ends[-1] != len(tokens):
        ends = np.append(ends, len(tokens))
    starts = np.concatenate([[0], ends[:-1]])
    is_end_alone = (ends - starts == 1) & np.isin(starts, places)
    return Documents(tokens, starts[~is_end_alone], ends[~is_end_alone])


def megatron_documents(source: schema.MegatronSource, key: str, *, vocab_size: int, show_progress: bool) -> Documents:
    """Return the documents that the index files list. Tokens are taken as they are: no end of text is added.

    Every token is read once to check that it is below `vocab_size`.

    Raises:
      ValueError: a file is missing or not of the format, or holds a token that the tokenizer does not have.
    """
    if not source.prefixes:
        raise ValueError(f"{key}.prefixes is empty: name at least one pair of files")
    arrays, starts, ends, paths = [], [], [], []
    offset = 0
    for prefix in source.prefixes:
        index_path, path = (_megatron_file(prefix, ending, key) for ending in (".idx", ".bin"))
        dtype, bounds = _read_megatron_index(index_path, f"{key}.prefixes: {index_path}")
        array = _map(path, f"{key}.prefixes: {path}", dtype)
        if array.size != bounds[-1]:
            raise ValueError(
                f"{key}.prefixes: {path} holds {array.size} tokens, but its index {index_path} lists {bounds[-1]}; "
                "one of them is cut short"
            )
        arrays.append(array)
        paths.append(path)
        starts.append(bounds[:-1] + offset)
        ends.append(bounds[1:] + offset)
        offset += array.size
    tokens = TokenArrays(arrays)
    _scan(tokens, tuple(paths), f"{key}.prefixes", vocab_size, None, show_progress)
    return _without_empty(Documents(tokens, np.concatenate(starts), np.concatenate(ends)))


def _open_nanogpt(path: Path, place: str) -> NDArray[Any]:
    return _map(path, place, np.uint16)


def _open_llmc(path: Path, place: str) -> NDArray[Any]:
    with path.open("rb") as file:
        header = file.read(_LLMC_HEADER_BYTES)
    if len(header) < _LLMC_HEADER_BYTES:
        raise ValueError(f"{place} is no llm.c token file: it is shorter than the {_LLMC_HEADER_BYTES}-byte header")
    magic, version, num_tokens = struct.unpack("<3i", header[:12])
    if magic not in _LLMC_KINDS or _LLMC_KINDS[magic][0] != version:
        known = ", ".join(f"{magic} (version {version})" for magic, (version, _) in _LLMC_KINDS.items())
        raise ValueError(
            f"{place} is no llm.c token file: it starts with {magic} (version {version}) where {known} are known; "
            'files without a header are format = "nanogpt"'
        )
    array = _map(path, place, _LLMC_KINDS[magic][1], _LLMC_HEADER_BYTES)
    if array.size != num_tokens:
        raise ValueError(f"{place} holds {array.size} tokens, but its header says {num_tokens}; it is cut short")
    return array


def _map(path: Path, place: str, dtype: DTypeLike, offset: int = 0) -> NDArray[Any]:
    """Memory-map the tokens of a file, which are little-endian."""
    dtype = np.dtype(dtype).newbyteorder("<")
    size = path.stat().st_size - offset
    if size % dtype.itemsize:
        raise ValueError(
            f"{place} holds {size} bytes of tokens, which is no multiple of {dtype.itemsize} ({dtype.name})"
        )
    if size == 0:
        raise ValueError(f"{place} is an empty corpus: it holds no tokens")
    return np.memmap(path, dtype, mode="r", offset=offset)


def _megatron_file(prefix: str, ending: str, key: str) -> Path:
    path = Path(prefix + ending).expanduser()
    if not path.is_file():
        raise ValueError(
            f"{key}.prefixes: there is no file {str(path)!r}; give paths without the .bin and .idx endings"
        )
    check_readable(path, f"{key}.prefixes")
    return path


def _read_megatron_index(path: Path, place: str) -> tuple[DTypeLike, NDArray[np.int64]]:
    """Return the dtype of the tokens, and the token offsets between which the documents lie."""
    content = path.read_bytes()
    header = struct.Struct("<9sQBQQ")
    if len(content) < header.size or not content.startswith(_MEGATRON_MAGIC):
        raise ValueError(f"{place} is no Megatron index: it does not start with {_MEGATRON_MAGIC!r}")
    _, version, code, num_sequences, num_bounds = header.unpack_from(content)
    if version != 1 or code not in _MEGATRON_DTYPES:
        raise ValueError(
            f"{place} has version {version} and dtype code {code}; version 1 and codes 1-5 and 8 are known"
        )
    if len(content) < header.size + 12 * num_sequences + 8 * num_bounds:
        raise ValueError(
            f"{place} is cut short: it announces {num_sequences} sequences and {num_bounds} document bounds"
        )
    lengths = np.frombuffer(content, "<i4", num_sequences, header.size)
    pointers = np.frombuffer(content, "<i8", num_sequences, header.size + 4 * num_sequences)
    bounds = np.frombuffer(content, "<i8", num_bounds, header.size + 12 * num_sequences)
    offsets = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])
    dtype = np.dtype(_MEGATRON_DTYPES[code])
    if not np.array_equal(pointers, offsets[:-1] * dtype.itemsize):
        raise ValueError(f"{place} lists sequences that do not lie one after the other, which is not supported")
    ordered = num_bounds > 0 and bounds[0] == 0 and bounds[-1] == num_sequences and bool(np.all(np.diff(bounds) >= 0))
    if not ordered:
        raise ValueError(f"{place} lists document bounds that do not rise from 0 to its {num_sequences} sequences")
    return dtype, offsets[bounds]


def _without_empty(documents: Documents) -> Documents:
    kept = documents.ends > documents.starts
    return Documents(documents.tokens, documents.starts[kept], documents.ends[kept])


def _scan(
    tokens: TokenArrays,
    paths: tuple[Path, ...],
    key: str,
    vocab_size: int,
    end_of_text: int | None,
    show_progress: bool,
) -> NDArray[np.int64]:
    """Return where the end of text occurs, and check every token.

    Raises:
      ValueError: a token is negative or not below `vocab_size`.
    """
    places: list[NDArray[np.int64]] = []
    num_bytes = sum(array.nbytes for array in tokens.arrays)
    with progress_bar("Checking tokens", num_bytes, show_progress) as advance:
        for array, path, offset in zip(tokens.arrays, paths, tokens.offsets, strict=False):
            for start in range(0, array.size, _SCAN_TOKENS):
                chunk = array[start : start + _SCAN_TOKENS]
                low, high = int(chunk.min()), int(chunk.max())
                if low < 0 or high >= vocab_size:
                    raise ValueError(
                        f"{key}: {path} holds token {low if low < 0 else high}, but the tokenizer's ids are 0 to "
                        f"{vocab_size - 1}; set data.tokenizer to the one that wrote the file, or correct the format"
                    )
                if end_of_text is not None:
                    places.append(np.flatnonzero(chunk == end_of_text) + start + offset)
                advance(chunk.nbytes)
    return np.concatenate(places) if places else np.empty(0, np.int64)
