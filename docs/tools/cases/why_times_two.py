"""Interleaving's warm-up with one forward per stage and with two: the exchanges of a step, numbered.

Called by: `symptoms`, for the page of that name. Calls: `short_warmup` for the two plans, and
the planner's imagined transport, which says where a rank waits for ever.

Work takes 1, messages 0. A rank's exchanges are its calls of the communicator that have a message in
them, counted from 1. A message is called by the virtual stage that it is for, since its sender and its
receiver call their chunks differently.
"""

from collections.abc import Iterable, Iterator
from functools import cache
from typing import NamedTuple

from cases.case_words import table
from cases.short_warmup import both_warmups
from minimegatron.core.orders.placement import usual_placement
from minimegatron.planner.actions import ACTIVATION, BACKWARD, COMMUNICATE, FORWARD, SEND, Message
from minimegatron.planner.imagined_transport import Execution, execute, match_messages
from minimegatron.planner.plan import Plan
from minimegatron.planner.simulator import Costs
from pictures import pictures


class Traced(NamedTuple):
    """A plan, and what came of it."""

    plan: Plan
    done: Execution
    numbers: list[dict[int, int]]
    """By rank: place of an exchange among its actions -> its number."""


@cache
def traced(steps: int, p: int, m: int, v: int, overlap: bool = False) -> Traced:
    """Interleaving with `steps` (1 or 2) forwards of warm-up per stage."""
    plan = both_warmups(p, m, v, overlap)[2 - steps]
    times = Costs(forward=1, backward=1).of_plan(plan)
    sizes = {message.num_bytes for rank in plan.ranks for a in rank for message in a.messages}
    done = execute(plan, times, dict.fromkeys(sizes, 0))
    numbers = []
    for actions in plan.ranks:
        places = [i for i, a in enumerate(actions) if a.kind == COMMUNICATE and a.messages]
        numbers.append({place: number for number, place in enumerate(places, 1)})
    return Traced(plan, done, numbers)


def num_warmups(steps: int, p: int, m: int, v: int) -> str:
    """Forwards before the first backward, by rank."""
    found = []
    for actions in traced(steps, p, m, v).plan.ranks:
        kinds = [a.kind for a in actions if a.kind in (FORWARD, BACKWARD)]
        # The steady state begins with a forward, and its backward is the first of all.
        found.append(kinds.index(BACKWARD) - 1)
    return ", ".join(map(str, found))


def held(steps: int, p: int, m: int, v: int) -> int:
    """Chunks' activations that rank 0 holds at most."""
    return traced(steps, p, m, v).plan.peak_in_flight(0)


# -- Words --


def stage_of(plan: Plan, rank: int, chunk: int) -> int:
    """The virtual stage that a chunk is."""
    return usual_placement(len(plan.ranks), plan.config.num_model_chunks).stage_of(rank, chunk)


def short(plan: Plan, rank: int, message: Message) -> str:
    """a1→2: the activation of microbatch 1 for virtual stage 2; g is a gradient. `rank` is its end."""
    is_activation = message.payload == ACTIVATION
    stage = stage_of(plan, rank, message.chunk)
    if message.direction == SEND:
        stage += 1 if is_activation else -1
    return f"{'a' if is_activation else 'g'}{message.microbatch}→{stage}"


def exchange_words(plan: Plan, rank: int, messages: Iterable[Message]) -> str:
    """What goes out and what comes in: "sends a0→3; takes a1→2, g0→2"."""
    ways: dict[bool, list[str]] = {True: [], False: []}
    for message in messages:
        ways[message.direction == SEND].append(short(plan, rank, message))
    parts = [("sends", ways[True]), ("takes", ways[False])]
    return "; ".join(f"{verb} {', '.join(names)}" for verb, names in parts if names)


def exchanges_table(last: int, p: int = 2, m: int = 4, v: int = 2) -> str:
    """The first exchanges of both, beside each other. Where a rank waits for ever, the cell says so."""
    runs = {1: traced(1, p, m, v), 2: traced(2, p, m, v)}
    rows = []
    for number in range(1, last + 1):
        row: list[object] = [number]
        for run in runs.values():
            row += [_cell(run, rank, number) for rank in range(p)]
        rows.append(row)
    head = [f"× {steps}, rank {rank}" for steps in runs for rank in range(p)]
    return table(["exchange", *head], rows)


def _cell(run: Traced, rank: int, number: int) -> str:
    place = next((at for at, n in run.numbers[rank].items() if n == number), None)
    if place is None:
        return ""
    words = exchange_words(run.plan, rank, run.plan.ranks[rank][place].messages)
    stuck = run.done.stuck.get(rank)
    if stuck is not None and place > stuck.index:
        return "never"
    return f"**{words}: waits for ever**" if stuck and place == stuck.index else words


