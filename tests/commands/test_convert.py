"""What `minimegatron convert` refuses before it begins; `convert/test_convert.py` has the weights."""

import io
import sys

import pytest

from minimegatron.__main__ import main


class Terminal(io.StringIO):
    """A stream where progress bars are drawn."""

    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("folder", ["nope", "no_model"])
def test_b10_a_refusal_stands_on_a_line_of_its_own(monkeypatch, tmp_path, folder):
    (tmp_path / "no_model").mkdir()
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    flags = ["--from", "hf", "--to", "minimegatron", "--save-dir", str(tmp_path / "out")]
    assert main(["convert", *flags, "--load-dir", str(tmp_path / folder)]) == 2
    (line,) = terminal.getvalue().splitlines()
    assert line.startswith("minimegatron convert: error: ")
    if folder == "nope":
        assert line.endswith(f"--load-dir: there is no folder {tmp_path / 'nope'}")
    assert not (tmp_path / "out").exists()
