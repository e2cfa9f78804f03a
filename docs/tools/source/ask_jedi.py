"""What jedi says of places in the package's code: of which class an object is.

Called by: `links`. Calls: `class_families`; jedi, which reads annotations, constructors' calls, loops
and `with`.

jedi sees the package alone, and its own description of Python's library: what is installed beside it
changes no answer. It gets a copy of the files, with some help at the ends of lines and below the last
one: what a class says of its attributes, imports of names that the module looks up on first use
(`exports.lazily`), and a `zip` that jedi can read. Two things it does not do are done here: it takes
NamedTuples apart, and knows what a loop over something unknown makes (`_Jedi._parts`).
"""

import ast
import builtins
import re
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import NoneType
from typing import Any
from unittest.mock import patch

from source.annotate import ANY_OTHER, AnnotatedPage
from source.class_families import CALLED, CLASS, ENTERED, MODULE, OBJECT, Families, Thing

At = tuple[int, int]
"""Where an expression ends: line, and column in bytes, as `ast` counts."""
METHODS = {CALLED: "__call__", ENTERED: "__enter__"}
SAID_TOO = frozenset(["functools.cached_property", "typing.NamedTuple"])
"""What jedi names beside the class that is meant."""
LONG_TUPLE = re.compile(r"\btuple(\[(?:[^][]|\[[^][]*\])*), \.\.\.\]")
"""One of any length, of which jedi does not say what it holds, with a list's it does."""
ZIP = """
from collections.abc import Iterable as I
from typing import TypeVar, overload
A, B, C = TypeVar("A"), TypeVar("B"), TypeVar("C")
@overload
def zip(a: I[A], b: I[B], c: I[C], *, strict: bool = False) -> I[tuple[A, B, C]]: ...
@overload
def zip(a: I[A], b: I[B], *, strict: bool = False) -> I[tuple[A, B]]: ...
"""


def ask(families: Families, places: dict[str, dict[At, str]]) -> dict[str, dict[At, Thing]]:
    """Module -> where an expression ends -> what it is; without those of which jedi is not sure."""
    with tempfile.TemporaryDirectory() as folder:
        return _Jedi(families, Path(folder)).answers(places)


class _Jedi:
    def __init__(self, families: Families, folder: Path):
        # Most builds ask nothing, and need no jedi.
        import jedi
        import parso.cache
        from jedi.api.classes import Name
        from jedi.api.helpers import infer
        from jedi.inference.base_value import ValueSet
        from jedi.inference.context import CompForContext
        from jedi.inference.lazy_value import LazyKnownValues

        self.infer, self.name, self.loop_context = infer, Name, CompForContext
        self.value_set, self.iterate, self.part = ValueSet, ValueSet.iterate, LazyKnownValues
        # Else files are forgotten after ten minutes; read again, they are not those jedi has noted.
        parso.cache._CACHED_SIZE_TRIGGER = 10_000
        jedi.settings.cache_directory = str(folder / "cache")
        # A parameter without annotation is of no class, whoever calls the function.
        jedi.settings.dynamic_params = False
        self.families, self.folder, self.script = families, folder, jedi.Script
        for page in families.package.pages.values():
            path = folder / page.path
            path.parent.mkdir(parents=True, exist_ok=True)
            (path.parent / "__init__.py").touch()
            path.write_text(_copy(page))
        (folder / "told_to_jedi.py").write_text(ZIP)
        project = jedi.Project(folder, sys_path=[str(folder)], smart_sys_path=False)
        self.given = {"project": project, "environment": jedi.InterpreterEnvironment()}

    def answers(self, places: dict[str, dict[At, str]]) -> dict[str, dict[At, Thing]]:
        found = {}
        # Until the end alone: the next package has other classes.
        with patch.object(self.value_set, "iterate", lambda *args, **kw: self._parts(*args, **kw)):
            for number, (module, names) in enumerate(places.items(), 1):
                print(f"{number} of {len(places)}: {module}", file=sys.stderr)
                found[module] = self._answers_in(self.families.package.pages[module], names)
        return found

    def _answers_in(self, page: AnnotatedPage, names: dict[At, str]) -> dict[At, Thing]:
        script, found = self.script(path=self.folder / page.path, **self.given), {}
        for (line, column), name in sorted(names.items()):
            # jedi stops where one function has asked for very much; here each question is a new one.
            script._inference_state.inferred_element_counts.clear()
            try:
                answers = self._infer(script, line, characters(page, line, column))
            except Exception:
                # It fails on some code, mostly with RecursionError: then it does not know.
                continue
            if thing := self._one(answers, name):
                found[line, column] = thing
        return found

    def _infer(self, script: Any, line: int, column: int) -> list:
        """`script.infer`, which knows but the first loop of a comprehension, and none in an `if`."""
        leaf = script._module_node.get_leaf_for_position((line, column))
        loops = _loops_around(leaf)
        if not loops:
            return script.infer(line, column)
        script._inference_state.reset_recursion_limitations()
        context = script._get_module_context().create_context(_before(loops[0]))
        for loop in loops:
            context = self.loop_context(context, loop)
        values = self.infer(script._inference_state, context, leaf)
        return [self.name(script._inference_state, value.name) for value in values]

    def _parts(self, values: Any, *args: Any, **kwargs: Any) -> Iterator:
        """What a loop over the values meets: jedi's `ValueSet.iterate`, and more.

        A NamedTuple has its fields in their order, `for node, start, end in nodes`. What is unknown has
        one part: so `[f(x) for x in unknown]` holds what `f` returns.
        """
        fields = [self._fields(value) for value in values]
        if fields and all(fields):
            value, names = next(iter(values)), fields[0]
            yield from (self.part(value.py__getattribute__(name)) for name in names)
        else:
            yield from list(self.iterate(values, *args, **kwargs)) or [
                self.part(self.value_set([]))
            ]

    def _fields(self, value: Any) -> list[str]:
        symbol = self.families.find(self.name(None, value.name).full_name or "")
        return self.families.fields(symbol) if value.is_instance() and symbol else []

    def _one(self, answers: list, name: str) -> Thing | None:
        """What all answers are; if each is an object of the class of one, or below it, that one.

        What has no such name is not meant: None, and lists beside what they hold; nor is what jedi
        says of some decorators and bases too.
        """
        things = set()
        for one in answers:
            if one.full_name in SAID_TOO or _is_without(one.full_name or "", name):
                continue
            what = {"instance": OBJECT, "class": CLASS, "module": MODULE}.get(one.type)
            symbol = self.families.find(one.full_name or "")
            if what is None or symbol is None or (what == MODULE) == bool(symbol[1]):
                return None
            things.add(Thing(what, symbol))
        for thing in things:
            if len(things) == 1 or all(self._is_below(one, thing) for one in things):
                return thing
        return None

    def _is_below(self, one: Thing, other: Thing) -> bool:
        is_class = self.families.is_class(one.symbol)
        return (
            is_class
            and one.what == other.what
            and other.symbol in self.families.line_of(one.symbol)
        )


