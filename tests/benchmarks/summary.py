"""One look over all results: who won, how far ahead of megatron-core, which claims hold.

Called by: `python -m tests.benchmarks`, when all are written. Calls: `results`, `measure`.
"""

import json
from itertools import groupby
from pathlib import Path
from typing import Any

from tests.benchmarks.measure import excess_ratio, score
from tests.benchmarks.results import LOST, TIED, WON, geometric_mean

PIPELINES = ("step_time", "paced")
LARGEST_RATIO = 0.6
NAME = "summary"


def summarise(folder: Path) -> list[dict[str, Any]]:
    """Writes `summary.json`; returns every claim, first those over several benchmarks."""
    found = {}
    for path in sorted(folder.glob("*.json")):
        kept = json.loads(path.read_text())
        if path.stem != NAME and kept["tables"]:
            found[path.stem] = kept
    ratios = [ratio for name in PIPELINES if name in found for ratio in excess_ratios(found[name])]
    claims = []
    if ratios:
        mean = geometric_mean(ratios)
        claims.append(
            {
                "text": f"ours / megatron-core's excess over the ideal, geometric mean of "
                f"{len(ratios)} cases, is at most {LARGEST_RATIO}",
                "found": f"{mean:.3f}",
                "is_kept": mean <= LARGEST_RATIO,
            }
        )
    rows = []
    for name, kept in found.items():
        claims += [{**claim, "benchmark": name} for claim in kept["claims"]]
        counts = score([row for table in kept["tables"] for row in table["rows"]])
        rows.append({"benchmark": name, **counts, "seconds": kept["seconds"]})
    summary = {"rows": rows, "words": [WON, TIED, LOST], "claims": claims}
    (folder / f"{NAME}.json").write_text(json.dumps(summary, indent=1) + "\n")
    return claims


def excess_ratios(kept: dict[str, Any]) -> list[float]:
    """By case; those without megatron-core are left out."""
    rows = [row for table in kept["tables"] for row in table["rows"]]
    by_case = [list(group) for _, group in groupby(rows, key=lambda row: row.get("case"))]
    return [ratio for rows in by_case if (ratio := excess_ratio(rows)) is not None]
