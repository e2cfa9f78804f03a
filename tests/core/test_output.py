"""What is printed never ends a run: letters that a stream lacks, closed streams, full disks."""

import io
import os
import subprocess
import sys

import pytest

from minimegatron.training import failures
from minimegatron.training.utils import print_rank_0


@pytest.fixture(autouse=True)
def nobody_ends(monkeypatch):
    """Where a run would end this process, the test fails instead."""

    def end(code: int) -> None:
        raise AssertionError(f"the process would have ended with {code}")

    monkeypatch.setattr(os, "_exit", end)


def test_b4_letters_that_the_stream_lacks_are_escaped(monkeypatch):
    written = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, encoding="ascii"))
    monkeypatch.setattr(sys, "stderr", io.TextIOWrapper(io.BytesIO(), encoding="ascii"))
    with failures.reported():
        print_rank_0("a sample: caf\xe9 \u2588")
        print("\u2588", file=sys.stderr)
    sys.stdout.flush()
    assert written.getvalue() == b"a sample: caf\\xe9 \\u2588\n"


def test_b4_every_command_prints_in_ascii():
    code = (
        "import sys; from minimegatron.__main__ import main\n"
        "main(['groups', '--world-size', '4']); print('\\u2588 f\\xfcr alle')"
    )
    environment = {**os.environ, "PYTHONIOENCODING": "ascii"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True)
    assert done.stdout.endswith(b"\\u2588 f\\xfcr alle\n"), done.stderr


@pytest.mark.parametrize("name", ["stdin", "stdout", "stderr"])
def test_b8_a_closed_stream_goes_nowhere(monkeypatch, name):
    monkeypatch.setattr(sys, name, None)  # what Python makes of a closed one
    with failures.reported():
        stream = getattr(sys, name)
        assert stream.isatty() is False
        if name == "stdin":
            assert stream.read() == ""
        else:
            print("nobody reads this", file=stream, flush=True)


def test_b8_no_file_takes_the_number_of_a_closed_stream(tmp_path):
    code = (
        "import os; from minimegatron.core.output import keep_printing; keep_printing()\n"
        f"file = open({str(tmp_path / 'out')!r}, 'w')\n"
        "os.write(1, b'lost'); print('lost'); file.write(str(file.fileno() > 2)); file.close()\n"
    )
    script = tmp_path / "program.py"
    script.write_text(code)
    shell = f'exec "{sys.executable}" "{script}" <&- >&- 2>&-'
    assert subprocess.run(["/bin/sh", "-c", shell]).returncode == 0
    assert (tmp_path / "out").read_text() == "True"


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs a device that is always full")
def test_b8_a_full_disk_under_the_log_is_told_once_and_ends_nothing(monkeypatch):
    said = io.BytesIO()
    monkeypatch.setattr(sys, "stderr", io.TextIOWrapper(said, encoding="utf-8"))
    monkeypatch.setattr(sys, "stdout", open("/dev/full", "w"))  # noqa: SIM115
    with failures.reported():
        for _ in range(3):
            print_rank_0("iteration")
            sys.stdout.flush()
    sys.stderr.flush()
    text = said.getvalue().decode()
    assert text.count("No space left on device") == 1
    assert "standard output" in text and "goes on without it" in text


def test_b8_a_reader_that_left_ends_nothing(monkeypatch):
    reader, writer = os.pipe()
    os.close(reader)
    said = io.BytesIO()
    monkeypatch.setattr(sys, "stderr", io.TextIOWrapper(said, encoding="utf-8"))
    monkeypatch.setattr(sys, "stdout", os.fdopen(writer, "w"))
    with failures.reported():
        print("iteration", flush=True)
        print("iteration", flush=True)
    sys.stderr.flush()
    assert said.getvalue().decode().count("Broken pipe") == 1


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs a device that is always full")
@pytest.mark.parametrize("command", ["--version", "groups --world-size 64"])
def test_b8_a_command_whose_output_has_no_room_says_so(command):
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "minimegatron", *command.split()],
            stdout=full,
            stderr=subprocess.PIPE,
        )
    said = b"minimegatron: error: standard output: No space left on device\n"
    assert (done.returncode, done.stderr) == (2, said)
