"""Who calls each function, method and class of the package: every line, read off the source.

Called by: `caller_lists`, `chain_map`, tests/docs. Calls: `links`, `class_families`, `package`; reads
hooks.toml.

A call is listed where the source says what is called; one through an object whose class is not known
is not. Three things are listed apart, with the name that the line has: a method that overrides the one
named there, a class that has the form named there, and the hooks of hooks.toml.
"""

import ast
import tomllib
from collections.abc import Iterator
from functools import lru_cache
from typing import NamedTuple

from source.annotate import AnnotatedPage
from source.class_families import HOOKS, Families, Symbol, families_of
from source.links import uses_of
from source.package import Package

CALL, HANDED_ON, DECORATES = "call", "handed on", "decorates"


class Site(NamedTuple):
    """A line that calls something, hands it on, or decorates with it."""

    module: str
    line: int
    symbol: str
    """The function or method that the line is in; "" for the module's own code."""
    name: str
    """The word in the line that stands for what is called."""
    how: str
    through: str = ""
    """What the line names, if that is another thing than what is called."""
    because: str = ""
    receiver: Symbol | None = None
    """The class of the object whose method is named, as far as the source says."""


class HookError(ValueError):
    """hooks.toml names something that is not there."""


@lru_cache(maxsize=8)
def sites_of(package: Package) -> dict[Symbol, list[Site]]:
    """Function, method or class -> its sites, by module and line. Raises HookError."""
    families = families_of(package)
    plain = list(_plain_sites(package))
    found: dict[Symbol, dict[tuple, Site]] = {}
    for target, site in [*plain, *_hooks(families), *_forms(families, plain)]:
        if target != (site.module, site.symbol):
            found.setdefault(target, {})[(site.module, site.line, site.how, site.through)] = site
    sites = {target: list(known.values()) for target, known in found.items()}
    for target, site in list(_overriding(families, sites)):
        sites.setdefault(target, []).append(site)
    return {target: sorted(known, key=lambda one: one[:6]) for target, known in sites.items()}


def _plain_sites(package: Package) -> Iterator[tuple[Symbol, Site]]:
    """Both what is named by itself or after a module's name, and what is named after an object."""
    for module, page in package.pages.items():
        marks, known = set(_marks(page.tree)), set()
        for use in uses_of(package)[module]:
            at = (use.line, use.column)
            known.add(at)
            how = DECORATES if at in marks else HANDED_ON if use.how == "named" else CALL
            if _is_code(package, use.target):
                place = (module, use.line, _inside(page, use.line, how))
                yield use.target, Site(*place, use.name, how, receiver=use.receiver)
        for one in page.references:
            at = (one.line, one.column)
            place = package.find(one.target)
            if one.is_import or at in known or place is None:
                continue
            target = (place.page.module, place.symbol)
            if _is_code(package, target):
                name = page.lines[one.line - 1][one.column :][: one.length]
                how = DECORATES if at in marks else CALL if one.is_call else HANDED_ON
                yield target, Site(module, one.line, _inside(page, one.line, how), name, how)


def _marks(tree: ast.Module) -> Iterator[tuple[int, int]]:
    """Line and column of the names that definitions are decorated with."""
    for node in ast.walk(tree):
        for mark in getattr(node, "decorator_list", ()):
            mark = mark.func if isinstance(mark, ast.Call) else mark
            name = getattr(mark, "attr", getattr(mark, "id", ""))
            yield mark.end_lineno, mark.end_col_offset - len(name)


def _inside(page: AnnotatedPage, line: int, how: str) -> str:
    """The function that the line is in; of a decorator, what it decorates, which may be a class."""
    found = page.symbol_at(line)
    if not found and how == DECORATES:
        below = (name for name, one in page.definitions.items() if one.line > line)
        found = min(below, key=lambda name: page.definitions[name].line, default="")
    return found


def _is_code(package: Package, symbol: Symbol) -> bool:
    """Whether it is a class or a function, not a variable or a module."""
    definition = package.pages[symbol[0]].definitions.get(symbol[1])
    return definition is not None and definition.kind != "variable"


def _overriding(
    families: Families, sites: dict[Symbol, list[Site]]
) -> Iterator[tuple[Symbol, Site]]:
    """A method, and a site that names the one which it overrides: an object may be of either class."""
    for (module, symbol), known in list(sites.items()):
        owner, _, name = symbol.rpartition(".")
        for below in families.below((module, owner)) if owner else ():
            override = (below[0], f"{below[1]}.{name}")
            if override not in families.nodes or below == (module, owner):
                continue
            above = families.line_of(below)
            for site in known:
                if site.receiver in above and not site.through:
                    yield override, site._replace(through=symbol, receiver=None)


# -- What the source does not say --


def hooks_of(package: Package) -> dict[str, list[dict]]:
    """The entries of hooks.toml that are about this package."""
    roots = {name.partition(".")[0] for name in package.pages}
    table = tomllib.loads(HOOKS.read_text())
    hooks = [one for one in table["hook"] if one["in"].partition(".")[0] in roots]
    forms = [one for one in table["form"] if one["name"].partition(".")[0] in roots]
    return {"hook": hooks, "form": forms}


def _hooks(families: Families) -> Iterator[tuple[Symbol, Site]]:
    for hook in hooks_of(families.package)["hook"]:
        module, symbol = _known(families, hook["in"])
        page = families.package.pages[module]
        definition = page.definitions[symbol]
        numbers = range(definition.line, definition.end_line + 1)
        lines = [number for number in numbers if hook["line"] in page.lines[number - 1]]
        if not lines:
            raise HookError(f"hooks.toml: {hook['in']} has no line with {hook['line']!r}")
        for called in hook["calls"]:
            target = _known(families, called)
            for number in lines:
                how = (hook["through"], CALL, hook["through"], hook["because"])
                yield target, Site(module, number, symbol, *how)


def _forms(families: Families, plain: list[tuple[Symbol, Site]]) -> Iterator[tuple[Symbol, Site]]:
    """The sites that name a form's method, for the classes that have the form."""
    for form in hooks_of(families.package)["form"]:
        module, owner = _known(families, form["name"])
        classes = [_known(families, cls) for cls in form["classes"]]
        for (there, method), site in plain:
            if there == module and method.rpartition(".")[0] == owner:
                for at, cls in classes:
                    target = (at, f"{cls}.{method.rpartition('.')[2]}")
                    if target in families.nodes:
                        yield target, site._replace(through=method, receiver=None)


def _known(families: Families, dotted: str) -> Symbol:
    found = families.find(dotted)
    if found not in families.nodes:
        raise HookError(f"hooks.toml: the package has no {dotted}")
    return found


def overrides_of(package: Package, symbol: Symbol) -> list[Symbol]:
    """The methods that take a method's place in classes below its own."""
    families = families_of(package)
    owner, _, name = symbol[1].rpartition(".")
    below = families.below((symbol[0], owner)) - {(symbol[0], owner)} if owner else set()
    found = ((cls[0], f"{cls[1]}.{name}") for cls in below)
    return sorted(one for one in found if one in families.nodes)
