"""When everything happens, given what it costs: makespan, bubbles, and what each gap waits for.

Megatron has no counterpart.

>>> from minimegatron.planner.plan import plan
>>> step = simulate(plan("1f1b", pp=4, num_microbatches=8), Costs(forward=1, backward=2))
>>> step.makespan, step.bubble_over_ideal, step.bubble_over_total
(33, Fraction(3, 8), Fraction(3, 11))
>>> gap = step.gaps(0)[0]
>>> gap.start, gap.end, str(step.action(gap.waits_for)), gap.waits_for[0]
(4, 10, 'backward of microbatch 0, chunk 0', 1)
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from itertools import chain
from math import lcm
from operator import attrgetter
from typing import Any

from minimegatron.core.orders.placement import Placement, usual_placement
from minimegatron.planner.actions import (
    BACKWARD,
    COMMUNICATE,
    FORWARD,
    KINDS,
    PAIR,
    Action,
    Event,
    Time,
    number_to_json,
    timeline_to_json,
)
from minimegatron.planner.imagined_transport import (
    BUFFERED,
    RENDEZVOUS,
    CostKey,
    Place,
    cost_key,
    execute,
)
from minimegatron.planner.plan import Plan, plan_config_to_json, without_garbage_collection
from minimegatron.planner.stage import PlanConfig

PairTime = Callable[[Time, Time], Time]


@dataclass(frozen=True)
class Costs:
    """How long things take, in any unit. Integers and Fractions keep every figure exact.

    Raises ValueError for a negative time or a bandwidth that is not above 0.
    """

    forward: Time | Sequence[Time] = 1
    """Of one chunk, one microbatch. One number; or one per virtual stage, in model order; or p
    numbers, one per rank, for each of its chunks. (With two copies of the model there are p virtual
    stages, and p numbers are theirs.)"""
    backward: Time | Sequence[Time] = 2
    """Of a backward in one go."""
    latency: Time = 0
    """Of one message, whatever its size."""
    bandwidth: Time | None = None
    """Bytes per unit of time on each link; None for no limit."""
    backward_input: Time | Sequence[Time] | None = None
    """Of a backward for the input's gradient alone; None for half of `backward`."""
    backward_weight: Time | Sequence[Time] | None = None
    """Of a backward for the weight gradients alone; None for half of `backward`."""
    pair: PairTime | None = None
    """Of two pieces of work that start and end together, a function of the times of the two:
    `max`, or `lambda first, second: 3` for a measured time. None: one after the other."""

    def __post_init__(self) -> None:
        for name in ("forward", "backward", "latency", "backward_input", "backward_weight"):
            value = getattr(self, name)
            if value is None:
                continue
            for number in value if isinstance(value, Sequence) else (value,):
                if not number >= 0:
                    raise ValueError(f"{name} time {number} is negative; give 0 or more")
        if self.bandwidth is not None and not self.bandwidth > 0:
            raise ValueError(
                f"bandwidth {self.bandwidth} is not above 0; leave it out for no limit"
            )

    @classmethod
    def of_stages(
        cls,
        forward: Time,
        backward: Time,
        num_model_chunks: int = 1,
        imbalance: Sequence[Time] | None = None,
        latency: Time = 0,
        bandwidth: Time | None = None,
        backward_input: Time | None = None,
        backward_weight: Time | None = None,
        pair: PairTime | None = None,
    ) -> "Costs":
        """Costs from the times of a *whole* stage, which its chunks share equally.

        So a model keeps its costs while it is cut into more chunks. `imbalance` holds one factor
        per stage. `pair` is a function of the times of chunks, as everywhere.

        >>> costs = Costs.of_stages(1, 2, num_model_chunks=2)
        >>> costs.forward, costs.backward
        (Fraction(1, 2), 1)
        """

        def share(time: Time | None) -> Time | list[Time] | None:
            if time is None:
                return None
            if imbalance is None:
                return divided(time, num_model_chunks)
            return [divided(time * factor, num_model_chunks) for factor in imbalance]

        split = share(backward_input), share(backward_weight)
        return cls(share(forward), share(backward), latency, bandwidth, *split, pair)

    @classmethod
    def from_layout(
        cls,
        layout: Any,
        layer_times: Mapping[str, tuple[Time, Time]],
        latency: Time = 0,
        bandwidth: Time | None = None,
        placement: Placement | None = None,
    ) -> "Costs":
        """Costs from what each chunk holds.

        Args:
            layout: a `PipelineParallelLayerLayout`, or nested lists [stage][chunk] of layer names.
            layer_times: (forward, backward) time per layer name, e.g. {"decoder": (1, 2),
                "embedding": (0, 0), "loss": (1, 1)}.
            placement: which virtual stage each chunk of the layout is; None for a line or a loop.

        >>> Costs.from_layout([[["embedding", "decoder"]], [["decoder", "loss"]]],
        ...                   {"embedding": (0, 0), "decoder": (2, 4), "loss": (1, 2)}).forward
        [2, 3]
        """
        stages = getattr(layout, "layout", layout)
        placement = placement or usual_placement(len(stages), len(stages[0]))
        forward, backward = [], []
        for stage in range(placement.num_stages):
            rank, chunk = placement.place_of(stage)
            names = [getattr(layer, "name", layer) for layer in stages[rank][chunk]]
            for name in names:
                if name not in layer_times:
                    raise ValueError(
                        f"the layout has a layer {name!r}, but layer_times knows only "
                        f"{', '.join(layer_times)}; add its forward and backward time"
                    )
            forward.append(sum(layer_times[name][0] for name in names))
            backward.append(sum(layer_times[name][1] for name in names))
        return cls(forward, backward, latency, bandwidth)

    def of_chunks(
        self, config: PlanConfig, kinds: Iterable[str] = (FORWARD, BACKWARD)
    ) -> tuple[list[list[Time]], ...]:
        """For each kind of work its times as lists [rank][chunk]. Pairs have none of their own.

        Raises ValueError where the number of times fits neither stages nor virtual stages.
        """
        return tuple(_of_chunks(self.given(kind), config, KINDS[kind].cost) for kind in kinds)

    def given(self, kind: str) -> Time | Sequence[Time]:
        """What was given for a kind of single work, or half of what was given for a backward."""
        times = getattr(self, KINDS[kind].cost)
        if times is not None:
            return times
        if isinstance(self.backward, Sequence):
            return [divided(time, 2) for time in self.backward]
        return divided(self.backward, 2)

    def of_plan(self, plan: Plan) -> dict[str, list[dict[CostKey, Time]]]:
        """How long each kind of work in the plan takes: [kind][rank][`cost_key` of an action].

        Raises as `of_chunks`, and ValueError for a pair of negative length.
        """
        has_pairs = PAIR in (kinds := kinds_of(plan))
        singles = [kind for kind in KINDS if kind in kinds | {FORWARD, BACKWARD} and kind != PAIR]
        of_chunks = self.of_chunks(plan.config, singles)
        times: dict[str, list[dict[CostKey, Time]]] = {
            kind: [dict(enumerate(chunks)) for chunks in of_ranks]
            for kind, of_ranks in zip(singles, of_chunks, strict=True)
        }
        if has_pairs:
            times[PAIR] = [
                {
                    key: self._of_pair(
                        plan.config, rank, key, [times[kind][rank][chunk] for kind, chunk in key]
                    )
                    for key in {cost_key(action) for action in actions if action.parts}
                }
                for rank, actions in enumerate(plan.ranks)
            ]
        return times

    def pair_time(
        self, config: PlanConfig, rank: int, key: tuple[tuple[str, int], ...], parts: list[Time]
    ) -> Time:
        """How long a pair takes: `key` has kind and chunk of its two parts, `parts` their times."""
        return sum(parts) if self.pair is None else self.pair(*parts)

    def _of_pair(self, config: PlanConfig, rank: int, key: tuple, parts: list[Time]) -> Time:
        time = self.pair_time(config, rank, key, parts)
        if not time >= 0:
            raise ValueError(
                f"a pair of work that takes {parts[0]} and {parts[1]} takes {time}, which is "
                "negative; let pair return 0 or more"
            )
        return time

    def message_time(self, num_bytes: int) -> Time:
        """How long one message takes once both ends are ready."""
        if self.bandwidth is None or num_bytes == 0:
            return self.latency
        return self.latency + divided(num_bytes, self.bandwidth)


