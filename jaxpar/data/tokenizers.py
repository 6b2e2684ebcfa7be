"""Tokenizers: bytes, a byte-pair encoding trained on the corpus, `tokenizer.json` files and tiktoken rank files."""

import base64
import hashlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Protocol

import numpy as np
import tokenizers
from numpy.typing import NDArray

from jaxpar.config import schema
from jaxpar.data.cache import cached_directory, content_key
from jaxpar.data.progress import progress_bar
from jaxpar.data.sources import text_files, training_documents
from jaxpar.data.token_bytes import byte_lengths

__all__ = ["END_OF_TEXT", "Tokenizer", "declared_vocab_size", "make_tokenizer"]

_LAYOUT_VERSION = 2

END_OF_TEXT = "<|endoftext|>"
_END_OF_TEXT_NAMES = (END_OF_TEXT, "</s>", "<|end_of_text|>", "<eos>")

# How OpenAI's GPT-2 and cl100k_base vocabularies split text before merging.
_TIKTOKEN_PATTERNS = {
    "gpt2": r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
    "cl100k": (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|"
        r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    ),
}


class Tokenizer(Protocol):
    """Text to token ids and back. Markers such as the end of text are never made from text, and decode to nothing."""

    vocab_size: int
    """Number of ids: all are below it."""
    end_of_text: int
    """Id that ends a document."""
    digest: str
    """Hash of everything that decides the ids."""

    def encode(self, text: str) -> NDArray[np.int32]:
        """Return the ids of a text, without an end of text."""
        ...

    def encode_batch(self, texts: Sequence[str]) -> list[NDArray[np.int32]]:
        """Return the ids of each text."""
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of the ids; bytes that are not UTF-8 become U+FFFD."""
        ...

    def token_byte_lengths(self) -> NDArray[np.int32]:
        """Return, for each id, how many bytes of UTF-8 text it stands for; 0 for markers."""
        ...


def make_tokenizer(config: schema.DataConfig, *, show_progress: bool) -> Tokenizer:
    """Return the configured tokenizer, trained first if it is one that is trained and none is cached.

    Raises:
      ValueError: its file cannot be used, or there is too little text to train it on.
    """
    match config.tokenizer:
        case schema.ByteTokenizer():
            return _Bytes()
        case schema.BpeTokenizer():
            return _trained_bpe(config, config.tokenizer.vocab_size, show_progress)
        case schema.HuggingFaceTokenizer():
            return _huggingface(config.tokenizer)
        case schema.TiktokenTokenizer():
            return _Tiktoken(config.tokenizer)


def declared_vocab_size(config: schema.DataConfig) -> int:
    """Return the configured tokenizer's `vocab_size` without training it or reading the corpus.

    Raises:
      ValueError: its file cannot be used.
    """
    if isinstance(config.tokenizer, schema.BpeTokenizer):
        return config.tokenizer.vocab_size
    return make_tokenizer(config, show_progress=False).vocab_size


class _Bytes:
    """UTF-8 bytes as ids 0 to 255, and the end of text."""

    vocab_size = 257
    end_of_text = 256
    digest = content_key("bytes")

    def encode(self, text: str) -> NDArray[np.int32]:
        return np.frombuffer(text.encode(), np.uint8).astype(np.int32)

    def encode_batch(self, texts: Sequence[str]) -> list[NDArray[np.int32]]:
        return [self.encode(text) for text in texts]

    def decode(self, ids: Sequence[int]) -> str:
        return bytes(i for i in _checked_ids(ids, self.vocab_size) if i != self.end_of_text).decode(errors="replace")

    def token_byte_lengths(self) -> NDArray[np.int32]:
        return np.array([1] * 256 + [0], np.int32)


class _HuggingFace:
    """A tokenizer of the `tokenizers` library."""

    def __init__(self, content: bytes, place: str, end_of_text_names: Sequence[str]) -> None:
        try:
            self._tokenizer = tokenizers.Tokenizer.from_buffer(content)
        except Exception as error:  # The library raises no narrower type.
            raise ValueError(f"{place} is not a tokenizer.json of the tokenizers library: {error}") from error
        # The file may cut, pad, or look for markers in text: a corpus is encoded whole and literally.
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._tokenizer.encode_special_tokens = True
        vocabulary = self._tokenizer.get_vocab(with_added_tokens=True)
        self.vocab_size = max(vocabulary.values()) + 1
        end_of_text = next((vocabulary[name] for name in end_of_text_names if name in vocabulary), None)
        if end_of_text is None:
            raise ValueError(
                f"data.tokenizer.end_of_text: {place} has none of the tokens {', '.join(end_of_text_names)}; "
                f"name the one that ends a document{_special_tokens(self._tokenizer)}"
            )
        self.end_of_text: int = end_of_text
        self.digest = content_key("huggingface", hashlib.blake2b(content).hexdigest(), self.end_of_text)

    def encode(self, text: str) -> NDArray[np.int32]:
        return np.array(self._tokenizer.encode(text, add_special_tokens=False).ids, np.int32)

    def encode_batch(self, texts: Sequence[str]) -> list[NDArray[np.int32]]:
        encodings = self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
        return [np.array(encoding.ids, np.int32) for encoding in encodings]

    def decode(self, ids: Sequence[int]) -> str:
        kept = [i for i in _checked_ids(ids, self.vocab_size) if i != self.end_of_text]
        return self._tokenizer.decode(kept, skip_special_tokens=True)

    def token_byte_lengths(self) -> NDArray[np.int32]:
        lengths = byte_lengths(self._tokenizer, self.vocab_size)
        lengths[self.end_of_text] = 0
        return lengths


class _Tiktoken:
    """A tiktoken rank file; the end of text takes the id after the last rank."""

    def __init__(self, config: schema.TiktokenTokenizer) -> None:
        try:
            import tiktoken
        except ImportError as error:
            raise ValueError(
                'data.tokenizer.name="tiktoken" needs the package tiktoken, which comes with the extra `datasets`: '
                'pip install "jaxpar[datasets]"'
            ) from error
        content = _read_file(config.path)
        self._ranks = _parse_ranks(content, f"data.tokenizer.path: {config.path}")
        self.end_of_text = max(self._ranks.values()) + 1
        self.vocab_size = self.end_of_text + 1
        pattern = _TIKTOKEN_PATTERNS.get(config.pattern, config.pattern)
        try:
            self._encoding = tiktoken.Encoding(
                "ranks", pat_str=pattern, mergeable_ranks=self._ranks, special_tokens={END_OF_TEXT: self.end_of_text}
            )
        except ValueError as error:
            known = ", ".join(f'"{name}"' for name in _TIKTOKEN_PATTERNS)
            raise ValueError(
                f"data.tokenizer.pattern={config.pattern!r} is neither {known} nor a regular expression: {error}"
            ) from error
        self.digest = content_key("tiktoken", hashlib.blake2b(content).hexdigest(), pattern)

    def encode(self, text: str) -> NDArray[np.int32]:
        return np.array(self._encoding.encode_ordinary(text), np.int32)

    def encode_batch(self, texts: Sequence[str]) -> list[NDArray[np.int32]]:
        return [np.array(ids, np.int32) for ids in self._encoding.encode_ordinary_batch(list(texts))]

    def decode(self, ids: Sequence[int]) -> str:
        return self._encoding.decode([i for i in _checked_ids(ids, self.vocab_size) if i != self.end_of_text])

    def token_byte_lengths(self) -> NDArray[np.int32]:
        lengths = np.zeros(self.vocab_size, np.int32)
        for token, rank in self._ranks.items():
            lengths[rank] = len(token)
        return lengths


def _huggingface(config: schema.HuggingFaceTokenizer) -> Tokenizer:
    names = (config.end_of_text,) if config.end_of_text else _END_OF_TEXT_NAMES
    return _HuggingFace(_read_file(config.path), f"data.tokenizer.path: {config.path}", names)


def _trained_bpe(config: schema.DataConfig, vocab_size: int, show_progress: bool) -> Tokenizer:
    """Return a byte-level BPE of the training documents of all text sources, each document counted once."""
    sources = list(text_files(config).values())
    if not sources:
        raise ValueError(
            'data.tokenizer.name="bpe" is trained on text, and data.sources names none; name the tokenizer that wrote '
            'the token files: "huggingface" or "tiktoken"'
        )
    num_bytes = sum(source.num_bytes for source in sources)
    with progress_bar("Hashing text", num_bytes, show_progress) as advance:
        digests = [source.digest(advance) for source in sources]

    def build(directory: Path) -> None:
        with progress_bar("Training the tokenizer", num_bytes, show_progress) as advance:
            documents = (
                text for source in sources for text in training_documents(source, config.holdout_every, advance)
            )
            trained = _train(documents, vocab_size)
        trained.save(str(directory / "tokenizer.json"))

    key = content_key("bpe", _LAYOUT_VERSION, vocab_size, config.holdout_every, digests)
    path = cached_directory(config.cache_dir, f"tokenizers/{key}", build) / "tokenizer.json"
    return _HuggingFace(path.read_bytes(), f"data.cache_dir: {path}", (END_OF_TEXT,))


def _train(documents: Iterator[str], vocab_size: int) -> tokenizers.Tokenizer:
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(documents, trainer)
    found = tokenizer.get_vocab_size(with_added_tokens=True)
    if found < vocab_size:
        raise ValueError(
            f"data.tokenizer.vocab_size={vocab_size} is more than the training documents yield; the largest legal "
            f"value for them is {found}"
        )
    return tokenizer


def _read_file(path: str) -> bytes:
    try:
        return Path(path).expanduser().read_bytes()
    except OSError as error:
        raise ValueError(f"data.tokenizer.path={path!r} cannot be read: {error.strerror}") from error


def _parse_ranks(content: bytes, place: str) -> dict[bytes, int]:
    ranks: dict[bytes, int] = {}
    for number, line in enumerate(content.splitlines(), start=1):
        if not line.strip():
            continue
        try:
            token, rank = line.split()
            ranks[base64.b64decode(token, validate=True)] = int(rank)
        except ValueError as error:  # binascii.Error is one.
            raise ValueError(
                f"{place}, line {number} is not a base64 token and its rank, as in a tiktoken rank file"
            ) from error
    missing = [byte for byte in range(256) if bytes([byte]) not in ranks]
    if missing:
        raise ValueError(f"{place} is no complete tiktoken rank file: it has no token for byte {missing[0]}")
    return ranks


def _checked_ids(ids: Sequence[int], vocab_size: int) -> list[int]:
    checked = [int(i) for i in ids]
    for i in checked:
        if not 0 <= i < vocab_size:
            raise ValueError(f"token id {i} is none of the tokenizer's, 0 to {vocab_size - 1}")
    return checked


def _special_tokens(tokenizer: tokenizers.Tokenizer) -> str:
    special = sorted(token.content for token in tokenizer.get_added_tokens_decoder().values() if token.special)
    return f"; its special tokens are: {', '.join(special)}" if special else ""
