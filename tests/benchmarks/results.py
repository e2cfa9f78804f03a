"""What every benchmark prints and keeps: tables, claims, and the machine they come from.

Called by: each benchmark's `main`. The file that `--json` writes is what the documentation shows
(docs/tools/pages/benchmarks_page.py), so it holds all of it: the command, the machine, the columns with
how to write their numbers, the rows.
"""

import argparse
import json
import math
import os
import platform
import statistics
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

WON, LOST, TIED = "won", "lost", "tied"


# -- The machine --


def machine_facts() -> dict[str, str]:
    """What a figure depends on besides the code."""
    return {
        "processor": f"{os.cpu_count()} x {_processor()}",
        "system": platform.system(),
        "Python": platform.python_version(),
        "torch": _version("torch"),
        "megatron-core": _version("megatron-core"),
        "load average at the start": f"{os.getloadavg()[0]:.1f}",
        "date": time.strftime("%Y-%m-%d"),
    }


def _processor() -> str:
    if os.path.exists("/proc/cpuinfo"):
        with open("/proc/cpuinfo") as lines:
            for line in lines:
                if line.startswith("model name"):
                    return line.split(":")[1].strip()
    return platform.machine()


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


# -- Who won --


def gap(one: Sequence[float], other: Sequence[float]) -> float:
    """|ratio of medians - 1|: of one implementation under two names, the noise.

    >>> round(gap([1.0, 1.1, 9.0], [1.0, 1.0, 1.0]), 3)
    0.1
    """
    return abs(statistics.median(one) / statistics.median(other) - 1)


def noise_of(own_gap: float, all_gaps: Sequence[float]) -> float:
    """How far apart two medians of this case may be and mean nothing.

    Two medians of the same thing can agree by luck, so the typical gap of the whole run is the
    least.

    >>> noise_of(0.001, [0.001, 0.02, 0.03])
    0.02
    """
    return max(own_gap, statistics.median(all_gaps))


def verdict(ours: float, theirs: float, noise: float) -> str:
    """For times: less is better. Within the noise it is a tie.

    >>> [verdict(x, 1.0, 0.02) for x in (0.97, 0.985, 1.03)]
    ['won', 'tied', 'lost']
    """
    ratio = ours / theirs
    if abs(ratio - 1) <= noise:
        return TIED
    return WON if ratio < 1 else LOST


def geometric_mean(values: Iterable[float]) -> float:
    """
    >>> geometric_mean([0.5, 2.0])
    1.0
    """
    logarithms = [math.log(value) for value in values]
    return math.exp(sum(logarithms) / len(logarithms))


# -- The report --


@dataclass(frozen=True)
class Table:
    """`columns`: key -> (heading, format); the format of text is "". A row may lack some keys."""

    title: str
    columns: dict[str, tuple[str, str]]
    rows: list[dict[str, Any]]
    note: str = ""

    def cells(self) -> list[list[str]]:
        """The headings, then the rows, as text."""
        lines = [[heading for heading, _ in self.columns.values()]]
        for row in self.rows:
            lines.append([written(row.get(key), form) for key, (_, form) in self.columns.items()])
        return lines


def written(value: Any, form: str) -> str:
    """
    >>> written(0.1234, ".1%"), written(None, ".1f"), written("p=2", "")
    ('12.3%', '-', 'p=2')
    """
    return "-" if value is None else format(value, form)


@dataclass(frozen=True)
class Claim:
    """Something the figures should show, and whether they do."""

    text: str
    found: str
    is_kept: bool


def parser(doc: str) -> argparse.ArgumentParser:
    """The flags that every benchmark has."""
    made = argparse.ArgumentParser(description=doc.splitlines()[0])
    made.add_argument("--json", type=Path, metavar="FILE", help="also write the results there")
    made.add_argument(
        "--quick", action="store_true", help="the smallest run; its figures mean nothing"
    )
    return made


class Report:
    """Of one run of one benchmark: prints as it comes, and keeps it.

    Args:
        name: the module's.
        doc: its docstring, whose first line is the title.
        arguments: see `parser`; `options` has them read.
        argv: None for the process's own.
    """

    def __init__(
        self, name: str, doc: str, arguments: argparse.ArgumentParser, argv: list[str] | None
    ):
        given = sys.argv[1:] if argv is None else argv
        self.options = arguments.parse_args(given)
        self.name = name
        self.doc = doc
        self.command = " ".join(["python -m", f"tests.benchmarks.{name}", *given])
        self.machine = machine_facts()
        self.tables: list[Table] = []
        self.claims: list[Claim] = []
        self.pictures: list[str] = []
        self._begun = time.perf_counter()
        print(f"$ {self.command}")
        print(", ".join(f"{key} {value}" for key, value in self.machine.items()), flush=True)

    def table(self, title: str, columns: Mapping, rows: list[dict], note: str = "") -> None:
        """Prints it, and keeps it."""
        table = Table(title, dict(columns), rows, note)
        self.tables.append(table)
        cells = table.cells()
        widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
        is_text = [form == "" for _, form in table.columns.values()]
        print(f"\n{title}")
        for line in cells:
            padded = [
                cell.ljust(width) if text else cell.rjust(width)
                for cell, width, text in zip(line, widths, is_text, strict=True)
            ]
            print("  " + "  ".join(padded).rstrip())
        if note:
            print(f"  {note}")
        sys.stdout.flush()

    def claim(self, text: str, found: str, is_kept: bool) -> None:
        """States what the figures should show. A quick run's show nothing, so it is not kept."""
        print(f"{'kept' if is_kept else 'BROKEN'}: {text}: {found}", flush=True)
        if not self.options.quick:
            self.claims.append(Claim(text, found, bool(is_kept)))

    def finish(self) -> int:
        """Writes the file, if one was asked for. Exit code 1 if a claim is broken."""
        if self.options.json:
            title, _, about = self.doc.partition("\n")
            kept = {
                "benchmark": self.name,
                "title": title,
                "about": about.strip(),
                "command": self.command,
                "machine": self.machine,
                "seconds": round(time.perf_counter() - self._begun, 1),
                "tables": [asdict(table) for table in self.tables],
                "claims": [asdict(claim) for claim in self.claims],
                "pictures": self.pictures,
            }
            self.options.json.write_text(json.dumps(kept, indent=1) + "\n")
        return 0 if all(claim.is_kept for claim in self.claims) else 1
