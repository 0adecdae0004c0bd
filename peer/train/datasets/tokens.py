"""Texts as numbers, by the tokenizers library: WordPiece with the vocabulary of BERT, or what a tokenizer.json says.

Encoding is a function of that file and the text alone, so that all peers see the same numbers.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

import torch

from peer.errors import DataError
from peer.train.data import Batch
from peer.train.datasets.documents import Encoding
from peer.train.datasets.text_files import Sentences

if TYPE_CHECKING:
    from tokenizers import Tokenizer

ENDS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>")
"""Tokens that end a document, the first that a tokenizer has."""
PADDING = "[PAD]"
SPECIAL = (PADDING, "[UNK]", "[CLS]", "[SEP]")
MULTIPLE = 8
"""A batch is as long as its longest sentence, rounded up to this."""


def read_vocabulary(path: Path) -> dict[str, int]:
    """Return the vocabulary of a file with one piece a line, numbered from 0. Raises DataError if a piece comes twice
    or one of BERT's special ones is missing."""
    try:
        pieces = path.read_text(encoding="utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"vocabulary {path} cannot be read: {error}") from None
    vocabulary = {piece: number for number, piece in enumerate(pieces)}
    if len(vocabulary) != len(pieces):
        raise DataError(f"vocabulary {path} contains a token twice")
    lacking = [piece for piece in SPECIAL if piece not in vocabulary]
    if lacking:
        raise DataError(f"vocabulary {path} lacks {', '.join(lacking)}, so it is not a BERT vocabulary")
    return vocabulary


def make_tokenizer(vocabulary: dict[str, int], *, length: int) -> Tokenizer:
    """Return BERT's tokenizer for uncased text: at most `length` pieces, [CLS] and [SEP] included."""
    tokenizers = _library()
    from tokenizers import models, normalizers, pre_tokenizers, processors

    tokenizer: Tokenizer = tokenizers.Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.post_processor = processors.BertProcessing(("[SEP]", vocabulary["[SEP]"]), ("[CLS]", vocabulary["[CLS]"]))
    tokenizer.enable_truncation(max_length=length)
    return tokenizer


def read_encoding(path: Path) -> Encoding:
    """Return the encoding of a tokenizer.json, of which nothing but the tokens of the text itself is taken: no special
    ones, no truncation. Raises DataError for a file that is none, or names no end of a document."""
    try:
        content = path.read_bytes()
        tokenizer = _library().Tokenizer.from_buffer(content)
    except DataError:
        raise
    except Exception as error:  # The library raises nothing narrower.
        raise DataError(f"tokenizer {path} cannot be read: {error}") from None
    tokenizer.no_truncation()
    tokenizer.no_padding()
    # A text that spells the end of a document does not end there.
    tokenizer.encode_special_tokens = True
    numbers: dict[str, int] = tokenizer.get_vocab()
    end = next((numbers[name] for name in ENDS if name in numbers), None)
    if end is None:
        raise DataError(f"tokenizer {path} has no token that ends a document; it takes one of {', '.join(ENDS)}")

    def encode(texts: Sequence[bytes]) -> torch.Tensor:
        parts = []
        for text in texts:
            try:
                ids = tokenizer.encode(text.decode(), add_special_tokens=False).ids
            except Exception as error:
                raise DataError(f"tokenizer {path} cannot encode a text: {error}") from None
            parts.append(torch.tensor([*ids, end], dtype=torch.int32))
        return torch.cat(parts)

    names = (*sorted(numbers, key=numbers.__getitem__), f"SHA-256 {hashlib.sha256(content).hexdigest()}")
    return Encoding(max(numbers.values()) + 1, end, encode, names)


def _library() -> ModuleType:
    """Return the module tokenizers."""
    # One thread: a process of ours computes in one.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    try:
        import tokenizers
    except ImportError:
        raise DataError(
            "tokenizing text needs the tokenizers library, which is not installed: pip install 'sottovoce[text]'"
        ) from None
    return tokenizers


class TextData:
    """Sentences that become numbers batch by batch."""

    def __init__(self, sentences: Sentences, tokenizer: Tokenizer, *, padding: int) -> None:
        """`padding` is the number that fills up shorter sentences: that of "[PAD]" in the vocabulary."""
        self._texts, self.labels, self._tokenizer, self._padding = sentences.texts, sentences.labels, tokenizer, padding

    def __len__(self) -> int:
        return len(self._texts)

    def batch(self, indices: torch.Tensor) -> Batch:
        """Return pieces int64[b, n], n the longest of the batch rounded up to 8, with padding, and labels int64[b]."""
        texts = [self._texts[index] for index in indices.tolist()]
        encoded = [encoding.ids for encoding in self._tokenizer.encode_batch(texts)]
        longest = -(-max(len(ids) for ids in encoded) // MULTIPLE) * MULTIPLE
        pieces = torch.full((len(encoded), longest), self._padding, dtype=torch.int64)
        for row, ids in enumerate(encoded):
            pieces[row, : len(ids)] = torch.tensor(ids, dtype=torch.int64)
        return pieces, self.labels.index_select(0, indices)
