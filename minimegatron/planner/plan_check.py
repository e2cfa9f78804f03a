"""Is a plan right? Every fault is found before any process starts, and named.

Megatron has no counterpart: there a wrong schedule hangs, or trains on wrong gradients.

Three looks at the plan, each with its kinds of problem:

1. Each rank alone. `absent`, `duplicate`: a forward, or one of the two gradients, that is missing
   or computed twice. `range`: work of a kind, microbatch or chunk that does not exist. `order`: a
   backward before its forward, a weight gradient before its input gradient. `dependency`: work
   before its input is there, a tensor sent before it exists. `peer`: a message to a rank that is no
   neighbour in the model, or to the rank itself.
2. Each pair of ranks. `leak`: a message that nobody receives, or nobody sends. `crossed`: both do,
   but the n-th send meets a receive that is meant for another tensor. On a tagged wire the n-th
   send of a payload meets the n-th receive of that payload.
3. All together, on the imagined transport: `deadlock`, with the cycle of who waits for whom.

>>> from minimegatron.planner.plan import plan
>>> check(plan("interleaved", pp=4, num_microbatches=8, vpp=2))
[]
>>> print(check(plan("interleaved", pp=2, num_microbatches=4, vpp=2, batch_p2p_comm=True))[0])
rank 1, microbatch 2, chunk 0: crossed: message 4 from rank 0 to rank 1 is the gradient of \
microbatch 0, but rank 1 takes it for the activation of microbatch 2 (4 messages of this pair cross)
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from minimegatron.core.orders.order_check import Problem, ScheduleError
from minimegatron.core.orders.orders import TAGGED
from minimegatron.core.orders.placement import Place
from minimegatron.core.orders.work import INPUT_GRADIENT, WEIGHT_GRADIENT
from minimegatron.planner.actions import (
    ACTIVATION,
    BACKWARD,
    COMMUNICATE,
    FORWARD,
    GRADIENT,
    KINDS,
    PAIR,
    SEND,
    Action,
    Message,
    parts_of,
)
from minimegatron.planner.imagined_transport import Side, execute, match_messages
from minimegatron.planner.plan import Plan
from minimegatron.planner.stage import PlanConfig

__all__ = ["Problem", "ScheduleError", "check", "find_cycle", "require_valid"]

Unit = tuple[int, int]

SINGLE = [kind for kind in KINDS if kind != PAIR]
NEEDS = {
    ACTIVATION: ("input", "recv_forward", FORWARD),
    GRADIENT: ("gradient", "recv_backward", BACKWARD),
}
"""Payload -> what it is to the work that takes it; the call that receives it, the work."""
MAKERS = {payload: [kind for kind in SINGLE if KINDS[kind].gives == payload] for payload in NEEDS}
TAKERS = {payload: [kind for kind in SINGLE if KINDS[kind].takes == payload] for payload in NEEDS}
RIVALS = {
    kind: [other for other in SINGLE if other != kind and KINDS[other].computes & mine.computes]
    for kind, mine in KINDS.items()
}
"""Kind of work -> the others that compute something that it computes."""


def check(plan: Plan) -> list[Problem]:
    """All problems of the plan, those of single ranks first. An empty list for a right one."""
    problems = []
    for rank in range(len(plan.ranks)):
        problems += _RankCheck(plan.config, rank).run(plan.ranks[rank])
    problems += _check_messages(plan)
    # What does not exist cannot be run.
    if all(problem.kind != "peer" and problem.kind != "range" for problem in problems):
        problems += _check_progress(plan)
    return problems


def require_valid(plan: Plan) -> Plan:
    """The plan itself. Raises `ScheduleError`, a ValueError, if `check` finds anything."""
    problems = check(plan)
    if problems:
        raise ScheduleError(problems)
    return plan


# -- One rank alone --


@dataclass
class _RankCheck:
    """Walks through one rank's actions and remembers what it has done, received and sent."""

    config: PlanConfig
    rank: int
    done: dict[str, dict[Unit, int]] = field(default_factory=lambda: {kind: {} for kind in SINGLE})
    """Kind of work -> unit -> index of the (first) action that did it."""
    received: dict[str, set[Unit]] = field(
        default_factory=lambda: {ACTIVATION: set(), GRADIENT: set()}
    )
    sent: dict[str, set[Unit]] = field(default_factory=lambda: {ACTIVATION: set(), GRADIENT: set()})
    problems: list[Problem] = field(default_factory=list)
    units: list[Unit] = field(init=False)
    """What this rank has to do: each microbatch that its chunks work on."""

    def __post_init__(self) -> None:
        M, v = self.config.num_microbatches, self.config.num_model_chunks
        units = ((microbatch, chunk) for microbatch in range(M) for chunk in range(v))
        self.units = [unit for unit in units if self.config.placement.has(*unit, M)]
        self._here = frozenset(self.units)

    def run(self, actions: list[Action]) -> list[Problem]:
        for index, action in enumerate(actions):
            if action.kind == COMMUNICATE:
                for message in self._different(action.messages):
                    self._check_message(index, action, message)
            else:
                for part in parts_of(action):
                    self._check_work(index, part)
        self._check_complete()
        return self.problems

    def _different(self, messages: Iterable[Message]) -> Iterable[Message]:
        """Where a link carries several tensors, those that one call sends for one unit count once."""
        if self.config.message_sizes is None:
            return messages
        return {message._replace(num_bytes=0): message for message in messages}.values()

    def _report(self, kind: str, unit: Unit, text: str, index: int | None = None) -> None:
        self.problems.append(Problem(kind, self.rank, *unit, text, index))

    def _neighbour(self, payload: str, chunk: int, is_send: bool) -> Place | None:
        """Who makes the payload for a chunk or, where the chunk sends it, who needs it."""
        placement = self.config.placement
        is_next = is_send == (payload == ACTIVATION)
        return (placement.next_of if is_next else placement.previous_of)(self.rank, chunk)

    def _is_done(self, kinds: Iterable[str], unit: Unit, before: int | None = None) -> bool:
        """Whether one of the kinds of work is done, by an action before that index if one is given.

        The two parts of a pair start together: neither is done before the other.
        """
        found = (self.done[kind].get(unit) for kind in kinds)
        return any(index is not None and (before is None or index < before) for index in found)

    def _exists(self, unit: Unit) -> bool:
        M, v = self.config.num_microbatches, self.config.num_model_chunks
        return 0 <= unit[0] < M and 0 <= unit[1] < v

    def _is_here(self, unit: Unit) -> bool:
        return unit in self._here

    # -- Work --

    def _check_work(self, index: int, action: Action) -> None:
        unit = (action.microbatch, action.chunk)
        if action.kind not in SINGLE:
            text = f"{action.kind} is no single kind of work; those are {', '.join(SINGLE)}"
            return self._report("range", unit, text, index)
        kind = KINDS[action.kind]
        if not self._is_here(unit):
            M, v = self.config.num_microbatches, self.config.num_model_chunks
            text = f"{kind.words} of what does not exist; there are {M} microbatches, {v} chunk"
            text += "s" * (v > 1)
            if self._exists(unit):
                text += ", and this chunk is of the copy that runs other microbatches"
            return self._report("range", unit, text, index)
        self._check_once(index, action.kind, unit)
        self.done[action.kind].setdefault(unit, index)
        if kind.after and self.config.forward_only:
            self._report("order", unit, f"{kind.words} in a forward-only step", index)
        elif kind.after and not self._is_done(kind.after, unit, index):
            text = f"{kind.words} comes before its {KINDS[kind.after[0]].words}"
            self._report("order", unit, text, index)
        if kind.takes is not None:
            self._check_needs(index, action.kind, unit)

    def _check_once(self, index: int, kind: str, unit: Unit) -> None:
        words = KINDS[kind].words
        if unit in self.done[kind]:
            return self._report("duplicate", unit, f"{words} is done a second time", index)
        for other in RIVALS[kind]:
            if unit in self.done[other]:
                (what, *_) = sorted(KINDS[kind].computes & KINDS[other].computes)
                text = f"its {what} is computed a second time, by {words}"
                self._report("duplicate", unit, text, index)

    def _check_needs(self, index: int, kind: str, unit: Unit) -> None:
        """Is what the work takes from a neighbour there?"""
        payload, words = KINDS[kind].takes, KINDS[kind].words
        needed, call, _ = NEEDS[payload]
        place = self._neighbour(payload, unit[1], is_send=False)
        if place is None:
            return
        if place.rank == self.rank:
            if not self._is_done(MAKERS[payload], (unit[0], place.chunk), index):
                text = (
                    f"{words} starts before chunk {place.chunk} of this rank has made its {needed}"
                )
                self._report("dependency", unit, text, index)
        elif unit not in self.received[payload]:
            call = call if self.config.wire is None else "an exchange that receives it"
            text = f"{words} starts before its {needed} was received ({call} must precede it)"
            self._report("dependency", unit, text, index)

    # -- Messages --

    def _check_message(self, index: int, action: Action, message: Message) -> None:
        unit = (message.microbatch, message.chunk)
        is_send, payload = message.direction == SEND, message.payload
        words = f"{action.call}: {message.direction}s the {payload}"
        place = self._neighbour(payload, unit[1], is_send) if self._is_here(unit) else None
        if place is None:
            return self._report("peer", unit, f"{words}, but no such message exists", index)
        to_or_from, goes = ("to", "belongs to") if is_send else ("from", "comes from")
        text = f"{words} {to_or_from} rank {message.peer}, but it {goes}"
        if place.rank == self.rank:
            text += f" chunk {place.chunk} of this rank and needs no message"
            self._report("peer", unit, text, index)
        elif message.peer != place.rank:
            self._report("peer", unit, f"{text} rank {place.rank}", index)
        seen = (self.sent if is_send else self.received)[payload]
        if unit in seen:
            self._report("duplicate", unit, f"{words} a second time", index)
        seen.add(unit)
        if is_send and not self._is_done(MAKERS[payload], unit):
            maker = NEEDS[payload][2]
            self._report("dependency", unit, f"{words} before its {maker} made it", index)

    # -- The whole step --

    def _check_complete(self) -> None:
        for unit in self.units:
            self._check_unit(unit)
        for payload, (_, _, work) in NEEDS.items():
            done = {unit for kind in TAKERS[payload] for unit in self.done[kind]}
            for unit in sorted(self.received[payload] - done):
                text = f"{payload} is received, but no {work} uses it, so it is never freed"
                self._report("leak", unit, text)

    def _check_unit(self, unit: Unit) -> None:
        has_forward = unit in self.done[FORWARD]
        if not has_forward:
            self._report("absent", unit, "forward is never done")
        if self.config.forward_only:
            return
        computed = {
            what for kind in SINGLE if unit in self.done[kind] for what in KINDS[kind].computes
        }
        absent = [what for what in (INPUT_GRADIENT, WEIGHT_GRADIENT) if what not in computed]
        if not absent:
            return
        text = "backward is never done" if len(absent) > 1 else f"its {absent[0]} is never computed"
        if has_forward:
            text += ", so the activation of its forward is never freed (leak)"
        self._report("absent", unit, text)


