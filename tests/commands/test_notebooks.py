"""`minimegatron notebooks`, from a clone and from an installed package."""

import re
from pathlib import Path
from types import SimpleNamespace

from minimegatron.__main__ import main
from minimegatron.commands import notebooks_command as notebooks

ROOT = Path(__file__).parents[2]
NAMES = sorted(path.name for path in (ROOT / "notebooks").glob("*.ipynb"))


def test_puts_what_is_missing_there_and_keeps_the_rest(tmp_path, capsys):
    folder = tmp_path / "mine"
    folder.mkdir()
    (folder / NAMES[0]).write_text("changed")
    assert main(["notebooks", str(folder)]) == 0
    assert sorted(path.name for path in folder.iterdir()) == NAMES
    assert (folder / NAMES[0]).read_text() == "changed"
    said = capsys.readouterr().out
    assert f"Notebooks put into {folder}: {len(NAMES) - 1}; left as they were: 1" in said
    assert f"jupyter lab {folder / NAMES[0]}" in said


def test_an_installed_package_knows_where_they_are(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(notebooks, "CLONE", tmp_path / "no clone")
    path = ROOT / "notebooks" / NAMES[0]
    files = [SimpleNamespace(suffix=path.suffix, locate=lambda: path)]
    monkeypatch.setattr(notebooks.metadata, "files", lambda _: files)
    assert main(["notebooks", str(tmp_path / "mine")]) == 0
    assert [one.name for one in (tmp_path / "mine").iterdir()] == [NAMES[0]]
    monkeypatch.setattr(notebooks.metadata, "files", lambda _: None)
    assert main(["notebooks", str(tmp_path / "mine")]) == 2
    assert "were not installed with this package" in capsys.readouterr().err


def test_the_wheel_has_them():
    """`tests.exercises.first_use` makes the wheel and uses them; here, that it is told to hold them."""
    text = (ROOT / "pyproject.toml").read_text()
    assert re.search(r'"share/minimegatron/notebooks" = \["notebooks/\*\.ipynb"\]', text)
