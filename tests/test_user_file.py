"""A user's file runs as it is now, leaves nothing behind, and its lines can be shown."""

import os
import sys
import traceback

import pytest

from minimegatron.launching.user_file import load_user_file

NAME = "a_users_file"


@pytest.fixture
def path(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    yield tmp_path / "mine.py"
    sys.modules.pop(NAME, None)


def test_a_change_within_the_same_second_counts(path):
    """Of the same length, too: Python's compiled copy would be taken for the file."""
    for value in (1, 2):
        path.write_text(f"value = {value}\n")
        os.utime(path, (1_000_000_000, 1_000_000_000))
        assert load_user_file(path, NAME).value == value
    assert [found.name for found in path.parent.iterdir()] == ["mine.py"]


def test_what_it_raises_shows_its_lines(path):
    path.write_text("def fail():\n    raise KeyError('gone')\n")
    module = load_user_file(path, NAME)
    assert sys.modules[NAME] is module and module.__file__ == str(path)
    with pytest.raises(KeyError) as raised:
        module.fail()
    frame = traceback.extract_tb(raised.value.__traceback__)[-1]
    assert (frame.filename, frame.lineno, frame.line) == (str(path), 2, "raise KeyError('gone')")


def test_a_file_that_is_no_python(path):
    path.write_text("def (:\n")
    with pytest.raises(SyntaxError):
        load_user_file(path, NAME)
