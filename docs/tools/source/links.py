"""Where names after an object lead: `chunk.backward_step`, `self._p2p.send_forward`, `x.config`.

Called by: `code_html` for links, `callers` for who calls what, `link_names`. Calls: `class_families`,
`ask_jedi`; reads links.txt.

jedi says of which class an object is. That takes minutes for the whole package, so its answers are in
links.txt: below the path of a file and the beginning of its text's SHA-256, each line has a class and
the places where an object of it is named. What the name leads to is looked up anew in each build: a
method may move, also to a class above.

An entry holds while the file has the text that it is about, and each class of the entry still has the
names that the file takes from it. Else jedi is asked anew, of this file alone; the build says so, and
goes on. So a new name of a class or a method makes the entries of the files that use it invalid. One
change goes unseen: another file says now that an object is of another class, and that class has a
member of the same name. `python docs/tools/record.py links --check all` asks jedi of every file.
"""

import ast
import hashlib
import sys
from collections.abc import Iterable, Iterator
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

from source.annotate import AnnotatedPage
from source.ask_jedi import At, ask, characters
from source.class_families import (
    CALLED,
    ENTERED,
    OBJECT,
    PARENT,
    Families,
    Symbol,
    Thing,
    families_of,
)
from source.package import Package

RECORD = Path(__file__).with_name("links.txt")


class Use(NamedTuple):
    """A place in the code where an object's method or field is named, or its class is called."""

    line: int
    column: int
    """In characters, from 0; of the name."""
    name: str
    """As it stands there."""
    target: Symbol
    receiver: Symbol | None
    """The class that the object is known to be of; None where no other method can be meant."""
    how: str
    """call, named, with, or object: an object, or autograd's function, is called like a function."""


class LookUp(NamedTuple):
    """A place where something is taken of a thing: `thing.name`, `thing()`, `with thing`."""

    name: str
    """Of the last two, CALLED and ENTERED."""
    thing: ast.expr
    node: ast.expr
    """What ends with the name; of the last two, the thing."""
    known: Thing | None = None
    """Of `self` and `super()` in a class: jedi need not be asked."""

    @property
    def at(self) -> At:
        return self.thing.end_lineno, self.thing.end_col_offset

    @property
    def end(self) -> At:
        return self.node.end_lineno, self.node.end_col_offset


@lru_cache(maxsize=8)
def uses_of(package: Package) -> dict[str, list[Use]]:
    """Module -> what its code names of objects, as far as it is known."""
    families, things = families_of(package), recorded(package)
    if missing := [module for module in package.pages if module not in things]:
        print(f"links.txt does not know these as they are: {', '.join(missing)}", file=sys.stderr)
        things |= asked(package, missing)
    return {
        module: list(_uses(page, things[module], families))
        for module, page in package.pages.items()
    }


def _uses(page: AnnotatedPage, things: dict[At, Thing], families: Families) -> Iterator[Use]:
    # Of two links at one place, `thing.name` and then what a call of it runs, the last one counts.
    lookups = sorted(lookups_of(families.package)[page.module], key=lambda one: one.name == CALLED)
    called = {id(one.node) for one in lookups if one.name == CALLED}
    for one in lookups:
        thing = one.known or things.get(one.at)
        target = families.target(thing, one.name) if thing else None
        if target is None:
            continue
        owner, _, last = target[1].rpartition(".")
        of = thing.symbol if thing.what == OBJECT else None
        if of and (target[0], owner) not in families.line_of(of):
            of = (target[0], owner)  # the class of a form
        if one.name == ENTERED:
            at = (one.node.lineno, one.node.col_offset)
            yield Use(*at, "with", target, of, "with")
            if leaves := families.member(of, "__exit__"):
                yield Use(*at, "with", leaves, of, "with")
            continue
        is_call = id(one.node) in called or families.is_property(target)
        how = "object" if last != one.name else "call" if is_call else "named"
        name = one.node.id if isinstance(one.node, ast.Name) else one.node.attr
        column = characters(page, one.node.end_lineno, one.node.end_col_offset) - len(name)
        yield Use(one.node.end_lineno, column, name, target, of, how)


# -- What the code looks up --


@lru_cache(maxsize=8)
def lookups_of(package: Package) -> dict[str, list[LookUp]]:
    """Module -> its look-ups, in no order."""
    classes = {id(node): symbol for symbol, node in families_of(package).nodes.items()}
    return {name: list(_lookups(page.tree, classes)) for name, page in package.pages.items()}


