"""Text to token ids and back: raw bytes, a BPE of Hugging Face's `tokenizers`, or numbers.

Counterpart: `megatron.core.tokenizers`; of its libraries these three are kept, and WordPiece in a file
of its own.

Torch-free, so that the worker processes of `preprocess` start in milliseconds.
"""

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy

EOD_CANDIDATES = ("<|endoftext|>", "<|end_of_text|>", "<eod>", "</s>", "<eos>")
"""Names under which published tokenizers keep their end-of-document token, the likeliest first."""


class MegatronTokenizer(ABC):
    """What a dataset, a trainer and `preprocess` need of a tokenizer."""

    @property
    @abstractmethod
    def vocab_size(self) -> int:
        """The number of ids: 0 to `vocab_size - 1`, special tokens included."""

    @property
    @abstractmethod
    def eod(self) -> int:
        """The id that ends a document. Raises ValueError where there is none."""

    @property
    @abstractmethod
    def unique_identifiers(self) -> dict[str, Any]:
        """What tells this tokenizer from every other, as JSON: part of the key of cached indices."""

    @abstractmethod
    def tokenize_batch(self, documents: Sequence[bytes]) -> list[numpy.ndarray]:
        """One 1-D integer array per document of UTF-8 text, in order. Raises ValueError for bytes
        this tokenizer cannot read, with the number of the document and of the byte."""

    @abstractmethod
    def detokenize(self, ids: Iterable[int]) -> str:
        """The text of these ids; special tokens are left out, broken UTF-8 becomes U+FFFD."""

    def tokenize(self, text: str) -> list[int]:
        """The ids of `text`; nothing is added before or after them."""
        return self.tokenize_batch([text.encode()])[0].tolist()


class ByteLevelTokenizer(MegatronTokenizer):
    """Every byte is its own id, and 256 ends a document: any file of any encoding is text."""

    vocab_size = 257
    eod = 256
    unique_identifiers = {"class": "ByteLevelTokenizer"}

    def tokenize_batch(self, documents: Sequence[bytes]) -> list[numpy.ndarray]:
        return [numpy.frombuffer(document, dtype=numpy.uint8) for document in documents]

    def detokenize(self, ids: Iterable[int]) -> str:
        return bytes(i for i in map(int, ids) if i < 256).decode(errors="replace")


class NullTokenizer(MegatronTokenizer):
    """A text is its ids, written as numbers with spaces between: for runs without real text.

    Args:
        vocab_size: ids 0 to `vocab_size - 1` are tokens, and the id `vocab_size` ends a document. The
            attribute `vocab_size` counts that one too.
    """

    def __init__(self, vocab_size: int):
        if int(vocab_size) < 1:
            raise ValueError(f"a NullTokenizer has vocab_size {vocab_size}; give 1 or more")
        self._eod = int(vocab_size)

    @property
    def vocab_size(self) -> int:
        return self._eod + 1

    @property
    def eod(self) -> int:
        return self._eod

    @property
    def unique_identifiers(self) -> dict[str, Any]:
        return {"class": "NullTokenizer", "vocab_size": self.vocab_size}

    def tokenize_batch(self, documents: Sequence[bytes]) -> list[numpy.ndarray]:
        try:
            return [numpy.array(x.split(), dtype=numpy.int64) for x in documents]
        except ValueError as error:
            raise ValueError(
                f"the NullTokenizer reads numbers with spaces between only: {error}; "
                "use another tokenizer for text"
            ) from None

    def detokenize(self, ids: Iterable[int]) -> str:
        return " ".join(str(int(i)) for i in ids)


