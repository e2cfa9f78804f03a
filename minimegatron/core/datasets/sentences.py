"""Text cut into sentences, for samples that are made of whole ones.

Torch-free. Counterpart: the sentence splitters of Megatron's `tools/preprocess_data.py`, which are
those of the package NLTK and know abbreviations. This one knows signs only: after "Mr." it begins a
sentence.
"""

import re
from collections.abc import Callable

_END = re.compile(r"(?<=[.!?])['\")\]]*\s+(?=[^\sa-z])|(?<=[。！？])\s*|\n\s*\n")
"""Behind a full stop, a question or exclamation mark, and brackets or quotes that close, before what
does not begin small; and where a blank line is."""


def _by_punctuation(text: str) -> list[str]:
    sentences, begin = [], 0
    for end in _END.finditer(text):
        sentences.append(text[begin : end.end()])
        begin = end.end()
    return [*sentences, text[begin:]]


SPLITTERS: dict[str, Callable[[str], list[str]]] = {
    "punctuation": _by_punctuation,
    "lines": str.splitlines,
}
"""By `--split-sentences`."""


def split_sentences(text: str, how: str) -> list[str]:
    """The sentences of `text` that are not blank, without the space around them.

    >>> split_sentences("It is 3.5 m. (Or so.) Is it?\\nYes, e.g. here.", "punctuation")
    ['It is 3.5 m.', '(Or so.)', 'Is it?', 'Yes, e.g. here.']
    """
    sentences = [sentence.strip() for sentence in SPLITTERS[how](text)]
    return [sentence for sentence in sentences if sentence]
