"""Tokenizers invert themselves, never make markers from text, and know the bytes of their tokens."""

import base64
import json
import sys

import numpy as np
import pytest
import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers

from jaxpar.config import schema
from jaxpar.data import declared_vocab_size, make_tokenizer
from jaxpar.data.sources import text_files

TEXTS = ["Fellow-Citizens, dass  naïve 日本 <|endoftext|>", " a\n\n", "", "\x00é"]


def bpe_config(tmp_path, texts=("low lower lowest " * 9, "new newer newest naïve " * 9), vocab_size=270, **changes):
    path = tmp_path / "corpus.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return schema.DataConfig(
        sources=(schema.TextSource(paths=(str(path),)),),
        tokenizer=schema.BpeTokenizer(vocab_size=vocab_size),
        cache_dir=str(tmp_path / "cache"),
        **{"holdout_every": 0, **changes},
    )


def write_ranks(path):
    merges = [b"th", b"the", b" a", "é".encode()]
    tokens = [bytes([byte]) for byte in range(256)] + merges
    path.write_bytes(b"".join(base64.b64encode(token) + b" %d\n" % rank for rank, token in enumerate(tokens)))
    return schema.TiktokenTokenizer(path=str(path))


def write_huggingface(path, **changes):
    """A byte-level tokenizer.json that also cuts, pads, adds a first token, and has literal and special tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = tokenizers.Tokenizer(models.BPE({token: i for i, token in enumerate([*alphabet, "Ġa"])}, [("Ġ", "a")]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<s>", "</s>"])
    tokenizer.add_tokens(["日本"])
    tokenizer.post_processor = tokenizers.processors.TemplateProcessing(
        "<s> $A </s>", None, [("<s>", 257), ("</s>", 258)]
    )
    tokenizer.enable_truncation(3)
    tokenizer.enable_padding(length=9)
    tokenizer.save(str(path))
    return schema.HuggingFaceTokenizer(path=str(path), **changes)


@pytest.fixture(params=["bytes", "bpe", "huggingface", "tiktoken"])
def config(request, tmp_path):
    base = bpe_config(tmp_path)
    if request.param == "bpe":
        return base
    made = {
        "bytes": lambda: schema.ByteTokenizer(),
        "huggingface": lambda: write_huggingface(tmp_path / "tokenizer.json"),
        "tiktoken": lambda: write_ranks(tmp_path / "ranks.tiktoken"),
    }[request.param]()
    return base.model_copy(update={"tokenizer": made})


def test_round_trip_ids_and_byte_lengths(config):
    tokenizer = make_tokenizer(config, show_progress=False)
    assert tokenizer.vocab_size == declared_vocab_size(config)
    lengths = tokenizer.token_byte_lengths()
    assert lengths.shape == (tokenizer.vocab_size,)
    assert lengths.dtype == np.int32
    assert lengths[tokenizer.end_of_text] == 0
    for text, batched in zip(TEXTS, tokenizer.encode_batch(TEXTS), strict=True):
        ids = tokenizer.encode(text)
        assert ids.dtype == batched.dtype == np.int32
        np.testing.assert_array_equal(ids, batched)
        assert tokenizer.end_of_text not in ids
        assert lengths[ids].sum() == len(text.encode())
        assert tokenizer.decode([*ids, tokenizer.end_of_text]) == text
    with pytest.raises(ValueError, match=rf"token id {tokenizer.vocab_size} is none of the tokenizer's, 0 to"):
        tokenizer.decode([tokenizer.vocab_size])


def test_vocabulary_sizes_are_those_of_the_format(tmp_path):
    config = bpe_config(tmp_path)
    sizes = {"bytes": (schema.ByteTokenizer(), 257, 256), "bpe": (config.tokenizer, 270, 0)}
    sizes["huggingface"] = (write_huggingface(tmp_path / "tokenizer.json"), 260, 258)
    sizes["tiktoken"] = (write_ranks(tmp_path / "ranks"), 261, 260)
    for tokenizer_config, vocab_size, end_of_text in sizes.values():
        tokenizer = make_tokenizer(config.model_copy(update={"tokenizer": tokenizer_config}), show_progress=False)
        assert (tokenizer.vocab_size, tokenizer.end_of_text) == (vocab_size, end_of_text)


def test_declared_vocab_size_trains_nothing(tmp_path):
    assert declared_vocab_size(bpe_config(tmp_path, vocab_size=99_999)) == 99_999
    assert not (tmp_path / "cache").exists()


def test_bpe_of_the_packaged_corpus(tmp_path):
    config = schema.DataConfig(cache_dir=str(tmp_path))
    tokenizer = make_tokenizer(config, show_progress=False)
    assert tokenizer.vocab_size == 4096
    heldout = list(text_files(config)[0].documents(lambda num_bytes: None))[::10]
    tokens = np.concatenate(tokenizer.encode_batch(heldout))
    assert len(heldout) == 24
    assert tokenizer.token_byte_lengths()[tokens].sum() == 954_878
    assert 4.2 < 954_878 / tokens.size < 4.5


def test_bpe_is_deterministic_and_trained_on_training_documents_only(tmp_path):
    texts = ["held out zzzzqqqq " * 20, "training text, some words of it " * 9]
    first = make_tokenizer(bpe_config(tmp_path, texts, 270, holdout_every=2), show_progress=False)
    config = bpe_config(tmp_path, texts, 270, holdout_every=2).model_copy(update={"cache_dir": str(tmp_path / "other")})
    again = make_tokenizer(config, show_progress=False)
    assert first.digest == again.digest
    assert first.encode("zzzz").size == 4
    everything = make_tokenizer(bpe_config(tmp_path, texts, 270), show_progress=False)
    assert everything.encode("zzzz").size < 4
    changed = make_tokenizer(
        bpe_config(tmp_path, ["other zzzz " * 20, texts[1]], 270, holdout_every=2), show_progress=False
    )
    assert changed.encode("training words").tolist() == first.encode("training words").tolist()


def test_bpe_is_trained_once(tmp_path, monkeypatch):
    config = bpe_config(tmp_path)
    first = make_tokenizer(config, show_progress=True)

    def fail(*args, **keys):
        raise AssertionError("trained again")

    monkeypatch.setattr("jaxpar.data.tokenizers._train", fail)
    assert make_tokenizer(config, show_progress=True).digest == first.digest


def test_bpe_that_cannot_be_trained(tmp_path):
    with pytest.raises(
        ValueError, match=r"data\.tokenizer\.vocab_size=5000 is more than .*; the largest legal value .* \d+$"
    ):
        make_tokenizer(bpe_config(tmp_path, vocab_size=5000), show_progress=False)
    assert not list((tmp_path / "cache" / "tokenizers").glob("*.tmp-*"))
    token_files = (schema.TokenFileSource(paths=("a.bin",)),)
    with pytest.raises(
        ValueError, match=r'data\.tokenizer\.name="bpe" is trained on text, and data\.sources names none'
    ):
        make_tokenizer(schema.DataConfig(sources=token_files), show_progress=False)


def huggingface_lengths(tmp_path, tokenizer):
    tokenizer.add_special_tokens(["</s>"])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    config = schema.DataConfig(tokenizer=schema.HuggingFaceTokenizer(path=str(tmp_path / "tokenizer.json")))
    made = make_tokenizer(config, show_progress=False)
    return lambda text: made.token_byte_lengths()[made.encode(text)].tolist()


def test_byte_lengths_of_a_sentencepiece_vocabulary(tmp_path):
    tokens = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "a", "é", "▁a"]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    tokenizer = tokenizers.Tokenizer(models.BPE(vocabulary, [("▁", "a")], unk_token="<unk>", byte_fallback=True))
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    assert huggingface_lengths(tmp_path, tokenizer)(" aéa 日") == [2, 2, 1, 1, 1, 1, 1]


def test_byte_lengths_of_a_wordpiece_vocabulary(tmp_path):
    tokenizer = tokenizers.Tokenizer(models.WordPiece({"[UNK]": 0, "low": 1, "##er": 2}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.decoder = decoders.WordPiece()
    assert huggingface_lengths(tmp_path, tokenizer)("lower low") == [3, 2, 3]


def make(**keys):
    return make_tokenizer(schema.DataConfig(**keys), show_progress=False)


def test_unusable_huggingface_files_are_named(tmp_path):
    path = tmp_path / "tokenizer.json"
    with pytest.raises(ValueError, match=r"data\.tokenizer\.path='none\.json' cannot be read: No such file"):
        make(tokenizer=schema.HuggingFaceTokenizer(path="none.json"))
    path.write_text("{}")
    with pytest.raises(ValueError, match=r"data\.tokenizer\.path: .*tokenizer\.json is not a tokenizer\.json"):
        make(tokenizer=schema.HuggingFaceTokenizer(path=str(path)))
    with pytest.raises(
        ValueError, match=r"data\.tokenizer\.end_of_text: .* has none of the tokens <eot>; .*: </s>, <s>$"
    ):
        make(tokenizer=write_huggingface(path, end_of_text="<eot>"))
    assert make(tokenizer=write_huggingface(path, end_of_text="<s>")).end_of_text == 257


def test_unusable_tiktoken_files_are_named(tmp_path, monkeypatch):
    good = write_ranks(tmp_path / "ranks")
    assert make(tokenizer=good.model_copy(update={"pattern": "cl100k"})).vocab_size == 261
    with pytest.raises(
        ValueError, match=r'data\.tokenizer\.pattern=\'\(\' is neither "gpt2", "cl100k" nor a regular expr'
    ):
        make(tokenizer=good.model_copy(update={"pattern": "("}))
    (tmp_path / "text").write_text("IQ== 0\nhello\n")
    with pytest.raises(ValueError, match=r"data\.tokenizer\.path: .*text, line 2 is not a base64 token and its rank"):
        make(tokenizer=schema.TiktokenTokenizer(path=str(tmp_path / "text")))
    (tmp_path / "text").write_text("AA== 0\n")
    with pytest.raises(
        ValueError, match=r"data\.tokenizer\.path: .*text is no complete .*: it has no token for byte 1$"
    ):
        make(tokenizer=schema.TiktokenTokenizer(path=str(tmp_path / "text")))
    monkeypatch.setitem(sys.modules, "tiktoken", None)
    with pytest.raises(ValueError, match=r'data\.tokenizer\.name="tiktoken" needs .* pip install "jaxpar\[datasets\]"'):
        make(tokenizer=good)


def test_digests_tell_tokenizers_apart(tmp_path):
    ranks = write_ranks(tmp_path / "ranks")
    made = [
        make(tokenizer=schema.ByteTokenizer()),
        make(tokenizer=ranks),
        make(tokenizer=ranks.model_copy(update={"pattern": "cl100k"})),
        make(tokenizer=write_huggingface(tmp_path / "tokenizer.json")),
        make(tokenizer=write_huggingface(tmp_path / "tokenizer.json", end_of_text="<s>")),
    ]
    assert len({tokenizer.digest for tokenizer in made}) == len(made)
