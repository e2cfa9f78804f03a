"""`minimegatron groups`: who talks to whom in a layout, without starting a process.

Torch-free. What it prints is what `parallel_state.initialize_model_parallel` makes, from the same
lists. Megatron has no counterpart.
"""

import argparse
import textwrap
from collections.abc import Iterator
from shutil import get_terminal_size

from minimegatron.core.rank_generator import (
    DEFAULT_ORDER,
    GROUP_KINDS,
    RankGenerator,
    all_groups,
    make_grids,
)

MOST_WIDTH = 100
MOST_GROUPS = 32
MOST_RANKS = 64
"""More groups of a kind, members of a group or ranks than these are shown in part."""
SHORT = 40
"""A group of up to so many characters is kept on one line, if it fits there at all."""
FIRST = 4
"""How many of too many groups, and of too many members, are shown."""
GLUE = "~"
"""Stands for a space that no line may be broken at."""


USAGE = "--world-size N [options]"
EXAMPLES = (
    "--world-size 16 --tp 2 --pp 4",
    "--world-size 32 --tp 2 --pp 2 --ep 4",
    "--world-size 1024 --tp 8 --pp 16 --full",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Sizes under the names people call them by."""
    parser.add_argument("--world-size", type=int, required=True, metavar="N", help="ranks in all")
    parser.add_argument("--tp", type=int, default=1, metavar="N", help="ranks that share a layer")
    parser.add_argument("--pp", type=int, default=1, metavar="N", help="stages of a pipeline")
    parser.add_argument("--cp", type=int, default=1, metavar="N", help="pieces of a sequence")
    parser.add_argument("--ep", type=int, default=1, metavar="N", help="ranks that share experts")
    parser.add_argument(
        "--etp", type=int, metavar="N", help="ranks that share one expert (default: as --tp)"
    )
    parser.add_argument(
        "--order",
        default=DEFAULT_ORDER,
        help="which coordinate changes fastest from rank to rank, and so on (default: %(default)s)",
    )
    parser.add_argument(
        "--full", action="store_true", help="leave nothing out, however many ranks there are"
    )


def run(args: argparse.Namespace) -> None:
    """Prints the group table and the table of coordinates. Raises ValueError for a bad layout."""
    layout = (args.world_size, args.tp, args.pp, args.cp, args.ep, args.etp, args.order)
    dense, expert = make_grids(*layout)
    groups = all_groups(*layout)
    print(f"{args.world_size} ranks, order {dense.order}")
    print(f"  dense layers   tp {dense.tp} x cp {dense.cp} x dp {dense.dp} x pp {dense.pp}")
    print(f"  expert layers  etp {expert.tp} x ep {expert.ep} x edp {expert.dp} x pp {expert.pp}")
    print()
    width = min(get_terminal_size((MOST_WIDTH, 24)).columns, MOST_WIDTH)
    for line in group_table(groups, args.world_size, None if args.full else MOST_GROUPS, width):
        print(line)
    print()
    for line in coordinate_table(dense, expert, None if args.full else MOST_RANKS):
        print(line)


def group_table(
    groups: dict[str, list[list[int]]], world_size: int, most: int | None, width: int
) -> Iterator[str]:
    """One paragraph per kind: its name, how many groups of which size, and their ranks.

    A group that fits a line of `width` columns is not broken.

    Kinds with the same groups as an earlier one say so, for they share its process groups.
    """
    titles = {kind.name: kind.title for kind in GROUP_KINDS}
    name_width, title_width = max(map(len, titles)), max(map(len, titles.values()))
    head = f"{{:<{name_width}}}  {{:<{title_width}}}  {{:>6}} x {{:<6}}"
    yield head.format("name", "kind", "groups", "size") + "  ranks"
    for name, title in titles.items():
        of_kind = groups[name]
        start = head.format(name, title, len(of_kind), len(of_kind[0])) + "  "
        lines = textwrap.wrap(
            _members(name, groups, world_size, most, width - len(start)),
            width=width,
            initial_indent=start,
            subsequent_indent=" " * len(start),
            break_long_words=False,
        )
        yield from (line.replace(GLUE, " ") for line in lines)
    made = {tuple(sorted(ranks)) for of_kind in groups.values() for ranks in of_kind}
    yield ""
    yield f"{len(made)} distinct sets of ranks, so {len(made)} process groups" + (
        " beside the default one" if any(len(ranks) == world_size for ranks in made) else ""
    )


def _members(
    name: str, groups: dict[str, list[list[int]]], world_size: int, most: int | None, room: int
) -> str:
    of_kind = groups[name]
    twin = next(other for other, ranks in groups.items() if ranks == of_kind)
    if len(of_kind) == world_size:
        return "every rank alone"
    if twin != name:
        return f"as {twin}"
    if len(of_kind) == 1 and len(of_kind[0]) == world_size:
        return "all ranks"
    few = of_kind if most is None or len(of_kind) <= most else of_kind[:FIRST]
    shown = [f"[{_ranks(ranks, most)}]" for ranks in few]
    shown = [text.replace(" ", GLUE) if len(text) <= min(SHORT, room) else text for text in shown]
    left_out = len(of_kind) - len(shown)
    rest = [f"... and {left_out} more (--full)".replace(" ", GLUE)] if left_out else []
    return " ".join(shown + rest)


def _ranks(ranks: list[int], most: int | None) -> str:
    if most is None or len(ranks) <= most:
        return " ".join(map(str, ranks))
    return " ".join([*map(str, ranks[:FIRST]), "...", str(ranks[-1])])


def coordinate_table(
    dense: RankGenerator, expert: RankGenerator, most: int | None
) -> Iterator[str]:
    """One line per rank: its place in the dense grid, then in the expert grid."""
    dense_words = [word for word in dense.order.split("-") if word != "ep"]
    expert_words = [word for word in expert.order.split("-") if word not in ("cp", "pp")]
    titles = dense_words + [{"tp": "etp", "dp": "edp"}.get(word, word) for word in expert_words]
    width = max(4, len(str(dense.world_size)))
    dense_title = "dense".center(len(dense_words) * (width + 1))
    yield " " * width + f" {dense_title} | expert"
    yield _row(["rank", *titles], len(dense_words), width)
    shown = dense.world_size if most is None else min(most, dense.world_size)
    for rank in range(shown):
        place, expert_place = dense.coordinates(rank), expert.coordinates(rank)
        cells = [place[word] for word in dense_words] + [expert_place[w] for w in expert_words]
        yield _row([rank, *cells], len(dense_words), width)
    if shown < dense.world_size:
        yield f"... and {dense.world_size - shown} more ranks (--full)"


def _row(cells: list, num_dense: int, width: int) -> str:
    padded = [str(cell).rjust(width) for cell in cells]
    return " ".join(padded[: num_dense + 1]) + "  | " + " ".join(padded[num_dense + 1 :])
