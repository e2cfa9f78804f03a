"""Old names of modules: they import, they are no files any more, and the site's old pages lead on."""

import importlib
import subprocess
import sys
from pathlib import Path

import pytest

import minimegatron
from minimegatron.moved import MOVED, new_file, spec_of_old

PACKAGE = Path(minimegatron.__file__).parent


@pytest.mark.parametrize(("old", "new"), MOVED.items())
def test_an_old_name_is_the_same_module(old, new):
    assert not (PACKAGE / f"{old.replace('.', '/')}.py").exists()
    assert (PACKAGE / f"{new.replace('.', '/')}.py").exists()
    moved = importlib.import_module(f"minimegatron.{old}")
    assert moved is importlib.import_module(f"minimegatron.{new}")
    assert moved.__name__ == moved.__spec__.name == f"minimegatron.{new}"


def test_old_names_are_found_before_the_new_ones_are_loaded():
    program = (
        "from minimegatron.exercises import verdict\n"
        "import minimegatron.planner.transport as transport, minimegatron.planner.check\n"
        "from minimegatron.planner.report import figures\n"
        "print(verdict.__name__, transport.__name__, minimegatron.planner.check.__name__)\n"
        "import minimegatron.planner.never\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout.split() == [
        "minimegatron.exercises.room.verdict",
        "minimegatron.planner.imagined_transport",
        "minimegatron.planner.plan_check",
    ]
    assert "ModuleNotFoundError: No module named 'minimegatron.planner.never'" in done.stderr


def test_only_old_names_are_found():
    assert spec_of_old("minimegatron.training.training") is None
    assert spec_of_old("launcher") is None
    assert new_file("/x/minimegatron/core/device.py") == "/x/minimegatron/core/utils.py"
    assert new_file("my_launcher.py") == "my_launcher.py"
