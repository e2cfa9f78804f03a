"""Runs every test that starts processes, many times, on a machine that is busy with other work.

    make test-stress                                # ten times under four busy loops
    make test-stress STRESS_TIMES=3 STRESS_BUSY=8   # other numbers
    python -m tests.stress --times 3 tests/doctor   # some of them

The tests are those with the mark `processes`. One run of pytest takes a few files of tests, once; the
first round takes every file, then the second round begins. What is done is in the log after each
run, and a second call goes on from there: after Ctrl-C, a crash, or the end of the day. Another commit,
other changes or other numbers begin a new log; `--continue` goes on with the old one all the same,
and notes that in it.

The log has a line of JSON about the whole, then a line per file of tests: how many times each test
has passed, and each failure with the file that holds its output. The exit code is 1 if any failed.
"""

import argparse
import contextlib
import hashlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
import xml.etree.ElementTree as ElementTree
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path

from tests.busy import busy_loops

ROOT = Path(__file__).parents[1]
LOG = "tests/stress_log.jsonl"
OUTPUTS = "build/stress"
MARK = "processes"
LIMIT_SECONDS = 3600
"""For one file in a run; a test has its own limit, which names it."""
END_SECONDS = 30
"""How long a run of pytest may take to end what it has started."""
TEST_SECONDS = 1500
"""For one test that does not say how long it may take."""
NO_TESTS = 5
"""pytest's exit code where it found none."""


@dataclass
class Failure:
    """A test that has failed once."""

    test: str
    round: int
    output: str


@dataclass
class FileLog:
    """What is known of one file of tests."""

    file: str
    rounds: list[int] = field(default_factory=list)
    """Those that are over."""
    seconds: float = 0.0
    passed: dict[str, int] = field(default_factory=dict)
    skipped: dict[str, int] = field(default_factory=dict)
    failures: list[Failure] = field(default_factory=list)


@dataclass
class Log:
    """The whole log. `about`: commit, numbers, when it began, and with what else it went on later."""

    path: Path
    about: dict[str, object]
    files: dict[str, FileLog] = field(default_factory=dict)

    @classmethod
    def open(cls, path: Path, about: dict[str, object], goes_on: bool) -> "Log":
        """The log that is there, if it is about the same; else a new one."""
        if path.exists():
            first, *rest = [json.loads(line) for line in path.read_text().splitlines()]
            went_on = first.get("went_on", [])
            last = [first, *went_on][-1]
            same = all(last.get(key) == about[key] for key in ("commit", "busy", "workers"))
            if same or goes_on:
                went_on = went_on if same else [*went_on, about]
                log = cls(path, first | {"times": about["times"], "went_on": went_on})
                for line in rest:
                    failures = [Failure(**one) for one in line.pop("failures")]
                    log.files[line["file"]] = FileLog(**line, failures=failures)
                return log
        return cls(path, about)

    def save(self) -> None:
        """Writes it, whole or not at all."""
        lines = [self.about, *(asdict(self.files[name]) for name in sorted(self.files))]
        new = self.path.with_name(f"{self.path.name}.new")
        new.write_text("".join(json.dumps(line) + "\n" for line in lines))
        new.replace(self.path)


# -- What there is to run --


def commit_of(root: Path) -> str:
    """The commit, and a digest of what was changed since; the log itself does not count."""

    def git(*words: str) -> bytes:
        return subprocess.run(["git", *words], cwd=root, capture_output=True).stdout

    commit = git("rev-parse", "--short=12", "HEAD").decode().strip() or "no commit"
    changes = git("diff", "HEAD", "--", ".", f":!{LOG}")
    for name in git("ls-files", "--others", "--exclude-standard", "-z").decode().split("\0"):
        if name and not name.startswith(LOG):
            changes += name.encode() + (root / name).read_bytes()
    return f"{commit}+{hashlib.sha256(changes).hexdigest()[:8]}" if changes else commit


