"""Writes orders: who does what, in which order, for every plan that the schedule player offers.

Run by: `build_docs`, in a process of its own. Called by: `emit_player`, `unrolled_pages` and
`browser_python` (its `script`), tests/docs. Calls: `minimegatron.planner`, which makes every order;
`plan_words`, which writes it down. The player's script decides when, never what: a schedule that is
registered when the site is built is offered, whatever its placement and its kinds of work.

    PYTHONPATH=docs/tools:. python -m player.emit_orders build/docs/javascripts

orders.js holds what a page shows at first, the schedules with one chunk per stage;
orders_NAME.js holds another schedule, and is loaded when a reader chooses it.

Stages of different plans that do the same share a row. Each file holds the JSON below, deflated and in
base64, since a plain file server compresses nothing:

    {"rows": [row, ...], "placements": [placement, ...], "plans": {"1f1b 4 8 1 0": {"r": [row number per
     stage], "p": placement number, "b": 1 if messages are batched, "w": 1 if the wire has tags,
     "n": 1 if a pair's backward frees what its forward comes to hold, "f": {formulas}}}}

and orders.js the words and colours that all share. A plan's key is schedule, p, M, v, G, and "overlap"
where messages are. Formulas are those of `planner.formulas`, worked out there: makespan for f + b = 1,
both bubbles, messages, peak per stage; a schedule may have none.
"""

import base64
import gc
import json
import sys
import zlib
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any

from minimegatron.core.orders.orders import (
    COMBINED,
    INTERLEAVED,
    NO_PIPELINING,
    TAGGED,
    get_schedule,
    schedule_names,
)
from minimegatron.core.orders.placement import LINE, LOOP
from minimegatron.planner import formulas
from minimegatron.planner.actions import KINDS
from minimegatron.planner.plan import Plan, plan
from minimegatron.planner.plan_report import NAMES
from minimegatron.planner.svg_shapes import shade, text_colour
from player.plan_words import CALLS, LETTERS, kinds_data, placement_data, row

STAGES = (*range(1, 9), 12, 16)
MICROBATCHES = (*range(1, 17), 20, 24, 28, 32, 48, 64, 96, 128)
"""And p, 2p, 3p, 4p. With one chunk per stage every number up to 32."""
CHUNKS = (2, 4)
FIRST = "orders"


# -- The plans --


Options = dict[str, Any]


def plans(name: str) -> Iterator[tuple[str, Plan]]:
    """(key, plan) of everything that can be chosen of one schedule."""
    for pp, M, options in sizes(name):
        try:
            step = plan(name, pp, M, **options)
        except ValueError:  # the planner says which sizes do not go together
            continue
        yield key_of(name, pp, M, options, step.config.num_model_chunks), step


def key_of(name: str, pp: int, M: int, options: Options, num_chunks: int | None = None) -> str:
    """A plan's key: schedule, p, M, v, G, and "overlap" where messages are."""
    sizes_of_chunks = [num_chunks or options.get("vpp", 1), options.get("group_size", 0)]
    key = " ".join(map(str, [name, pp, M, *sizes_of_chunks]))
    return key + (" overlap" if options.get("overlap_p2p_comm") else "")


def sizes(name: str) -> Iterator[tuple[int, int, Options]]:
    """(p, M, other arguments of `plan`) to try."""
    for pp in STAGES:
        for M in microbatches(pp, get_schedule(name).placement is not LINE):
            for options in _options(name, pp, M):
                yield pp, M, options


def microbatches(pp: int, has_chunks: bool) -> list[int]:
    """The numbers of microbatches that are offered for p stages."""
    more = range(2 * pp, 5 * pp, pp) if has_chunks else range(1, 33)
    return sorted({*MICROBATCHES, pp, *more})


def _options(name: str, pp: int, M: int) -> Iterator[Options]:
    if name == NO_PIPELINING or pp == 1:
        if name in (NO_PIPELINING, COMBINED) and pp == 1:
            yield {}
    elif (rule := get_schedule(name).placement) is None or rule is LINE:
        yield {}
    elif rule is not LOOP:
        yield {}  # such a rule says how many chunks there are
    else:
        for vpp in CHUNKS:
            # The largest plans with four chunks would make the build slow.
            if vpp == 2 or (pp <= 8 and M <= 64):
                yield from _of_chunks(name, pp, M, vpp)


def _of_chunks(name: str, pp: int, M: int, vpp: int) -> Iterator[Options]:
    if name not in (INTERLEAVED, COMBINED):
        yield {"vpp": vpp}
        return
    for group_size in sorted({pp, 2 * pp, M} if M <= 32 else {pp, 2 * pp}):
        if group_size > max(M, pp):
            continue
        # Groups of more than 2p change nothing more with overlap, and would double the file.
        for overlap in (False, True) if group_size <= 2 * pp else (False,):
            yield {"vpp": vpp, "group_size": group_size, "overlap_p2p_comm": overlap}


