"""`minimegatron --version`: one line for a report, also where torch is not installed."""

import platform
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import minimegatron
from minimegatron.__main__ import main

ROOT = Path(__file__).parents[2]


def test_one_line_with_all_versions(capsys):
    assert main(["--version"]) == 0
    python = f"Python {platform.python_version()}, {platform.system()}"
    torch = metadata.version("torch")
    line = f"minimegatron {minimegatron.__version__}, torch {torch}, {python}\n"
    assert capsys.readouterr().out == line


def test_without_torch(capsys, monkeypatch):
    def unknown(name: str) -> str:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "version", unknown)
    assert main(["--version"]) == 0
    assert ", no torch, Python " in capsys.readouterr().out


def test_it_imports_no_torch():
    program = (
        "import sys\nsys.modules['torch'] = None  # importing it now raises ImportError\n"
        "from minimegatron.__main__ import main\nsys.exit(main(['--version']))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0 and done.stdout.startswith("minimegatron "), done.stderr


def test_the_overview_names_it(capsys):
    assert main(["--help"]) == 0
    assert "minimegatron --version" in capsys.readouterr().out
