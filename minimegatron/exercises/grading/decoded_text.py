"""The bytes of a Python file as text.

Torch-free. Megatron has no counterpart.
"""

import codecs
import io
import re
import tokenize

UTF_16_AND_32 = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE, codecs.BOM_UTF32_BE)
DECLARED = r"[ \t\f]*#.*?coding[:=][ \t]*([-\w.]+)"
FIRST_LINE = re.compile(DECLARED, re.A)
SECOND_LINE = re.compile(r"[ \t\f]*(?:#.*)?\n" + DECLARED, re.A)
"""After an empty line or a comment."""


def decode(data: bytes) -> str:
    """The text, as Python reads it: UTF-8, or what the file declares in its first two lines.

    Lines end in "\\n", as Python makes them before it looks for anything; and what comes back declares
    nothing but UTF-8. So Python reads the same in it, as text and written as UTF-8. Raises ValueError,
    with words for the student, for bytes that Python would not take either.

    >>> decode("# coding: latin-1\\r\\nx = 'é'\\r".encode("latin-1"))
    "# coding: utf-8\\nx = 'é'\\n"
    """
    if data.startswith(UTF_16_AND_32):
        raise ValueError("it is UTF-16 or UTF-32; save it as UTF-8")
    if b"\x00" in data:
        raise ValueError("it holds NUL bytes, as no Python file does")
    data = data.replace(b"\r\n", b"\n").replace(b"\r", b"\n")
    encoding = _encoding(data)
    if not _extends_ascii(encoding):
        raise ValueError(f"it declares the encoding {encoding!r}; save it as UTF-8")
    try:
        text = data.decode(encoding)
    except UnicodeDecodeError as error:
        number = data.count(b"\n", 0, error.start) + 1
        raise ValueError(
            f"line {number} has the byte 0x{data[error.start]:02x}, which is not "
            f"{encoding.upper()}; save it as UTF-8"
        ) from None
    return _declaring_utf_8(text.lstrip("\ufeff"))


def _encoding(data: bytes) -> str:
    """What the file declares, by Python's name for it."""
    mark = codecs.BOM_UTF8 if data.startswith(codecs.BOM_UTF8) else b""
    # As Latin-1, every byte is one character, whatever the encoding is.
    found = _declaration(data.removeprefix(mark).decode("latin-1"))
    if not found:
        return "utf-8"
    try:
        line = mark + b"# coding: " + found[1].encode()
        return tokenize.detect_encoding(io.BytesIO(line).readline)[0]
    except SyntaxError as error:
        raise ValueError(f"{error.msg}; save it as UTF-8") from None


def _declaration(text: str) -> re.Match | None:
    """Where the first or the second line declares an encoding, as Python looks for it."""
    return FIRST_LINE.match(text) or SECOND_LINE.match(text)


def _extends_ascii(encoding: str) -> bool:
    """Whether the encoding is one for text, and its first 128 characters are the usual ones."""
    # At the end, what some encodings take for the number of another character.
    everything = bytes(range(0x5C)) + bytes(range(0x5D, 128)) + b"\\x41 \\u0041 .xn--mnchen-3ya"
    try:
        return everything.decode(encoding) == everything.decode("ascii")
    except (UnicodeError, LookupError):
        return False


def _declaring_utf_8(text: str) -> str:
    found = _declaration(text)
    return f"{text[: found.start(1)]}utf-8{text[found.end(1) :]}" if found else text
