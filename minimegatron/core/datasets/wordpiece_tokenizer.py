"""WordPiece: a word is a known word, or the longest known first part and then known further parts.

Counterpart: `megatron.training.tokenizer.tokenizer`, its `_BertWordPieceTokenizer`. The library
`tokenizers` does the work. Torch-free.
"""

import functools
import hashlib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy

from minimegatron.core.datasets.megatron_tokenizer import (
    MegatronTokenizer,
    decode_document,
    import_tokenizers,
)
from minimegatron.core.datasets.stdlib_text import part_of_stdlib
from minimegatron.core.datasets.wordpiece_vocabulary import (
    BOS,
    CLS,
    EOS,
    INSIDE,
    MASK,
    PAD,
    SEP,
    SPECIALS,
    UNK,
    make_vocabulary,
    read_vocabulary,
    sentinels,
)

LOWER_CASE = {"BertWordPieceLowerCase": True, "BertWordPieceCase": False}
"""By `--tokenizer-type`: whether A is read as a."""


class BertWordPieceTokenizer(MegatronTokenizer):
    """Pieces of words, and the special tokens of BERT and T5.

    Args:
        pieces: the vocabulary; a piece's place is its id. `[BOS]`, `[EOS]` and sentinels are added
            after it, the first two where they are missing.
        lower_case: read A as a, and leave accents out.
        vocab_extra_ids: sentinels, for T5.

    Text never turns into a special token, whatever it says. Raises ValueError, with one line, where
    the package `tokenizers` is missing.
    """

    def __init__(self, pieces: Sequence[str], lower_case: bool, vocab_extra_ids: int = 0):
        tokenizers = import_tokenizers("WordPiece")
        extra = sentinels(vocab_extra_ids)
        self.pieces = list(dict.fromkeys([*pieces, BOS, EOS, *extra]))
        self.lower_case = lower_case
        self.inv_vocab = dict(enumerate(self.pieces))
        self.vocab = {piece: number for number, piece in self.inv_vocab.items()}
        self.cls, self.sep, self.mask, self.pad, self.bos, self.eos = (
            self.vocab[name] for name in (CLS, SEP, MASK, PAD, BOS, EOS)
        )
        self.additional_special_tokens_ids = [self.vocab[name] for name in extra]
        self.begins_word = numpy.array([not piece.startswith(INSIDE) for piece in self.pieces])
        """By id: whether a word begins there, bool [vocab_size]."""
        model = tokenizers.models.WordPiece(self.vocab, unk_token=UNK, max_input_chars_per_word=100)
        self._tokenizer = tokenizers.Tokenizer(model)
        self._tokenizer.normalizer = tokenizers.normalizers.BertNormalizer(lowercase=lower_case)
        self._tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.BertPreTokenizer()
        self._specials = frozenset(self.vocab[name] for name in (*SPECIALS, BOS, EOS, *extra))

    @property
    def vocab_size(self) -> int:
        return len(self.pieces)

    @property
    def eod(self) -> int:
        """`[EOS]`: BERT and T5 have no other end of a document."""
        return self.eos

    @property
    def unique_identifiers(self) -> dict[str, Any]:
        digest = hashlib.sha256("\n".join(self.pieces).encode()).hexdigest()
        return {"class": type(self).__name__, "sha256": digest, "lower_case": self.lower_case}

    def tokenize_batch(self, documents: Sequence[bytes]) -> list[numpy.ndarray]:
        texts = [decode_document(document, number) for number, document in enumerate(documents)]
        encodings = self._tokenizer.encode_batch_fast(texts, add_special_tokens=False)
        return [numpy.array(encoding.ids, dtype=numpy.int64) for encoding in encodings]

    def detokenize(self, ids: Iterable[int]) -> str:
        """The pieces with a space before each word: how the text was spaced is not known."""
        pieces = [self.pieces[i] for i in map(int, ids) if i not in self._specials]
        return " ".join(pieces).replace(f" {INSIDE}", "")


@functools.cache
def build_wordpiece(
    tokenizer_type: str, vocab_file: str | Path | None = None, vocab_extra_ids: int = 0
) -> BertWordPieceTokenizer:
    """The tokenizer of `--tokenizer-type BertWordPieceLowerCase` or `BertWordPieceCase`.

    Without a file, the vocabulary is made of the built-in text: 0.3 seconds, once per process.
    Raises ValueError, with one line, for a file that is no vocabulary.
    """
    lower_case = LOWER_CASE[tokenizer_type]
    if vocab_file is None:
        pieces = make_vocabulary(part_of_stdlib(), lower_case)
    else:
        pieces = read_vocabulary(vocab_file)
    return BertWordPieceTokenizer(pieces, lower_case, vocab_extra_ids)
