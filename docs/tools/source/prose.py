"""Docstrings as the Markdown they nearly are, and names in prose as links.

Called by: `source_pages`, `macros`. Calls: `package`.
"""

import re
from collections.abc import Callable

from source.package import Place

SECTION = re.compile(r"^(Args|Arguments|Returns|Raises|Yields|Attributes):\s*$")
ENTRY = re.compile(r"^ {4}(\*{0,2}[\w.]+(?: \([^)]*\))?): +(.*)$|^ {4}(\*{0,2}[\w.]+):$")
CODE_SPAN = re.compile(r"(`+)(.+?)\1", re.DOTALL)
BLOCK_START = re.compile(r"\s*(\*|-|\d+\.|\||>|```)")

Find = Callable[[str], Place | None]


def to_markdown(docstring: str) -> str:
    """
    >>> print(to_markdown("Adds.\\n\\nArgs:\\n    x: a number,\\n        any."))
    Adds.
    <BLANKLINE>
    Args
    {: .mm-section }
    <BLANKLINE>
    - **`x`**: a number, any.
    <BLANKLINE>
    """
    lines, out, index = docstring.strip("\n").split("\n"), [], 0
    while index < len(lines):
        line = lines[index]
        if line.lstrip().startswith(">>>"):
            index = _example(lines, index, out)
        elif SECTION.match(line):
            index = _section(lines, index, out)
        else:
            _plain(line, out)
            index += 1
    return "\n".join(out)


def _plain(line: str, out: list[str]) -> None:
    is_item = bool(re.match(r"(\*|-|\d+\.) ", line))
    previous = out[-1] if out else ""
    # A list or table right under a line of text is meant as one; Markdown wants a blank line.
    starts = is_item and previous.strip() and not re.match(r"(\*|-|\d+\.|  )", previous)
    table = line.startswith("|") and previous.strip() and not previous.startswith("|")
    if starts or table:
        out.append("")
    # Nested text of a list item is indented as far as its words; Markdown wants four spaces.
    if re.match(r"  \S", line) and previous.strip():
        line = "  " + line
    out.append(line if line.startswith("    ") and not previous.strip() else _escape(line))


def _example(lines: list[str], index: int, out: list[str]) -> int:
    indent = len(lines[index]) - len(lines[index].lstrip())
    if out and out[-1].strip():
        out.append("")
    start = index
    while index < len(lines) and lines[index].strip():
        index += 1
    example = [line[indent:] for line in lines[start:index]]
    # Pygments' reader of consoles does not come back from a string over several lines.
    has_long_string = any(mark in line for line in example for mark in ("'''", '"""'))
    out += ["```text" if has_long_string else "```pycon", *example, "```", ""]
    return index


def _section(lines: list[str], index: int, out: list[str]) -> int:
    if out and out[-1].strip():
        out.append("")
    out += [lines[index].strip().rstrip(":"), "{: .mm-section }", ""]
    index += 1
    while index < len(lines) and (lines[index].startswith("    ") or not lines[index].strip()):
        line = lines[index]
        entry = ENTRY.match(line)
        if entry:
            name, words = entry[1] or entry[3], entry[2] or ""
            out.append(f"- **`{name}`**: {_escape(words)}".rstrip())
        elif not line.strip():
            if index + 1 < len(lines) and lines[index + 1].startswith("    "):
                out.append("")
        elif line.startswith("        ") and out[-1].startswith("-"):
            out[-1] += " " + _escape(line.strip())
        else:
            out.append(_escape(line.strip()))
        index += 1
    out.append("")
    return index


def _escape(text: str) -> str:
    """`<` outside code is a less-than sign here, never a tag; `[s, b, h]` never a link.

    >>> _escape("`a < b` but not <this>")
    '`a < b` but not &lt;this>'
    """
    parts = re.split(r"(`+[^`]*`+)", text)
    for i in range(0, len(parts), 2):
        parts[i] = re.sub(r"<(?=[\w/!?])", "&lt;", parts[i])
        parts[i] = re.sub(r"\[(?=[^\]]*\](?!\())", r"\\[", parts[i])
        parts[i] = re.sub(r"(?<!\w)__(?=\w)|(?<=\w)__(?!\w)", r"\\_\\_", parts[i])
    return "".join(parts)


def is_line(anchor: str) -> bool:
    """
    >>> is_line("L12"), is_line("Layer")
    (True, False)
    """
    return re.fullmatch(r"L\d+", anchor) is not None


def link_names(markdown: str, find: Find, url: Callable[[Place], str]) -> str:
    """Turns each code span that names something of the package into a link to its definition."""
    out, fenced = [], False
    for line in markdown.split("\n"):
        if line.lstrip().startswith("```"):
            fenced = not fenced
        out.append(line if fenced or line.startswith("    ") else _link_line(line, find, url))
    return "\n".join(out)


def _link_line(line: str, find: Find, url: Callable[[Place], str]) -> str:
    def replace(match: re.Match) -> str:
        before, after = line[: match.start()], line[match.end() :]
        is_name = re.fullmatch(r"[A-Za-z_][\w.]*(\(\))?", match[2])
        # Inside a link's text already, or a heading's anchor.
        if not is_name or after.startswith(("](", "]{")) or before.endswith("**"):
            return match[0]
        place = find(match[2])
        if place is None:
            return match[0]
        if is_line(place.anchor):
            return f'<a href="{url(place)}">{match[0]}</a>'
        return f"[{match[0]}]({url(place)})"

    return CODE_SPAN.sub(replace, line)
