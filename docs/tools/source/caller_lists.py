"""Under a heading of an annotated page: who calls the function, each with a link to the very line.

Called by: `source_pages`. Calls: `callers`, `spine`.
"""

import re
from collections.abc import Iterable
from html import escape

from source.annotate import AnnotatedPage, Row
from source.callers import CALL, DECORATES, HANDED_ON, Site, overrides_of, sites_of
from source.package import Package, Place
from source.spine import read_spine

SHOWN = 4
"""Callers before the fold."""
SOLUTIONS = "minimegatron.exercises.catalog."
"""What students are asked to write is not shown to them here."""


def callers_of(row: Row, page: AnnotatedPage, package: Package) -> str:
    """Lists for a function, method or class; "" where nothing is known."""
    if row.kind not in ("function", "method", "class"):
        return ""
    symbol = (page.module, row.symbol)
    sites = [
        one for one in sites_of(package).get(symbol, []) if not one.module.startswith(SOLUTIONS)
    ]
    plain = [one for one in sites if not one.through]
    lists = [_list("Called by", [one for one in plain if one.how == CALL], page)]
    for through in sorted({one.through for one in sites} - {""}):
        called = [one for one in sites if one.through == through and one.how == CALL]
        lists.append(_list(f"Called as <code>{escape(through)}</code> by", called, page))
    # A class is named by every annotation.
    if row.kind != "class":
        lists.append(_list("Handed on in", [one for one in plain if one.how == HANDED_ON], page))
    lists.append(_list("Decorates", [one for one in plain if one.how == DECORATES], page))
    lists.append(_overrides(package, symbol, page))
    return "".join(lists)


def _list(title: str, sites: list[Site], page: AnnotatedPage) -> str:
    if not sites:
        return ""
    by_caller: dict[tuple[str, str], list[Site]] = {}
    for site in sites:
        by_caller.setdefault((site.module, site.symbol), []).append(site)
    # This file's own first, then those of the files to read first.
    near = {page.module: 0} | {link.module: link.number for link in read_spine()}
    near[page.module] = 0
    ordered = sorted(by_caller, key=lambda one: (near.get(one[0], len(near) + 1), one))
    items = [_caller(by_caller[one], page) for one in ordered]
    reasons = sorted({site.because for site in sites} - {""})
    return _folded(title, items) + "".join(map(_reason, reasons))


def _folded(title: str, items: list[str]) -> str:
    """All items; those that are many, most of them folded away."""
    # To fold a single one away would save nothing.
    shown = len(items) if len(items) <= SHOWN + 1 else SHOWN
    rest = ""
    if items[shown:]:
        rest = (
            f"<details><summary>{len(items) - shown} more</summary>"
            f"<ul>{''.join(items[shown:])}</ul></details>"
        )
    return f'<div class="mm-callers">{title}<ul>{"".join(items[:shown])}</ul>{rest}</div>'


def _caller(sites: Iterable[Site], page: AnnotatedPage) -> str:
    """The name of the function, with that of its module if it is another one, and each line."""
    first, *others = sites
    shown = _shown(first.module, first.symbol, page)
    full = ".".join(filter(None, (first.module, first.symbol)))
    here = "" if first.module == page.module else f"{first.module}.html"
    links = [
        f'<a href="{here}#L{first.line}" title="{escape(full)}, line {first.line}">'
        f"<code>{escape(shown)}</code>:{first.line}</a>"
    ]
    for line in dict.fromkeys(one.line for one in others if one.line != first.line):
        links.append(f'<a href="{here}#L{line}" title="line {line}">:{line}</a>')
    return f"<li>{' '.join(links)}</li>"


def _shown(module: str, symbol: str, page: AnnotatedPage) -> str:
    """
    >>> from types import SimpleNamespace
    >>> page = SimpleNamespace(module="minimegatron.core.utils")
    >>> _shown("minimegatron.training.training", "train", page), _shown(page.module, "", page)
    ('training.train', 'this file')
    """
    names = module.removeprefix("minimegatron.").split(".")
    if module == page.module:
        return symbol or "this file"
    return f"{names[-1]}.{symbol}" if symbol else ".".join(names)


def _reason(words: str) -> str:
    """
    >>> _reason("`train` hands it on.")
    '<p class="mm-because"><code>train</code> hands it on.</p>'
    """
    html = re.sub("`(.+?)`", r"<code>\1</code>", escape(words))
    return f'<p class="mm-because">{html}</p>'


def _overrides(package: Package, symbol: tuple[str, str], page: AnnotatedPage) -> str:
    items = []
    for module, name in overrides_of(package, symbol):
        if not module.startswith(SOLUTIONS):
            url = Place(package.pages[module], name).url
            items.append(
                f'<li><a href="{url}"><code>{escape(_shown(module, name, page))}</code></a></li>'
            )
    return _folded("Overridden in", items) if items else ""
