"""The scripts that make the site keep the rules of the house: sizes, docstrings, style."""

import ast
import re
import subprocess
import sys

import pytest

from tests.docs.conftest import ROOT
from tests.test_house import MAX_FILE_LINES, MAX_FUNCTION_LINES, code_lines, functions

TOOLS = sorted((ROOT / "docs" / "tools").glob("*.py"))
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


@pytest.mark.parametrize("command", [("check",), ("format", "--check")], ids=" ".join)
def test_ruff_is_content(command):
    ruff = [sys.executable, "-m", "ruff", *command, "docs/tools"]
    done = subprocess.run(ruff, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr
