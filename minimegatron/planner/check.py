"""Is a plan right? Every fault is found before any process starts, and named.

Called by: `minimegatron plan`, exercises, whoever wrote a schedule. Calls: `plan`, `transport`.
Megatron has no counterpart: there a wrong schedule hangs, or trains on wrong gradients.

Three looks at the plan, each with its kinds of problem:

1. Each rank alone. `absent`, `duplicate`: a forward or backward that is missing or done twice.
   `range`: one of a microbatch or chunk that does not exist. `order`: a backward before its
   forward. `dependency`: work before its input has been received, a tensor sent before it exists.
   `peer`: a message to a rank that is no neighbour in the model.
2. Each pair of ranks. `leak`: a message that nobody receives, or nobody sends. `crossed`: both do,
   but the n-th send meets a receive that is meant for another tensor.
3. All together, on the imagined transport: `deadlock`, with the cycle of who waits for whom.

>>> from minimegatron.planner.plan import plan
>>> check(plan("interleaved", pp=4, num_microbatches=8, vpp=2))
[]
>>> print(check(plan("interleaved", pp=2, num_microbatches=4, vpp=2, batch_p2p_comm=True))[0])
rank 1, microbatch 2, chunk 0: crossed: message 4 from rank 0 to rank 1 is the gradient of \
microbatch 0, but rank 1 takes it for the activation of microbatch 2 (4 messages of this pair cross)
"""

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field

from minimegatron.planner.actions import (
    ACTIVATION,
    BACKWARD,
    COMMUNICATE,
    FORWARD,
    GRADIENT,
    SEND,
    Action,
    Message,
)
from minimegatron.planner.plan import Plan
from minimegatron.planner.stage import PlanConfig
from minimegatron.planner.transport import Side, execute, match_messages

Unit = tuple[int, int]


class ScheduleError(ValueError):
    """A plan with problems; `problems` lists them."""

    def __init__(self, problems: list["Problem"]):
        self.problems = problems
        more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
        super().__init__(f"{problems[0]}{more}")


@dataclass(frozen=True)
class Problem:
    """One fault of a plan. `str()` gives it in a line."""

    kind: str
    """`absent`, `duplicate`, `range`, `order`, `dependency`, `peer`, `leak`, `crossed` or
    `deadlock`."""
    rank: int
    microbatch: int | None
    chunk: int | None
    text: str
    index: int | None = None
    """Where in the rank's list of actions; None for what is absent."""

    def __str__(self) -> str:
        return (
            f"rank {self.rank}, microbatch {self.microbatch}, chunk {self.chunk}: "
            f"{self.kind}: {self.text}"
        )


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
    done: dict[str, set[Unit]] = field(default_factory=lambda: {FORWARD: set(), BACKWARD: set()})
    received: dict[str, set[Unit]] = field(
        default_factory=lambda: {ACTIVATION: set(), GRADIENT: set()}
    )
    sent: dict[str, set[Unit]] = field(default_factory=lambda: {ACTIVATION: set(), GRADIENT: set()})
    problems: list[Problem] = field(default_factory=list)

    def run(self, actions: list[Action]) -> list[Problem]:
        for index, action in enumerate(actions):
            if action.kind == COMMUNICATE:
                for message in action.messages:
                    self._check_message(index, action, message)
            else:
                self._check_work(index, action)
        self._check_complete()
        return self.problems

    def _report(self, kind: str, unit: Unit, text: str, index: int | None = None) -> None:
        self.problems.append(Problem(kind, self.rank, *unit, text, index))

    def _virtual_stage(self, chunk: int) -> int:
        return chunk * self.config.pp_size + self.rank

    def _needs_input(self, chunk: int) -> bool:
        return self._virtual_stage(chunk) > 0

    def _needs_gradient(self, chunk: int) -> bool:
        return self._virtual_stage(chunk) < self.config.num_virtual_stages - 1

    def _exists(self, unit: Unit) -> bool:
        microbatch, chunk = unit
        return (
            0 <= microbatch < self.config.num_microbatches
            and 0 <= chunk < self.config.num_model_chunks
        )

    def _check_work(self, index: int, action: Action) -> None:
        unit = (action.microbatch, action.chunk)
        if not self._exists(unit):
            M, v = self.config.num_microbatches, self.config.num_model_chunks
            text = f"{action.kind} of what does not exist; there are {M} microbatches, {v} chunk"
            return self._report("range", unit, text + "s" * (v > 1), index)
        if unit in self.done[action.kind]:
            self._report("duplicate", unit, f"{action.kind} is done a second time", index)
        self.done[action.kind].add(unit)
        if action.kind == FORWARD:
            if self._needs_input(action.chunk) and unit not in self.received[ACTIVATION]:
                text = "forward starts before its input was received (recv_forward must precede it)"
                self._report("dependency", unit, text, index)
            return
        if self.config.forward_only:
            self._report("order", unit, "backward in a forward-only step", index)
        elif unit not in self.done[FORWARD]:
            self._report("order", unit, "backward comes before its forward", index)
        if self._needs_gradient(action.chunk) and unit not in self.received[GRADIENT]:
            text = (
                "backward starts before its gradient was received (recv_backward must precede it)"
            )
            self._report("dependency", unit, text, index)

    def _check_message(self, index: int, action: Action, message: Message) -> None:
        unit = (message.microbatch, message.chunk)
        is_send = message.direction == SEND
        step = 1 if is_send == (message.payload == ACTIVATION) else -1
        neighbour = self._virtual_stage(message.chunk) + step
        words = f"{action.call}: {message.direction}s the {message.payload}"
        if not self._exists(unit) or not 0 <= neighbour < self.config.num_virtual_stages:
            return self._report("peer", unit, f"{words}, but no such message exists", index)
        if message.peer != neighbour % self.config.pp_size:
            other = neighbour % self.config.pp_size
            to_or_from, goes = ("to", "belongs to") if is_send else ("from", "comes from")
            text = f"{words} {to_or_from} rank {message.peer}, but it {goes} rank {other}"
            self._report("peer", unit, text, index)
        seen = (self.sent if is_send else self.received)[message.payload]
        if unit in seen:
            self._report("duplicate", unit, f"{words} a second time", index)
        seen.add(unit)
        if is_send:
            maker = FORWARD if message.payload == ACTIVATION else BACKWARD
            if unit not in self.done[maker]:
                self._report("dependency", unit, f"{words} before its {maker} made it", index)

    def _check_complete(self) -> None:
        forwards, backwards = self.done[FORWARD], self.done[BACKWARD]
        for unit in self._all_units():
            if unit not in forwards:
                self._report("absent", unit, "forward is never done")
            if unit not in backwards and not self.config.forward_only:
                text = "backward is never done"
                if unit in forwards:
                    text += ", so the activation of its forward is never freed (leak)"
                self._report("absent", unit, text)
        for payload, work in ((ACTIVATION, FORWARD), (GRADIENT, BACKWARD)):
            for unit in sorted(self.received[payload] - self.done[work]):
                text = f"{payload} is received, but no {work} uses it, so it is never freed"
                self._report("leak", unit, text)

    def _all_units(self) -> Iterator[Unit]:
        for microbatch in range(self.config.num_microbatches):
            for chunk in range(self.config.num_model_chunks):
                yield microbatch, chunk


