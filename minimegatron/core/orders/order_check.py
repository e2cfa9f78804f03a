"""Is an order of work complete, and can it be done? Each fault is found before any message is sent.

Torch-free. Megatron has no counterpart. What is sent where is checked in `planner.plan_check`,
whose problems are of the same kind.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from minimegatron.core.orders.orders import PlanConfig
from minimegatron.core.orders.placement import Place
from minimegatron.core.orders.work import (
    FORWARD,
    INPUT_GRADIENT,
    KINDS,
    OUTPUT,
    WEIGHT_GRADIENT,
    Work,
)

Unit = tuple[int, int]
"""(microbatch, chunk)"""


class ScheduleError(ValueError):
    """A schedule with problems; `problems` lists them."""

    def __init__(self, problems: list["Problem"]):
        self.problems = problems
        more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
        super().__init__(f"{problems[0]}{more}")

    def __reduce__(self) -> tuple:
        return type(self), (self.problems,)


@dataclass(frozen=True)
class Problem:
    """One fault of a schedule. `str()` gives it in a line."""

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


_NEXT = {
    (kind.after[0] if kind.after else None, kind.name) for kind in KINDS.values() if kind.computes
}
"""(what was done last of a microbatch and chunk, or None; what may be done then)"""

_LAST = {kind.name for kind in KINDS.values() if WEIGHT_GRADIENT in kind.computes}
"""After these, nothing of a unit is left to be done."""


def check_orders(orders: list[list[Work]], config: PlanConfig) -> None:
    """Raises `ScheduleError` unless every rank does each of its units once, in a possible order."""
    M, v, has = config.num_microbatches, config.num_model_chunks, config.placement.has
    units = {(i, chunk) for i in range(M) for chunk in range(v) if has(i, chunk, M)}
    last = {FORWARD} if config.forward_only else _LAST
    problems = [
        problem
        for rank, order in enumerate(orders)
        if not _is_complete(order, units, last)
        for problem in _OrderOfRank(config, rank).problems_of(order)
    ]
    if problems:
        raise ScheduleError(problems)


def _is_complete(order: list[Work], units: set[Unit], last: set[str]) -> bool:
    """Whether nothing is wrong, which takes less time to find than what is."""
    done: dict[Unit, str] = {}
    for work in order:
        for kind, microbatch, chunk, _, _ in work.parts or (work,):
            unit = (microbatch, chunk)
            if (done.get(unit), kind) not in _NEXT:
                return False
            done[unit] = kind
    return done.keys() == units and last.issuperset(done.values())


class _OrderOfRank:
    """One rank's order; `_done` has, by unit, what was computed of it, and by which kinds."""

    def __init__(self, config: PlanConfig, rank: int):
        self.config, self.rank = config, rank
        self._done: dict[Unit, dict[str, str]] = {}
        needed = (OUTPUT,) if config.forward_only else (OUTPUT, INPUT_GRADIENT, WEIGHT_GRADIENT)
        self._needed = needed

    def problems_of(self, order: list[Work]) -> Iterator[Problem]:
        for index, work in enumerate(order):
            for part in work.parts or (work,):
                if problem := self._problem_of(part, index):
                    yield problem
        config = self.config
        for microbatch in range(config.num_microbatches):
            for chunk in range(config.num_model_chunks):
                if config.placement.has(microbatch, chunk, config.num_microbatches):
                    yield from self._absent((microbatch, chunk))

    def _problem_of(self, work: Work, index: int) -> Problem | None:
        unit, config = (work.microbatch, work.chunk), self.config
        kind = KINDS[work.kind]
        exists = 0 <= unit[0] < config.num_microbatches and 0 <= unit[1] < config.num_model_chunks
        if not exists or not config.placement.has(*unit, config.num_microbatches):
            M, v = config.num_microbatches, config.num_model_chunks
            text = f"{kind.words} of what does not exist; there are {M} microbatches, {v} chunk"
            text += "s" * (v > 1) + ", counted from 0 (the placement says how many chunks)"
            if exists:
                text += ", and this chunk is of the copy that runs other microbatches"
            return Problem("range", self.rank, *unit, text, index)
        done = self._done.setdefault(unit, {})
        problem = None
        if kind.after and kind.after[0] not in done.values():
            text = f"{kind.words} comes before its {KINDS[kind.after[0]].words}"
            problem = Problem("order", self.rank, *unit, text, index)
        for what in sorted(kind.computes):
            if what in done:
                text = f"its {what} is computed a second time, by {kind.words}"
                problem = Problem("duplicate", self.rank, *unit, text, index)
            done[what] = work.kind
        return problem

    def _absent(self, unit: Unit) -> Iterator[Problem]:
        done = self._done.get(unit, {})
        absent = [what for what in self._needed if what not in done]
        if absent == [INPUT_GRADIENT, WEIGHT_GRADIENT]:
            text = "backward is never done, so the activation of its forward is never freed (leak)"
            yield Problem("absent", self.rank, *unit, text)
        elif OUTPUT in absent:
            yield Problem("absent", self.rank, *unit, "forward is never done")
        elif absent:
            yield Problem("absent", self.rank, *unit, f"its {absent[0]} is never computed")


def stuck_order(waiting: Mapping[int, tuple[Work, str, Place]]) -> ScheduleError:
    """The error for ranks that wait for each other: rank -> (its work, payload, who makes that)."""
    links = [
        f"rank {rank} waits with {work} for the {payload} of microbatch {work.microbatch} from chunk "
        f"{maker.chunk} of " + ("itself" if maker.rank == rank else f"rank {maker.rank}")
        for rank, (work, payload, maker) in sorted(waiting.items())
    ]
    rank, (work, _, _) = min(waiting.items())
    return ScheduleError([Problem("deadlock", rank, work.microbatch, work.chunk, "; ".join(links))])