def files_of_tests(root: Path, paths: list[str]) -> list[str]:
    """Every file below `paths` that has a test with the mark."""
    command = [sys.executable, "-m", "pytest", "--collect-only", "-qq", "-m", MARK, *paths]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True)
    if done.returncode not in (0, NO_TESTS):
        raise RuntimeError(f"the tests cannot be collected:\n{done.stdout}\n{done.stderr}")
    counts = [line.rpartition(": ") for line in done.stdout.splitlines()]
    return [file for file, _, count in counts if count.isdigit()]


# -- One run --


class Stress:
    """All runs, a few at a time."""

    def __init__(self, root: Path, log: Log):
        self.root, self.log = root, log
        self._lock = threading.Lock()
        self._running: dict[int, subprocess.Popen] = {}
        self._is_over = False

    def run(self, files: list[str], times: int, workers: int, together: int) -> None:
        """Whatever is not in the log yet; `together` files in one run of pytest."""
        todo: list[tuple[int, list[str]]] = []
        for number in range(1, times + 1):
            known = self.log.files
            left = [one for one in files if one not in known or number not in known[one].rounds]
            todo += [(number, left[at : at + together]) for at in range(0, len(left), together)]
        num_left = sum(len(files_of_run) for _, files_of_run in todo)
        print(f"{num_left} of {times * len(files)} runs of a file are left to do", flush=True)
        with ThreadPoolExecutor(workers) as pool:
            jobs = [pool.submit(self._run, *run) for run in todo]
            try:
                for job in jobs:
                    job.result()
            except BaseException:
                self._is_over = True
                _end(*self._running.values())
                raise

    def _run(self, number: int, files: list[str]) -> None:
        if self._is_over:
            return
        folder, name = self.root / OUTPUTS, f"{files[0].replace('/', '.')}-{number}"
        folder.mkdir(parents=True, exist_ok=True)
        output, report = folder / f"{name}.txt", folder / f"{name}.xml"
        report.unlink(missing_ok=True)
        command = [sys.executable, "-m", "pytest", "-m", MARK, f"--junitxml={report}"]
        command += ["-o", f"timeout={TEST_SECONDS}", "-p", "no:cacheprovider", *files]
        began = time.monotonic()
        with open(output, "w") as out:
            program = subprocess.Popen(
                command, cwd=self.root, stdout=out, stderr=out, start_new_session=True
            )
            self._running[program.pid] = program
            try:
                code = program.wait(LIMIT_SECONDS * len(files))
            except subprocess.TimeoutExpired:
                _end(program)
                code = program.wait()
            finally:
                del self._running[program.pid]
        if self._is_over:
            return
        found = results_in(report, files)
        has_failed = any("failed" in results.values() for results in found.values())
        if code not in (0, NO_TESTS) and not has_failed:
            has_failed = True
            for results in found.values():
                results[f"(pytest itself, exit code {code})"] = "failed"
        seconds = (time.monotonic() - began) / len(files)
        with self._lock:
            for file, results in found.items():
                self._note(number, file, results, output, seconds)
        if not has_failed:
            output.unlink()
        report.unlink(missing_ok=True)

    def _note(
        self, number: int, file: str, results: dict[str, str], output: Path, seconds: float
    ) -> None:
        known = self.log.files.setdefault(file, FileLog(file))
        known.rounds.append(number)
        known.seconds = round(known.seconds + seconds, 1)
        for test, result in results.items():
            if result == "failed":
                known.failures.append(Failure(test, number, str(output.relative_to(self.root))))
            else:
                counts = known.passed if result == "passed" else known.skipped
                counts[test] = counts.get(test, 0) + 1
        self.log.save()
        words = ", ".join(f"{n} {what}" for what, n in sorted(Counter(results.values()).items()))
        print(f"round {number}  {file}: {words or 'nothing'}, {seconds:.0f} s", flush=True)


