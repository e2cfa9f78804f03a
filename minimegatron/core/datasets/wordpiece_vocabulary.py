"""A WordPiece vocabulary: read from a file, or made of the built-in text.

Torch-free. Megatron has no counterpart to the second half; it needs a file that was downloaded.
"""

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

PAD, UNK, CLS, SEP, MASK = SPECIALS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
"""What every published BERT vocabulary holds, under these names."""
BOS, EOS = "[BOS]", "[EOS]"
"""Begin and end of what a T5 decoder writes; added where a file does not hold them."""

INSIDE = "##"
"""How a piece begins that goes on with a word."""

VOCABULARY_SIZE = 2048
"""Of the vocabulary that is made here, all special tokens but sentinels included."""

_RARE = 20
"""A character seen less often becomes [UNK]."""
_SHARE_OF_WORDS = 0.75
"""Of the places that special tokens and characters leave, whole words get this share."""
_WORD = re.compile(r"[^\W_]+|[^\w\s]|_")
"""Punctuation stands alone, as WordPiece has it."""


def read_vocabulary(path: str | Path) -> list[str]:
    """The pieces of a vocabulary file, one a line; the line's number, from 0, is the id.

    Raises ValueError, with one line, for a file that is not there or is no such vocabulary.
    """
    remedy = "give the file of a BERT vocabulary, or drop --vocab-file for one of the built-in text"
    if not Path(path).is_file():
        raise ValueError(f"--vocab-file {path} is not a file; {remedy}")
    try:
        pieces = Path(path).read_text(encoding="utf-8").rstrip("\n").split("\n")
    except UnicodeDecodeError as error:
        raise ValueError(
            f"--vocab-file {path} is not UTF-8 text: byte {error.start}; {remedy}"
        ) from None
    pieces = [piece.rstrip("\r") for piece in pieces]
    missing = [special for special in SPECIALS if special not in pieces]
    if missing:
        raise ValueError(f"--vocab-file {path} has no piece {', '.join(missing)}; {remedy}")
    if len(set(pieces)) < len(pieces):
        ((piece, count),) = Counter(pieces).most_common(1)
        raise ValueError(f"--vocab-file {path} has {piece!r} on {count} lines; {remedy}")
    return pieces


def make_vocabulary(
    texts: Iterable[str], lower_case: bool, size: int = VOCABULARY_SIZE
) -> list[str]:
    """`size` pieces, fewer of a small text: the same for the same texts, in any process.

    In this order: special tokens; every character that is not rare, as the begin of a word and as
    what goes on with one, so that few words become [UNK]; the most frequent words; the most frequent
    first and last parts of other words. What occurs equally often goes by its text.
    """
    words = Counter()
    for text in texts:
        words.update(_WORD.findall(text.lower() if lower_case else text))
    characters = Counter()
    for word, count in words.items():
        characters.update(dict.fromkeys(word, count))
    kept = sorted(character for character, count in characters.items() if count >= _RARE)
    pieces = dict.fromkeys([*SPECIALS, BOS, EOS, *kept])
    pieces.update(dict.fromkeys(INSIDE + character for character in kept if character.isalnum()))
    whole = len(pieces) + int(_SHARE_OF_WORDS * max(0, size - len(pieces)))
    _fill(pieces, words, whole)
    _fill(pieces, _parts(words, pieces), size)
    return list(pieces)[:size]


def _fill(pieces: dict[str, None], counts: Counter, size: int) -> None:
    """Adds the most frequent of `counts` until there are `size` pieces."""
    for piece in sorted(counts, key=lambda piece: (-counts[piece], piece)):
        if len(pieces) >= size:
            return
        pieces[piece] = None


def _parts(words: Counter, pieces: dict[str, None]) -> Counter:
    """How often each first and last part of the words without a piece of their own occurs."""
    parts = Counter()
    for word, count in words.items():
        if word in pieces:
            continue
        for cut in range(2, len(word) - 1):
            parts[word[:cut]] += count
            parts[INSIDE + word[cut:]] += count
    return parts


def sentinels(count: int) -> Sequence[str]:
    """`count` tokens that each stand for a piece of text that was taken out."""
    return [f"<extra_id_{number}>" for number in range(count)]
