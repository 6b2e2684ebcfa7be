"""Text files become documents, and what is wrong with one is said with the key, the file and the place."""

import gzip
import json
import lzma
import os
import sys

import pyarrow
import pyarrow.parquet
import pytest
import zstandard

from jaxpar.config import schema
from jaxpar.data.sources import text_files, training_documents

PACK = {
    "": bytes,
    ".gz": gzip.compress,
    ".xz": lzma.compress,
    # Two frames, as concatenated files have.
    ".zst": lambda content: zstandard.compress(content[:7]) + zstandard.compress(content[7:]),
}


def source_of(*paths, text_key="text"):
    sources = (schema.TextSource(paths=tuple(map(str, paths)), text_key=text_key),)
    return text_files(schema.DataConfig(sources=sources))[0]


def documents_of(*paths, text_key="text"):
    return list(source_of(*paths, text_key=text_key).documents(lambda num_bytes: None))


def jsonl(*texts):
    return "".join(json.dumps({"text": text}) + "\n" for text in texts).encode()


@pytest.mark.parametrize("packing", PACK)
def test_jsonl_gives_a_document_a_line(tmp_path, packing):
    path = tmp_path / f"a.jsonl{packing}"
    path.write_bytes(PACK[packing](b"\n" + jsonl("één", "", "two\r\nlines") + b'{"text": null}\n' + b'{"text": "end"}'))
    assert documents_of(path) == ["één", "two\r\nlines", "end"]


@pytest.mark.parametrize("packing", PACK)
def test_txt_is_one_document_byte_for_byte(tmp_path, packing):
    path = tmp_path / f"a.txt{packing}"
    path.write_bytes(PACK[packing]("one\r\n\n två".encode()))
    assert documents_of(path) == ["one\r\n\n två"]


def test_parquet_gives_a_document_a_row(tmp_path):
    path = tmp_path / "a.parquet"
    table = pyarrow.table({"body": ["one", None, "", "två"], "n": [1, 2, 3, 4]})
    pyarrow.parquet.write_table(table, path, row_group_size=3)
    assert documents_of(path, text_key="body") == ["one", "två"]
    with pytest.raises(ValueError, match=r"data\.sources\[0\]\.text_key='text' is not in .*a\.parquet; .*: body, n$"):
        documents_of(path)
    with pytest.raises(ValueError, match=r"text_key='n' is int and not text in .*a\.parquet, row 1"):
        documents_of(path, text_key="n")


def test_files_come_in_order_each_once(tmp_path):
    for name in "cab":
        (tmp_path / f"{name}.txt").write_text(name)
    assert documents_of(tmp_path / "b.txt", tmp_path / "*.txt") == ["b", "a", "c"]


def test_all_bytes_are_reported(tmp_path):
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(jsonl(*map(str, range(500)))))
    (tmp_path / "b.txt").write_text("text")
    source = source_of(tmp_path / "a.jsonl.gz", tmp_path / "b.txt")
    for read in (source.documents, source.digest):
        reported = []
        list(read(reported.append))
        assert sum(reported) == source.num_bytes


def test_digest_follows_content_kind_order_and_key(tmp_path):
    def digest(*paths, text_key="text"):
        return source_of(*paths, text_key=text_key).digest(lambda num_bytes: None)

    one, other, jsonl_file = tmp_path / "1.txt", tmp_path / "2.txt", tmp_path / "1.jsonl"
    one.write_text("1234")
    other.write_text("5678")
    jsonl_file.write_text("1234")
    digests = [digest(one), digest(other), digest(jsonl_file), digest(one, other), digest(other, one)]
    digests.append(digest(one, text_key="body"))
    assert len(set(digests)) == len(digests)
    times = one.stat()
    one.write_text("4321")
    os.utime(one, ns=(times.st_atime_ns, times.st_mtime_ns))
    assert digest(one) != digests[0]
    one.rename(tmp_path / "renamed.txt")
    (tmp_path / "renamed.txt").write_text("1234")
    assert digest(tmp_path / "renamed.txt") == digests[0]


