"""Runs parts, each in a process of its own, shows what each found, and keeps it for the report.

Called by: `__main__`. Calls: `processes`, which runs `run_part`. docs/tools/cases/gpu_page.py says what
a report says. Imports no torch: a part, or torch itself, may crash or hang, and the report is written.
"""

import contextlib
import importlib.util
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.benchmarks.results import machine_facts
from tests.checkout import git
from tests.gpu.parts import Part
from tests.gpu.processes import Ended, run_limited
from tests.gpu.run_part import DONE

ROOT = Path(__file__).parents[2]
HOLDS, FAILED, NOT_RUN, NOT_ASKED = "holds", "failed", "not run", "not asked for"
PROBE_SECONDS = 120.0
"""The first import of torch on a new machine reads some gigabytes."""
LEAST_SECONDS, RESERVE_SECONDS = 10.0, 8.0
"""A part begins if it has so long; and so much is kept for ending it and for the report."""
CUT_OFF = "the check was ended during it"
LOG_LINES, LONGEST = 60, 600
FIELDS = {"what": str, "found": str, "expected": str, "holds": bool}


@dataclass
class Check:
    """One run of the check."""

    path: Path
    """Of the report."""
    deadline: float
    """By `time.monotonic`."""
    device: str = "cuda"
    is_quick: bool = False
    python: str = sys.executable
    commit: str = ""
    """What is run, where git cannot say it."""
    say: Callable[[str], Any] = print
    report: dict[str, Any] = field(default_factory=dict)

    def left(self) -> float:
        """Seconds that a part may take now."""
        return self.deadline - time.monotonic() - RESERVE_SECONDS

    # -- The machine --

    def probe(self, pretend_gpus: int | None = None) -> bool:
        """Asks torch, in another process, what is here; False if it has no answer."""
        machine = machine_facts() | {"commit": self.commit or commit_here()}
        self.report = {"machine": machine, "gpu": "unknown", "num_gpus": 0, "parts": []}
        self.report["problem"] = "torch was asked what is here, and has not answered"
        if pretend_gpus is not None:
            self.report["rehearsal"] = True
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
            file, log = Path(folder) / "facts.json", Path(folder) / "log"
            command = [self.python, "-m", "tests.gpu.probe", str(file)]
            ended = run_limited(command, min(PROBE_SECONDS, self.left()), log, ROOT, _environment())
            facts = _read_json(file)
            self.report["log"] = _last_lines(log)
        if ended.code != 0 or not isinstance(facts, dict):
            self.report["problem"] = f"torch does not say what is here: {ended.in_words()}"
            return False
        del self.report["problem"]
        self.report |= {"gpu": facts.pop("gpu"), "num_gpus": facts.pop("num_gpus")}
        machine |= facts
        if pretend_gpus is not None:
            self.report["num_gpus"] = pretend_gpus
        elif not self.report["num_gpus"] and any("CUDA" in line for line in self.report["log"]):
            # A machine without a GPU prints nothing here. This torch says what is wrong with its GPU.
            self.report["problem"] = "torch finds a GPU here that it cannot use"
            return False
        return True

    # -- The parts --

    def run(self, parts: Sequence[Part], only: Sequence[str] = ()) -> dict[str, Any]:
        """Runs them in order, whatever comes of each; writes the report after every one.

        With `only`, the others keep what the report at `path` says of them, if it is of such a machine.
        """
        earlier = self._earlier() if only else {}
        self.report["parts"] = [_blank(number, part) for number, part in enumerate(parts, 1)]
        for entry, part in zip(self.report["parts"], parts, strict=True):
            is_asked_for = not only or part.name in only
            entry["state"] = f"{NOT_RUN}: {'the check ended before' if is_asked_for else NOT_ASKED}"
            if not is_asked_for and part.name in earlier:
                entry |= earlier[part.name] | {"number": entry["number"], "title": part.title}
        self.write()
        for entry, part in zip(self.report["parts"], parts, strict=True):
            if only and part.name not in only:
                continue
            reason = self._why_not(part)
            entry["state"] = f"{NOT_RUN}: {reason}" if reason else f"{FAILED}: {CUT_OFF}"
            self.write()
            entry |= {} if reason else self._run(part)
            self.write()
            self.say(in_words(entry))
        return self.report

    def _earlier(self) -> dict[str, dict[str, Any]]:
        """Parts by name, of the report that is there, if the same GPU and torch made it."""
        found = _read_json(self.path)
        try:
            is_same = found["machine"]["torch"] == self.report["machine"]["torch"] and all(
                found.get(key) == self.report.get(key) for key in ("gpu", "num_gpus", "rehearsal")
            )
            return {entry["name"]: entry for entry in found["parts"]} if is_same else {}
        except (TypeError, KeyError):
            return {}

    def _why_not(self, part: Part) -> str:
        num_gpus = self.report["num_gpus"]
        missing = [name for name in part.packages if not _is_installed(name)]
        if part.num_gpus > num_gpus:
            return f"needs {part.num_gpus} GPUs, here {'is' if num_gpus == 1 else 'are'} {num_gpus}"
        if missing:
            return f"needs {', '.join(missing)}, not installed here"
        if self.left() < LEAST_SECONDS:
            return "the time of the check was up"
        return ""

    def _run(self, part: Part) -> dict[str, Any]:
        seconds = min(part.seconds, self.left())
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
            file, log = Path(folder) / "findings", Path(folder) / "log"
            command = [self.python, "-m", "tests.gpu.run_part", part.run, str(file)]
            command += ["--device", self.device, "--num-gpus", str(self.report["num_gpus"])]
            command += ["--seconds", str(seconds)] + ["--quick"] * self.is_quick
            ended = run_limited(command, seconds, log, ROOT, _environment())
            findings, is_done = read_findings(file)
            words = _last_lines(log)
        state = state_of(findings, is_done, ended)
        entry = {"state": state, "findings": findings, "seconds": round(ended.seconds, 1)}
        return entry | {"commit": self.report["machine"]["commit"], "log": words}

    def write(self) -> None:
        """The report as it is now, in one move: whoever stops this finds a whole one.

        Where that cannot be, the check goes on, and writes into the folder for temporary files.
        """
        for path in (self.path, Path(tempfile.gettempdir()) / self.path.name):
            partial = path.with_name(f"{path.name}.{os.getpid()}")
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
                partial.write_text(json.dumps(self.report, indent=1) + "\n")
                partial.replace(path)
            except OSError as error:
                with contextlib.suppress(OSError):
                    partial.unlink()
                self.say(f"The report cannot be written to {path} ({error})")
                continue
            self.path = path
            return


