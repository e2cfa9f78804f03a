"""Names that are looked up on first use: each one exists, and nothing is loaded before."""

import doctest
import importlib
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

import minimegatron
from minimegatron import exports
from minimegatron.tracing import pace

PACKAGE = Path(minimegatron.__file__).parent
PLACES = [
    ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts).removesuffix(".__init__")
    for path in sorted(PACKAGE.rglob("*.py"))
    if re.search(r"^__getattr__, __dir__ = lazily\($", path.read_text(), re.MULTILINE)
]


def test_doctest():
    assert doctest.testmod(exports) == (0, 4)


@pytest.mark.parametrize("place", PLACES)
def test_every_name_exists_and_is_listed(place):
    module = importlib.import_module(place)
    names = module.__dir__()
    assert set(names) > set(vars(module))
    for name in names:
        getattr(module, name)


def test_a_name_that_is_replaced_is_found_replaced(monkeypatch):
    before = minimegatron.pace
    monkeypatch.setattr(pace, "pace", print)
    assert minimegatron.pace is print
    monkeypatch.undo()
    assert minimegatron.pace is before


def test_an_unknown_name_is_an_attribute_error_like_pythons():
    with pytest.raises(AttributeError, match="^module 'math' has no attribute 'rot'$") as pythons:
        importlib.import_module("math").rot  # noqa: B018
    look_up, _ = exports.lazily("math", {})
    with pytest.raises(AttributeError, match="^module 'math' has no attribute 'rot'$") as ours:
        look_up("rot")
    assert (ours.value.name, ours.value.obj) == (pythons.value.name, pythons.value.obj)
    assert not hasattr(minimegatron, "__path_of_nothing__")


ASKED_BY_IMPORT = {
    "minimegatron.core",
    "minimegatron.core.left_out",
    "minimegatron.core.left_out_record",
}
"""Python asks these for each module of the package that it imports."""


def test_the_package_loads_quickly_and_without_torch():
    program = (
        "import sys, time; before = set(sys.modules); start = time.process_time()\n"
        "import minimegatron\n"
        "print(time.process_time() - start, *sorted(set(sys.modules) - before))\n"
    )
    runs = [
        subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
        for _ in range(3)
    ]
    took, modules = zip(*(run.stdout.split(maxsplit=1) for run in runs), strict=True)
    assert min(map(float, took)) < 0.05
    loaded = {name for name in modules[0].split() if name.startswith("minimegatron")}
    loaded -= ASKED_BY_IMPORT
    assert loaded == {"minimegatron", "minimegatron.exports"}
    assert "torch" not in modules[0].split()
    assert not hasattr(
        minimegatron, "name"
    )  # what the import needs itself is no name of the package's


def test_the_imports_that_readme_shows():
    (program,) = re.findall(
        r"```python\n(.*?)```", (PACKAGE.parent / "README.md").read_text(), re.S
    )
    assert program.count("import") == 4
    found: dict = {}
    exec(program, found)
    assert found["mpu"].__name__ == "minimegatron.core.parallel_state"
    record = json.loads((PACKAGE / "core" / "left_out.json").read_text())
    assert record["version"] == importlib.import_module("minimegatron.core").__version__ == "0.16.1"
    assert "Megatron-Core 0.16.1" in (PACKAGE.parent / "README.md").read_text()