def test_training_documents_leave_out_every_nth(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(jsonl("0", "", "1", "2", "3", "4"))

    def training(n):
        return list(training_documents(source_of(path), n, lambda num_bytes: None))

    assert training(2) == ["1", "3"]
    assert training(0) == ["0", "1", "2", "3", "4"]
    with pytest.raises(
        ValueError, match=r"data\.sources\[0\] has nothing to train on: data\.holdout_every=1 .* its 5 "
    ):
        training(1)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", b'{"text": "x"}\n{"text": \n', r"a\.jsonl, line 2 is not valid JSON"),
        ("a.jsonl", b"[1]\n", r"a\.jsonl, line 1 is not a JSON object but list"),
        ("a.jsonl", b'{"b": 1, "a": 2}\n', r"text_key='text' is not in .*a\.jsonl, line 1; the keys there are: a, b$"),
        ("a.jsonl", b'{"text": 5}\n', r"text_key='text' is int and not text in .*a\.jsonl, line 1"),
        ("a.jsonl", b'{"text": "\\ud800"}\n', r"a\.jsonl, line 1 holds text that is not Unicode"),
        ("a.txt", b"\xff\xfe", r"data\.sources\[0\]\.paths: .*a\.txt is not UTF-8"),
        ("a.txt", b"", r"data\.sources\[0\] is an empty corpus: no document in .*a\.txt holds any text"),
        ("a.jsonl", b'{"text": ""}\n', r"data\.sources\[0\] is an empty corpus"),
        ("a.parquet", b"PAR1", r"data\.sources\[0\]\.paths: .*a\.parquet is not a readable \.parquet file"),
        ("a.txt.gz", b"plain", r"data\.sources\[0\]\.paths: .*a\.txt\.gz cannot be read"),
        ("a.txt.zst", b"plain", r"data\.sources\[0\]\.paths: .*a\.txt\.zst cannot be read"),
    ],
)
def test_unusable_content_is_named(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=message):
        documents_of(tmp_path / name)


@pytest.mark.parametrize("packing", [".gz", ".xz", ".zst"])
def test_a_file_cut_short_is_an_error_and_not_less_text(tmp_path, packing):
    path = tmp_path / f"a.jsonl{packing}"
    path.write_bytes(PACK[packing](jsonl(*map(str, range(1000))))[:-9])
    with pytest.raises(ValueError, match=rf"data\.sources\[0\]\.paths: .*a\.jsonl\{packing} cannot be read"):
        documents_of(path)


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("none.txt", r"data\.sources\[0\]\.paths: there is no file '.*none\.txt' \(relative paths start at /"),
        ("*.jsonl", r"data\.sources\[0\]\.paths: pattern '.*\*\.jsonl' matches no file"),
        ("folder", r"data\.sources\[0\]\.paths: '.*folder' is a directory; .* for example .*folder/\*\.jsonl"),
        ("a.csv", r"data\.sources\[0\]\.paths: '.*a\.csv' ends in none of \.txt, \.jsonl"),
        ("b.parquet.gz", r"'.*b\.parquet\.gz' ends in none of"),
    ],
)
def test_unusable_paths_are_named(tmp_path, path, message):
    (tmp_path / "folder").mkdir()
    (tmp_path / "a.csv").write_text("x")
    (tmp_path / "b.parquet.gz").write_text("x")
    with pytest.raises(ValueError, match=message):
        source_of(tmp_path / path)


def test_no_paths_and_unreadable_files_are_errors(tmp_path, monkeypatch):
    with pytest.raises(ValueError, match=r"data\.sources\[0\]\.paths is empty"):
        source_of()
    (tmp_path / "a.txt").write_text("x")
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    with pytest.raises(ValueError, match=r"data\.sources\[0\]\.paths: '.*a\.txt' cannot be read: permission denied"):
        source_of(tmp_path / "a.txt")


@pytest.mark.parametrize(("name", "package"), [("a.parquet", "pyarrow"), ("a.txt.zst", "zstandard")])
def test_a_missing_package_names_its_extra(tmp_path, monkeypatch, name, package):
    (tmp_path / name).write_bytes(b"x")
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ValueError, match=rf'data\.sources\[0\].*{package}.*pip install "jaxpar\[datasets\]"'):
        documents_of(tmp_path / name)


def test_packaged_corpus():
    source = text_files(schema.DataConfig())[0]
    documents = list(source.documents(lambda num_bytes: None))
    assert len(documents) == 233
    assert sum(len(text.encode()) for text in documents) == 10_761_202