def divided(a: Time, b: Time) -> Time:
    """a / b, exact unless one of them is a float; a whole number stays an int.

    >>> divided(6, 3), divided(1, 2), divided(1.0, 2)
    (2, Fraction(1, 2), 0.5)
    """
    if isinstance(a, float) or isinstance(b, float):
        return a / b
    return _whole(Fraction(a) / Fraction(b))


def _whole(value: Fraction) -> int | Fraction:
    return value.numerator if value.denominator == 1 else value


def _of_chunks(times: Time | Sequence[Time], config: PlanConfig, name: str) -> list[list[Time]]:
    placement = config.placement
    p, v, num_stages = placement.pp_size, placement.num_model_chunks, placement.num_stages
    if not isinstance(times, Sequence):
        return [[times] * v for _ in range(p)]
    if len(times) == num_stages:
        return [[times[stage] for stage in stages] for stages in placement.stages]
    if len(times) == p:
        return [[times[rank]] * v for rank in range(p)]
    raise ValueError(
        f"{len(times)} {name} times for {p} stages of {v} chunk{'s' * (v > 1)}; give one number, "
        f"{p} (one per stage)"
        + (f" or {num_stages} (one per virtual stage)" if num_stages > p else "")
    )


def kinds_of(plan: Plan) -> set[str]:
    """The kinds of work in the plan; of a pair, `PAIR` and the kinds of its parts."""
    kinds = set(chain.from_iterable(map(attrgetter("kind"), actions) for actions in plan.ranks))
    if PAIR in kinds:
        actions = chain.from_iterable(plan.ranks)
        kinds |= {part.kind for action in actions for part in action.parts}
    return kinds - {COMMUNICATE}