# -- As data --


def formula_values(step: Plan) -> dict[str, Any]:
    """The closed forms of a plan, worked out: [text, value in words] or [text, number]."""
    config = step.config
    bubbles = formulas.bubble_formulas(config)
    found = {
        "ideal": bubbles and bubbles[0],
        "total": bubbles and bubbles[1],
        "makespan": formulas.makespan_formula(config, 1, 0),
        "messages": formulas.message_formula(config),
    }
    data = {name: [form.text, str(form.value)] for name, form in found.items() if form is not None}
    peaks = [formulas.peak_in_flight_formula(config, rank) for rank in range(config.pp_size)]
    if all(peaks):
        data["peak"] = [peaks[0].text, [peak.value for peak in peaks]]
    return data


class Pack:
    """Plans by key, and the rows and placements that they share."""

    def __init__(self) -> None:
        self.rows: dict[str, list[str]] = {}
        self.placements: dict[Any, tuple[int, dict[str, Any]]] = {}
        self.plans: dict[str, dict[str, Any]] = {}

    def add(self, key: str, step: Plan) -> None:
        """Writes one plan down. The plan itself, up to a million objects, is not kept."""
        config = step.config
        self.rows[key] = [row(actions) for actions in step.ranks]
        letters = "".join(letter for letter in LETTERS if letter in "".join(self.rows[key]))
        place = config.placement, letters
        if place not in self.placements:
            self.placements[place] = len(self.placements), placement_data(*place)
        self.plans[key] = {"p": self.placements[place][0], "b": int(config.batch_p2p_comm)}
        if config.wire == TAGGED:
            self.plans[key]["w"] = 1
        if step.pairs_go_by_layers:
            self.plans[key]["n"] = 1
        self.plans[key]["f"] = formula_values(step)

    def data(self) -> dict[str, Any]:
        """All of it, for JSON."""
        # Like rows stand together, which makes the packed file half as large.
        rows = {word: number for number, word in enumerate(sorted(set(chain(*self.rows.values()))))}
        return {
            "rows": list(rows),
            "placements": [data for _, data in self.placements.values()],
            "plans": {
                key: {"r": [rows[word] for word in self.rows[key]]} | data
                for key, data in self.plans.items()
            },
        }


def orders() -> dict[str, dict[str, Any]]:
    """File name -> what it holds."""
    packs = {FIRST: Pack()}
    for name in schedule_names():
        rule = get_schedule(name).placement
        file = FIRST if rule is LINE or name == NO_PIPELINING else f"{FIRST}_{name}"
        for key, step in plans(name):
            packs.setdefault(file, Pack()).add(key, step)
    words = {
        "calls": CALLS,
        "kinds": kinds_data(),
        "names": {name: NAMES.get(name, name) for name in schedule_names()},
        "late": [file.removeprefix(f"{FIRST}_") for file in packs if file != FIRST],
        "shades": shades(),
    }
    files = {file: pack.data() for file, pack in packs.items()}
    return files | {FIRST: files[FIRST] | words}


def shades() -> dict[str, dict[str, list[list[str]]]]:
    """Number of chunks -> letter -> per chunk [fill, text on it, pattern], as in pictures of plans."""
    kinds = [kind for kind in KINDS.values() if kind.letter]
    return {
        str(v): {
            kind.letter: [
                [fill, text_colour(fill), kind.fill]
                for fill in (shade(kind.name, c, v) for c in range(v))
            ]
            for kind in kinds
        }
        for v in (1, *CHUNKS)
    }


# -- The file --


def script(data: dict[str, Any], name: str = FIRST) -> str:
    """A script that leaves `data`, packed, at `MM.packed[name]`."""
    text = json.dumps(data, separators=(",", ":"), ensure_ascii=False)
    packed = base64.b64encode(zlib.compress(text.encode(), 9)).decode()
    return (
        "// Generated by docs/tools/player/emit_orders.py.\n"
        f"((globalThis.MM ||= {{}}).packed ||= {{}})[{json.dumps(name)}] = {json.dumps(packed)};\n"
    )


def write_orders(folder: Path) -> None:
    """Writes the files."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, data in orders().items():
        (folder / f"{name}.js").write_text(script(data, name))


if __name__ == "__main__":
    # It would look again and again through millions of actions, none in a cycle.
    gc.disable()
    write_orders(Path(sys.argv[1]))
