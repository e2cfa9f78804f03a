"""Numbers as words, and tables: how the pages' cases are written.

Called by: all of `cases`, `benchmarks_page`. Calls: the planner's way to write a share.
"""

import html
import re
from collections.abc import Iterable, Sequence
from fractions import Fraction

from minimegatron.planner.plan_report import percent


def table(head: Sequence[object], rows: Iterable[Sequence[object]]) -> str:
    """A Markdown table.

    >>> print(table(["p", "M"], [[1, 2]]))
    | p | M |
    | --- | --- |
    | 1 | 2 |
    """
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(str(c) for c in line) + " |" for line in lines)


def escaped(text: str) -> str:
    """For a cell or a line of Markdown, where it stands as it is.

    >>> escaped("a_b | <c>")
    'a\\\\_b \\\\| &lt;c&gt;'
    """
    return re.sub(r"([|*_\[\]`])", r"\\\1", html.escape(text, quote=False))


def size_words(num_bytes: float | Fraction) -> str:
    """
    >>> size_words(4194304), size_words(18 * 10**9)
    ('4 MiB', '16.8 GiB')
    """
    value, unit = float(num_bytes), "bytes"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if value < 1024:
            break
        value, unit = value / 1024, larger
    return f"{value:.3g} {unit}" if value < 1000 else f"{value:.0f} {unit}"


def count_words(number: float) -> str:
    """
    >>> count_words(1_315_000_000), count_words(85_000_000)
    ('1.3 billion', '85 million')
    """
    for power, word in ((1e12, "trillion"), (1e9, "billion"), (1e6, "million")):
        if number >= power:
            value = number / power
            return f"{value:.1f} {word}" if value < 10 else f"{value:.0f} {word}"
    return f"{number:,}"


def fraction_words(value: Fraction) -> str:
    """
    >>> fraction_words(Fraction(3, 11))
    '3/11 = 27.3%'
    """
    return f"{value} = {percent(value)}"
