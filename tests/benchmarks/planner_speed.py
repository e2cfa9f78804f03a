"""How long the planner takes, and how that grows with the size of the step, p x v x M.

Run: python -m tests.benchmarks.planner_speed. Calls: `planner.plan`, `planner.simulator`.

Interleaved 1F1B (1F1B for one chunk) from p = 4 to p = 64 stages. "plan" is every rank's order of
actions, "simulate" their times with costs that differ from stage to stage. The exponent is that of
a straight line through the logarithms, by least squares, over sizes of 2,000 and more:
1 means that twice the work takes twice the time.
"""

import math
import statistics
import sys
import time
from pathlib import Path

from minimegatron.planner.plan import plan
from minimegatron.planner.simulator import Costs, simulate
from tests.benchmarks import results

LARGEST = (64, 8, 512)
LARGEST_SECONDS = 5.0
LARGEST_EXPONENT = 1.15
FITTED_FROM = 2000

# (p, v, M)
SIZES = [
    (4, 1, 8),
    (4, 2, 16),
    (8, 1, 64),
    (8, 2, 64),
    (8, 4, 64),
    (16, 1, 128),
    (16, 2, 128),
    (16, 4, 128),
    (32, 1, 256),
    (32, 2, 256),
    (32, 4, 256),
    (64, 1, 512),
    (64, 2, 512),
    (64, 4, 512),
    LARGEST,
]


def seconds_of(p: int, v: int, num_microbatches: int) -> tuple[float, float]:
    """(plan, simulate) for one step."""
    name, chunks = ("1f1b", None) if v == 1 else ("interleaved", v)
    forward = [1 + stage % 3 for stage in range(p * v)]
    costs = Costs(forward, [2 * cost for cost in forward], latency=1)
    begun = time.perf_counter()
    made = plan(name, p, num_microbatches, vpp=chunks)
    planned = time.perf_counter()
    simulate(made, costs)
    return planned - begun, time.perf_counter() - planned


def exponent(sizes: list[float], seconds: list[float]) -> float:
    """The slope of log(seconds) over log(size), by least squares.

    >>> round(exponent([10, 100, 1000], [2, 20, 200]), 6)
    1.0
    """
    xs, ys = [math.log(size) for size in sizes], [math.log(value) for value in seconds]
    return statistics.linear_regression(xs, ys).slope


COLUMNS = {
    "p": ("p", "d"),
    "v": ("v", "d"),
    "M": ("M", "d"),
    "size": ("p v M", ",d"),
    "plan_seconds": ("plan s", ".4f"),
    "simulate_seconds": ("simulate s", ".4f"),
    "seconds": ("together s", ".4f"),
    "microseconds": ("us per chunk pass", ".2f"),
}


def rows_of(sizes: list[tuple[int, int, int]], repetitions: int) -> list[dict]:
    """A row per size, smallest first; all take turns."""
    found: dict[tuple, list[tuple[float, float]]] = {size: [] for size in sizes}
    for _ in range(repetitions):
        for size in sizes:
            found[size].append(seconds_of(*size))
    rows = []
    for p, v, m in sorted(sizes, key=math.prod):
        planned, simulated = map(statistics.median, zip(*found[p, v, m], strict=True))
        rows.append(
            {
                "p": p,
                "v": v,
                "M": m,
                "size": p * v * m,
                "plan_seconds": planned,
                "simulate_seconds": simulated,
                "seconds": planned + simulated,
                "microseconds": 1e6 * (planned + simulated) / (2 * p * v * m),
            }
        )
    return rows


def draw(rows: list[dict], slope: float, path: Path) -> None:
    """Time over size, both axes logarithmic; a thin line where time grows as size does."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4.2), dpi=120, layout="constrained")
    # Okabe and Ito's colours, and a marker each, so that colour is not needed.
    looks = {1: ("#0072b2", "o"), 2: ("#e69f00", "s"), 4: ("#009e73", "^"), 8: ("#cc79a7", "D")}
    for v, (colour, marker) in looks.items():
        points = [(row["size"], row["seconds"]) for row in rows if row["v"] == v]
        if not points:
            continue
        label = f"v = {v}" + (", 1F1B" if v == 1 else ", interleaved")
        axes.plot(*zip(*points, strict=True), marker, color=colour, label=label, markersize=7)
    sizes = [rows[0]["size"], rows[-1]["size"]]
    last = rows[-1]["seconds"] / rows[-1]["size"]
    axes.plot(sizes, [last * size for size in sizes], color="#555555", linewidth=1, zorder=0)
    axes.annotate("in proportion", (sizes[0] * 3, last * sizes[0] * 2), color="#555555")
    axes.set(
        xscale="log",
        yscale="log",
        xlabel="size of the step: stages x chunks x microbatches",
        ylabel="seconds to plan and simulate",
        title=f"Planner: time grows as size to the power {slope:.2f}",
    )
    axes.grid(True, which="major", color="#dddddd")
    axes.legend(frameon=False)
    figure.savefig(path)
    pyplot.close(figure)


def main(argv: list[str] | None = None) -> int:
    """The command line."""
    arguments = results.parser(__doc__)
    arguments.add_argument("--repetitions", type=int, default=3)
    report = results.Report("planner_speed", __doc__, arguments, argv)
    options = report.options
    sizes = [(4, 1, 8), (4, 2, 16), (4, 4, 16), (4, 8, 16)] if options.quick else SIZES
    rows = rows_of(sizes, 1 if options.quick else options.repetitions)
    report.table("Seconds to plan and simulate one step", COLUMNS, rows)
    fitted = [row for row in rows if row["size"] >= FITTED_FROM] or rows
    slope = exponent([row["size"] for row in fitted], [row["seconds"] for row in fitted])
    report.claim("time grows about as the size", f"exponent {slope:.2f}", slope < LARGEST_EXPONENT)
    last = rows[-1]
    where = f"p={last['p']} v={last['v']} M={last['M']}"
    text = f"{where} takes less than {LARGEST_SECONDS:g} s"
    report.claim(text, f"{last['seconds']:.2f} s", last["seconds"] < LARGEST_SECONDS)
    if options.json:
        picture = options.json.with_suffix(".png")
        draw(rows, slope, picture)
        report.pictures.append(picture.name)
    return report.finish()


if __name__ == "__main__":
    sys.exit(main())
