"""Batches through Grain, as a pure function of (seed, step)."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import cast

import grain
import numpy as np

from jaxpar.config import schema
from jaxpar.data.mixture import integer_shares, locate
from jaxpar.data.opening import Corpus
from jaxpar.data.packing import Batch, blank_row, num_full_windows, num_windows, pack_window, stack_rows
from jaxpar.data.sources import nothing_left
from jaxpar.data.streams import TokenStream

__all__ = ["TrainBatches", "heldout_batches", "train_batches"]

# A batch takes milliseconds from memory; more threads only hide the latency of a cold disk.
_MAX_THREADS = 4
# Endless, yet exact in the floating-point division by which Grain counts batches.
_NUM_ROWS = 1 << 53


class TrainBatches(Iterator[Batch]):
    """An endless iterator over a process's rows of each batch; `batch_at` gives those of any step."""

    def __init__(self, dataset: grain.MapDataset, start_step: int, prefetch: int) -> None:
        options = grain.ReadOptions(num_threads=min(prefetch, _MAX_THREADS), prefetch_buffer_size=prefetch)
        self._dataset = dataset
        self._iterator = iter(dataset[start_step:].to_iter_dataset(options))

    def __next__(self) -> Batch:
        return cast(Batch, next(self._iterator))

    def batch_at(self, step: int) -> Batch:
        """Return the batch of a step, counted from 0 whatever the first step was."""
        return cast(Batch, self._dataset[step])

    def close(self) -> None:
        """Stop the threads that prepare batches."""
        self._iterator.close()


def train_batches(
    corpus: Corpus,
    config: schema.DataConfig,
    *,
    batch_size: int,
    seed: int,
    start_step: int,
    rows: Sequence[int],
) -> TrainBatches:
    """Return the training batches of `batch_size` rows from step `start_step` on, and of each only `rows`.

    Each source is shuffled without repetition within an epoch, differently in each epoch, and repeated on its own; the
    sources are mixed by their weights. A row depends on the seed, the step, `batch_size` and its place in the batch
    alone, and no other is read.

    Raises:
      ValueError: a source has less than one sequence.
    """
    shares = integer_shares([source.weight for source in config.sources])
    sources = []
    for index, stream in enumerate(corpus.train):
        _check_length(stream, corpus.heldout[index], index, config)
        # Grain adds the epoch to the seed: hashing keeps one seed's epochs from being the next seed's.
        shuffle_seed = int(np.random.SeedSequence([seed, index]).generate_state(1)[0])
        windows = _Windows(stream, config.sequence_length, config.document_boundaries == "respect")
        sources.append(grain.MapDataset.source(windows).shuffle(seed=shuffle_seed).repeat())
    order = _Order(shares, batch_size, tuple(rows))
    dataset = grain.MapDataset.select_from_datasets(sources, order).batch(len(rows), batch_fn=stack_rows)
    return TrainBatches(dataset, start_step, config.prefetch)


def heldout_batches(
    corpus: Corpus, config: schema.DataConfig, *, batch_size: int, rows: Sequence[int]
) -> Iterator[Batch]:
    """Return batches of `batch_size` rows that hold the whole held-out set once, in order; of each only `rows`.

    Incomplete windows and the last batch are padded and masked, so that every process has equally many batches. There
    are none if nothing is held out.
    """
    length = config.sequence_length
    first_rows = np.cumsum([0, *(num_windows(stream.num_tokens, length) for stream in corpus.heldout)])
    num_rows = int(first_rows[-1])

    def row(index: int) -> Batch:
        if index >= num_rows:
            return blank_row(length)
        source = int(np.searchsorted(first_rows, index, side="right")) - 1
        return pack_window(
            corpus.heldout[source],
            index - int(first_rows[source]),
            length,
            respect_boundaries=config.document_boundaries == "respect",
        )

    return (stack_rows([row(first + i) for i in rows]) for first in range(0, num_rows, batch_size))


@dataclass(frozen=True)
class _Windows:
    """The complete windows of a stream, as a source for Grain."""

    stream: TokenStream
    sequence_length: int
    respect_boundaries: bool

    def __len__(self) -> int:
        return num_full_windows(self.stream.num_tokens, self.sequence_length)

    def __getitem__(self, index: int) -> Batch:
        return pack_window(self.stream, index, self.sequence_length, respect_boundaries=self.respect_boundaries)


class _Order(grain.transforms.DatasetSelectionMap):
    """From a process's rows, counted over all steps, to sources and their rows.

    Grain's own mixing rounds the weights; this one is exact.
    """

    def __init__(self, shares: tuple[int, ...], batch_size: int, rows: tuple[int, ...]) -> None:
        self._shares = shares
        self._batch_size = batch_size
        self._rows = rows

    def __len__(self) -> int:
        return _NUM_ROWS

    def __getitem__(self, index: int) -> tuple[int, int]:
        step, place = divmod(index, len(self._rows))
        return locate(step * self._batch_size + self._rows[place], self._shares)


def _check_length(stream: TokenStream, heldout: TokenStream, index: int, config: schema.DataConfig) -> None:
    if stream.num_documents == 0:
        raise ValueError(nothing_left(f"data.sources[{index}]", heldout.num_documents, config.holdout_every))
    if num_full_windows(stream.num_tokens, config.sequence_length) == 0:
        largest = stream.num_tokens - 1
        fix = f"the largest legal value is {largest}" if largest > 0 else "more text is needed"
        raise ValueError(
            f"data.sequence_length={config.sequence_length} is a sequence longer than the data: the training documents "
            f"of data.sources[{index}] are {stream.num_tokens} tokens, and a sequence takes one more than its length; "
            f"{fix}"
        )
