"""Writes orders: who does what, in which order, for every plan that the schedule player offers.

Called by: `emit_player`, tests/docs. Calls: `minimegatron.planner`, which makes every order; the
player's script decides when, never what. Nothing here or there computes an order a second time.

    python docs/tools/emit_orders.py build/docs/javascripts

orders.js holds what a page shows at first; orders_interleaved.js, eight times as large, is loaded when
a reader chooses interleaving.

A stage's order is a word, its row. Stages of different plans that do the same share a row:

    W S C               warm-up, steady state, cool-down from here on
    F B F1              forward, backward; then the chunk, if that is not 0
    a ... i             a call of P2PCommunicator (`CALLS`); ! before it: it returns at once
    > ) < ( >1          after a call, its messages as they start: activation to the next stage,
                        activation from the previous, gradient to the previous, gradient from the next

Which microbatch is not written: of each mark and chunk, the first is of microbatch 0, the next of 1.

Each file holds the JSON below, deflated and in base64, since a plain file server compresses nothing:

    {"rows": [row, ...], "plans": {"1f1b 4 8 1 4": {"r": [row number per stage],
     "b": 1 if messages are batched, "f": {formulas}}}, "words": {...}, "shades": {...}}

A plan's key is schedule, p, M, v, G, and "overlap" where messages are. Formulas are those of
`planner.formulas`, worked out there: makespan for f + b = 1, both bubbles, messages, peak per stage.
"""

import base64
import json
import sys
import zlib
from collections import Counter
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from minimegatron.planner import formulas
from minimegatron.planner.actions import (
    ACTIVATION,
    BACKWARD,
    COMMUNICATE,
    COOLDOWN,
    FORWARD,
    SEND,
    STEADY,
    WARMUP,
    Action,
)
from minimegatron.planner.plan import Plan, plan
from minimegatron.planner.plan_report import NAMES
from minimegatron.planner.render_svg import shade, text_colour
from minimegatron.planner.written_schedules import GPIPE, INTERLEAVED, NO_PIPELINING, ONE_F_ONE_B

MAX_PP = 8
MICROBATCHES = (*range(1, 33), 64)
CHUNKS = (2, 4)

CALLS = (
    "recv_forward",
    "recv_backward",
    "send_forward",
    "send_backward",
    "send_forward_recv_backward",
    "send_backward_recv_forward",
    "send_forward_recv_forward",
    "send_backward_recv_backward",
    "send_forward_backward_recv_forward_backward",
)
PHASES = {WARMUP: "W", STEADY: "S", COOLDOWN: "C"}
MARKS = {(True, True): ">", (False, True): ")", (True, False): "<", (False, False): "("}
"""(is sent, is activation) -> the message's mark."""


# -- The plans --


def plans() -> Iterator[tuple[str, Plan]]:
    """(key, plan) of everything that can be chosen."""
    for M in MICROBATCHES:
        yield _key(plan(NO_PIPELINING, 1, M))
        for pp in range(2, MAX_PP + 1):
            for schedule in (GPIPE, ONE_F_ONE_B):
                yield _key(plan(schedule, pp, M))
            for vpp in CHUNKS:
                yield from _interleaved(pp, M, vpp)


def _interleaved(pp: int, M: int, vpp: int) -> Iterator[tuple[str, Plan]]:
    for group_size in sorted({pp, 2 * pp, M}):
        # Groups of more than 2p change nothing more with overlap, and would double the file.
        for overlap in (False, True) if group_size <= 2 * pp else (False,):
            try:
                yield _key(plan(INTERLEAVED, pp, M, vpp, group_size, overlap_p2p_comm=overlap))
            except ValueError:  # the planner says which sizes do not go together
                continue


def _key(step: Plan) -> tuple[str, Plan]:
    config = step.config
    group_size = config.microbatch_group_size_per_vp_stage or 0
    parts = [config.schedule, config.pp_size, config.num_microbatches, config.num_model_chunks]
    key = " ".join(map(str, [*parts, group_size]))
    return key + (" overlap" if config.overlap_p2p_comm else ""), step


# -- As words --