# -- Pairs of ranks --


def _check_messages(plan: Plan) -> Iterator[Problem]:
    for (source, target), (sends, receives) in sorted(match_messages(plan).items()):
        sent = {_content(plan.config, side): side for side in sends}
        expected = {_content(plan.config, side): side for side in receives}
        for content in [c for c in sent if c not in expected]:
            text = f"sent to rank {target}, which never receives it"
            yield _message_problem("leak", sent[content], text)
        for content in [c for c in expected if c not in sent]:
            text = f"expected from rank {source}, which never sends it"
            yield _message_problem("leak", expected[content], text)
        # Where one is missing, all later ones are one place off: only those that have a partner
        # tell anything about the order.
        pairs = zip(
            [side for side in sends if _content(plan.config, side) in expected],
            [side for side in receives if _content(plan.config, side) in sent],
            strict=False,
        )
        crossed = [
            (number, a, b)
            for number, (a, b) in enumerate(pairs)
            if _content(plan.config, a) != _content(plan.config, b)
        ]
        if crossed:
            number, a, b = crossed[0]
            text = (
                f"message {number} from rank {source} to rank {target} is the {_words(a.message)}, "
                f"but rank {target} takes it for the {_words(b.message)} "
                f"({len(crossed)} messages of this pair cross)"
            )
            yield Problem(
                "crossed", target, b.message.microbatch, b.message.chunk, text, b.place[1]
            )


def _content(config: PlanConfig, side: Side) -> tuple[str, int, int]:
    """What the message is, the same at both ends: payload, microbatch, boundary in the model.

    Boundary s lies between the virtual stages s and s + 1.
    """
    message = side.message
    virtual_stage = message.chunk * config.pp_size + side.place[0]
    made_here = message.direction == SEND
    is_lower_end = made_here == (message.payload == ACTIVATION)
    return message.payload, message.microbatch, virtual_stage - (0 if is_lower_end else 1)


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
    no_times = [[0] * plan.config.num_model_chunks] * plan.config.pp_size
    stuck = execute(plan, no_times, no_times, defaultdict(int)).stuck
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
