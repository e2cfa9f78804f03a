"""When everything happens, given what it costs: makespan, bubbles, and what each gap waits for.

Called by: the renderers, `memory`, `minimegatron plan`, tests, the documentation. Calls: `plan`,
`transport`. Megatron has no counterpart.

>>> from minimegatron.planner.plan import plan
>>> step = simulate(plan("1f1b", pp=4, num_microbatches=8), Costs(forward=1, backward=2))
>>> step.makespan, step.bubble_over_ideal, step.bubble_over_total
(33, Fraction(3, 8), Fraction(3, 11))
>>> gap = step.gaps(0)[0]
>>> gap.start, gap.end, str(step.action(gap.waits_for)), gap.waits_for[0]
(4, 10, 'backward of microbatch 0, chunk 0', 1)
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from itertools import chain
from math import lcm
from typing import Any

from minimegatron.planner.actions import (
    COMMUNICATE,
    FORWARD,
    Action,
    Event,
    Time,
    number_to_json,
    timeline_to_json,
)
from minimegatron.planner.plan import Plan, plan_config_to_json, without_garbage_collection
from minimegatron.planner.stage import PlanConfig
from minimegatron.planner.transport import BUFFERED, RENDEZVOUS, Place, execute


@dataclass(frozen=True)
class Costs:
    """How long things take, in any unit. Integers and Fractions keep every figure exact.

    Raises ValueError for a negative time or a bandwidth that is not above 0.
    """

    forward: Time | Sequence[Time] = 1
    """Of one chunk, one microbatch. One number; or p numbers, one per stage, for each of its
    chunks; or p * v numbers, one per virtual stage in model order (chunk c of stage r is number
    c * p + r)."""
    backward: Time | Sequence[Time] = 2
    latency: Time = 0
    """Of one message, whatever its size."""
    bandwidth: Time | None = None
    """Bytes per unit of time on each link; None for no limit."""

    def __post_init__(self) -> None:
        for name in ("forward", "backward", "latency"):
            value = getattr(self, name)
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
    ) -> "Costs":
        """Costs from the times of a *whole* stage, which its chunks share equally.

        So a model keeps its costs while it is cut into more chunks. `imbalance` holds one factor
        per stage.

        >>> Costs.of_stages(1, 2, num_model_chunks=2)
        Costs(forward=Fraction(1, 2), backward=1, latency=0, bandwidth=None)
        """

        def share(time: Time) -> Time | list[Time]:
            if imbalance is None:
                return _divide(time, num_model_chunks)
            return [_divide(time * factor, num_model_chunks) for factor in imbalance]

        return cls(share(forward), share(backward), latency, bandwidth)

    @classmethod
    def from_layout(
        cls,
        layout: Any,
        layer_times: Mapping[str, tuple[Time, Time]],
        latency: Time = 0,
        bandwidth: Time | None = None,
    ) -> "Costs":
        """Costs from what each chunk holds.

        Args:
            layout: a `PipelineParallelLayerLayout`, or nested lists [stage][chunk] of layer names.
            layer_times: (forward, backward) time per layer name, e.g. {"decoder": (1, 2),
                "embedding": (0, 0), "loss": (1, 1)}.

        >>> Costs.from_layout([[["embedding", "decoder"]], [["decoder", "loss"]]],
        ...                   {"embedding": (0, 0), "decoder": (2, 4), "loss": (1, 2)}).forward
        [2, 3]
        """
        stages = getattr(layout, "layout", layout)
        num_chunks = len(stages[0])
        forward, backward = [], []
        for chunk in range(num_chunks):
            for stage in stages:
                names = [getattr(layer, "name", layer) for layer in stage[chunk]]
                for name in names:
                    if name not in layer_times:
                        raise ValueError(
                            f"the layout has a layer {name!r}, but layer_times knows only "
                            f"{', '.join(layer_times)}; add its forward and backward time"
                        )
                forward.append(sum(layer_times[name][0] for name in names))
                backward.append(sum(layer_times[name][1] for name in names))
        return cls(forward, backward, latency, bandwidth)

    def of_chunks(self, config: PlanConfig) -> tuple[list[list[Time]], list[list[Time]]]:
        """Forward and backward times as lists [rank][chunk].

        Raises ValueError where the number of times fits neither stages nor virtual stages.
        """
        p, v = config.pp_size, config.num_model_chunks
        forward = _of_chunks(self.forward, p, v, "forward")
        return forward, _of_chunks(self.backward, p, v, "backward")

    def message_time(self, num_bytes: int) -> Time:
        """How long one message takes once both ends are ready."""
        if self.bandwidth is None or num_bytes == 0:
            return self.latency
        return self.latency + _divide(num_bytes, self.bandwidth)


def _divide(a: Time, b: Time) -> Time:
    """a / b, exact unless one of them is a float; a whole number stays an int.

    >>> _divide(6, 3), _divide(1, 2), _divide(1.0, 2)
    (2, Fraction(1, 2), 0.5)
    """
    if isinstance(a, float) or isinstance(b, float):
        return a / b
    return _whole(Fraction(a) / Fraction(b))


def _whole(value: Fraction) -> int | Fraction:
    return value.numerator if value.denominator == 1 else value


def _of_chunks(times: Time | Sequence[Time], p: int, v: int, name: str) -> list[list[Time]]:
    if not isinstance(times, Sequence):
        return [[times] * v for _ in range(p)]
    if len(times) == p:
        return [[times[rank]] * v for rank in range(p)]
    if len(times) == p * v:
        return [[times[chunk * p + rank] for chunk in range(v)] for rank in range(p)]
    raise ValueError(
        f"{len(times)} {name} times for {p} stages of {v} chunk{'s' * (v > 1)}; give one number, "
        f"{p} (one per stage)" + (f" or {p * v} (one per virtual stage)" if v > 1 else "")
    )


@dataclass(frozen=True)
class Gap:
    """A stretch in which a rank computes nothing."""

    rank: int
    start: Time
    end: Time
    before: int | None
    """Index of the forward or backward that ends the gap; None for the end of the step."""
    waits_for: Place | None
    """(rank, index) of the forward or backward whose end (plus transfers) ends the gap. None where
    only transfers fill it: before the first action of all."""

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

    def action(self, place: Place) -> Action:
        """The action at (rank, index)."""
        return self.plan.ranks[place[0]][place[1]]

    # -- How long --

    @cached_property
    def makespan(self) -> Time:
        """From the start of the step to the end of its last action."""
        return max((ends[-1] for ends in self.ends if ends), default=0)

    def busy(self, rank: int) -> Time:
        """Time that the rank spends in forwards and backwards."""
        forward, backward = (times[rank] for times in self.costs.of_chunks(self.plan.config))
        counts = Counter((action.kind, action.chunk) for action in self.plan.work(rank))
        return sum(
            count * (forward if kind == FORWARD else backward)[chunk]
            for (kind, chunk), count in counts.items()
        )

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
        """The forward or backward that ends last; of several, the one on the lowest rank."""
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
        """The chain of forwards and backwards that makes the step as long as it is, in order.

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
    forward_times, backward_times = costs.of_chunks(plan.config)
    message_times = {n: costs.message_time(n) for n in _message_sizes(plan)}
    # Integers are quicker than Fractions: count in the smallest unit, and translate at the end.
    unit = _common_unit([*chain(*forward_times, *backward_times), *message_times.values()])
    with without_garbage_collection():
        execution = execute(
            plan,
            _in_units(forward_times, unit),
            _in_units(backward_times, unit),
            dict(zip(message_times, _in_units([message_times.values()], unit)[0], strict=True)),
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
    return Simulation(plan, costs, *times, execution.causes)


def _message_sizes(plan: Plan) -> set[int]:
    return {m.num_bytes for actions in plan.ranks for action in actions for m in action.messages}


def _common_unit(times: list[Time]) -> Fraction | None:
    """One over the least common denominator; None if nothing is to be gained by it, or floats."""
    if any(isinstance(time, float) for time in times):
        return None
    denominator = lcm(*(Fraction(time).denominator for time in times))
    return None if denominator == 1 else Fraction(1, denominator)


def _in_units(lists: Iterable[Iterable[Time]], unit: Fraction | None) -> list[list[Time]]:
    if unit is None:
        return [list(times) for times in lists]
    return [[int(time / unit) for time in times] for times in lists]


def _from_units(lists: list[list[Time]], unit: Fraction | None) -> list[list[Time]]:
    if unit is None:
        return lists
    translated = {number: _whole(number * unit) for number in set(chain(*lists))}
    return [[translated[number] for number in numbers] for numbers in lists]