def _lookups(tree: ast.Module, classes: dict[int, Symbol]) -> Iterator[LookUp]:
    nodes: list[tuple[ast.AST, Symbol | None]] = [(tree, None)]
    while nodes:
        node, owner = nodes.pop()
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
            what = _known_by_itself(node.value) if owner else None
            yield LookUp(node.attr, node.value, node, Thing(what, owner) if what else None)
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name | ast.Attribute):
            # `super().__call__` is what is called, not an object: jedi takes it for its own class's.
            if getattr(node.func, "attr", "") != "__call__":
                yield LookUp(CALLED, node.func, node.func)
        elif isinstance(node, ast.withitem):
            yield LookUp(ENTERED, node.context_expr, node.context_expr)
        if isinstance(node, ast.ClassDef):
            # One inside a function has no known name.
            owner = classes.get(id(node))
        nodes += [(child, owner) for child in ast.iter_child_nodes(node)]


def _known_by_itself(node: ast.expr) -> str | None:
    """What it is of the class around it."""
    match node:
        case ast.Name("self"):
            return OBJECT
        case ast.Call(ast.Name("super"), []):
            return PARENT
    return None


def asked(package: Package, modules: Iterable[str]) -> dict[str, dict[At, Thing]]:
    """What jedi says of these modules, as far as it makes a link."""
    families, lookups = families_of(package), lookups_of(package)
    names = {
        name.rpartition(".")[2] for page in package.pages.values() for name in page.definitions
    }
    names |= {module.rpartition(".")[2] for module in package.pages} | {CALLED, ENTERED, "apply"}
    places = {}
    for module in modules:
        found = _found_by_name(package, module)
        for one in lookups[module]:
            if one.known and families.is_function(families.target(one.known, one.name)):
                found.add(one.end)
        places[module] = {
            one.at: one.name
            for one in lookups[module]
            if one.name in names and one.known is None and one.end not in found
        }
    said = ask(families, places)
    for module, things in said.items():
        used = set(_used(lookups[module], things, families))
        said[module] = {at: thing for at, thing in things.items() if at in used}
    return said


def _found_by_name(package: Package, module: str) -> set[At]:
    """Where names of functions and classes end that `annotate` knows, not being told of any object.

    Not those after `self`, which may be of a class below: a method there may override the one named.
    """
    page, found = package.pages[module], set()
    for one in page.references:
        place, before = package.find(one.target), page.lines[one.line - 1][: one.column]
        is_known = place and place.symbol and place.definition.kind != "variable"
        if is_known and not before.endswith("self."):
            found.add((one.line, len(before.encode()) + one.length))
    return found


def _used(lookups: list[LookUp], things: dict[At, Thing], families: Families) -> Iterator[At]:
    for one in lookups:
        if one.at in things and families.target(things[one.at], one.name):
            yield one.at


# -- What is recorded --


def recorded(package: Package) -> dict[str, dict[At, Thing]]:
    """Of each module of which links.txt still holds."""
    families, lookups, found = families_of(package), lookups_of(package), {}
    entries = _entries()
    for module, page in package.pages.items():
        lines = entries.get((page.path, _digest(page)))
        if lines is None:
            continue
        things = {}
        for line in lines:
            what, name, *ends = line.split(" ")
            thing = Thing(what, families.find(name))
            things |= {tuple(map(int, end.split(":"))): thing for end in ends}
        gone = any(thing.symbol is None for thing in things.values())
        if not gone and len(things) == len(set(_used(lookups[module], things, families))):
            found[module] = things
    return found


def _entries() -> dict[tuple[str, str], list[str]]:
    """Path and digest -> lines."""
    found: dict[tuple[str, str], list[str]] = {}
    key = ("", "")
    for line in RECORD.read_text().splitlines() if RECORD.exists() else ():
        if line.startswith(" "):
            found[key].append(line[1:])
        else:
            path, _, digest = line.partition(" ")
            key = (path, digest)
            found[key] = []
    return found


def record(package: Package, things: dict[str, dict[At, Thing]]) -> None:
    """Writes links.txt."""
    lines = []
    for module, page in sorted(package.pages.items()):
        lines.append(f"{page.path} {_digest(page)}")
        by_thing: dict[str, list[str]] = {}
        for (line, column), (what, symbol) in sorted(things[module].items()):
            name = ".".join(filter(None, symbol))
            by_thing.setdefault(f" {what} {name}", []).append(f"{line}:{column}")
        lines += [" ".join([name, *ends]) for name, ends in sorted(by_thing.items())]
    RECORD.write_text("\n".join(lines) + "\n")


def _digest(page: AnnotatedPage) -> str:
    return hashlib.sha256(page.source.encode()).hexdigest()[:12]
