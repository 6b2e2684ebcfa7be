"""Batches through Grain, as a pure function of (seed, step)."""

from collections.abc import Iterator
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
from jaxpar.multiples import nearest_multiples

__all__ = ["TrainBatches", "heldout_batches", "train_batches"]

# A batch takes milliseconds from memory; more threads only hide the latency of a cold disk.
_MAX_THREADS = 4
# Endless, yet exact in the floating-point division by which Grain counts batches.
_NUM_ROWS = 1 << 53


class TrainBatches(Iterator[Batch]):
    """An endless iterator over one process's rows of each batch; `batch_at` gives any of them by its step."""

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
    process_index: int,
    process_count: int,
) -> TrainBatches:
    """Return the training batches of `batch_size` rows from step `start_step` on, this process's block of each.

    Each source is shuffled without repetition within an epoch, differently in each epoch, and repeated on its own; the
    sources are mixed by their weights. A batch depends on the seed, the step and `batch_size` alone: the blocks of all
    processes, in their order, are the batch of one process.

    Raises:
      ValueError: a source has less than one sequence, or `batch_size` cannot be split over the processes.
    """
    rows = _block(batch_size, process_index, process_count)
    shares = integer_shares([source.weight for source in config.sources])
    sources = []
    for index, stream in enumerate(corpus.train):
        _check_length(stream, corpus.heldout[index], index, config)
        # Grain adds the epoch to the seed: hashing keeps one seed's epochs from being the next seed's.
        shuffle_seed = int(np.random.SeedSequence([seed, index]).generate_state(1)[0])
        windows = _Windows(stream, config.sequence_length, config.document_boundaries == "respect")
        sources.append(grain.MapDataset.source(windows).shuffle(seed=shuffle_seed).repeat())
    order = _Order(shares, batch_size, rows.start, len(rows))
    dataset = grain.MapDataset.select_from_datasets(sources, order).batch(len(rows), batch_fn=stack_rows)
    return TrainBatches(dataset, start_step, config.prefetch)


def heldout_batches(
    corpus: Corpus, config: schema.DataConfig, *, batch_size: int, process_index: int, process_count: int
) -> Iterator[Batch]:
    """Return batches that hold the whole held-out set once, in order; this process's block of rows of each.

    Incomplete windows and the last batch are padded and masked, so that every process has equally many batches. There
    are none if nothing is held out.

    Raises:
      ValueError: `batch_size` cannot be split over the processes.
    """
    block = _block(batch_size, process_index, process_count)
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

    return (stack_rows([row(first + i) for i in block]) for first in range(0, num_rows, batch_size))


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

    def __init__(self, shares: tuple[int, ...], batch_size: int, first_row: int, num_rows: int) -> None:
        self._shares = shares
        self._batch_size = batch_size
        self._first_row = first_row
        self._num_rows = num_rows

    def __len__(self) -> int:
        return _NUM_ROWS

    def __getitem__(self, index: int) -> tuple[int, int]:
        step, row = divmod(index, self._num_rows)
        return locate(step * self._batch_size + self._first_row + row, self._shares)


def _block(batch_size: int, process_index: int, process_count: int) -> range:
    """Return the rows of a batch that are a process's."""
    assert 0 <= process_index < process_count
    if batch_size % process_count:
        raise ValueError(
            f"a batch of {batch_size} sequences (train.batch_size or evaluation.batch_size) must be a multiple of the "
            f"{process_count} processes; nearest legal values: {nearest_multiples(batch_size, process_count)}"
        )
    num_rows = batch_size // process_count
    return range(process_index * num_rows, (process_index + 1) * num_rows)


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
