"""Token files as nanoGPT, llm.c and Megatron-LM write them; the writers here follow those projects' layouts."""

import struct
from itertools import chain

import numpy as np
import pytest

from jaxpar.config import schema
from jaxpar.data import make_tokenizer, open_data

END = 9


def open_source(source, *, holdout_every=2):
    config = schema.DataConfig(sources=(source,), tokenizer=schema.ByteTokenizer(), holdout_every=holdout_every)
    return open_data(config, make_tokenizer(config, show_progress=False), show_progress=False)


def tokens_of(streams):
    return [stream.read(0, stream.num_tokens).tolist() if stream.num_tokens else [] for stream in streams]


def write_nanogpt(path, *tokens):
    np.array(tokens, "<u2").tofile(path)
    return str(path)


def write_llmc(path, tokens, *, magic=20240520, version=1, dtype="<u2", num_tokens=None):
    header = np.zeros(256, "<i4")
    header[:3] = magic, version, len(tokens) if num_tokens is None else num_tokens
    path.write_bytes(header.tobytes() + np.array(tokens, dtype).tobytes())
    return str(path)


def write_megatron(prefix, sequences, bounds, *, code=8, dtype="<u2", version=1, shift=0, extra=()):
    lengths = [len(sequence) for sequence in sequences]
    pointers = (np.cumsum([0, *lengths])[:-1] + shift) * np.dtype(dtype).itemsize
    index = struct.pack("<9sQBQQ", b"MMIDIDX\x00\x00", version, code, len(sequences), len(bounds))
    index += np.array(lengths, "<i4").tobytes() + pointers.astype("<i8").tobytes() + np.array(bounds, "<i8").tobytes()
    prefix.with_suffix(".idx").write_bytes(index)
    np.array([*chain(*sequences), *extra], dtype).tofile(prefix.with_suffix(".bin"))
    return str(prefix)


def test_documents_end_at_the_end_of_text(tmp_path):
    path = write_nanogpt(tmp_path / "a.bin", 1, 2, END, 3, END, END, 4, 5, END, 6, 7)
    corpus = open_source(schema.TokenFileSource(paths=(path,), end_of_text=END))
    # The lone end of text in the middle is an empty document, which is skipped and not counted.
    assert tokens_of(corpus.heldout) == [[1, 2, END, 4, 5, END]]
    assert tokens_of(corpus.train) == [[3, END, 6, 7]]
    assert corpus.heldout[0].document_starts(0, 6).tolist() == [0, 3]


def test_documents_may_reach_from_file_to_file(tmp_path):
    paths = (write_nanogpt(tmp_path / "a.bin", 1, END, 2), write_nanogpt(tmp_path / "b.bin", 3, END, 4, END))
    corpus = open_source(schema.TokenFileSource(paths=paths, end_of_text=END))
    assert tokens_of(corpus.heldout) == [[1, END, 4, END]]
    assert tokens_of(corpus.train) == [[2, 3, END]]


def test_llmc_puts_the_end_of_text_first(tmp_path):
    path = write_llmc(tmp_path / "a.bin", [END, 1, 2, END, 3, END, 4])
    corpus = open_source(schema.TokenFileSource(paths=(path,), format="llm.c", end_of_text=END))
    assert tokens_of(corpus.heldout) == [[1, 2, END, 4]]
    assert tokens_of(corpus.train) == [[3, END]]


def test_llmc_llama3_files_have_32_bit_tokens(tmp_path):
    path = write_llmc(tmp_path / "a.bin", [1, 2, 256], magic=20240801, version=7, dtype="<u4")
    corpus = open_source(schema.TokenFileSource(paths=(path,), format="llm.c"), holdout_every=0)
    assert tokens_of(corpus.train) == [[1, 2, 256]]
    assert tokens_of(corpus.heldout) == [[]]


@pytest.mark.parametrize(("n", "num_heldout"), [(0, 0), (1, 11), (4, 3), (100, 1)])
def test_without_end_of_text_the_last_part_is_held_out(tmp_path, n, num_heldout):
    paths = (write_nanogpt(tmp_path / "a.bin", *range(5)), write_nanogpt(tmp_path / "b.bin", *range(5, 11)))
    corpus = open_source(schema.TokenFileSource(paths=paths), holdout_every=n)
    assert tokens_of(corpus.train) == [list(range(11 - num_heldout))]
    assert tokens_of(corpus.heldout) == [list(range(11 - num_heldout, 11))]


