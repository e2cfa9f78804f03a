"""A theme's stylesheet without the rules that no page of this site can match.

Called by: `mkdocs_hook`, when the site is there. Calls nothing. Half of what a first visitor would load
is the theme's style for features that are not used here.

A rule stays if all class names of one of its selectors stand in some page, or in some script, which
may add them later. Text from right to left is not used here either.
"""

import re
from collections.abc import Iterator
from pathlib import Path

CLASS = re.compile(r"\.(-?[A-Za-z_](?:[\w-]|\\.)*)")
WORD = re.compile(r"[\w-]+")


def trim_site(site: Path) -> tuple[int, int]:
    """Trims the theme's stylesheets in place. Returns their bytes before and after."""
    known: set[str] = set()
    for path in site.rglob("*.html"):
        for names in re.findall(r'class="([^"]*)"', path.read_text()):
            known.update(names.split())
    for path in [*site.rglob("*.js"), *site.rglob("*.mjs")]:
        if "python" not in path.relative_to(site).parts:
            known.update(WORD.findall(path.read_text()))
    before = after = 0
    for path in (site / "assets").rglob("*.css"):
        text = path.read_text()
        trimmed = trim(text, known)
        path.write_text(trimmed)
        before, after = before + len(text), after + len(trimmed)
    return before, after


def trim(css: str, known: set[str]) -> str:
    """
    >>> trim(".a,.b .c{x:1}.b{y:2}@media print{.b{z:3}}@media all{.a{z:4}}", {"a"})
    '.a{x:1}@media all{.a{z:4}}'
    """
    parts = []
    for head, body in blocks(css):
        if body is None or head.startswith(("@font-face", "@keyframes", "@-webkit", "@page")):
            parts.append(head if body is None else f"{head}{{{body}}}")
        elif head.startswith("@"):
            inner = trim(body, known)
            parts += [f"{head}{{{inner}}}"] if inner else []
        else:
            kept = [selector for selector in selectors(head) if can_match(selector, known)]
            parts += [f"{','.join(kept)}{{{body}}}"] if kept else []
    return "".join(parts)


def can_match(selector: str, known: set[str]) -> bool:
    """
    >>> can_match(".a:not(.b)", {"a"}), can_match(".a .b", {"a"}), can_match("[dir=rtl] p", set())
    (True, False, False)
    """
    if "[dir=rtl]" in selector:
        return False
    # What must not match may well be unknown; alternatives are left alone.
    plain = re.sub(r":(?:not|is|where|has)\([^()]*(?:\([^()]*\)[^()]*)*\)", "", selector)
    plain = re.sub(r"\[[^\]]*\]", "", plain)
    return all(name.replace("\\", "") in known for name in CLASS.findall(plain))


def selectors(head: str) -> list[str]:
    """Split at commas, but not within brackets.

    >>> selectors("a:is(b,c),d")
    ['a:is(b,c)', 'd']
    """
    parts, depth = [""], 0
    for letter in head:
        depth += (letter in "([") - (letter in ")]")
        if letter == "," and not depth:
            parts.append("")
        else:
            parts[-1] += letter
    return parts


def blocks(css: str) -> Iterator[tuple[str, str | None]]:
    """(head, body) of each rule; (statement, None) for what has no body, and for comments."""
    start = position = 0
    while position < len(css):
        letter = css[position]
        if css.startswith("/*", position):
            position = css.index("*/", position) + 2
            start = position
        elif letter in "\"'":
            position = end_of_string(css, position)
        elif letter == ";":
            position += 1
            yield css[start:position], None
            start = position
        elif letter == "{":
            end = end_of_block(css, position)
            yield css[start:position].strip(), css[position + 1 : end]
            start = position = end + 1
        else:
            position += 1


def end_of_block(css: str, position: int) -> int:
    """Where the brace that opens here is closed."""
    depth = 0
    while True:
        letter = css[position]
        if letter in "\"'":
            position = end_of_string(css, position)
            continue
        depth += (letter == "{") - (letter == "}")
        if not depth:
            return position
        position += 1


def end_of_string(css: str, position: int) -> int:
    """Behind the quote that closes the string that opens here."""
    quote = css[position]
    position += 1
    while css[position] != quote:
        position += 2 if css[position] == "\\" else 1
    return position + 1
