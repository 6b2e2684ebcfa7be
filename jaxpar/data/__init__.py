"""What the model reads: sources, tokenizers, a cache of tokens, and batches as a pure function of (seed, step)."""

from jaxpar.data.loader import TrainBatches, heldout_batches, train_batches
from jaxpar.data.opening import Corpus, open_data
from jaxpar.data.packing import Batch
from jaxpar.data.streams import TokenStream
from jaxpar.data.tokenizers import Tokenizer, declared_vocab_size, make_tokenizer

__all__ = [
    "Batch",
    "Corpus",
    "TokenStream",
    "Tokenizer",
    "TrainBatches",
    "declared_vocab_size",
    "heldout_batches",
    "make_tokenizer",
    "open_data",
    "train_batches",
]
