"""The cache is keyed by content, complete or absent, repaired when damaged, and safe among processes."""

import json
import logging
import subprocess
import sys

import numpy as np
import pytest

from jaxpar.config import schema
from jaxpar.data import make_tokenizer, open_data
from jaxpar.data.cache import cached_directory

OPEN_DATA = """
import sys
from jaxpar.config import schema
from jaxpar.data.opening import open_data
from jaxpar.data.tokenizers import make_tokenizer
config = schema.DataConfig.model_validate_json(sys.argv[1])
print("ready", flush=True)
sys.stdin.readline()
tokenizer = make_tokenizer(config, show_progress=False)
stream = open_data(config, tokenizer, show_progress=False).train[0]
print(tokenizer.digest, stream.read(0, stream.num_tokens).tolist())
"""


def write_corpus(tmp_path, texts):
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))


def data_config(tmp_path, **changes):
    sources = (schema.TextSource(paths=(str(tmp_path / "a.jsonl"),)),)
    keys = {"tokenizer": schema.ByteTokenizer(), "cache_dir": str(tmp_path / "cache"), "holdout_every": 0, **changes}
    return schema.DataConfig(sources=sources, **keys)


def train_tokens(config):
    stream = open_data(config, make_tokenizer(config, show_progress=False), show_progress=False).train[0]
    return stream.read(0, stream.num_tokens).tolist()


def entries(tmp_path):
    return [path for path in (tmp_path / "cache" / "tokens").iterdir() if path.is_dir()]


def test_a_corpus_has_the_digest_of_its_texts(tmp_path):
    """Also where their tokens are as many as before."""

    def digest(**changes):
        config = data_config(tmp_path, **changes)
        return open_data(config, make_tokenizer(config, show_progress=False), show_progress=False).digest

    write_corpus(tmp_path, ["ab", "c"])
    before = digest()
    assert digest(holdout_every=2, cache_dir=str(tmp_path / "other")) == before
    write_corpus(tmp_path, ["ba", "c"])
    assert digest() != before
    write_corpus(tmp_path, ["ab", "c"])
    assert digest() == before


def test_tokens_follow_content_and_tokenizer(tmp_path):
    write_corpus(tmp_path, ["ab", "", "c"])
    config = data_config(tmp_path)
    assert train_tokens(config) == [97, 98, 256, 99, 256]
    assert len(entries(tmp_path)) == 1
    assert train_tokens(config.model_copy(update={"holdout_every": 2})) == [99, 256]
    assert len(entries(tmp_path)) == 1
    write_corpus(tmp_path, ["ba", "", "c"])
    assert train_tokens(config) == [98, 97, 256, 99, 256]
    assert len(entries(tmp_path)) == 2
    train_tokens(config.model_copy(update={"tokenizer": schema.BpeTokenizer(vocab_size=257)}))
    assert len(entries(tmp_path)) == 3


@pytest.mark.parametrize(("vocab_size", "dtype"), [(1 << 16, np.uint16), ((1 << 16) + 1, np.uint32)])
def test_token_width_follows_the_vocabulary(tmp_path, monkeypatch, vocab_size, dtype):
    write_corpus(tmp_path, ["ab"])
    config = data_config(tmp_path)
    tokenizer = make_tokenizer(config, show_progress=False)
    monkeypatch.setattr(tokenizer, "vocab_size", vocab_size, raising=False)
    monkeypatch.setattr(tokenizer, "end_of_text", vocab_size - 1, raising=False)
    stream = open_data(config, tokenizer, show_progress=False).train[0]
    assert stream.read(0, 3).tolist() == [97, 98, vocab_size - 1]
    assert (entries(tmp_path)[0] / "tokens.bin").stat().st_size == 3 * np.dtype(dtype).itemsize


def test_nothing_is_tokenised_twice(tmp_path, monkeypatch):
    write_corpus(tmp_path, ["ab"])
    config = data_config(tmp_path)
    first = train_tokens(config)

    def fail(*args):
        raise AssertionError("tokenised again")

    monkeypatch.setattr("jaxpar.data.opening._write_tokens", fail)
    assert train_tokens(config) == first


