"""JSON from outside, which may be anything, and JSON that becomes part of a page.

It reads what somebody else may have written: recordings, plans, verdicts, checkpoints, models.
Torch-free. Megatron has no counterpart.

Python's own reader ends in a RecursionError where lists are nested some thousand deep, and other
functions do so later, at less. Nothing that belongs here is nested deeper than MOST_DEPTH.
"""

import json
from pathlib import Path
from typing import Any

MOST_DEPTH = 100


def parse_json(text: str | bytes, what: str | Path) -> Any:
    """The value that `text` says. `what` names it in errors: a file, or where it came from.

    Raises ValueError if it is no JSON, not UTF-8, or nested deeper than MOST_DEPTH.

    >>> parse_json("[1, 2", "plan.json")
    Traceback (most recent call last):
    ValueError: plan.json: not JSON (Expecting ',' delimiter: line 1 column 6 (char 5))
    """
    try:
        words = text.decode("utf-8-sig") if isinstance(text, bytes) else text
        value = json.loads(words)
    except RecursionError:
        raise _too_deep(what) from None
    except ValueError as error:
        raise ValueError(f"{what}: not JSON ({error})") from None
    if words.count("[") + words.count("{") > MOST_DEPTH:
        check_depth(value, what)
    return value


def read_json(path: str | Path) -> Any:
    """What the file holds. Raises ValueError as `parse_json` does, OSError if it cannot be read."""
    return parse_json(Path(path).read_bytes(), path)


def check_depth(value: Any, what: str | Path) -> None:
    """Raises ValueError if lists and dicts in `value` are nested deeper than MOST_DEPTH."""
    level, depth = [value], 0
    while level:
        # All containers of one depth; no recursion, since that is what must not happen.
        level = [part for part in level if isinstance(part, dict | list | tuple)]
        if level and depth == MOST_DEPTH:
            raise _too_deep(what)
        parts = (part.values() if isinstance(part, dict) else part for part in level)
        level, depth = [inner for some in parts for inner in some], depth + 1


def json_for_html(value: Any) -> str:
    """`value` as JSON that may stand inside a page's script element.

    There, the end tag of a script within a string would end the script, and the start of a comment
    before a start tag would make the reader take what follows, up to the page's end, for part of it.
    So every less-than sign is written as its number.

    >>> json_for_html({"text": chr(60)})
    '{"text":"\\\\u003c"}'
    """
    return json.dumps(value, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")


def _too_deep(what: str | Path) -> ValueError:
    return ValueError(
        f"{what}: lists or objects are nested deeper than {MOST_DEPTH}; nothing that minimegatron "
        "writes is, so take the file as it was written"
    )