@dataclass(frozen=True)
class Gap:
    """A stretch in which a rank computes nothing."""

    rank: int
    start: Time
    end: Time
    before: int | None
    """Index of the work that ends the gap; None for the end of the step."""
    waits_for: Place | None
    """(rank, index) of the work whose end (plus transfers) ends the gap. None where only transfers
    fill it: before the first action of all."""

    @property
    def length(self) -> Time:
        return self.end - self.start


@dataclass(frozen=True)
class Simulation:
    """A plan with times. Lists are per rank, and within a rank per action of the plan."""

    plan: Plan
    costs: Costs
    starts: list[list[Time]]
    ends: list[list[Time]]
    waits: list[list[Time]]
    causes: list[list[Place | None]]
    transport: str = RENDEZVOUS

    def action(self, place: Place) -> Action:
        """The action at (rank, index)."""
        return self.plan.ranks[place[0]][place[1]]

    # -- How long --

    @cached_property
    def makespan(self) -> Time:
        """From the start of the step to the end of its last action."""
        return max((ends[-1] for ends in self.ends if ends), default=0)

    @cached_property
    def times(self) -> dict[str, list[dict[CostKey, Time]]]:
        """How long work takes: [kind][rank][`cost_key`]."""
        return self.costs.of_plan(self.plan)

    @cached_property
    def kinds(self) -> list[str]:
        """The kinds of single work in the plan, in the order of `KINDS`."""
        found = kinds_of(self.plan) or {FORWARD}
        return [kind for kind in KINDS if kind in found and kind != PAIR]

    def busy(self, rank: int) -> Time:
        """Time that the rank spends in work. A pair counts once."""
        counts = Counter((action.kind, cost_key(action)) for action in self.plan.work(rank))
        return sum(count * self.times[kind][rank][key] for (kind, key), count in counts.items())

    def idle(self, rank: int) -> Time:
        """The rest: waiting and transfers. This is the rank's bubble."""
        return self.makespan - self.busy(rank)

    @cached_property
    def _busy_and_idle(self) -> tuple[Time, Time]:
        ranks = range(len(self.plan.ranks))
        busy = sum(self.busy(rank) for rank in ranks)
        return busy, self.makespan * len(ranks) - busy

    @property
    def bubble_over_ideal(self) -> Time:
        """Idle time over computing time, all ranks together: (p - 1) / (v * M) at equal costs.

        This is the "bubble time fraction" of Narayanan et al. 2021. It can exceed 1.
        """
        busy, idle = self._busy_and_idle
        return _fraction(idle, busy)

    @property
    def bubble_over_total(self) -> Time:
        """Idle time over all time: (p - 1) / (v * M + p - 1) at equal costs. Below 1.

        This is the share of the hardware that the pipeline wastes.
        """
        busy, idle = self._busy_and_idle
        return _fraction(idle, busy + idle)

    # -- Why --

    def gaps(self, rank: int) -> list[Gap]:
        """Every stretch in which the rank computes nothing, and what each waits for.

        Of the last one, after the rank's work is done, `waits_for` is the end of the whole step.
        """
        gaps = []
        free_since: Time = 0
        for index, action in enumerate(self.plan.ranks[rank]):
            if action.kind == COMMUNICATE:
                continue
            start = self.starts[rank][index]
            if start > free_since:
                gaps.append(Gap(rank, free_since, start, index, self.causes[rank][index]))
            free_since = self.ends[rank][index]
        if self.makespan > free_since:
            gaps.append(Gap(rank, free_since, self.makespan, None, self._last_work))
        return gaps

    @cached_property
    def _last_work(self) -> Place | None:
        """The work that ends last; of several pieces, the one on the lowest rank."""
        last = None
        for rank, actions in enumerate(self.plan.ranks):
            index = len(actions) - 1
            while index >= 0 and actions[index].kind == COMMUNICATE:
                index -= 1
            if index < 0:
                continue
            if last is None or self.ends[rank][index] > self.ends[last[0]][last[1]]:
                last = rank, index
        return last

    def critical_path(self) -> list[Place]:
        """The chain of work that makes the step as long as it is, in order.

        Each could start only when the one before it had ended (and its message had come); making
        one of them shorter shortens the step, unless another chain is as long.
        """
        path: list[Place] = []
        place = self._last_work
        while place is not None:
            path.append(place)
            place = self.causes[place[0]][place[1]]
        return path[::-1]

    # -- As events --

    def events(self, rank: int) -> list[Event]:
        """The rank's actions with their times, in the schema that recorded runs use."""
        return [
            Event(action, start, end, wait, waits_for)
            for action, start, end, wait, waits_for in zip(
                self.plan.ranks[rank],
                self.starts[rank],
                self.ends[rank],
                self.waits[rank],
                self.causes[rank],
                strict=True,
            )
        ]

    def summary(self) -> dict[str, Any]:
        """The figures of the step, ready for JSON."""
        ranks = range(len(self.plan.ranks))
        return {
            "makespan": number_to_json(self.makespan),
            "bubble_over_ideal": float(self.bubble_over_ideal),
            "bubble_over_total": float(self.bubble_over_total),
            "idle": [number_to_json(self.idle(rank)) for rank in ranks],
            "peak_in_flight": [self.plan.peak_in_flight(rank) for rank in ranks],
            "messages": self.plan.message_counts(),
            "bytes_sent": self.plan.bytes_sent(),
        }

    def to_json(self, unit: str = "unit") -> dict[str, Any]:
        """The simulation in the schema of `actions`. Fractions become floats."""
        return timeline_to_json(
            (self.events(rank) for rank in range(len(self.plan.ranks))),
            "simulation",
            plan_config_to_json(self.plan.config),
            unit,
            self.summary(),
        )


