"""Batches are a pure function of (seed, step), whatever the processes, the first step and the prefetching."""

import itertools
import json
from collections import Counter

import numpy as np
import pytest

from jaxpar.config import schema
from jaxpar.data import heldout_batches, loader, make_tokenizer, open_data, train_batches


def data_config(tmp_path, sources=(range(40),), weights=(1.0,), **changes):
    """One .jsonl file a source; document n of a source is n + 1 letters long, its letter the source's."""
    made = []
    for index, (documents, weight) in enumerate(zip(sources, weights, strict=True)):
        path = tmp_path / f"{index}.jsonl"
        letter = chr(ord("a") + index)
        path.write_text("".join(json.dumps({"text": letter * (n + 1)}) + "\n" for n in documents))
        made.append(schema.TextSource(paths=(str(path),), weight=weight))
    keys = {"tokenizer": schema.ByteTokenizer(), "cache_dir": str(tmp_path / "cache"), "sequence_length": 8, **changes}
    return schema.DataConfig(sources=tuple(made), **keys)


def open_corpus(config):
    return open_data(config, make_tokenizer(config, show_progress=False), show_progress=False)


def train(corpus, config, *, batch_size=4, seed=0, start_step=0, rows=None):
    rows = range(batch_size) if rows is None else rows
    return train_batches(corpus, config, batch_size=batch_size, seed=seed, start_step=start_step, rows=rows)


def heldout(corpus, config, batch_size, rows=None):
    rows = range(batch_size) if rows is None else rows
    return list(heldout_batches(corpus, config, batch_size=batch_size, rows=rows))


PARTS = [[range(3), range(3, 6)], [(0, 3), (1, 4), (2, 5)], [(i,) for i in range(6)]]
"""Rows of a batch of six that processes may have: side by side, or as a mesh's order scatters them."""


def assert_same(batch, other):
    assert batch.keys() == other.keys()
    for key in batch:
        np.testing.assert_array_equal(batch[key], other[key], strict=True)


def joined(batches):
    return {key: np.concatenate([batch[key] for batch in batches]) for key in batches[0]}


def rows_of(batches):
    """Rows as bytes of their tokens and positions, which tell all of this file's rows apart."""
    return [
        (t.tobytes(), p.tobytes())
        for batch in batches
        for t, p in zip(batch["tokens"], batch["positions"], strict=True)
    ]


@pytest.mark.parametrize("prefetch", [0, 2, 9])
def test_the_iterator_gives_batch_at_and_resumes_anywhere(tmp_path, prefetch):
    config = data_config(tmp_path, prefetch=prefetch)
    corpus = open_corpus(config)
    fresh = list(itertools.islice(train(corpus, config), 40))
    reference = train(corpus, config)
    for start_step in (0, 3, 31):
        resumed = train(corpus, config, start_step=start_step)
        for step in range(start_step, 40):
            batch = next(resumed)
            assert_same(batch, fresh[step])
            assert_same(resumed.batch_at(step), reference.batch_at(step))
            assert_same(batch, reference.batch_at(step))
        resumed.close()


def test_shapes_and_types(tmp_path):
    config = data_config(tmp_path)
    batch = train(open_corpus(config), config).batch_at(7)
    assert {key: (value.shape, value.dtype.name) for key, value in batch.items()} == {
        "tokens": ((4, 8), "int32"),
        "targets": ((4, 8), "int32"),
        "positions": ((4, 8), "int32"),
        "segment_ids": ((4, 8), "int32"),
        "loss_mask": ((4, 8), "bool"),
    }


def test_an_epoch_has_every_sequence_once_and_the_next_another_order(tmp_path):
    config = data_config(tmp_path, document_boundaries="ignore", sequence_length=4, sources=(range(60),))
    path = tmp_path / "0.jsonl"
    numbers = np.arange(30_000, dtype="<u2").reshape(-1, 2)[:999]
    path.write_text("".join(json.dumps({"text": f"{a:04x}"}) + "\n" for a, _ in numbers))
    corpus = open_corpus(config.model_copy(update={"holdout_every": 0}))
    num_sequences = (corpus.train[0].num_tokens - 1) // 4
    batches = train(corpus, config, batch_size=num_sequences)
    whole = [corpus.train[0].read(4 * i, 4 * i + 4).tobytes() for i in range(num_sequences)]
    epochs = [[row.tobytes() for row in batches.batch_at(step)["tokens"]] for step in range(3)]
    for epoch in epochs:
        assert sorted(epoch) == sorted(whole)
    assert epochs[0] != epochs[1] != epochs[2] != epochs[0]
    assert whole not in epochs
    # The seed decides the order, and one seed's later epochs are no other seed's.
    others = [
        [row.tobytes() for row in train(corpus, config, batch_size=num_sequences, seed=1).batch_at(step)["tokens"]]
        for step in range(2)
    ]
    assert all(other not in epochs for other in others)


def test_batches_straddle_epochs_without_loss(tmp_path):
    config = data_config(tmp_path, sources=(range(12),), holdout_every=0)
    corpus = open_corpus(config)
    num_sequences = (corpus.train[0].num_tokens - 1) // 8
    assert num_sequences % 4 != 0
    rows = rows_of(itertools.islice(train(corpus, config), num_sequences))
    epochs = [sorted(rows[i * num_sequences : (i + 1) * num_sequences]) for i in range(4)]
    assert epochs[0] == epochs[1] == epochs[2] == epochs[3]