# -- Pairs of ranks --


def _check_messages(plan: Plan) -> Iterator[Problem]:
    is_tagged = plan.config.wire == TAGGED
    for (source, target, *_), (sends, receives) in sorted(match_messages(plan).items()):
        sent_in_order = [(_content(plan.config, side), side) for side in sends]
        expected_in_order = [(_content(plan.config, side), side) for side in receives]
        sent, expected = dict(sent_in_order), dict(expected_in_order)
        for content in [c for c in sent if c not in expected]:
            text = f"sent to rank {target}, which never receives it"
            yield _message_problem("leak", sent[content], text)
        for content in [c for c in expected if c not in sent]:
            text = f"expected from rank {source}, which never sends it"
            yield _message_problem("leak", expected[content], text)
        # Where one is missing, all later ones are one place off: only those that have a partner
        # tell anything about the order.
        pairs = zip(
            [one for one in sent_in_order if one[0] in expected],
            [one for one in expected_in_order if one[0] in sent],
            strict=False,
        )
        crossed = [
            (number, a, b)
            for number, ((content, a), (other, b)) in enumerate(pairs)
            if content != other
        ]
        if crossed:
            number, a, b = crossed[0]
            name = f"{a.message.payload} {number}" if is_tagged else f"message {number}"
            text = (
                f"{name} from rank {source} to rank {target} is the {_words(a.message)}, "
                f"but rank {target} takes it for the {_words(b.message)} "
                f"({len(crossed)} messages of this pair cross)"
            )
            yield Problem(
                "crossed", target, b.message.microbatch, b.message.chunk, text, b.place[1]
            )


