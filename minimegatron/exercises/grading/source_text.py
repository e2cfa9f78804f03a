"""The bytes of a Python file as text.

Called by: `submissions`. Torch-free. Megatron has no counterpart.
"""

import codecs
import io
import re
import tokenize

UTF_16_AND_32 = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE, codecs.BOM_UTF32_BE)
DECLARED = re.compile(rb"^[ \t\f]*#.*?coding[:=]", re.M)
DECLARATION = re.compile(r"^([ \t\f]*#.*?coding[:=][ \t]*)[-\w.]+", re.A)


def decode(data: bytes) -> str:
    """The text, as Python reads it: UTF-8, or what the file declares in its first two lines.

    The text that comes back declares UTF-8, since it will be written so. Raises ValueError, with
    words for the student, for bytes that Python would not take either.

    >>> decode("# coding: latin-1\\nx = 'é'\\n".encode("latin-1"))
    "# coding: utf-8\\nx = 'é'\\n"
    """
    if data.startswith(UTF_16_AND_32):
        raise ValueError("it is UTF-16 or UTF-32; save it as UTF-8")
    if b"\x00" in data:
        raise ValueError("it holds NUL bytes, as no Python file does")
    encoding = "utf-8"
    try:
        if DECLARED.search(b"\n".join(data.removeprefix(codecs.BOM_UTF8).split(b"\n", 2)[:2])):
            encoding, _ = tokenize.detect_encoding(io.BytesIO(data).readline)
        if not _extends_ascii(encoding):
            raise ValueError(f"it declares the encoding {encoding!r}; save it as UTF-8")
        text = data.decode(encoding)
    except SyntaxError as error:
        raise ValueError(f"{error.msg}; save it as UTF-8") from None
    except UnicodeDecodeError as error:
        number = data.count(b"\n", 0, error.start) + 1
        raise ValueError(
            f"line {number} has the byte 0x{data[error.start]:02x}, which is not "
            f"{encoding.upper()}; save it as UTF-8"
        ) from None
    return text.removeprefix("\ufeff") if encoding == "utf-8" else _declaring_utf_8(text)


def _extends_ascii(encoding: str) -> bool:
    """Whether the encoding is one for text, and its first 128 characters are the usual ones."""
    # A backslash before what some encodings take for the number of another character.
    everything = bytes(range(0x5C)) + bytes(range(0x5D, 128)) + b"\\x41"
    try:
        return everything.decode(encoding) == everything.decode("ascii")
    except (UnicodeError, LookupError):
        return False


def _declaring_utf_8(text: str) -> str:
    lines = text.split("\n", 2)
    for number, line in enumerate(lines[:2]):
        if DECLARATION.match(line):
            lines[number] = DECLARATION.sub(r"\1utf-8", line)
            break
    return "\n".join(lines)
