"""The scripts that make the site keep the rules of the house: sizes, docstrings, style."""

import ast
import importlib
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs.conftest import ROOT
from tests.test_house import MAX_FILE_LINES, MAX_FUNCTION_LINES, code_lines, functions

FOLDER = ROOT / "docs" / "tools"
DOORS = ("build_docs", "mkdocs_hook", "record", "tell", "why")
"""What people, the Makefile and MkDocs run. All else is in a room."""
ROOMS = sorted(path.parent for path in FOLDER.glob("*/__init__.py"))
MAX_ROOMS = 8
INITS = [room / "__init__.py" for room in ROOMS]
TOOLS = sorted(set(FOLDER.rglob("*.py")).difference(INITS))
SCRIPTS = sorted((ROOT / "docs" / "javascripts").glob("*.*js"))


def test_functions_and_files_are_short():
    assert len(TOOLS) > 20 and len(SCRIPTS) > 10
    long = []
    for path in TOOLS:
        if len(code_lines(path)) > MAX_FILE_LINES:
            long.append(f"{path.name}: {len(code_lines(path))} code lines")
        for function in functions(path):
            body = range(function.body[0].lineno, function.end_lineno + 1)
            if len(code_lines(path).intersection(body)) > MAX_FUNCTION_LINES:
                long.append(f"{path.name}: {function.name}")
    for path in SCRIPTS:
        if len(path.read_text().splitlines()) > MAX_FILE_LINES:
            long.append(path.name)
    assert not long


@pytest.mark.parametrize("path", TOOLS, ids=lambda path: path.stem)
def test_every_script_says_what_it_does_and_for_whom(path):
    docstring = ast.get_docstring(ast.parse(path.read_text())) or ""
    assert re.search(r"(Called|Run|Filled in|Evaluated) by|`make docs` runs", docstring)
    assert not re.search(r"\b(TODO|FIXME|XXX)\b|for now", path.read_text())


def imported(path: Path) -> set[str]:
    """The rooms, and the doors, that a tool imports from."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module.partition(".")[0])
    return found & {*DOORS, *(room.name for room in ROOMS)}


def test_every_tool_is_in_a_room_or_is_a_door():
    assert 0 < len(ROOMS) <= MAX_ROOMS
    assert sorted(path.stem for path in FOLDER.glob("*.py")) == sorted(DOORS)
    in_rooms = {path for room in ROOMS for path in room.glob("*.py")}
    assert set(FOLDER.rglob("*.py")) == in_rooms | set(FOLDER.glob("*.py"))
    names = [path.stem for path in TOOLS]
    assert len(names) == len(set(names)), "a tool is found by its name alone"


@pytest.mark.parametrize("path", INITS, ids=lambda path: path.parent.name)
def test_a_room_says_what_comes_in_and_what_goes_out(path):
    first = (ast.get_docstring(ast.parse(path.read_text())) or "").partition("\n")[0]
    assert re.fullmatch(r".+ comes? in.*; .+ goe?s? out\.", first), first


def test_no_room_needs_itself_through_another():
    """Nor does a room need a door."""
    needs = {
        room.name: set().union(*map(imported, room.glob("*.py"))) - {room.name} for room in ROOMS
    }
    assert not set(DOORS) & set().union(*needs.values())
    left = dict(needs)
    while ready := [name for name, others in left.items() if not others & left.keys()]:
        for name in ready:
            del left[name]
    assert not left, f"in a cycle, or above one: {left}"


def test_a_door_lists_tools_that_are_there():
    for door in ("record", "tell"):
        commands = importlib.import_module(door).COMMANDS
        for module in commands.values():
            path = FOLDER.joinpath(*module.split(".")).with_suffix(".py")
            defined = {node.name for node in functions(path)}
            assert "main" in defined, module


@pytest.mark.parametrize("command", [("check",), ("format", "--check")], ids=" ".join)
def test_ruff_is_content(command):
    ruff = [sys.executable, "-m", "ruff", *command, "docs/tools"]
    done = subprocess.run(ruff, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr
