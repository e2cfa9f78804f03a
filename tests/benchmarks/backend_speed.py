"""The backend "shm" beside gloo: time of a collective or a message, by size and number of ranks.

Run: python -m tests.benchmarks.backend_speed [--rounds 25]. Calls: `torch.distributed` over both
backends, and the mesh below a group of ours.

Ranks of one machine, float32, from 256 bytes to 4 MiB. The ways take turns in the same processes:

- shm, gloo: the call of `torch.distributed`, on a group of that backend;
- direct: the same without `torch.distributed` and the group's own methods in between.

A turn is a run of calls between two barriers; its time is that of the rank that took longest, by call.
Shown are medians over all rounds. The size of an all-gather is that of one rank's part. Each
broadcast comes from another rank than the one before, so no rank runs ahead. "There and back" sends
a message to a neighbour and waits for its answer, between two ranks, or in two pairs at once.
"""

import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from time import perf_counter

import torch
import torch.distributed as dist

import minimegatron
import minimegatron.backend
from minimegatron.backend.mesh import Mesh
from tests.benchmarks import results

SIZES = [256 * 4**power for power in range(8)]
NUM_RANKS = (2, 4)
NUM_CALLS = {256 << 10: 10, 1 << 20: 5, 4 << 20: 2}
"""In a turn; of a smaller tensor: 20."""
SHM, AGAIN, GLOO, DIRECT = "shm", "shm'", "gloo", "direct"
SMALL = 64 << 10
MOST_OF_GLOO, MOST_OF_DIRECT = 0.5, 1.5

Way = Callable[[int], object]
"""One call; its argument counts the calls."""


# -- What is timed: an exchange -> by way, one call --


def ways_to_all_reduce(groups: dict[str, dist.ProcessGroup], tensor: torch.Tensor) -> dict:
    """Over each group; direct where there is a mesh."""
    found: dict[str, Way] = {
        name: lambda _, group=group: dist.all_reduce(tensor, group=group)
        for name, group in groups.items()
    }
    mesh, call = way_of(groups[SHM], "all_reduce", tensor, "MAX")
    if mesh is not None:
        found[DIRECT] = lambda _: mesh.all_reduce(tensor, "MAX", call).wait()
    return found


def way_of(group: dist.ProcessGroup, *call: object) -> tuple[Mesh | None, int]:
    """What the group itself uses for a call; None where it leaves it to gloo."""
    return group._way(*call)


def ways_to_all_gather(groups: dict[str, dist.ProcessGroup], tensor: torch.Tensor) -> dict:
    """See `ways_to_all_reduce`."""
    parts = list(tensor.new_empty(dist.get_world_size(), tensor.numel()))
    found: dict[str, Way] = {
        name: lambda _, group=group: dist.all_gather(parts, tensor, group=group)
        for name, group in groups.items()
    }
    mesh, number = way_of(groups[SHM], "all_gather", tensor)
    if mesh is not None:
        found[DIRECT] = lambda _: mesh.all_gather(parts, tensor, number).wait()
    return found


def ways_to_broadcast(groups: dict[str, dist.ProcessGroup], tensor: torch.Tensor) -> dict:
    """See `ways_to_all_reduce`."""
    size = dist.get_world_size()
    found: dict[str, Way] = {
        name: lambda call, group=group: dist.broadcast(tensor, call % size, group=group)
        for name, group in groups.items()
    }
    numbers = [way_of(groups[SHM], "broadcast", tensor, "SUM", root) for root in range(size)]
    if (mesh := numbers[0][0]) is not None:
        found[DIRECT] = lambda call: mesh.broadcast(
            tensor, call % size, numbers[call % size][1]
        ).wait()
    return found