@pytest.mark.parametrize(("code", "dtype"), [(8, "<u2"), (4, "<i4")])
def test_megatron_documents_are_those_of_the_index(tmp_path, code, dtype):
    # Document 1 has two sequences, document 2 none.
    one = write_megatron(tmp_path / "one", [[1, 2], [3], [4, 5], [6]], [0, 1, 3, 3, 4], code=code, dtype=dtype)
    two = write_megatron(tmp_path / "two", [[7], [8, 8]], [0, 1, 2], code=code, dtype=dtype)
    corpus = open_source(schema.MegatronSource(prefixes=(one, two)))
    assert tokens_of(corpus.heldout) == [[1, 2, 6, 8, 8]]
    assert tokens_of(corpus.train) == [[3, 4, 5, 7]]
    assert corpus.train[0].document_starts(0, 4).tolist() == [0, 3]


def test_unusable_token_files_are_named(tmp_path):
    def error(match, **keys):
        with pytest.raises(ValueError, match=match):
            open_source(schema.TokenFileSource(**keys))

    file = tmp_path / "a.bin"
    path = write_nanogpt(file, 1, 257)
    error(
        r"data\.sources\[0\]\.paths: .*a\.bin holds token 257, .* ids are 0 to 256; set data\.tokenizer", paths=(path,)
    )
    error(r"data\.sources\[0\]\.end_of_text=300 must be -1 or .* 0 to 256", paths=(path,), end_of_text=300)
    error(r"a\.bin is no llm\.c token file: it is shorter", paths=(path,), format="llm.c")
    write_nanogpt(file, *range(600))
    error(
        r"a\.bin is no llm\.c token file: it starts with 65536 .*20240520 \(version 1\)", paths=(path,), format="llm.c"
    )
    write_llmc(file, [1, 2], num_tokens=3)
    error(r"a\.bin holds 2 tokens, but its header says 3; it is cut short", paths=(path,), format="llm.c")
    file.write_bytes(b"abc")
    error(r"a\.bin holds 3 bytes of tokens, which is no multiple of 2 \(uint16\)", paths=(path,))
    file.write_bytes(b"")
    error(r"data\.sources\[0\]\.paths: .*a\.bin is an empty corpus", paths=(path,))
    write_nanogpt(file, END, END)
    error(r"data\.sources\[0\] is an empty corpus: its files hold no documents", paths=(path,), end_of_text=END)
    error(r"data\.sources\[0\]\.paths: there is no file", paths=(str(tmp_path / "none.bin"),))


@pytest.mark.parametrize(
    ("bounds", "changes", "message"),
    [
        ([0, 1, 2], {"extra": [7]}, r"a\.bin holds 4 tokens, but its index .*a\.idx lists 3; one of them is cut short"),
        ([0, 1, 2], {"code": 7}, r"a\.idx has version 1 and dtype code 7; version 1 and codes 1-5 and 8 are known"),
        ([0, 1, 2], {"version": 2}, r"a\.idx has version 2"),
        ([0, 1, 2], {"shift": 1}, r"a\.idx lists sequences that do not lie one after the other"),
        ([0, 2, 1], {}, r"a\.idx lists document bounds that do not rise from 0 to its 2 sequences"),
        ([0, 1, 2], {"code": 4, "dtype": "<i4", "extra": []}, None),
    ],
)
def test_unusable_megatron_files_are_named(tmp_path, bounds, changes, message):
    prefix = write_megatron(tmp_path / "a", [[1, 2], [3]], bounds, **changes)
    source = schema.MegatronSource(prefixes=(prefix,))
    if message is None:
        np.array([1, -2, 3], "<i4").tofile(tmp_path / "a.bin")
        message = r"a\.bin holds token -2, but the tokenizer's ids are 0 to 256"
    with pytest.raises(ValueError, match=rf"data\.sources\[0\]\.prefixes: .*{message}"):
        open_source(source)


def test_missing_and_foreign_megatron_indexes(tmp_path):
    source = schema.MegatronSource(prefixes=(str(tmp_path / "a.bin"),))
    with pytest.raises(
        ValueError, match=r"data\.sources\[0\]\.prefixes: there is no file '.*a\.bin\.idx'; give paths wit"
    ):
        open_source(source)
    prefix = write_megatron(tmp_path / "a", [[1, 2], [3]], [0, 1, 2])
    source = schema.MegatronSource(prefixes=(prefix,))
    index = (tmp_path / "a.idx").read_bytes()
    (tmp_path / "a.idx").write_bytes(index[:-1])
    with pytest.raises(ValueError, match=r"a\.idx is cut short: it announces 2 sequences and 3 document bounds"):
        open_source(source)
    (tmp_path / "a.idx").write_bytes(b"x" * 99)
    with pytest.raises(ValueError, match=r"a\.idx is no Megatron index"):
        open_source(source)
    with pytest.raises(ValueError, match=r"data\.sources\[0\]\.prefixes is empty"):
        open_source(schema.MegatronSource(prefixes=()))
