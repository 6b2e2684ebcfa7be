"""Token streams: chosen documents of memory-mapped token files, read as if they stood one after the other."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["Documents", "TokenArrays", "TokenStream"]

Offsets = NDArray[np.int64]


class TokenArrays:
    """Several one-dimensional token arrays, addressed as one.

    >>> TokenArrays([np.array([1, 2, 3]), np.array([4, 5])]).read(1, 4)
    array([2, 3, 4], dtype=int32)
    """

    def __init__(self, arrays: Sequence[NDArray[Any]]) -> None:
        # A plain ndarray over the same mapping: slicing np.memmap itself is several times slower.
        self.arrays = tuple(np.asarray(array) for array in arrays)
        self.offsets: Offsets = np.cumsum([0, *(len(array) for array in self.arrays)], dtype=np.int64)

    def __len__(self) -> int:
        return int(self.offsets[-1])

    def read(self, start: int, stop: int) -> NDArray[np.int32]:
        """Return tokens `start` to `stop` - 1."""
        tokens = np.empty(stop - start, np.int32)
        index = int(np.searchsorted(self.offsets, start, side="right")) - 1
        done = 0
        while done < tokens.size:
            begin = start + done - int(self.offsets[index])
            piece = self.arrays[index][begin : begin + tokens.size - done]
            tokens[done : done + piece.size] = piece
            done += piece.size
            index += 1
        return tokens


@dataclass(frozen=True)
class Documents:
    """Where the documents of a source lie: document d is `tokens[starts[d]:ends[d]]`, its end of text included."""

    tokens: TokenArrays
    starts: Offsets
    ends: Offsets

    def digest(self) -> str:
        """Return a hash of where the documents lie."""
        total = hashlib.blake2b(digest_size=16)
        for offsets in (self.starts, self.ends):
            total.update(np.ascontiguousarray(offsets, np.int64).data)
        return total.hexdigest()

    def stream(self, chosen: NDArray[np.bool_]) -> "TokenStream":
        """Return the chosen documents as one stream."""
        return TokenStream(self.tokens, self.starts[chosen], self.ends[chosen])


class TokenStream:
    """Documents joined into one stream of `num_tokens` tokens."""

    def __init__(self, tokens: TokenArrays, starts: Offsets, ends: Offsets) -> None:
        self._tokens = tokens
        lengths = ends - starts
        self._document_starts: Offsets = np.cumsum(lengths) - lengths
        self.num_documents = len(lengths)
        self.num_tokens = int(lengths.sum())
        # Neighbours in the files form one run, so that reading copies few pieces.
        first_of_run = np.ones(len(starts), bool)
        first_of_run[1:] = starts[1:] != ends[:-1]
        self._run_starts: Offsets = self._document_starts[first_of_run]
        self._run_sources: Offsets = starts[first_of_run]

    def read(self, start: int, stop: int) -> NDArray[np.int32]:
        """Return tokens `start` to `stop` - 1 of the stream."""
        run = int(np.searchsorted(self._run_starts, start, side="right")) - 1
        pieces = []
        while start < stop:
            last = run + 1 == len(self._run_starts)
            piece_stop = stop if last else min(stop, int(self._run_starts[run + 1]))
            shift = int(self._run_sources[run] - self._run_starts[run])
            pieces.append(self._tokens.read(start + shift, piece_stop + shift))
            start, run = piece_stop, run + 1
        return np.concatenate(pieces) if len(pieces) > 1 else pieces[0]

    def document_starts(self, start: int, stop: int) -> Offsets:
        """Return the places in the stream, from `start` to `stop` - 1, at which a document begins."""
        first, last = np.searchsorted(self._document_starts, [start, stop], side="left")
        return self._document_starts[first:last]
