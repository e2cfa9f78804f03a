"""Figures that tests measure: shown together at the end of the log, whichever worker took them.

figure(f"{len(cases)} cases, worst difference {worst:.1e}")
"""

MARK = "figure: "


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