class Wait(NamedTuple):
    """What a rank waits for, for ever: the exchange that it stands in, and where the message is."""

    rank: int
    exchange: int
    message: Message
    name: str
    """As on the page: g0→2."""
    their_exchange: int
    """In which exchange of its peer the message's other end is."""
    they_are_in: int
    """The exchange that its peer stands in."""


def waits(steps: int, p: int, m: int, v: int, overlap: bool = False) -> list[Wait]:
    """All waits of the step, by rank; none if it comes to its end."""
    run = traced(steps, p, m, v, overlap)
    found = []
    for rank, stuck in sorted(run.done.stuck.items()):
        for message in stuck.messages:
            peer = message.peer
            theirs = run.numbers[peer][_their_exchange(run, rank, stuck.index, message)]
            now = run.numbers[peer][run.done.stuck[peer].index]
            name = short(run.plan, rank, message)
            found.append(Wait(rank, run.numbers[rank][stuck.index], message, name, theirs, now))
    return found


def stuck_in(steps: int, p: int, m: int, v: int) -> str:
    """The exchanges in which ranks 0, 1, ... stand for ever: "10, 11, 11 and 10"."""
    by_rank = {wait.rank: str(wait.exchange) for wait in waits(steps, p, m, v)}
    *others, last = by_rank.values()
    return f"{', '.join(others)} and {last}"


def exchange_of(steps: int, p: int, m: int, v: int, rank: int, name: str) -> int:
    """Which exchange of this rank has the message with this name, such as g0→2."""
    run = traced(steps, p, m, v)
    (place,) = [
        place
        for place in run.numbers[rank]
        if any(short(run.plan, rank, msg) == name for msg in run.plan.ranks[rank][place].messages)
    ]
    return run.numbers[rank][place]


def who_waits(steps: int, p: int, m: int, v: int, overlap: bool = False) -> str:
    """A row per message that a rank waits for: in which exchange, for what, and where its peer is."""
    rows = []
    for wait in waits(steps, p, m, v, overlap):
        peer = wait.message.peer
        verb = "be taken" if wait.message.direction == SEND else "come"
        where = f"exchange {wait.their_exchange} of rank {peer}"
        where += f", which is in its exchange {wait.they_are_in}"
        rows.append([wait.rank, wait.exchange, f"`{wait.name}` to {verb}", where])
    return table(["rank", "stands in its exchange", "waits for", "that is in"], rows)


def _their_exchange(run: Traced, rank: int, place: int, message: Message) -> int:
    """Where among the peer's actions the message's other end is."""
    for sends, receives in match_messages(run.plan).values():
        for send, receive in zip(sends, receives, strict=True):
            for mine, other in ((send, receive), (receive, send)):
                if mine.place == (rank, place) and mine.message == message:
                    return other.place[1]
    raise ValueError(f"the plan has no other end of {message}")


def is_stuck(steps: int, p: int, m: int, v: int, overlap: bool = False) -> bool:
    """Whether some rank waits for ever."""
    return bool(traced(steps, p, m, v, overlap).done.stuck)


SIZES = ((2, 2, 4), (3, 2, 6), (4, 2, 8), (4, 2, 16), (4, 4, 8), (8, 2, 16))


def verdicts_table() -> str:
    """Of several sizes: does the step come to its end?"""
    rows = [
        [
            *size,
            *(
                "waits for ever" if is_stuck(steps, size[0], size[2], size[1], overlap) else "ends"
                for overlap in (False, True)
                for steps in (1, 2)
            ),
        ]
        for size in SIZES
    ]
    modes = [f"{mode}, × {s}" for mode in ("one exchange", "overlapped") for s in (1, 2)]
    return table(["p", "v", "M", *modes], rows)


# -- The picture --

LANE, GAP, UNIT, BOX = 46, 118, 38, 24


def exchange_figure(until: int, p: int = 2, m: int = 4, v: int = 2) -> str:
    """Both warm-ups of two stages, side by side; time goes down. `until`: how many units are shown."""
    panel = p * LANE + (p - 1) * GAP
    parts, titles = [], []
    for place, steps in enumerate((1, 2)):
        left = 34 + place * (panel + 90)
        run = traced(steps, p, m, v)
        title = f"× {steps}: " + ("waits for ever" if run.done.stuck else "goes on to the end")
        parts.append(pictures.text(left + panel / 2, 16, title, "mm-middle mm-strong"))
        parts += _panel(run, left, until)
        titles.append(f"{title}. " + " ".join(_spoken(run)))
    height = 62 + until * UNIT + 26
    return pictures.svg(34 * 2 + 2 * panel + 90, height, " ".join(titles), parts)


def _x(left: float, rank: int) -> float:
    return left + rank * (LANE + GAP) + LANE / 2


