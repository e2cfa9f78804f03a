"""What the page on ranks that share memory shows: the times of the backend beside gloo's.

Called by: `cases`, where pages find it as `backend`. Calls: `family_pictures`. Reads
docs/benchmarks/backend_speed.json.
"""

from functools import cache
from typing import Any

from cases.case_words import table
from pictures import family_pictures
from pictures.family_pictures import Panel
from source.places import DOCS, read_json

SHM, GLOO = "shm", "gloo"
EXCHANGES = ("all-reduce", "there and back")
SHOWN = ("256 B", "4 KiB", "64 KiB", "1 MiB", "4 MiB")


@cache
def kept() -> dict[str, Any]:
    """What the benchmark wrote."""
    return read_json(DOCS / "benchmarks" / "backend_speed.json")


def rows() -> list[dict[str, Any]]:
    """A row per number of ranks, exchange and size."""
    return kept()["tables"][0]["rows"]


def machine() -> str:
    """In a line: the processors, torch, and the day."""
    facts = kept()["machine"]
    return f"{facts['processor']}, torch {facts['torch']}, {facts['date']}"


def large_ratios() -> str:
    """Of collectives that gloo carries inside: the least and the largest time, as a part of gloo's."""
    found = [r["to_gloo"] for r in rows() if r["bytes"] > 1 << 20 and r["exchange"] != EXCHANGES[1]]
    return f"{min(found):.1f} to {max(found):.1f}"


def by_size(num_ranks: int) -> str:
    """Time of two exchanges over the size, for each backend; both axes logarithmic."""
    panels, sizes = [], []
    for exchange in EXCHANGES:
        found = [r for r in rows() if (r["num_ranks"], r["exchange"]) == (num_ranks, exchange)]
        curves = {f"{way}": [row[way] for row in found] for way in (SHM, GLOO)}
        sizes = [row["bytes"] for row in found]
        ticks = [(value, f"{value:,} µs") for value in (10, 100, 1000, 10000)]
        panels.append(Panel(f"{exchange}, by bytes", curves, ticks))
    return family_pictures.growth(sizes, panels)


def times() -> str:
    """Microseconds over each backend, by size; a column per exchange and number of ranks."""
    kinds = list(dict.fromkeys((row["exchange"], row["num_ranks"]) for row in rows()))
    kinds = [(exchange, num_ranks) for exchange, num_ranks in kinds if exchange in EXCHANGES]
    found = {(row["exchange"], row["num_ranks"], row["size"]): row for row in rows()}
    head = ["size", *(f"{exchange}, {num_ranks} ranks" for exchange, num_ranks in kinds)]
    lines = []
    for size in SHOWN:
        cells = [found[*kind, size] for kind in kinds]
        lines.append(
            [size.replace(" ", "\u00a0"), *(f"{row[SHM]:,.0f} / {row[GLOO]:,.0f}" for row in cells)]
        )
    return table(head, lines)