@pytest.mark.parametrize("damage", ["truncated", "one bit", "missing", "no meta", "bad meta"])
def test_a_damaged_entry_is_made_again_and_said(tmp_path, caplog, damage):
    write_corpus(tmp_path, ["ab", "c"])
    config = data_config(tmp_path)
    first = train_tokens(config)
    (entry,) = entries(tmp_path)
    if damage == "truncated":
        (entry / "tokens.bin").write_bytes((entry / "tokens.bin").read_bytes()[:-2])
    elif damage == "one bit":
        content = (entry / "tokens.bin").read_bytes()
        (entry / "tokens.bin").write_bytes(bytes([content[0] ^ 1]) + content[1:])
    elif damage == "bad meta":
        (entry / "meta.json").write_text("{")
    else:
        (entry / {"missing": "ends.bin", "no meta": "meta.json"}[damage]).unlink()
    with caplog.at_level(logging.WARNING):
        assert train_tokens(config) == first
    assert [record.getMessage() for record in caplog.records if "is damaged" in record.getMessage()]
    assert entries(tmp_path) == [entry]
    caplog.clear()
    assert train_tokens(config) == first
    assert not caplog.records


def test_a_failed_build_leaves_nothing(tmp_path):
    def fail(directory):
        (directory / "half").write_text("x")
        raise RuntimeError("stopped")

    with pytest.raises(RuntimeError, match="stopped"):
        cached_directory(str(tmp_path), "tokens/key", fail)
    assert [path.name for path in (tmp_path / "tokens").iterdir()] == ["key.lock"]


def test_leftovers_of_a_killed_process_are_removed(tmp_path):
    (tmp_path / "tokens" / "key.tmp-dead" / "fresh").mkdir(parents=True)
    made = cached_directory(str(tmp_path), "tokens/key", lambda directory: (directory / "a").touch())
    assert sorted(path.name for path in (tmp_path / "tokens").iterdir()) == ["key", "key.lock"]
    assert sorted(path.name for path in made.iterdir()) == ["a", "meta.json"]


@pytest.mark.parametrize("locks", [True, False])
def test_the_first_of_two_builders_wins(tmp_path, monkeypatch, locks):
    """Without locks a second process may finish while the first builds, and the first then takes its result."""
    if not locks:
        monkeypatch.setattr("fcntl.flock", lambda file, flags: (_ for _ in ()).throw(OSError(38, "not implemented")))

    def build(text, meanwhile=None):
        def write(directory):
            (directory / "a").write_text(text)
            if meanwhile is not None and not locks:
                cached_directory(str(tmp_path), "key", build(meanwhile))

        return write

    made = cached_directory(str(tmp_path), "key", build("slow", meanwhile="quick"))
    assert (made / "a").read_text() == ("slow" if locks else "quick")
    assert not list(tmp_path.glob("*.tmp-*"))


def test_an_unusable_cache_directory_is_named(tmp_path):
    (tmp_path / "file").write_text("x")
    with pytest.raises(ValueError, match=r"data\.cache_dir='.*file' cannot be written: .*; name another directory"):
        cached_directory(str(tmp_path / "file"), "tokens/key", lambda directory: None)


def test_processes_that_start_together_agree(tmp_path):
    write_corpus(tmp_path, [f"document {n} of the corpus, with words " * 20 for n in range(40)])
    config = data_config(tmp_path, tokenizer=schema.BpeTokenizer(vocab_size=300))
    command = [sys.executable, "-c", OPEN_DATA, config.model_dump_json()]
    processes = [
        subprocess.Popen(command, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        for _ in range(2)
    ]
    for process in processes:
        assert process.stdout.readline() == "ready\n"
    for process in processes:
        process.stdin.write("\n")
        process.stdin.flush()
    results = [process.communicate() for process in processes]
    assert [process.returncode for process in processes] == [0, 0], results
    tokenizer = make_tokenizer(config, show_progress=False)
    assert {output for output, _ in results} == {f"{tokenizer.digest} {train_tokens(config)}\n"}
    assert len(entries(tmp_path)) == 1
    assert not list((tmp_path / "cache").glob("*/*.tmp-*"))