def ways_to_send(groups: dict[str, dist.ProcessGroup], tensor: torch.Tensor) -> dict:
    """To the neighbour and back."""
    rank = dist.get_rank()
    peer, is_first = rank ^ 1, rank % 2 == 0

    def over(group: dist.ProcessGroup) -> Way:
        def there_and_back(_: int) -> None:
            if is_first:
                dist.send(tensor, peer, group=group)
                dist.recv(tensor, peer, group=group)
            else:
                dist.recv(tensor, peer, group=group)
                dist.send(tensor, peer, group=group)

        return there_and_back

    found = {name: over(group) for name, group in groups.items()}
    if (mesh := groups[SHM].mesh) is not None:
        connection, lane = mesh.to[peer], 99  # no tag that a group uses

        def direct(_: int) -> None:
            if is_first:
                connection.send(tensor, "direct", lane)
                connection.expect(tensor, lane=lane).wait()
            else:
                connection.expect(tensor, lane=lane).wait()
                connection.send(tensor, "direct", lane)

        found[DIRECT] = direct
    return found


EXCHANGES: dict[str, Callable[[dict, torch.Tensor], dict[str, Way]]] = {
    "all-reduce": ways_to_all_reduce,
    "all-gather": ways_to_all_gather,
    "broadcast": ways_to_broadcast,
    "there and back": ways_to_send,
}


# -- On the ranks --


