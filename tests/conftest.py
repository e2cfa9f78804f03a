"""For every test: one torch thread per process; at the end, the figures that tests took."""

import os

import pytest

from tests.figures import figures_of

os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    reports = [report for of_kind in terminalreporter.stats.values() for report in of_kind]
    figures = figures_of(reports)
    if figures:
        terminalreporter.section("figures")
        for test, lines in figures.items():
            for line in lines:
                terminalreporter.write_line(f"{test.split('/')[-1]}: {line}")