@pytest.mark.parametrize("rows", PARTS, ids=len)
def test_rows_of_all_processes_are_the_batch_of_one(tmp_path, rows):
    config = data_config(tmp_path, sources=(range(30), range(20)), weights=(2.0, 1.0))
    corpus = open_corpus(config)
    whole = train(corpus, config, batch_size=6)
    parts = [train(corpus, config, batch_size=6, rows=part) for part in rows]
    for step in (0, 1, 99):
        for part, own in zip(parts, rows, strict=True):
            assert_same(part.batch_at(step), {key: array[list(own)] for key, array in whole.batch_at(step).items()})


def test_only_the_rows_that_are_asked_for_are_read(tmp_path, monkeypatch):
    config = data_config(tmp_path, prefetch=0)
    corpus = open_corpus(config)
    read = []
    original = loader.pack_window
    monkeypatch.setattr(
        loader,
        "pack_window",
        lambda stream, index, *rest, **keys: read.append(index) or original(stream, index, *rest, **keys),
    )
    everything, own = train(corpus, config, batch_size=6), train(corpus, config, batch_size=6, rows=(1, 4))
    everything.batch_at(3)
    whole = read.copy()
    read.clear()
    own.batch_at(3)
    assert read == [whole[1], whole[4]]
    read.clear()
    assert heldout(corpus, config, 6, rows=(1, 4))
    assert {index % 6 for index in read} == {1, 4}


def test_mixtures_have_the_weights_shares_and_repeat_each_source_on_its_own(tmp_path):
    config = data_config(tmp_path, sources=(range(6), range(40)), weights=(0.7, 0.3), document_boundaries="ignore")
    corpus = open_corpus(config)
    batches = train(corpus, config, batch_size=100)
    tokens = np.concatenate([batches.batch_at(step)["tokens"] for step in range(3)])
    from_first, from_second = ((tokens == ord(letter)).any(axis=1) for letter in "ab")
    assert not (from_first & from_second).any()
    assert from_first[:100].sum() == from_first[200:].sum() == 70
    # The small source has come round many times while the large one is in its first epoch.
    large = corpus.train[1]
    windows = Counter(large.read(8 * i, 8 * i + 8).tobytes() for i in range((large.num_tokens - 1) // 8))
    seen = Counter(row.tobytes() for row in tokens[from_second])
    assert windows.total() > seen.total() == 90
    assert seen <= windows


@pytest.mark.parametrize("boundaries", ["respect", "ignore"])
@pytest.mark.parametrize("rows", [[range(6)], *PARTS[:2]], ids=len)
def test_evaluation_counts_the_whole_held_out_set_once(tmp_path, boundaries, rows):
    config = data_config(
        tmp_path, sources=(range(30), range(17)), weights=(1.0, 5.0), document_boundaries=boundaries, holdout_every=3
    )
    corpus = open_corpus(config)
    parts = [heldout(corpus, config, 6, part) for part in rows]
    assert len({len(part) for part in parts}) == 1
    order = np.argsort(np.concatenate([np.array(part) for part in rows]))
    batches = [{key: array[order] for key, array in joined(blocks).items()} for blocks in zip(*parts, strict=True)]
    assert all(batch["tokens"].shape == (6, 8) for batch in batches)
    seen = joined(batches)
    assert (~seen["loss_mask"][seen["segment_ids"] == 0]).all()
    assert (seen["segment_ids"][-1] == 0).all()
    expected = []
    for stream in corpus.heldout:
        begins = set(stream.document_starts(0, stream.num_tokens).tolist())
        tokens = stream.read(0, stream.num_tokens).tolist()
        expected += [t for i, t in enumerate(tokens) if i > 0 and (boundaries == "ignore" or i not in begins)]
    assert seen["targets"][seen["loss_mask"]].tolist() == expected


def test_nothing_held_out_gives_no_batches(tmp_path):
    config = data_config(tmp_path, holdout_every=0)
    assert heldout(open_corpus(config), config, 4) == []


def test_a_sequence_longer_than_the_data(tmp_path):
    config = data_config(tmp_path, sources=([0, 9, 4],), sequence_length=17)
    corpus = open_corpus(config)
    message = (
        r"data\.sequence_length=17 is a sequence longer than the data: .* of data\.sources\[0\] are 17 tokens, .*; "
        r"the largest legal value is 16$"
    )
    with pytest.raises(ValueError, match=message):
        train(corpus, config)
    fitting = config.model_copy(update={"sequence_length": 16})
    assert train(corpus, fitting).batch_at(0)["loss_mask"].sum(axis=1).tolist() == [15] * 4


def test_nothing_left_to_train_on(tmp_path):
    config = data_config(tmp_path, sources=([5],))
    with pytest.raises(
        ValueError, match=r"data\.sources\[0\] has nothing to train on: data\.holdout_every=10 .* its 1 doc"
    ):
        train(open_corpus(config), config)