def _fraction(a: Time, b: Time) -> Time:
    if b == 0:
        return 0
    return a / b if isinstance(a, float) or isinstance(b, float) else Fraction(a) / Fraction(b)


def simulate(plan: Plan, costs: Costs | None = None, transport: str = RENDEZVOUS) -> Simulation:
    """Runs the plan with the given costs (forward 1, backward 2, messages free).

    `transport` is "rendezvous" (both ends of a message wait for each other, as NCCL's streams do) or
    "buffered" (a send never waits, as gloo's `isend`). Messages do not slow each other down.

    Raises ValueError for a plan that cannot finish (`check.check` says why), and for costs that do
    not fit its number of stages and chunks.
    """
    costs = costs or Costs()
    if transport not in (RENDEZVOUS, BUFFERED):
        raise ValueError(f"unknown transport {transport!r}; use {RENDEZVOUS!r} or {BUFFERED!r}")
    with without_garbage_collection():
        times = costs.of_plan(plan)
        message_times = {n: costs.message_time(n) for n in _message_sizes(plan)}
        # Integers are quicker than Fractions: count in the smallest unit, and translate at the end.
        tables = [of_rank for of_ranks in times.values() for of_rank in of_ranks]
        costs_of_all = [*chain(*(table.values() for table in tables)), *message_times.values()]
        unit = _common_unit(costs_of_all)
        execution = execute(
            plan,
            {kind: [_in_units(table, unit) for table in times[kind]] for kind in times},
            _in_units(message_times, unit),
            transport,
        )
        if execution.stuck:
            ranks = ", ".join(map(str, execution.stuck))
            raise ValueError(
                f"the plan of {plan.config.schedule} never finishes: rank {ranks} waits for ever; "
                "see check() for the reason"
            )
        times = [
            _from_units(lists, unit)
            for lists in (execution.starts, execution.ends, execution.waits)
        ]
    return Simulation(plan, costs, *times, execution.causes, transport)


def _message_sizes(plan: Plan) -> set[int]:
    return {m.num_bytes for actions in plan.ranks for action in actions for m in action.messages}


def _common_unit(times: list[Time]) -> Fraction | None:
    """One over the least common denominator; None if nothing is to be gained by it, or floats."""
    if any(isinstance(time, float) for time in times):
        return None
    denominator = lcm(*(Fraction(time).denominator for time in times))
    return None if denominator == 1 else Fraction(1, denominator)


def _in_units(table: dict[Any, Time], unit: Fraction | None) -> dict[Any, Time]:
    if unit is None:
        return table
    return {key: int(time / unit) for key, time in table.items()}


def _from_units(lists: list[list[Time]], unit: Fraction | None) -> list[list[Time]]:
    if unit is None:
        return lists
    translated = {number: _whole(number * unit) for number in set(chain(*lists))}
    return [[translated[number] for number in numbers] for numbers in lists]
