"""Rows of a batch against the definition: windows of one stream, whose targets are the next tokens."""

from itertools import chain

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxpar.data.packing import num_full_windows, num_windows, pack_window
from jaxpar.data.streams import Documents, TokenArrays


def stream_of(documents, chosen=None, cuts=()):
    """A stream of the chosen documents, all of which lie in files cut at `cuts`."""
    ends = np.cumsum([len(document) for document in documents])
    tokens = TokenArrays(np.split(np.array(list(chain(*documents)), np.uint16), sorted(cuts)))
    chosen = np.ones(len(documents), bool) if chosen is None else np.array(chosen)
    return Documents(tokens, np.concatenate([[0], ends[:-1]]), ends).stream(chosen)


STREAM = stream_of([[1, 2, 0], [3, 0], [4, 5, 6, 0]])


def row_of(index, sequence_length, respect):
    row = pack_window(STREAM, index, sequence_length, respect_boundaries=respect)
    assert row["loss_mask"].dtype == np.bool_
    assert all(row[key].dtype == np.int32 for key in ("tokens", "targets", "positions", "segment_ids"))
    return {key: value.astype(int).tolist() for key, value in row.items()}


def test_boundaries_respected():
    assert row_of(0, 6, respect=True) == {
        "tokens": [1, 2, 0, 3, 0, 4],
        "targets": [2, 0, 3, 0, 4, 5],
        "positions": [0, 1, 2, 0, 1, 0],
        "segment_ids": [1, 1, 1, 2, 2, 3],
        "loss_mask": [1, 1, 0, 1, 0, 1],
    }


def test_boundaries_ignored():
    assert row_of(0, 6, respect=False) == {
        "tokens": [1, 2, 0, 3, 0, 4],
        "targets": [2, 0, 3, 0, 4, 5],
        "positions": [0, 1, 2, 3, 4, 5],
        "segment_ids": [1, 1, 1, 1, 1, 1],
        "loss_mask": [1, 1, 1, 1, 1, 1],
    }


def test_a_window_inside_a_document_and_its_padding():
    assert row_of(1, 6, respect=True) == {
        "tokens": [5, 6, 0, 0, 0, 0],
        "targets": [6, 0, 0, 0, 0, 0],
        "positions": [0, 1, 0, 0, 0, 0],
        "segment_ids": [1, 1, 0, 0, 0, 0],
        "loss_mask": [1, 1, 0, 0, 0, 0],
    }


def test_a_document_that_begins_with_the_window_is_its_first_segment():
    assert row_of(1, 3, respect=True)["segment_ids"] == [1, 1, 2]
    assert row_of(1, 3, respect=True)["loss_mask"] == [1, 0, 1]


@given(
    lengths=st.lists(st.tuples(st.integers(1, 6), st.booleans()), min_size=1, max_size=12),
    cuts=st.sets(st.integers(1, 20), max_size=3),
    sequence_length=st.integers(1, 9),
    respect=st.booleans(),
)
def test_rows_hold_every_token_once(lengths, cuts, sequence_length, respect):
    """Whatever the documents, the files that hold them and the choice among them."""
    numbers = iter(range(1, 1000))
    documents = [[next(numbers) for _ in range(length)] for length, _ in lengths]
    cuts = {cut for cut in cuts if cut < sum(map(len, documents))}
    stream = stream_of(documents, [chosen for _, chosen in lengths], cuts)
    kept = [document for document, (_, chosen) in zip(documents, lengths, strict=True) if chosen]
    expected = list(chain(*kept))
    begins = [document[0] for document in kept]
    assert stream.num_tokens == len(expected)
    rows = [
        pack_window(stream, i, sequence_length, respect_boundaries=respect)
        for i in range(num_windows(len(expected), sequence_length))
    ]
    for i, row in enumerate(rows):
        assert (row["segment_ids"] > 0).all() == (i < num_full_windows(len(expected), sequence_length))
    real = [{key: value[row["segment_ids"] > 0] for key, value in row.items()} for row in rows]
    joined = {key: np.concatenate([row[key] for row in real]).tolist() for key in real[0]} if real else {}
    if real:
        assert joined["tokens"] == expected[:-1]
        assert joined["targets"] == expected[1:]
        counted = [not respect or target not in begins for target in joined["targets"]]
        assert joined["loss_mask"] == counted
    else:
        assert len(expected) < 2
    for row in real:
        for j, token in enumerate(row["tokens"]):
            restarts = j == 0 or (respect and token in begins)
            assert row["positions"][j] == (0 if restarts else row["positions"][j - 1] + 1)
            assert row["segment_ids"][j] == (1 if j == 0 else row["segment_ids"][j - 1] + restarts)


@pytest.mark.parametrize(("num_tokens", "full", "all_windows"), [(0, 0, 0), (1, 0, 0), (4, 0, 1), (5, 1, 1), (6, 1, 2)])
def test_window_counts(num_tokens, full, all_windows):
    assert num_full_windows(num_tokens, 4) == full
    assert num_windows(num_tokens, 4) == all_windows