def row(actions: list[Action]) -> str:
    """A stage's order as one word.

    >>> row(plan(ONE_F_ONE_B, 2, 2).ranks[1])
    'Sa)FeBf<)FeBd<'

    Raises ValueError for an order in which a chunk's microbatches do not come one after the other.
    """
    parts, phase, counts = [], None, Counter()

    def write(mark: str, microbatch: int, chunk: int) -> None:
        if microbatch != counts[mark, chunk]:
            raise ValueError(f"{mark} of microbatch {microbatch}, chunk {chunk} is out of turn")
        counts[mark, chunk] += 1
        parts.append(mark + (str(chunk) if chunk else ""))

    for action in actions:
        if action.phase != phase:
            phase = action.phase
            parts.append(PHASES[phase])
        if action.kind == COMMUNICATE:
            parts.append("!" * action.overlap + "abcdefghi"[CALLS.index(action.call)])
            for message in action.messages:
                mark = MARKS[message.direction == SEND, message.payload == ACTIVATION]
                write(mark, message.microbatch, message.chunk)
        else:
            letter = "F" if action.kind == FORWARD else "B"
            write(letter, action.microbatch, action.chunk)
    return "".join(parts)


def formula_values(step: Plan) -> dict[str, Any]:
    """The closed forms of a plan, worked out: [text, value in words] or [text, number]."""
    config = step.config
    over_ideal, over_total = formulas.bubble_formulas(config)
    makespan = formulas.makespan_formula(config, 1, 0)
    messages = formulas.message_formula(config)
    peaks = [formulas.peak_in_flight_formula(config, rank) for rank in range(config.pp_size)]
    return {
        "ideal": [over_ideal.text, str(over_ideal.value)],
        "total": [over_total.text, str(over_total.value)],
        "makespan": [makespan.text, str(makespan.value)],
        "messages": [messages.text, str(messages.value)],
        "peak": [peaks[0].text, [peak.value for peak in peaks]],
    }


def orders() -> dict[str, dict[str, Any]]:
    """File name -> what it holds."""
    steps = dict(plans())
    late = {key for key, step in steps.items() if step.config.schedule == INTERLEAVED}
    first = packed_plans({key: step for key, step in steps.items() if key not in late})
    words = {"calls": CALLS, "names": NAMES, "shades": shades()}
    return {
        "orders": first | words,
        "orders_interleaved": packed_plans({key: steps[key] for key in steps if key in late}),
    }


def packed_plans(steps: dict[str, Plan]) -> dict[str, Any]:
    """The plans by key, and the rows that they share."""
    rows = {key: [row(actions) for actions in step.ranks] for key, step in steps.items()}
    # Like rows stand together, which makes the packed file half as large.
    numbers = {word: number for number, word in enumerate(sorted(set(chain(*rows.values()))))}
    return {
        "rows": list(numbers),
        "plans": {
            key: {
                "r": [numbers[word] for word in rows[key]],
                "b": int(step.config.batch_p2p_comm),
                "f": formula_values(step),
            }
            for key, step in steps.items()
        },
    }


def shades() -> dict[str, dict[str, list[list[str]]]]:
    """Number of chunks -> kind -> per chunk [fill, text on it], as in the planner's pictures."""
    return {
        str(v): {
            kind: [[fill, text_colour(fill)] for fill in (shade(kind, c, v) for c in range(v))]
            for kind in (FORWARD, BACKWARD)
        }
        for v in (1, *CHUNKS)
    }


# -- The file --


def script(data: dict[str, Any], name: str = "orders") -> str:
    """A script that leaves `data`, packed, at `MM.packed[name]`."""
    text = json.dumps(data, separators=(",", ":"), ensure_ascii=False)
    packed = base64.b64encode(zlib.compress(text.encode(), 9)).decode()
    return (
        "// Generated by docs/tools/emit_orders.py.\n"
        f"((globalThis.MM ||= {{}}).packed ||= {{}})[{json.dumps(name)}] = {json.dumps(packed)};\n"
    )


def write_orders(folder: Path) -> None:
    """Writes the files."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, data in orders().items():
        (folder / f"{name}.js").write_text(script(data, name))


if __name__ == "__main__":
    write_orders(Path(sys.argv[1]))
