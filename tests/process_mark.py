"""The mark `processes`: on every test that starts processes, set by what its code names.

Used by: `conftest`. `python -m tests.stress` runs the tests with this mark.

A test gets the mark if it, a fixture that it uses, or something of these tests that one of both names,
names a module that starts processes, or something from one. Where the code hides it, the test carries
`@pytest.mark.processes`; one that starts a process without the mark fails.
"""

import functools
import multiprocessing.process
import os
import subprocess
import types
from collections.abc import Callable, Iterator
from typing import Any

import pytest

STARTING = (
    "jupyter_client",
    "minimegatron.doctor.folders",
    "minimegatron.doctor.session",
    "minimegatron.exercises.check",
    "minimegatron.exercises.check.engine",
    "minimegatron.exercises.grading",
    "minimegatron.exercises.labs",
    "minimegatron.exercises.check.runner",
    "minimegatron.launching.launcher",
    "minimegatron.notebook",
    "multiprocessing",
    "pages.notebook_runs",
    "playwright",
    "subprocess",
)
"""Modules, with all below them, that start processes."""
SYSTEM_CALLS = {"fork", "forkpty", "posix_spawn", "posix_spawnp", "system"}
PLACES = (
    *((os, name) for name in sorted(SYSTEM_CALLS) if hasattr(os, name)),
    (subprocess.Popen, "__init__"),
    (multiprocessing.process.BaseProcess, "start"),
)
"""What is called in this process for every process that it starts."""

_started: list[str] = []


# -- Which tests have the mark --


def names_processes(root: Callable) -> bool:
    """Whether the function, or what of these tests it names, names what starts processes."""
    todo, seen = [root], set()
    while todo:
        thing = todo.pop()
        if id(thing) in seen:
            continue
        seen.add(id(thing))
        if _starts(thing):
            return True
        if isinstance(thing, functools.partial):
            todo.append(thing.func)
        elif isinstance(thing, type):
            todo += [*vars(thing).values(), *thing.__mro__[1:]] if _is_ours(thing) else []
        elif isinstance(thing, staticmethod | classmethod | property | types.FunctionType):
            function = _function_of(thing)
            if function is not None and (function is root or _is_ours(function)):
                names, values = _names_in(function)
                if "os" in names and names & SYSTEM_CALLS:
                    return True
                todo += values
    return False


def _starts(thing: Any) -> bool:
    name = thing.__name__ if isinstance(thing, types.ModuleType) else _module(thing)
    return any(name == one or name.startswith(f"{one}.") for one in STARTING)


def _module(thing: Any) -> str:
    name = getattr(thing, "__module__", None)
    return name if isinstance(name, str) else ""


def _is_ours(thing: Any) -> bool:
    return _module(thing).partition(".")[0] in ("tests", "conftest") or _module(thing).startswith(
        ("test_", "docs")
    )


def _function_of(thing: Any) -> types.FunctionType | None:
    if isinstance(thing, property):
        thing = thing.fget
    thing = getattr(thing, "__func__", thing)
    thing = getattr(thing, "__wrapped__", thing)
    return thing if isinstance(thing, types.FunctionType) else None


def _names_in(function: types.FunctionType) -> tuple[set[str], list[Any]]:
    """The names in a function's code, and what those that are global stand for."""
    names = set(_code_names(function.__code__))
    values = [function.__globals__[name] for name in names if name in function.__globals__]
    for cell in function.__closure__ or ():
        try:
            values.append(cell.cell_contents)
        except ValueError:  # not yet filled
            continue
    # What is in a table of cases, one level deep.
    for value in list(values):
        if isinstance(value, dict | list | tuple | set) and len(value) < 1000:
            values += value.values() if isinstance(value, dict) else value
        elif isinstance(value, types.ModuleType) and _is_ours_module(value):
            values += [vars(value)[name] for name in names if name in vars(value)]
    return names, values


def _is_ours_module(module: types.ModuleType) -> bool:
    return module.__name__.partition(".")[0] == "tests"


def _code_names(code: types.CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _code_names(constant)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Sets the mark."""
    known: dict[Callable, bool] = {}
    for item in items:
        fixtures = getattr(item, "_fixtureinfo", None)
        functions = [getattr(item, "function", None)]
        if fixtures is not None:
            functions += [one.func for some in fixtures.name2fixturedefs.values() for one in some]
        for function in filter(None, functions):
            if function not in known:
                known[function] = names_processes(function)
            if known[function]:
                item.add_marker("processes")
                break
    _started.clear()  # what modules start while they are imported is no test's


# -- Whether any was missed --


def _noted(original: Callable, name: str) -> Callable:
    @functools.wraps(original)
    def start(*args: Any, **kwargs: Any) -> Any:
        _started.append(name)
        return original(*args, **kwargs)

    return start


def pytest_configure(config: pytest.Config) -> None:
    """Notes every start of a process from now on. It costs nothing but at a start."""
    for holder, name in PLACES:
        original = getattr(holder, name)
        if not hasattr(original, "__wrapped__"):
            owner = holder.__name__ if isinstance(holder, types.ModuleType) else holder.__qualname__
            setattr(holder, name, _noted(original, f"{owner}.{name}"))


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo) -> Iterator[None]:
    """Fails a test that has started a process and lacks the mark."""
    outcome = yield
    started, _started[:] = sorted(set(_started)), []
    report = outcome.get_result()
    if started and report.passed and item.get_closest_marker("processes") is None:
        report.outcome = "failed"
        report.longrepr = (
            f"{item.nodeid} starts a process ({', '.join(started)}) in its {report.when} and has "
            "no mark `processes`; decorate it with @pytest.mark.processes"
        )
