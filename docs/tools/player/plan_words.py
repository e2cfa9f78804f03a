"""A plan as words: what each stage does, in order, and what that needs, for the schedule player.

Called by: `emit_orders`, `emit_player`, `unrolled_pages`, and `in_browser` inside the page. Calls:
the planner's schema. Needs nothing but the standard library. docs/javascripts/engine.js
reads the words; it knows no schedule, no placement and no kind of work but those that are written
here.

A stage's order is a word, its row:

    U S C N             warm-up, steady state, cool-down, no phase, from here on
    F I2 W              work: the letter of its kind, then the chunk
    P                   the next two pieces of work are a pair
    a ... j             a call of P2PCommunicator (`CALLS`); ! before it: it returns at once
    >0 )0 <0 (1         after a call, its messages as they start: activation to the next virtual stage,
                        activation from the previous, gradient to the previous, gradient from the next
    @5                  the mark before it is of microbatch 5

Letters of kinds are those of the table `KINDS`. A digit 0 is left out. Nor is a microbatch written
that is the one after the last of the same mark and chunk, or 0 for the first.

A placement says where the virtual stages are and what work needs, so that the page draws edges and
does not make them:

    {"stages": [[virtual stage per chunk] per rank], "next": [[[rank, chunk] or null]], "prev": ...,
     "needs": {letter: [[[[letters, rank, chunk], ...] per chunk] per rank]}}

Each entry of "needs" is work of the same microbatch: one of the letters, at that place.
"""

from collections.abc import Iterable, Iterator
from typing import Any

from minimegatron.core.orders.placement import Place, Placement
from minimegatron.planner.actions import (
    ACTIVATION,
    COMMUNICATE,
    COOLDOWN,
    KINDS,
    SEND,
    STEADY,
    WARMUP,
    Action,
)

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
    "exchange",
)
CALL_LETTERS = dict(zip(CALLS, "abcdefghij", strict=True))
LETTERS = "".join(kind.letter for kind in KINDS.values())
"""Of all kinds of single work."""
PHASES = {WARMUP: "U", STEADY: "S", COOLDOWN: "C"}
MARKS = {(True, True): ">", (False, True): ")", (True, False): "<", (False, False): "("}
"""(is sent, is activation) -> the message's mark."""


def row(actions: Iterable[Action]) -> str:
    """A stage's order as one word.

    >>> from minimegatron.planner.plan import plan
    >>> row(plan("1f1b", 2, 2).ranks[1])
    'Sa)FeBf<)FeBd<'
    """
    return "".join(_row_parts(actions))


def _row_parts(actions: Iterable[Action]) -> Iterator[str]:
    # A function and not small ones: the site's build writes down millions of actions.
    phase, counts = None, dict[tuple[str, int], int]()
    for action in actions:
        if action.phase != phase:
            phase = action.phase
            yield PHASES.get(phase, "N")
        if action.kind == COMMUNICATE:
            yield "!" * action.overlap + CALL_LETTERS[action.call]
            marks = [(MARKS[m[0] == SEND, m[1] == ACTIVATION], m[3], m[4]) for m in action.messages]
        elif action.parts:
            yield "P"
            marks = [(KINDS[x.kind].letter, x.microbatch, x.chunk) for x in action.parts]
        else:
            marks = [(KINDS[action.kind].letter, action.microbatch, action.chunk)]
        for mark, microbatch, chunk in marks:
            yield f"{mark}{chunk}" if chunk else mark
            if microbatch != counts.get((mark, chunk), 0):
                yield f"@{microbatch}"
            counts[mark, chunk] = microbatch + 1


# -- What does not change with the number of microbatches --


def placement_data(placement: Placement, letters: Iterable[str]) -> dict[str, Any]:
    """A placement as the page reads it, for work of these kinds."""
    p, v = placement.pp_size, placement.num_model_chunks
    places = [[Place(rank, chunk) for chunk in range(v)] for rank in range(p)]
    kinds = [kind for kind in KINDS.values() if kind.letter in set(letters)]

    def table(of_place: Any) -> list[list[Any]]:
        return [[of_place(place) for place in of_rank] for of_rank in places]

    return {
        "stages": [list(chunks) for chunks in placement.stages],
        "next": table(lambda place: _listed(placement.next_of(*place))),
        "prev": table(lambda place: _listed(placement.previous_of(*place))),
        "needs": {kind.letter: table(_Needs(placement, kind, kinds).of) for kind in kinds},
    }


def _listed(place: Place | None) -> list[int] | None:
    return None if place is None else list(place)


class _Needs:
    """What one kind of work needs: what makes the payload that it takes, and what comes before it."""

    def __init__(self, placement: Placement, kind: Any, kinds: list[Any]):
        self.placement, self.kind = placement, kind
        self.makers = "".join(k.letter for k in kinds if kind.takes and k.gives == kind.takes)
        self.before = "".join(k.letter for k in kinds if k.name in kind.after)

    def of(self, place: Place) -> list[list[Any]]:
        found = []
        neighbour = self.placement.previous_of if self.kind.takes == ACTIVATION else None
        neighbour = neighbour or self.placement.next_of
        source = neighbour(*place) if self.makers else None
        if source is not None:
            found.append([self.makers, *source])
        if self.before:
            found.append([self.before, *place])
        return found


def kinds_data() -> dict[str, dict[str, Any]]:
    """The table of kinds by letter, as far as the page needs it."""
    return {
        kind.letter: {
            "name": kind.name,
            "words": kind.words,
            "cost": kind.cost,
            "lane": kind.lane,
            "holds": kind.held(),
            "takes": kind.takes,
            "fill": kind.fill,
            "owes": kind.holds_share,
        }
        for kind in KINDS.values()
        if kind.letter
    }
