"""A corpus: every source tokenised once into memory-mapped files, in two streams, for training and held out."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import DTypeLike

from jaxpar.config import schema
from jaxpar.data.cache import cached_directory, content_key
from jaxpar.data.progress import Advance, progress_bar
from jaxpar.data.sources import TextFiles, held_out, text_files
from jaxpar.data.streams import Documents, TokenArrays, TokenStream
from jaxpar.data.token_files import megatron_documents, token_file_documents
from jaxpar.data.tokenizers import Tokenizer

__all__ = ["Corpus", "open_data"]

_LAYOUT_VERSION = 2
_BATCH_CHARACTERS = 1 << 20


@dataclass(frozen=True)
class Corpus:
    """Two streams a source, in the order of `data.sources`.

    `digest` is of the texts, and of where the documents of token files begin and end.
    """

    train: tuple[TokenStream, ...]
    heldout: tuple[TokenStream, ...]
    digest: str


def open_data(config: schema.DataConfig, tokenizer: Tokenizer, *, show_progress: bool) -> Corpus:
    """Return the corpus, tokenising first what is not in the cache.

    Documents without text do not count. Of the others, 0, n, 2n, ... of each source are held out (n = `holdout_every`).

    Raises:
      ValueError: a source cannot be read or is empty.
    """
    texts = text_files(config)
    sides = []
    digests = []
    for index, source in enumerate(config.sources):
        key = f"data.sources[{index}]"
        if isinstance(source, schema.TokenFileSource):
            documents = token_file_documents(
                source,
                key,
                vocab_size=tokenizer.vocab_size,
                end_of_text=tokenizer.end_of_text,
                holdout_every=config.holdout_every,
                show_progress=show_progress,
            )
        elif isinstance(source, schema.MegatronSource):
            documents = megatron_documents(source, key, vocab_size=tokenizer.vocab_size, show_progress=show_progress)
        else:
            documents, text_digest = _tokenised(texts[index], tokenizer, config.cache_dir, show_progress)
            digests.append(text_digest)
        if documents.starts.size == 0:
            raise ValueError(f"{key} is an empty corpus: its files hold no documents")
        digests.append(documents.digest())
        chosen = held_out(np.arange(documents.starts.size), config.holdout_every)
        sides.append((documents.stream(~chosen), documents.stream(chosen)))
    train, heldout = (tuple(streams) for streams in zip(*sides, strict=True))
    return Corpus(train, heldout, content_key(*digests))


def _tokenised(source: TextFiles, tokenizer: Tokenizer, cache_dir: str, show_progress: bool) -> tuple[Documents, str]:
    """Return a text source's documents from the cache, and the texts' digest.

    Cached are `tokens.bin` and, as int64 in `ends.bin`, the offset at which each document ends.
    """
    with progress_bar("Hashing text", source.num_bytes, show_progress) as advance:
        digest = source.digest(advance)
    key = content_key(_LAYOUT_VERSION, digest, tokenizer.digest)
    dtype: DTypeLike = np.uint16 if tokenizer.vocab_size <= 1 << 16 else np.uint32

    def build(directory: Path) -> None:
        with progress_bar("Tokenising", source.num_bytes, show_progress) as advance:
            _write_tokens(directory, source, tokenizer, dtype, advance)

    directory = cached_directory(cache_dir, f"tokens/{key}", build)
    tokens = np.memmap(directory / "tokens.bin", dtype, mode="r")
    ends = np.fromfile(directory / "ends.bin", np.int64)
    return Documents(TokenArrays([tokens]), np.concatenate([[0], ends[:-1]]), ends), digest


def _write_tokens(directory: Path, source: TextFiles, tokenizer: Tokenizer, dtype: DTypeLike, advance: Advance) -> None:
    end_of_text = np.array([tokenizer.end_of_text], dtype)
    num_tokens = 0
    ends = []
    with (directory / "tokens.bin").open("wb") as file:
        for texts in _batches(source.documents(advance)):
            for ids in tokenizer.encode_batch(texts):
                ids.astype(dtype).tofile(file)
                end_of_text.tofile(file)
                num_tokens += ids.size + 1
                ends.append(num_tokens)
    np.array(ends, np.int64).tofile(directory / "ends.bin")


def _batches(documents: Iterator[str]) -> Iterator[list[str]]:
    """Yield documents in groups large enough for several threads to share."""
    texts: list[str] = []
    characters = 0
    for text in documents:
        texts.append(text)
        characters += len(text)
        if characters >= _BATCH_CHARACTERS:
            yield texts
            texts, characters = [], 0
    if texts:
        yield texts
