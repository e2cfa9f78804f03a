"""What this commit's ancestors were run against: versions of torch, Python, megatron-core, and when.

Called by: `cases`, for the page docs/held_against.md. `make torch-check` writes the record.
"""

import re
import tomllib
from pathlib import Path

from cases.case_words import table
from source.places import DOCS, project, read_json

RECORD = DOCS / "held_against.json"
INTERNALS = DOCS / "torch_internals.toml"
KNOWN = DOCS / "known_failures.toml"


def runs(record: Path = RECORD) -> list[dict]:
    """The runs, the oldest torch first."""
    return read_json(record) if record.exists() else []


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


def known_failures() -> list[dict]:
    """Reasons for failures with an older torch, in the order of the file."""
    return tomllib.loads(KNOWN.read_text())["known"]


def failures_with(torch: str, record: Path = RECORD) -> list[str]:
    """The tests that failed in runs with versions of torch that begin so."""
    of_version = [run for run in runs(record) if run["torch"].startswith(torch)]
    return [failure for run in of_version for failure in run["failures"]]


def is_known(failure: str, torch: str) -> bool:
    """Whether the page says what a failed test means."""
    return any(
        torch.startswith(known["torch"]) and failure.startswith(tuple(known["tests"]))
        for known in known_failures()
    )


def older_torch(record: Path = RECORD) -> str:
    """A row for each reason why a test of a recorded run has failed."""
    rows = [
        [known["torch"] + "x", known["why"], ", ".join(f"`{name}`" for name in known["tests"])]
        for known in known_failures()
        if failures_with(known["torch"], record)
    ]
    return table(["torch", "what does not hold", "tests"], rows)


def torch_range() -> str:
    """The versions of torch that the package takes.

    >>> torch_range().startswith("2.9")
    True
    """
    (wanted,) = [one for one in project()["dependencies"] if re.match(r"torch\b", one)]
    least, below = re.fullmatch(r"torch>=([\d.]+),<([\d.]+)", wanted).groups()
    return f"{least} or newer, and older than {below}"


def held_internals() -> str:
    """A row for each name of torch's internals: who uses it, and what for."""
    rows: dict[str, tuple[list[str], list[str]]] = {}
    for entry in _internals():
        files, reasons = rows.setdefault(entry["name"], ([], []))
        files.append(f"`{entry['file'].rpartition('/')[2]}`")
        instead = f"; without it, {entry['without']}" if "without" in entry else ""
        reasons.append(entry["why"] + instead)
    cells = [
        [f"`{name}` in {', '.join(dict.fromkeys(files))}", "; ".join(dict.fromkeys(reasons))]
        for name, (files, reasons) in rows.items()
    ]
    return table(["torch's name", "what for"], cells)


def names_not_there(record: Path = RECORD) -> str:
    """A sentence: which names which of these versions of torch has not.

    >>> names_not_there(Path("no such record"))
    'No version has been tried.'
    """
    tried = runs(record)
    if not tried:
        return "No version has been tried."
    lacking: dict[str, list[str]] = {}
    for run in tried:
        for name in run["missing"]:
            lacking.setdefault(name, []).append(run["torch"])
    said = "Each of these names was there in each version of torch in the first table"
    exceptions = "; ".join(f"`{name}` not in {', '.join(of)}" for name, of in lacking.items())
    return f"{said}, with an exception: {exceptions}." if lacking else f"{said}."


def _internals() -> list[dict[str, str]]:
    return tomllib.loads(INTERNALS.read_text())["internal"]