def _y(time: object) -> float:
    return 62 + float(time) * UNIT


def _panel(run: Traced, left: float, until: int) -> Iterator[str]:
    for rank in range(len(run.plan.ranks)):
        x = _x(left, rank)
        yield pictures.text(x, 36, f"rank {rank}", "mm-middle mm-small")
        yield f'<line x1="{x:g}" y1="46" x2="{x:g}" y2="{_y(until):g}" class="mm-life"/>'
    yield from _arrows(run, left, until)
    for rank, actions in enumerate(run.plan.ranks):
        x, done = _x(left, rank), run.done
        for place, action in enumerate(actions):
            if place >= len(done.ends[rank]):
                break
            start, end = done.starts[rank][place], done.ends[rank][place]
            if end > until:
                break
            if action.kind == COMMUNICATE:
                if place in run.numbers[rank]:
                    yield from _node(x, _y(end), run.numbers[rank][place])
                continue
            hue = 0 if action.kind == FORWARD else 1
            stage = stage_of(run.plan, rank, action.chunk)
            words = f"{'F' if hue == 0 else 'B'}{action.microbatch}·{stage}"
            y = (_y(start) + _y(end)) / 2
            yield pictures.box(x - LANE / 2, y - BOX / 2, LANE, BOX, f"mm-hue-{hue}", words)
            yield pictures.text(x, y + 4, words, f"mm-middle mm-small mm-on-{hue}")
        if rank in done.stuck:
            stuck = done.stuck[rank]
            y = _y(done.ends[rank][-1])
            yield from _node(x, y, run.numbers[rank][stuck.index], "mm-stuck")
            words = ", ".join(short(run.plan, rank, message) for message in stuck.messages)
            yield pictures.text(x, y + 26, f"waits for {words}", "mm-middle mm-small mm-strong")


def _node(x: float, y: float, number: int, css: str = "") -> Iterator[str]:
    yield f'<circle cx="{x:g}" cy="{y:g}" r="8" class="mm-exchange {css}"/>'
    words = f"{css}-words" if css else ""
    yield pictures.text(x, y + 3.5, number, f"mm-middle mm-tiny {words}")


SHIFTS = {("mm-activation", 1): -5, ("mm-activation", -1): -1.5}
SHIFTS |= {("mm-gradient", 1): 1.5, ("mm-gradient", -1): 5}
"""How far from its exchange's middle a message is drawn: by kind, and 1 for one to the right."""


def _arrows(run: Traced, left: float, until: int) -> Iterator[str]:
    """Every message that was exchanged, from the circle of its send to that of its receive."""
    for sends, receives in match_messages(run.plan).values():
        for send, receive in zip(sends, receives, strict=True):
            y1, y2 = _when(run, send.place), _when(run, receive.place)
            missing = run.done.stuck.get(receive.place[0])
            is_missing = missing is not None and receive.message in missing.messages
            if None in (y1, y2) or max(y1, y2) > _y(until) or is_missing:
                continue
            x1, x2 = _x(left, send.place[0]), _x(left, receive.place[0])
            way = 1 if x2 > x1 else -1
            css = "mm-activation" if send.message.payload == ACTIVATION else "mm-gradient"
            shift = SHIFTS[css, way]
            tip, y = x2 - 9 * way, y2 + shift
            yield (
                f'<line x1="{x1 + 9 * way:g}" y1="{y1 + shift:g}" x2="{tip - 4 * way:g}" '
                f'y2="{y:g}" class="mm-message {css}"/>'
                f'<path d="M{tip:g} {y:g}l{-7 * way} -3v6z" class="{css}-head"/>'
            )
            # Near its sender: activations above their line, gradients below.
            x, y = x1 + (x2 - x1) * 0.2 + 14 * way, y1 + (y2 - y1) * 0.2
            y += 15 if css == "mm-gradient" else -8
            name = short(run.plan, send.place[0], send.message)
            yield pictures.text(x, y, name, "mm-middle mm-tiny")


def _when(run: Traced, place: tuple[int, int]) -> float | None:
    """Where the circle of an exchange is drawn; None for one that never began."""
    rank, index = place
    ends, stuck = run.done.ends[rank], run.done.stuck.get(rank)
    if index < len(ends):
        return _y(ends[index])
    return _y(ends[-1]) if stuck is not None and stuck.index == index else None


def _spoken(run: Traced) -> Iterator[str]:
    """The picture for those who do not see it."""
    for rank in run.done.stuck:
        stuck = run.done.stuck[rank]
        words = ", ".join(short(run.plan, rank, message) for message in stuck.messages)
        number = run.numbers[rank][stuck.index]
        yield f"Rank {rank} waits in its exchange {number} for {words}."