class BPETokenizer(MegatronTokenizer):
    """Byte-pair encoding from a `tokenizer.json`.

    Args:
        tokenizer_file: path of the `tokenizer.json`.
        eod_token: its end-of-document token; by default the first of `EOD_CANDIDATES` it has.

    Text never turns into a special token, whatever it says: a document that spells `<|endoftext|>`
    does not end there.
    """

    def __init__(self, tokenizer_file: str | Path, eod_token: str | None = None):
        tokenizers = import_tokenizers("BPE")
        self.tokenizer_file = Path(tokenizer_file)
        if not self.tokenizer_file.is_file():
            raise ValueError(f"{tokenizer_file} is not a file; give the path of a tokenizer.json")
        content = self.tokenizer_file.read_bytes()
        try:
            self._tokenizer = tokenizers.Tokenizer.from_buffer(content)
        except Exception as error:  # the library raises bare Exception
            raise ValueError(f"{tokenizer_file} is not a tokenizer.json: {error}") from None
        self._tokenizer.encode_special_tokens = True
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._digest = hashlib.sha256(content).hexdigest()
        # Ids may have gaps; the embedding needs a row for the highest.
        self._vocab_size = max(self._tokenizer.get_vocab(with_added_tokens=True).values()) + 1
        self._eod = self._find_eod(eod_token)

    def _find_eod(self, eod_token: str | None) -> int | None:
        for token in (eod_token,) if eod_token else EOD_CANDIDATES:
            found = self._tokenizer.token_to_id(token)
            if found is not None:
                return found
        if eod_token:
            raise ValueError(f"{self.tokenizer_file} has no token {eod_token!r}; choose another")
        return None

    @property
    def vocab_size(self) -> int:
        return self._vocab_size

    @property
    def eod(self) -> int:
        if self._eod is None:
            raise ValueError(
                f"{self.tokenizer_file} has no end-of-document token among "
                f"{', '.join(EOD_CANDIDATES)}; name its own with --eod-token"
            )
        return self._eod

    @property
    def unique_identifiers(self) -> dict[str, Any]:
        return {"class": "BPETokenizer", "sha256": self._digest, "eod": self._eod}

    def tokenize_batch(self, documents: Sequence[bytes]) -> list[numpy.ndarray]:
        texts = [decode_document(document, number) for number, document in enumerate(documents)]
        encodings = self._tokenizer.encode_batch_fast(texts, add_special_tokens=False)
        return [numpy.array(encoding.ids, dtype=numpy.int64) for encoding in encodings]

    def detokenize(self, ids: Iterable[int]) -> str:
        return self._tokenizer.decode([int(i) for i in ids], skip_special_tokens=True)


class UnreadableText(ValueError):
    """Bytes that are not UTF-8: `document` counts within the batch, `byte` within the document."""

    def __init__(self, document: int, byte: int):
        super().__init__(
            f"document {document} is not UTF-8 text: byte {byte}; convert it, "
            "or use the byte-level tokenizer, which reads any bytes"
        )
        self.document, self.byte = document, byte


def decode_document(document: bytes, number: int) -> str:
    """Document `number` of a batch as text. Raises UnreadableText."""
    try:
        return document.decode()
    except UnicodeDecodeError as error:
        raise UnreadableText(number, error.start) from None


def import_tokenizers(what: str) -> Any:
    """The package `tokenizers`. Raises ValueError, with one line, where it is missing."""
    try:
        import tokenizers
    except ImportError:
        raise ValueError(
            f"{what} needs the tokenizers package; pip install 'minimegatron[data]'"
        ) from None
    return tokenizers


def train_bpe(documents: Iterable[str], vocab_size: int) -> str:
    """A byte-level BPE learned from `documents`, as the text of a `tokenizer.json`.

    `vocab_size` counts the 256 bytes, the merges and `<|endoftext|>`; it must be 257 or more. Text
    too small for that many merges gives a smaller vocabulary.
    """
    if vocab_size < 257:
        raise ValueError(
            f"--vocab-size is {vocab_size}; BPE needs 257 or more: 256 bytes and {EOD_CANDIDATES[0]}"
        )
    tokenizers = import_tokenizers("BPE")
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[EOD_CANDIDATES[0]],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(documents, trainer=trainer)
    return tokenizer.to_str(pretty=True)


def build_tokenizer(
    tokenizer_type: str, tokenizer_file: str | Path | None = None, eod_token: str | None = None
) -> MegatronTokenizer:
    """The tokenizer of `--tokenizer-type byte` (or `ByteLevelTokenizer`) or `bpe`
    (`BPETokenizer`), the latter with its file."""
    if tokenizer_type in ("byte", "ByteLevelTokenizer"):
        return ByteLevelTokenizer()
    if tokenizer_type not in ("bpe", "BPETokenizer"):
        raise ValueError(
            f"tokenizer type {tokenizer_type!r} is unknown; use 'byte' or 'bpe', which the flag calls "
            "ByteLevelTokenizer and BPETokenizer"
        )
    if tokenizer_file is None:
        raise ValueError("BPE needs its tokenizer.json: give --tokenizer-file")
    return BPETokenizer(tokenizer_file, eod_token)