def measure(sizes: list[int], rounds: int) -> dict[tuple[str, int], dict[str, list[float]]]:
    """Exchange and bytes -> way -> seconds of a call, by round: the longest of all ranks."""
    over_shm = dist.new_group(backend="shm")
    groups = {SHM: over_shm, GLOO: dist.new_group(backend="gloo"), AGAIN: over_shm}
    mine: dict[tuple[str, int], dict[str, list[float]]] = {}
    for exchange, ways_to in EXCHANGES.items():
        for size in sizes:
            tensor = torch.ones(size // 4)
            ways = ways_to(groups, tensor)
            mine[exchange, size] = take_turns(ways, NUM_CALLS.get(size, 20), rounds)
    everyone: list = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    return {
        case: {
            way: [max(times) for times in zip(*(one[case][way] for one in everyone), strict=True)]
            for way in ways
        }
        for case, ways in mine.items()
    }


def take_turns(ways: dict[str, Way], num_calls: int, rounds: int) -> dict[str, list[float]]:
    """This rank's seconds of a call; each round begins with another way. One round is thrown away."""
    order = list(ways)
    found: dict[str, list[float]] = {way: [] for way in order}
    for number in range(rounds + 1):
        turn = number % len(order)
        for name in order[turn:] + order[:turn]:
            way = ways[name]
            dist.barrier()
            begun = perf_counter()
            for call in range(num_calls):
                way(call)
            if number > 0:
                found[name].append((perf_counter() - begun) / num_calls)
    return found


# -- The command --

COLUMNS = {
    "num_ranks": ("ranks", "d"),
    "exchange": ("exchange", ""),
    "size": ("size", ""),
    "shm": ("shm us", ".0f"),
    "gloo": ("gloo us", ".0f"),
    "to_gloo": ("shm / gloo", ".2f"),
    "direct": ("direct us", ".0f"),
    "to_direct": ("shm / direct", ".2f"),
    "noise": ("noise", ".1%"),
    "ours": ("shm against gloo", ""),
}
NOTE = (
    "Noise: the gap between shm under two names, at least the typical one of the run; gloo within it "
    "is a tie. Direct is left out where the group leaves the tensor to gloo."
)


def rows_of(num_ranks: int, times: dict[tuple[str, int], dict[str, list[float]]]) -> list[dict]:
    """A row per exchange and size."""
    gaps = [results.gap(ways[SHM], ways[AGAIN]) for ways in times.values()]
    rows = []
    for ((exchange, size), ways), gap in zip(times.items(), gaps, strict=True):
        shm, gloo = statistics.median(ways[SHM]), statistics.median(ways[GLOO])
        noise = results.noise_of(gap, gaps)
        row = {
            "num_ranks": num_ranks,
            "exchange": exchange,
            "size": size_words(size),
            "bytes": size,
            "shm": shm * 1e6,
            "gloo": gloo * 1e6,
            "to_gloo": shm / gloo,
            "noise": noise,
            "ours": results.verdict(shm, gloo, noise),
        }
        if DIRECT in ways:
            direct = statistics.median(ways[DIRECT])
            row |= {"direct": direct * 1e6, "to_direct": shm / direct}
        rows.append(row)
    return rows


def size_words(size: int) -> str:
    """
    >>> size_words(256), size_words(4096), size_words(4 << 20)
    ('256 B', '4 KiB', '4 MiB')
    """
    for unit, words in ((1 << 20, "MiB"), (1 << 10, "KiB")):
        if size >= unit:
            return f"{size // unit} {words}"
    return f"{size} B"


def claim_all(report: results.Report, rows: list[dict]) -> None:
    """Against gloo for what is small, and against the way without `torch.distributed`."""
    small = [row for row in rows if row["bytes"] <= SMALL]
    for num_ranks in sorted({row["num_ranks"] for row in rows}):
        ratios = [row["to_gloo"] for row in small if row["num_ranks"] == num_ranks]
        mean = results.geometric_mean(ratios)
        text = f"{num_ranks} ranks, up to 64 KiB: shm takes at most {MOST_OF_GLOO:g} of gloo's time"
        report.claim(text, f"geometric mean {mean:.2f}", mean <= MOST_OF_GLOO)
    mean = results.geometric_mean(row["to_direct"] for row in small if "to_direct" in row)
    text = f"up to 64 KiB: shm takes at most {MOST_OF_DIRECT:g} of the direct way's time"
    report.claim(text, f"geometric mean {mean:.2f}", mean <= MOST_OF_DIRECT)


def draw(rows: list[dict], path: Path) -> None:
    """A panel per exchange and number of ranks: time over size, both axes logarithmic."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    counts = sorted({row["num_ranks"] for row in rows})
    figure, grid = pyplot.subplots(
        len(counts),
        len(EXCHANGES),
        figsize=(11, 2.9 * len(counts)),
        dpi=110,
        layout="constrained",
        squeeze=False,
        sharex=True,
        sharey="row",
    )
    # Okabe and Ito's colours, and a marker each, so that colour is not needed.
    looks = {SHM: ("#0072b2", "o"), GLOO: ("#e69f00", "s"), DIRECT: ("#009e73", "^")}
    for line, num_ranks in zip(grid, counts, strict=True):
        for axes, exchange in zip(line, EXCHANGES, strict=True):
            for way, (colour, marker) in looks.items():
                points = [
                    (row["bytes"], row[way])
                    for row in rows
                    if (row["num_ranks"], row["exchange"]) == (num_ranks, exchange) and way in row
                ]
                if points:
                    axes.plot(*zip(*points, strict=True), marker + "-", color=colour, label=way)
            axes.set(xscale="log", yscale="log", title=f"{exchange}, {num_ranks} ranks")
            axes.set_xscale("log", base=4)
            marks = [256, 4 << 10, 64 << 10, 1 << 20]
            axes.set_xticks(marks, [size_words(mark) for mark in marks])
            axes.grid(True, which="major", color="#dddddd")
        line[0].set_ylabel("microseconds")
    grid[0][0].legend(frameon=False)
    figure.savefig(path)
    pyplot.close(figure)


def main(argv: list[str] | None = None) -> int:
    """The command line."""
    arguments = results.parser(__doc__)
    arguments.add_argument("--rounds", type=int, default=25)
    report = results.Report("backend_speed", __doc__, arguments, argv)
    sizes, counts, rounds = SIZES, NUM_RANKS, report.options.rounds
    if report.options.quick:
        sizes, counts, rounds = [256, 2 << 20], (2,), 1
    rows = []
    for num_ranks in counts:
        options = {"backend": "gloo", "device": "cpu"}
        times = minimegatron.launch(measure, num_ranks, sizes, rounds, **options)[0]
        rows += rows_of(num_ranks, times)
    report.table("Time of a call", COLUMNS, rows, NOTE)
    claim_all(report, rows)
    if report.options.json:
        picture = report.options.json.with_suffix(".png")
        draw(rows, picture)
        report.pictures.append(picture.name)
    return report.finish()


if __name__ == "__main__":
    sys.exit(main())