def _end(*programs: subprocess.Popen) -> None:
    # pytest first, which ends what its test has started in groups of their own.
    for program in programs:
        program.send_signal(signal.SIGINT)
    deadline = time.monotonic() + END_SECONDS
    for program in programs:
        with contextlib.suppress(subprocess.TimeoutExpired):
            program.wait(max(0.0, deadline - time.monotonic()))
        with contextlib.suppress(ProcessLookupError):
            os.killpg(program.pid, signal.SIGKILL)


def results_in(report: Path, files: list[str]) -> dict[str, dict[str, str]]:
    """By file: test -> "passed", "failed" or "skipped", from pytest's report, if there is one."""
    found: dict[str, dict[str, str]] = {file: {} for file in files}
    try:
        cases = ElementTree.parse(report).iter("testcase")
    except (OSError, ElementTree.ParseError):
        return found
    modules = {f"{file.removesuffix('.py').replace('/', '.')}.": file for file in files}
    for case in cases:
        inside = {part.tag for part in case}
        result = "skipped" if "skipped" in inside else "passed"
        result = "failed" if inside & {"failure", "error"} else result
        # Where a file cannot be loaded, no class is given, and the name is that of the module.
        name = case.get("name", "")
        place = f"{case.get('classname') or name}."
        results = next(found[file] for module, file in modules.items() if place.startswith(module))
        # A test that passes and fails in its teardown is in the report twice.
        results[name] = "failed" if results.get(name) == "failed" else result
    return found


# -- The end --


def summary(log: Log, times: int) -> list[str]:
    """How often how many tests were run, and what failed, where its output is."""
    tests = sum(len(one.passed | one.skipped) for one in log.files.values())
    passed = sum(sum(one.passed.values()) for one in log.files.values())
    minutes = sum(one.seconds for one in log.files.values()) / 60
    failures = [(one.file, failure) for one in log.files.values() for failure in one.failures]
    lines = [
        f"{failure.output}: {file}::{failure.test} failed in round {failure.round}"
        for file, failure in failures
    ]
    commits = [about["commit"] for about in (log.about, *log.about.get("went_on", []))]
    lines.append(
        f"commit {', then '.join(dict.fromkeys(commits))}: {len(log.files)} files, {tests} tests, "
        f"{times} rounds, {log.about['busy']} busy loops: {passed} passed, {len(failures)} failed, "
        f"{minutes:.0f} minutes of runs; see {log.path}"
    )
    return lines


def main(words: list[str] | None = None, root: Path = ROOT) -> int:
    """The command."""
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0],
        epilog="The numbers can also be given as STRESS_TIMES, STRESS_BUSY and so on.",
    )
    for name, default, meaning in (
        ("times", 10, "how often each test is run"),
        ("busy", 4, "how many processes compute beside the tests"),
        ("workers", 2, "how many runs of pytest there are at the same time"),
        ("together", 4, "how many files of tests are in one of them"),
    ):
        value = int(os.environ.get(f"STRESS_{name.upper()}", default))
        parser.add_argument(f"--{name}", type=int, default=value, help=f"{meaning} ({value})")
    parser.add_argument("--continue", action="store_true", dest="goes_on", help="with any log")
    parser.add_argument("--log", default=LOG)
    parser.add_argument("paths", nargs="*", default=["tests"])
    args = parser.parse_args(words)
    about = {
        "commit": commit_of(root),
        "times": args.times,
        "busy": args.busy,
        "workers": args.workers,
        "together": args.together,
        "processors": os.cpu_count(),
        "began": time.strftime("%Y-%m-%d %H:%M"),
    }
    files = files_of_tests(root, args.paths)
    log = Log.open(root / args.log, about, args.goes_on)
    log.save()
    try:
        with busy_loops(args.busy):
            Stress(root, log).run(files, args.times, args.workers, args.together)
    except KeyboardInterrupt:
        print("\nstopped; the same command goes on from here")
        return 130
    print("\n".join(summary(log, args.times)))
    return int(any(one.failures for one in log.files.values()))


if __name__ == "__main__":
    # Told to end, it ends its busy loops and runs like after Ctrl-C, which a program in the background
    # of a script would ignore, and its children too.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.exit(main())