def characters(page: AnnotatedPage, line: int, column: int) -> int:
    """Of a column in bytes."""
    return len(page.lines[line - 1].encode()[:column].decode())


def _is_without(full_name: str, name: str) -> bool:
    """Whether it is a class of Python's own without this member.

    >>> _is_without("builtins.NoneType", "run"), _is_without("builtins.list", "append")
    (True, False)
    """
    module, _, last = full_name.rpartition(".")
    cls = NoneType if last == "NoneType" else getattr(builtins, last, None)
    members = {member for base in getattr(cls, "__mro__", ()) for member in vars(base)}
    return module == "builtins" and bool(members) and METHODS.get(name, name) not in members


def _loops_around(leaf: Any) -> list:
    """The loops of comprehensions whose names the leaf may use, the outermost first."""
    found, node = [], leaf
    while node.parent is not None and node.type not in ("funcdef", "lambdef", "classdef"):
        below, node = node, node.parent
        if node.type == "sync_comp_for" and below is not node.children[3]:
            found.insert(0, node)
        if len(node.children) > 1 and below is node.children[0] or node.type == "dictorsetmaker":
            inner, loop = [], node.children[-1]
            while below is not loop and loop.type in ("comp_for", "sync_comp_for", "comp_if"):
                inner += [loop] if loop.type == "sync_comp_for" else []
                loop = loop.children[-1]
            found = inner + found
    return found


def _before(loop: Any) -> Any:
    """A leaf of the scope that the comprehension stands in."""
    while loop.type in ("comp_for", "sync_comp_for", "comp_if"):
        loop = loop.parent
    return loop.get_previous_leaf() or loop.get_first_leaf()


def _copy(page: AnnotatedPage) -> str:
    """The text for jedi; what was there before stands where it stood."""
    lines = LONG_TUPLE.sub(r"list \1     ]", page.source).split("\n")
    added = _repeated_annotations(page.tree) | _unsaid(page.tree)
    for (line, column), words in sorted(added.items(), reverse=True):
        text = lines[line - 1].encode()
        lines[line - 1] = (text[:column] + words.encode() + text[column:]).decode()
    lines += ["", "from told_to_jedi import zip"]
    for name, target in page.looked_up.items():
        module, _, last = target.rpartition(".")
        one = f"from {module} import {last} as {name}"
        lines.append(f"from {target} import *" if name == ANY_OTHER else one)
    return "\n".join(lines) + "\n"


def _unsaid(tree: ast.Module) -> dict[At, str]:
    """Behind values of what is Any: an attribute that nothing has. Else jedi says the value's class."""
    values = [
        node.value
        for node in ast.walk(tree)
        if isinstance(node, ast.AnnAssign) and node.value and ast.unparse(node.annotation) == "Any"
    ]
    return {(one.end_lineno, one.end_col_offset): ".unsaid" for one in values}


def _repeated_annotations(tree: ast.Module) -> dict[At, str]:
    """What a class says of an attribute, for the end of a method's statement that sets it.

    jedi looks at what methods set, and at the class's body only if none does.
    """
    found: dict[At, str] = {}
    for cls in (node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)):
        said = {
            ast.unparse(node.target): ast.unparse(node.annotation)
            for node in cls.body
            if isinstance(node, ast.AnnAssign)
        }
        for node in ast.walk(cls):
            if not isinstance(node, ast.Assign | ast.AugAssign):
                continue
            end = (node.end_lineno, node.end_col_offset)
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            for part in (part for target in targets for part in ast.walk(target)):
                name = ast.unparse(part).removeprefix("self.")
                if isinstance(part, ast.Attribute) and name in said:
                    found[end] = found.get(end, "") + f"; self.{name}: {said[name]}"
    return found
