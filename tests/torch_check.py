"""The monthly check: the whole suite with another torch, noted for the page "Held against".

    python3 -m tests.torch_check [--torch torch==2.15.0]
    python3 -m tests.torch_check --record LOG --python PYTHON [--checkout FOLDER]

Called by: `make torch-check`. The first form clones this checkout's commit into build/torch-check, lets
it take any torch, and runs `make test` there; without `--torch`, with the newest one. The second form
notes a run of `make test` that is over, from what it printed. Needs no package; both write
docs/held_against.json, one row for each Python, torch and megatron-core.
"""

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
RECORD = ROOT / "docs" / "held_against.json"
WORK = ROOT / "build" / "torch-check"
FAILED = re.compile(r"^(?:FAILED|ERROR) tests/(\S+::\S+)", re.MULTILINE)
SUMMARY = re.compile(r"^=+ (\d+ \w+.*) in ([\d.]+)s(?: \([\d:]+\))? =+$", re.MULTILINE)
"""The last line of pytest."""
KEY = ("torch", "Python", "megatron-core")

# -- Run in the Python that ran the tests: it prints what is installed there. --
ASK = """
import importlib.metadata, json, os, platform
def version(name):
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"
from tests import torch_internals
print(json.dumps({
    "torch": version("torch"), "Python": platform.python_version(),
    "megatron-core": version("megatron-core"), "transformers": version("transformers"),
    "system": f"{platform.system()}, {os.cpu_count()} processors",
    "missing": torch_internals.missing(),
}))
"""


def main(argv: list[str] | None = None) -> int:
    """The exit code: that of the tests; 1 if the log has no result."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--torch", default="torch", help="what pip shall install")
    parser.add_argument("--record", type=Path, metavar="LOG", help="note a run that is over")
    parser.add_argument("--python", type=Path, default=Path(".venv/bin/python"))
    parser.add_argument("--checkout", type=Path, default=ROOT, help="where that run was made")
    args = parser.parse_args(argv)
    if args.record:
        log, python, checkout, code = args.record, args.python, args.checkout, 0
    else:
        log, checkout = WORK / "log", WORK / "minimegatron"
        python = checkout / ".venv" / "bin" / "python"
        code = run_suite(args.torch, checkout, log)
    counts = counts_in(log.read_text(errors="replace"))
    if counts is None:
        print(f"{log} has no last line of pytest, so nothing is noted", file=sys.stderr)
        return code or 1
    row = counts | versions(python.absolute()) | {"commit": commit_of(checkout)}
    note(row)
    print(f"Noted in {RECORD}: {in_words(row)}")
    return code


# -- A run --


def run_suite(requirement: str, checkout: Path, log: Path) -> int:
    """`make test` with this torch in a new clone; what it prints is shown, and kept in `log`."""
    shutil.rmtree(WORK, ignore_errors=True)
    WORK.mkdir(parents=True)
    subprocess.run(["git", "clone", "--quiet", str(ROOT), str(checkout)], check=True)
    project = checkout / "pyproject.toml"
    project.write_text(any_torch(project.read_text()))
    command = ["make", "test", f"TORCH={requirement}", f"PYTHON={sys.executable}"]
    with log.open("w") as kept:
        process = subprocess.Popen(
            command, cwd=checkout, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        for line in process.stdout:
            print(line, end="", flush=True)
            kept.write(line)
    return process.wait()


def any_torch(project: str) -> str:
    """pyproject.toml without an upper bound: whether it is right is the question.

    >>> any_torch('dependencies = ["torch>=2.9,<2.16", "numpy>=1.26"]')
    'dependencies = ["torch>=2.9", "numpy>=1.26"]'
    """
    changed, count = re.subn(r'"torch(>=[\d.]+),<[\d.]+"', r'"torch\1"', project)
    if count != 1:
        raise ValueError(f"pyproject.toml has {count} ranges like torch>=2.9,<2.16; make it one")
    return changed


# -- The note --


def counts_in(log: str) -> dict[str, Any] | None:
    """
    >>> counts_in("FAILED tests/a.py::b - x\\n=== 1 failed, 6447 passed in 740.12s (0:12:20) ===\\n")
    {'passed': 6447, 'failed': 1, 'skipped': 0, 'seconds': 740, 'failures': ['a.py::b']}
    """
    found = SUMMARY.findall(log)
    if not found:
        return None
    words, seconds = found[-1]
    counts = {kind: int(number) for number, kind in re.findall(r"(\d+) (\w+)", words)}
    failed = sum(counts.get(kind, 0) for kind in ("failed", "error", "errors"))
    kept = {"passed": counts.get("passed", 0), "failed": failed}
    kept |= {"skipped": counts.get("skipped", 0), "seconds": round(float(seconds))}
    return kept | {"failures": sorted(set(FAILED.findall(log)))}


def versions(python: Path) -> dict[str, Any]:
    """What is installed where the tests ran."""
    # The table of internals is this checkout's, whatever stands in the folder.
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONSAFEPATH": "1"}
    done = subprocess.run(
        [python, "-c", ASK], env=environment, capture_output=True, text=True, check=True
    )
    return json.loads(done.stdout) | {"date": datetime.now(UTC).date().isoformat()}


def commit_of(checkout: Path) -> str:
    """What was run. The widened range of torch in pyproject.toml does not count as a change."""
    command = ["git", "describe", "--always"]
    return subprocess.run(
        command, cwd=checkout, capture_output=True, text=True, check=True
    ).stdout.strip()


def note(row: dict[str, Any], record: Path = RECORD) -> None:
    """Adds the row, in place of an earlier one of the same versions."""
    rows = json.loads(record.read_text()) if record.exists() else []
    rows = [other for other in rows if any(other[key] != row[key] for key in KEY)] + [row]
    rows.sort(key=lambda one: ([int(n) for n in re.findall(r"\d+", one["torch"])], one["Python"]))
    record.write_text("[\n" + ",\n".join(json.dumps(one) for one in rows) + "\n]\n")


def in_words(row: dict[str, Any]) -> str:
    """One line."""
    lacks = f"; this torch has no {', '.join(row['missing'])}" if row["missing"] else ""
    return (
        f"torch {row['torch']}, Python {row['Python']}, megatron-core {row['megatron-core']}: "
        f"{row['passed']} passed, {row['failed']} failed, {row['skipped']} skipped{lacks}"
    )


if __name__ == "__main__":
    sys.exit(main())
