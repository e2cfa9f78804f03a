"""What this commit's ancestors were run against: versions of torch, Python, megatron-core, and when.

Called by: `cases`, for the page docs/held_against.md. `make torch-check` writes the record.
"""

import json
import re
import tomllib
from pathlib import Path

from case_words import table
from package import ROOT

RECORD = ROOT / "docs" / "held_against.json"
INTERNALS = ROOT / "docs" / "torch_internals.toml"


def runs(record: Path = RECORD) -> list[dict]:
    """The runs, the oldest torch first."""
    return json.loads(record.read_text()) if record.exists() else []


def held_runs(record: Path = RECORD) -> str:
    """A row for each run of the whole suite."""
    head = ["torch", "Python", "megatron-core", "transformers", "tests", "on", "commit"]
    rows = []
    for run in runs(record):
        tests = f"{run['passed']:,} passed"
        tests += f", **{run['failed']} failed**" if run["failed"] else ""
        tests += f", {run['skipped']} skipped" if run["skipped"] else ""
        versions = [run["torch"], run["Python"], run["megatron-core"], run["transformers"]]
        rows.append([*versions, tests, run["date"], f"`{run['commit']}`"])
    return table(head, rows)


def torch_range() -> str:
    """The versions of torch that the package takes.

    >>> torch_range().startswith("2.9")
    True
    """
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (wanted,) = [one for one in project["dependencies"] if re.match(r"torch\b", one)]
    least, below = re.fullmatch(r"torch>=([\d.]+),<([\d.]+)", wanted).groups()
    return f"{least} or newer, and older than {below}"


def held_internals(record: Path = RECORD) -> str:
    """A row for each name of torch's internals, and the versions of the runs that had it."""
    rows = []
    for entry in tomllib.loads(INTERNALS.read_text())["internal"]:
        had = [run["torch"] for run in runs(record) if entry["name"] not in run["missing"]]
        had = list(dict.fromkeys(had))
        what = f"`{entry['name']}`"
        where = f"`{entry['file'].rpartition('/')[2]}`"
        rows.append([what, where, entry["why"], entry.get("without", "it fails"), ", ".join(had)])
    return table(["torch's name", "used in", "for", "without it", "there in torch"], rows)
