"""Windows of a token stream as rows of a batch.

Row i is the window `stream[i*T : i*T + T + 1]`: its first T tokens are the inputs, its last T the targets, so that
every token of the stream but the first is a target once. B is the batch, T the sequence.
"""

from typing import TypedDict

import numpy as np
from numpy.typing import NDArray

from jaxpar.data.streams import TokenStream

__all__ = ["Batch", "blank_row", "num_full_windows", "num_windows", "pack_window", "stack_rows"]


class Batch(TypedDict):
    """One row a sequence, each array [B, T]; a single row has shape [T]."""

    tokens: NDArray[np.int32]
    targets: NDArray[np.int32]
    """The token that follows each token of the stream."""
    positions: NDArray[np.int32]
    """Place within the document if boundaries are respected, else within the row."""
    segment_ids: NDArray[np.int32]
    """The document's number within the row, from 1; 0 is padding."""
    loss_mask: NDArray[np.bool_]
    """Whether the target counts: not at padding, and not where it begins another document than its token's."""


def num_full_windows(num_tokens: int, sequence_length: int) -> int:
    """Return how many windows of a stream are complete.

    >>> num_full_windows(9, 4), num_full_windows(8, 4)
    (2, 1)
    """
    return max(0, num_tokens - 1) // sequence_length


def num_windows(num_tokens: int, sequence_length: int) -> int:
    """Return how many windows of a stream have at least one target.

    >>> num_windows(9, 4), num_windows(8, 4), num_windows(1, 4)
    (2, 2, 0)
    """
    return -(-max(0, num_tokens - 1) // sequence_length)


def pack_window(stream: TokenStream, index: int, sequence_length: int, *, respect_boundaries: bool) -> Batch:
    """Return row `index` of a stream; an incomplete last window is padded."""
    start = index * sequence_length
    stop = min(start + sequence_length + 1, stream.num_tokens)
    window = stream.read(start, stop)
    begins = np.zeros(window.size, np.bool_)
    if respect_boundaries:
        begins[stream.document_starts(start + 1, stop) - start] = True
    document = 1 + np.cumsum(begins, dtype=np.int32)
    place = np.arange(window.size, dtype=np.int32)
    position = place - np.maximum.accumulate(np.where(begins, place, 0))
    row = blank_row(sequence_length)
    size = window.size - 1
    row["tokens"][:size] = window[:-1]
    row["targets"][:size] = window[1:]
    row["positions"][:size] = position[:-1]
    row["segment_ids"][:size] = document[:-1]
    row["loss_mask"][:size] = document[:-1] == document[1:]
    return row


def blank_row(sequence_length: int) -> Batch:
    """Return a row of padding."""
    zeros = np.zeros((4, sequence_length), np.int32)
    return Batch(
        tokens=zeros[0],
        targets=zeros[1],
        positions=zeros[2],
        segment_ids=zeros[3],
        loss_mask=np.zeros(sequence_length, np.bool_),
    )


def stack_rows(rows: list[Batch]) -> Batch:
    """Return rows [T] as a batch [B, T]."""
    return Batch(
        tokens=np.stack([row["tokens"] for row in rows]),
        targets=np.stack([row["targets"] for row in rows]),
        positions=np.stack([row["positions"] for row in rows]),
        segment_ids=np.stack([row["segment_ids"] for row in rows]),
        loss_mask=np.stack([row["loss_mask"] for row in rows]),
    )