def state_of(findings: list[dict], is_done: bool, ended: Ended) -> str:
    """
    >>> state_of([{"holds": True}], False, Ended(-9, 3.0))
    'failed: killed by SIGKILL'
    """
    if ended.code != 0:
        return f"{FAILED}: {ended.in_words()}"
    if not is_done or not findings:
        return f"{FAILED}: it ended without a result"
    return HOLDS if all(finding["holds"] for finding in findings) else FAILED


def read_findings(file: Path) -> tuple[list[dict[str, Any]], bool]:
    """What a part has written, and whether it was done. A line without sense is a finding, too."""
    lines = _end_of(file).decode(errors="replace").splitlines()
    findings, is_done = [], False
    for line in lines:
        try:
            found = json.loads(line)
        except (ValueError, RecursionError):
            found = None
        if line == json.dumps(DONE):
            is_done = True
        elif _is_finding(found):
            findings.append({key: _plain(found[key]) for key in FIELDS})
        else:
            text = {"found": _plain(line[:80]), "expected": "a finding", "holds": False}
            findings.append({"what": "what the part wrote"} | text)
    return findings, is_done


def _is_finding(found: Any) -> bool:
    return (
        isinstance(found, dict)
        and found.keys() == FIELDS.keys()
        and all(isinstance(found[key], kind) for key, kind in FIELDS.items())
    )


# -- Helpers --


def _blank(number: int, part: Part) -> dict[str, Any]:
    entry = {"number": number, "name": part.name, "title": part.title}
    return entry | {"findings": [], "seconds": 0.0}


def commit_here() -> str:
    """What is run: a commit of the project, and whether files differ from it."""
    return git("describe", "--always", "--dirty") or "unknown"


def _environment() -> dict[str, str]:
    """The checkout comes first, whatever else is installed; a processor for each rank."""
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {"OMP_NUM_THREADS": "1", **os.environ, "PYTHONPATH": os.pathsep.join(paths)}


def _is_installed(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except (ImportError, ValueError):
        return False


def _read_json(file: Path) -> Any:
    try:
        return json.loads(file.read_bytes())
    except (OSError, ValueError):
        return None


def _end_of(file: Path, most: int = 1 << 20) -> bytes:
    """Its last bytes: a part may have written more than there is room for in memory."""
    try:
        with file.open("rb") as open_file:
            open_file.seek(max(0, file.stat().st_size - most))
            return open_file.read(most)
    except OSError:
        return b""


def _last_lines(log: Path) -> list[str]:
    lines = _end_of(log).decode(errors="replace").splitlines()
    return [_plain(line) for line in lines[-LOG_LINES:]]


def _plain(value: Any) -> Any:
    """Text as a page and a terminal can show it."""
    if not isinstance(value, str):
        return value
    shown = "".join(char if char.isprintable() else "\N{REPLACEMENT CHARACTER}" for char in value)
    return shown if len(shown) <= LONGEST else shown[:LONGEST] + " ..."


def in_words(entry: dict[str, Any]) -> str:
    """A part for a terminal: its title and state, a line per finding."""
    lines = [f"{entry['number']:2}. {entry['title']}: {entry['state']} ({entry['seconds']:.1f} s)"]
    for finding in entry["findings"]:
        mark = " " if finding["holds"] else "!"
        expected = f"   expected: {finding['expected']}" if finding["expected"] else ""
        lines.append(f"  {mark} {finding['what']}: {finding['found']}{expected}")
    return "\n".join(lines)