def _content(config: PlanConfig, side: Side) -> tuple[str, int, int]:
    """What the message is, the same at both ends: payload, microbatch, boundary in the model.

    Boundary s lies between the virtual stages s and s + 1. With two copies of the model the
    microbatch says in which one.
    """
    message, (rank, _) = side.message, side.place
    if not 0 <= message.chunk < config.num_model_chunks:
        return message.payload, message.microbatch, -2
    made_here = message.direction == SEND
    is_lower_end = made_here == (message.payload == ACTIVATION)
    stage = config.placement.stage_of(rank, message.chunk)
    return message.payload, message.microbatch, stage - (0 if is_lower_end else 1)


def _words(message: Message) -> str:
    return f"{message.payload} of microbatch {message.microbatch}"


def _message_problem(kind: str, side: Side, text: str) -> Problem:
    message, (rank, index) = side.message, side.place
    return Problem(
        kind, rank, message.microbatch, message.chunk, f"{message.payload} is {text}", index
    )


# -- All together --


def _check_progress(plan: Plan) -> Iterator[Problem]:
    """A deadlock, if there is one. That a rank waits for one that has finished is a leak, above."""
    no_times = dict.fromkeys(KINDS, [defaultdict(int)] * plan.config.pp_size)
    stuck = execute(plan, no_times, defaultdict(int)).stuck
    waits = {
        rank: {m.peer: m for m in reversed(where.messages) if m.peer in stuck}
        for rank, where in stuck.items()
    }
    cycle = find_cycle({rank: sorted(messages) for rank, messages in waits.items()})
    if not cycle:
        return
    links = []
    for rank, peer in zip(cycle, cycle[1:] + cycle[:1], strict=True):
        message, action = waits[rank][peer], plan.ranks[rank][stuck[rank].index]
        links.append(
            f"rank {rank} waits for rank {peer} in {action.call or action} to {message.direction} "
            f"the {_words(message)}, chunk {message.chunk}"
        )
    rank, message = cycle[0], waits[cycle[0]][(cycle[1:] + cycle[:1])[0]]
    yield Problem(
        "deadlock",
        rank,
        message.microbatch,
        message.chunk,
        "; ".join(links),
        stuck[rank].index,
    )


def find_cycle(graph: dict[int, list[int]]) -> list[int]:
    """Nodes of a cycle, each pointing to the next and the last to the first; [] without one.

    >>> find_cycle({0: [1], 1: [2], 2: [1]})
    [1, 2]
    """
    finished: set[int] = set()
    for start in sorted(graph):
        path: list[int] = []
        branches = [iter([start])]
        while branches:
            node = next(branches[-1], None)
            if node is None:
                branches.pop()
                if path:
                    finished.add(path.pop())
            elif node in path:
                return path[path.index(node) :]
            elif node not in finished:
                path.append(node)
                branches.append(iter(graph.get(node, [])))
    return []
