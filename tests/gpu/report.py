"""Runs parts in order, shows what each found, and keeps it for the report.

Called by: `__main__`. docs/tools/gpu_page.py says what a report says.
"""

import shutil
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import torch

from tests.benchmarks.results import machine_facts
from tests.gpu.place import Finding, Place

ROOT = Path(__file__).parents[2]
NO_GPU = "Nothing was checked: torch finds no GPU here."


class Part(NamedTuple):
    """One of the thirteen."""

    title: str
    num_gpus: int
    """How many it needs."""
    run: Callable[[Place], list[Finding]]


def run_parts(parts: Sequence[Part], place: Place, say: Callable[[str], Any] = print) -> dict:
    """Runs them in order, and stops at the first one that does not hold; what came of each."""
    name = torch.cuda.get_device_name() if place.is_gpu else "none"
    machine = machine_facts() | {"commit": commit()}
    report = {"machine": machine, "gpu": name, "num_gpus": place.num_gpus, "parts": []}
    failed = False
    for number, part in enumerate(parts, 1):
        entry = {"number": number, "title": part.title, "findings": [], "seconds": 0.0}
        report["parts"].append(entry)
        if failed:
            entry["state"] = "not run: an earlier part failed"
        elif part.num_gpus > place.num_gpus:
            entry["state"] = f"not run: needs {part.num_gpus} GPUs, here are {place.num_gpus}"
        else:
            entry |= _run(part, place)
            failed = entry["state"] == "failed"
        say(in_words(entry))
    return report


def commit() -> str:
    """What is run: a commit of the project, and whether files differ from it."""
    git = shutil.which("git")
    if git is None:
        return "unknown"
    said = subprocess.run(
        [git, "describe", "--always", "--dirty"], cwd=ROOT, capture_output=True, text=True
    )
    return said.stdout.strip() or "unknown"


def _run(part: Part, place: Place) -> dict[str, Any]:
    begun = time.perf_counter()
    try:
        findings = part.run(place)
    except Exception as error:  # whatever a part meets is what it found
        last = str(error).strip().splitlines()[-1:] or [""]
        findings = [Finding("error", f"{type(error).__name__}: {last[0]}", "none", False)]
    holds = bool(findings) and all(finding.holds for finding in findings)
    return {
        "state": "holds" if holds else "failed",
        "findings": [asdict(finding) for finding in findings],
        "seconds": round(time.perf_counter() - begun, 1),
    }


def in_words(entry: dict[str, Any]) -> str:
    """A part for a terminal: its title and state, a line per finding."""
    lines = [f"{entry['number']:2}. {entry['title']}: {entry['state']} ({entry['seconds']:.1f} s)"]
    for finding in entry["findings"]:
        mark = " " if finding["holds"] else "!"
        expected = f"   expected: {finding['expected']}" if finding["expected"] else ""
        lines.append(f"  {mark} {finding['what']}: {finding['found']}{expected}")
    return "\n".join(lines)
