"""How many bytes of UTF-8 text each entry of a `tokenizers` vocabulary stands for."""

import json
import re
from collections.abc import Iterator
from typing import Any

import numpy as np
import tokenizers
from numpy.typing import NDArray

__all__ = ["byte_lengths"]

_BYTE_TOKEN = re.compile(r"<0x[0-9A-F]{2}>")
_SPACE_MARK = "\N{LOWER ONE EIGHTH BLOCK}"


def byte_lengths(tokenizer: tokenizers.Tokenizer, vocab_size: int) -> NDArray[np.int32]:
    """Return int32[vocab_size], by what the tokenizer's decoder makes of an entry; special tokens count 0.

    Exact for byte-level vocabularies (GPT-2, Llama 3, Qwen), whose entries spell each byte as one character.
    Vocabularies in SentencePiece's manner count a space for each of its space marks and one byte for `<0x41>`; text
    whose first word they mark too counts one byte more than it has. Bytes that a normalizer drops or changes are not
    seen.
    """
    settings = json.loads(tokenizer.to_str())
    decoders = list(_components(settings["decoder"]))
    kinds = {component["type"] for component in decoders}
    marks_spaces = "Metaspace" in kinds or any(
        component["type"] == "Replace" and component["content"] == " " for component in decoders
    )
    added = tokenizer.get_added_tokens_decoder()
    lengths = np.zeros(vocab_size, np.int32)
    for token, index in tokenizer.get_vocab(with_added_tokens=True).items():
        if index in added:
            lengths[index] = 0 if added[index].special else len(token.encode())
        elif "ByteLevel" in kinds:
            lengths[index] = len(token)
        elif "ByteFallback" in kinds and _BYTE_TOKEN.fullmatch(token):
            lengths[index] = 1
        else:
            text = _without_affixes(token, settings["model"])
            lengths[index] = len((text.replace(_SPACE_MARK, " ") if marks_spaces else text).encode())
    return lengths


def _components(decoder: dict[str, Any] | None) -> Iterator[dict[str, Any]]:
    """Yield a decoder's parts, a sequence taken apart."""
    if decoder is None:
        return
    if decoder["type"] == "Sequence":
        for part in decoder["decoders"]:
            yield from _components(part)
    else:
        yield decoder


def _without_affixes(token: str, model: dict[str, Any]) -> str:
    """Return a token without the marks that say that it continues or ends a word."""
    if model.get("continuing_subword_prefix"):
        token = token.removeprefix(model["continuing_subword_prefix"])
    if model.get("end_of_word_suffix"):
        token = token.removesuffix(model["end_of_word_suffix"])
    return token
