"""Text that others wrote, made safe for a terminal, a table, XML and JSON.

Torch-free. Megatron has no counterpart.

A name or a message comes from a student. It may hold escape sequences that a terminal obeys, marks
that turn the order of letters round, halves of characters that no file can hold, formulas, or 50 MB.
"""

import math
import re
from typing import Any, TextIO

MOST_LINE = 5000
"""Characters of a name or a remark. Whoever makes one keeps it far shorter: written as numbers,
characters need up to ten times their room, and nothing is to be cut twice."""
MOST_TEXT = 20_000
"""Characters of a message."""
MOST_CELL = 30_000
"""Characters in one cell of a table; a spreadsheet takes 32,767."""
MOST_LEVELS = 20
MOST_ITEMS = 1000
"""Of data in a report: lists in lists, and items in one of them."""

_UNSAFE = (
    r"\x7f-\x9f\xad\u061c\u200b\u200e\u200f\u2028\u2029\u202a-\u202e\u2060-\u206f\ufeff"
    r"\ufff0-\ufffb\ufffe\uffff\ud800-\udfff\U000e0000-\U000e0fff"
)
"""Control characters, invisible ones, those that change the direction, and half characters."""
_IN_TEXT = re.compile(rf"[\x00-\x08\x0b-\x1f{_UNSAFE}]")
_IN_LINE = re.compile(rf"[\x00-\x1f{_UNSAFE}]")
_FORMULA = re.compile(r"(^|[;,|])([\s'\"]*)(?=[=+\-@\uff1d\uff0b\uff0d\uff20])")
"""Where a cell begins, for any separator, and would be taken for a formula."""


def text(value: object, most: int = MOST_TEXT) -> str:
    r"""For several lines: whatever is not to be printed is written as its number.

    >>> print(text("red:\x1b[31m\nsecond line"))
    red:\x1b[31m
    second line
    """
    words = _as_str(value).replace("\r\n", "\n")
    return _IN_TEXT.sub(_number, cut(words, most))


def line(value: object, most: int = MOST_LINE) -> str:
    r"""The same for one line: a name, a remark.

    >>> line("two\nlines")
    'two\\nlines'
    """
    return _IN_LINE.sub(_number, cut(_as_str(value), most, " "))


def cut(words: str, most: int, separator: str = "\n") -> str:
    """The first `most` characters; says how many there were, if there were more.

    >>> cut("abcdef", 4, " ")
    'abcd [cut here: 2 of 6 characters are left out]'
    """
    if len(words) <= most:
        return words
    left_out = f"[cut here: {len(words) - most:,} of {len(words):,} characters are left out]"
    return f"{words[:most]}{separator}{left_out}"


def cell(value: object) -> object:
    """For a table: nothing in it is run as a formula, whatever separates the cells.

    Who opens the file may choose another separator than the comma; then a cell begins in the middle
    of one of ours.

    >>> cell("=1+1"), cell("late; -2+3"), cell(7)
    ("'=1+1", "late; '-2+3", 7)
    """
    if isinstance(value, int):
        return value
    return _FORMULA.sub(r"\1\2'", line(value, MOST_CELL))


def data(value: Any, levels: int = MOST_LEVELS) -> Any:
    """For JSON: plain values, texts that are safe, and no number that JSON does not have."""
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, int):
        # Python refuses to print an integer of more than 4300 digits.
        return value if value.bit_length() <= 64 else line(hex(value))
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if levels and isinstance(value, dict):
        items = list(value.items())[:MOST_ITEMS]
        kept = {line(key): data(inner, levels - 1) for key, inner in items}
        left_out = len(value) - len(items)
        return kept | ({"[cut here]": f"{left_out} more"} if left_out else {})
    if levels and isinstance(value, list | tuple):
        kept = [data(inner, levels - 1) for inner in value[:MOST_ITEMS]]
        left_out = len(value) - len(kept)
        return kept + ([f"[cut here: {left_out} more]"] if left_out else [])
    return text(value)


def for_stream(words: str, stream: TextIO) -> str:
    """What the stream can write: other characters as their numbers."""
    encoding = getattr(stream, "encoding", None) or "utf-8"
    return words.encode(encoding, "backslashreplace").decode(encoding)


def _as_str(value: object) -> str:
    if isinstance(value, str):
        return value
    try:
        return str(value)
    except Exception as error:
        return f"[a {type(value).__name__} without words: {type(error).__name__}]"


def _number(match: re.Match[str]) -> str:
    number = ord(match[0])
    if match[0] in "\t\n\r":
        return {"\t": "\\t", "\n": "\\n", "\r": "\\r"}[match[0]]
    if 0xDC80 <= number <= 0xDCFF:  # a byte of a name that is not UTF-8
        number -= 0xDC00
    if number < 0x100:
        return f"\\x{number:02x}"
    return f"\\u{number:04x}" if number < 0x10000 else f"\\U{number:08x}"
