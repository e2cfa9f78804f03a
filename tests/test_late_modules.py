"""Modules that are loaded when somebody first uses them."""

import ast
import copy
import pickle
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from unittest import mock

import cloudpickle
import pytest

import minimegatron
from minimegatron.exports import LATE, StandIn, put_stand_ins

NAMES = [f"{package}.{name}".lstrip(".") for package in LATE for name in LATE[package]]


def in_a_new_process(*lines: str) -> str:
    """What they print, in a process that has imported nothing of the package yet."""
    command = [sys.executable, "-c", "\n".join(("import sys", *lines))]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def test_a_late_module_is_imported_by_its_first_use():
    text = in_a_new_process(
        "from minimegatron.core import words",
        "print('minimegatron.core.words' in sys.modules, words)",
        "print(words.first_few(['a', 'b']))",
        "print('minimegatron.core.words' in sys.modules)",
        "from minimegatron.core import words as again",
        "print(type(again).__name__, again.first_few is words.first_few)",
    )
    stood_in, said, is_there, same = text.splitlines()
    assert stood_in == "False <stand-in of module 'minimegatron.core.words'>"
    assert said and is_there == "True"
    # From then on, an import finds the module itself.
    assert same == "module True"


def test_a_name_of_a_late_module_is_imported_at_once():
    text = in_a_new_process(
        "from minimegatron.core.words import first_few",
        "print('minimegatron.core.words' in sys.modules, first_few.__module__)",
    )
    assert text.split() == ["True", "minimegatron.core.words"]


@pytest.mark.parametrize("name", NAMES)
def test_each_late_module_is_there(name):
    """Under its name, with its names, and with no other's."""
    stand_in = StandIn(f"minimegatron.{name}")
    assert stand_in.__name__ == f"minimegatron.{name}"
    assert "__file__" in dir(stand_in) and vars(stand_in)["__file__"] == stand_in.__file__
    with pytest.raises(AttributeError, match="nothing_of_that_name"):
        stand_in.nothing_of_that_name  # noqa: B018


def test_what_a_test_puts_in_is_in_the_module(monkeypatch):
    from minimegatron.core import words

    stand_in = StandIn("minimegatron.core.words")
    before = words.first_few
    with mock.patch.object(stand_in, "first_few", "other"):
        assert words.first_few == stand_in.first_few == "other"
    monkeypatch.setattr(stand_in, "first_few", "third")
    assert words.first_few == "third"
    monkeypatch.undo()
    assert words.first_few is before is stand_in.first_few


def test_another_process_gets_the_module():
    """A function of a notebook is sent with what its names mean."""
    stand_in = StandIn("minimegatron.core.words")
    assert pickle.loads(pickle.dumps(stand_in)).__name__ == "minimegatron.core.words"
    assert cloudpickle.loads(cloudpickle.dumps(stand_in)).__name__ == "minimegatron.core.words"
    assert copy.deepcopy(stand_in).__name__ == "minimegatron.core.words"


def test_only_packages_that_have_late_modules_get_stand_ins():
    package = ModuleType("minimegatron.core.distributed")
    put_stand_ins(package)
    assert set(LATE["core.distributed"]) <= vars(package).keys()
    other = ModuleType("minimegatron.core.utils")
    put_stand_ins(other)
    assert not [name for name in vars(other) if isinstance(vars(other)[name], StandIn)]


def test_a_plain_program_loads_no_late_module():
    """Each is on the list because a plain GPT's program does not need it to begin."""
    text = in_a_new_process("import minimegatron.pretrain_gpt", "print(*sys.modules)")
    loaded = {name for name in NAMES if f"minimegatron.{name}" in text.split()}
    assert not loaded, "take these off the list, or let nobody import their names at once"


def test_no_late_module_is_imported_for_what_its_import_does():
    """What registers something when it is imported would not be there."""
    late = {f"minimegatron.{name}" for name in NAMES}
    idle = []
    for path in Path(minimegatron.__file__).parent.rglob("*.py"):
        tree = ast.parse(path.read_text())
        used = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
        idle += [
            f"{path.name}: {alias.name}"
            for node in ast.walk(tree)
            if isinstance(node, ast.ImportFrom)
            for alias in node.names
            if f"{node.module}.{alias.name}" in late and (alias.asname or alias.name) not in used
        ]
    assert not idle
