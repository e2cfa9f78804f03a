"""Figures that tests measure: shown together at the end of the log, whichever worker took them.

figure(f"{len(cases)} cases, worst difference {worst:.1e}")
"""

import time

MARK = "figure: "
QUIET_SECONDS = 0.14
"""What `_work` takes on a quiet machine of the kind that the bounds of processor time were set on."""


class QuietTime:
    """Processor time, as a quiet machine would have taken it: `clock = QuietTime(); clock.read()`.

    A busy machine gives a process less work for a second of processor time, by a half and more. So
    a fixed piece of work is timed before and after, and what is between is divided by its slowness.
    """

    def __init__(self):
        self._before = _work()
        self._begin = time.process_time()

    def read(self) -> float:
        """Seconds since it was made."""
        seconds = time.process_time() - self._begin
        slowness = (self._before + _work()) / 2 / QUIET_SECONDS
        return seconds / max(1.0, slowness)


def slowness() -> float:
    """How much longer a piece of work takes now than on a quiet machine, by wall clock; 1 at least.

    For the work of another process: this one does not know how much processor time that got.
    """
    return max(1.0, _work(time.perf_counter) / QUIET_SECONDS)


def _work(now=time.process_time) -> float:
    begin = now()
    table: dict[int, int] = {}
    for i in range(400_000):
        table[i % 1000] = table.get(i % 997, 0) + len(str(i))
    return now() - begin


def figure(text: str) -> None:
    """Keeps one line for the table at the end; for the test that runs now, or a fixture of it."""
    print(f"\n{MARK}{text}")


def figures_of(reports) -> dict[str, list[str]]:
    """By test: its lines. `reports` are pytest's, of setup, call and teardown."""
    found: dict[str, list[str]] = {}
    for report in reports:
        for line in getattr(report, "capstdout", "").splitlines():
            lines = found.setdefault(report.nodeid, [])
            # A later phase's report repeats what an earlier one printed.
            if line.startswith(MARK) and line.removeprefix(MARK) not in lines:
                lines.append(line.removeprefix(MARK))
    return {test: lines for test, lines in found.items() if lines}
