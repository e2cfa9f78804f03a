"""The figures that go with a timeline: counted from the simulation, each beside its formula.

Megatron has no counterpart.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction

from minimegatron.core.orders.orders import (
    BREADTH_FIRST,
    COMBINED,
    GPIPE,
    INTERLEAVED,
    NO_PIPELINING,
    ONE_F_ONE_B,
    PlanConfig,
)
from minimegatron.core.orders.placement import usual_placement
from minimegatron.planner.actions import (
    ACTIVATION,
    BACKWARD,
    COOLDOWN,
    FORWARD,
    GRADIENT,
    KINDS,
    PAIR,
    STEADY,
    WARMUP,
    Action,
    Time,
    parts_of,
)
from minimegatron.planner.formulas import (
    Formula,
    bubble_formulas,
    first_stage_with_two_messages,
    makespan_formula,
    message_formula,
    peak_in_flight_formula,
)
from minimegatron.planner.layer_costs import has_exchanges, lanes_of, rings_of, ways_of
from minimegatron.planner.layer_plan import (
    ALL_TO_ALL,
    RING_HOP,
    LayerTimeline,
    one_ring,
    one_stage,
)
from minimegatron.planner.simulator import Gap, Simulation

NAMES = {
    NO_PIPELINING: "No pipelining",
    GPIPE: "GPipe",
    ONE_F_ONE_B: "1F1B",
    INTERLEAVED: "Interleaved 1F1B",
    COMBINED: "Combined 1F1B",
    BREADTH_FIRST: "Breadth-first",
}


LANE_WORDS = {ALL_TO_ALL: ALL_TO_ALL, RING_HOP: "ring hops"}


@dataclass(frozen=True)
class Figure:
    """One figure of a step. `formula` is None where there is no closed form."""

    name: str
    value: Time
    text: str
    formula: Formula | None = None

    @property
    def agrees(self) -> bool:
        """True where the formula gives the counted value."""
        return self.formula is not None and self.formula.value == self.value


def title(simulation: Simulation) -> str:
    """The plan in a line: schedule, sizes, what is special.

    >>> from minimegatron.planner.plan import plan
    >>> from minimegatron.planner.simulator import simulate
    >>> title(simulate(plan("interleaved", 4, 8, vpp=2, forward_only=True)))
    'Interleaved 1F1B, 4 stages, 2 chunks per stage, 8 microbatches in groups of 4, forward only'
    """
    config = simulation.plan.config
    parts = [NAMES.get(config.schedule, config.schedule), _count(config.pp_size, "stage")]
    microbatches = _count(config.num_microbatches, "microbatch", "es")
    if config.num_model_chunks > 1:
        parts.append(f"{config.num_model_chunks} chunks per stage{_placement_words(config)}")
        if config.schedule == INTERLEAVED or config.wire is None:
            microbatches += f" in groups of {config.microbatch_group_size_per_vp_stage}"
    if (first := first_stage_with_two_messages(config)) is not None:
        parts.append(f"two tensors sent from stage {first} on")
    parts.append(microbatches)
    if config.forward_only:
        parts.append("forward only")
    if config.overlap_p2p_comm:
        parts.append("messages overlapped")
    if config.wire is not None:
        parts.append(f"{config.wire} wire")
    return ", ".join(parts)


def _placement_words(config: PlanConfig) -> str:
    usual = usual_placement(config.pp_size, config.num_model_chunks)
    return "" if config.placement == usual else f" (placement {config.placement.name})"


def cost_words(simulation: Simulation) -> str:
    """The costs in a line.

    >>> from minimegatron.planner.plan import plan
    >>> from minimegatron.planner.simulator import Costs, simulate
    >>> cost_words(simulate(plan("1f1b", 2, 2), Costs([1, 2], 3, latency=Fraction(1, 4))))
    'forward 1 to 2, backward 3, message 0.25'
    """
    costs, config, times = simulation.costs, simulation.plan.config, simulation.times
    words = [f"{KINDS[kind].words} {_range_words(costs.given(kind))}" for kind in simulation.kinds]
    if PAIR in times:
        lengths = [time for of_rank in times[PAIR] for time in of_rank.values()]
        words.append(f"pair {_range_words(lengths)}")
    sizes = config.message_sizes or [[config.message_bytes]]
    messages = [costs.message_time(size) for of_stage in sizes for size in of_stage]
    if max(messages):
        words.append(f"message {_range_words(messages)}")
    text = ", ".join(words)
    return f"per chunk: {text}" if config.num_model_chunks > 1 else text


def figures(simulation: Simulation) -> list[Figure]:
    """Makespan, both bubble fractions, messages."""
    config = simulation.plan.config
    over_ideal, over_total = bubble_formulas(config) or (None, None)
    counts = simulation.plan.message_counts()
    words = _count(counts[ACTIVATION], ACTIVATION)
    if not config.forward_only:
        words += f", {_count(counts[GRADIENT], GRADIENT)}"
    return [
        Figure(
            "makespan",
            simulation.makespan,
            number_words(simulation.makespan),
            _makespan(simulation),
        ),
        Figure(
            "idle / computing",
            simulation.bubble_over_ideal,
            percent(simulation.bubble_over_ideal),
            over_ideal,
        ),
        Figure(
            "idle / total",
            simulation.bubble_over_total,
            percent(simulation.bubble_over_total),
            over_total,
        ),
        Figure("messages", counts[ACTIVATION], words, message_formula(config)),
    ]


def formula_words(figure: Figure) -> str:
    """What stands beside a figure: its formula, and how the two compare."""
    formula = figure.formula
    if formula is None:
        return ""
    if formula.text == "0" and figure.agrees:
        return "= 0"
    if figure.name == "messages":
        return f"= {formula.text} each way" if figure.agrees else f"{formula.text} expected"
    if not figure.agrees:
        value = number_words(formula.value) if figure.name == "makespan" else percent(formula.value)
        return f"{formula.text} gives {value} for equal stages and free messages"
    value = ""
    if isinstance(formula.value, Fraction) and figure.name != "makespan":
        value = f" = {formula.value}"
    return f"= {formula.text}{value}"


def _makespan(simulation: Simulation) -> Formula | None:
    costs, config = simulation.costs, simulation.plan.config
    if isinstance(costs.forward, Sequence) or isinstance(costs.backward, Sequence):
        return None
    v = config.num_model_chunks
    return makespan_formula(config, costs.forward * v, costs.backward * v)


# -- Per rank --


@dataclass(frozen=True)
class RankFigures:
    """One row of the table under a timeline."""

    rank: int
    phases: dict[str, str]
    """Phase -> how many pieces of work of each kind, in words."""
    busy: Time
    idle: Time
    peak_in_flight: int
    peak_formula: Formula | None
    longest_gap: Gap | None


def rank_figures(simulation: Simulation, rank: int) -> RankFigures:
    """What the rank does in each phase, what it holds, and what it waits for longest."""
    plan = simulation.plan
    counts = Counter(
        (action.phase, part.kind) for action in plan.work(rank) for part in parts_of(action)
    )
    phases = {}
    for phase in (WARMUP, STEADY, COOLDOWN):
        words = [
            f"{counts[phase, kind]} {KINDS[kind].letter}"
            for kind in simulation.kinds
            if counts[phase, kind]
        ]
        phases[phase] = " ".join(words) or "-"
    gaps = simulation.gaps(rank)
    return RankFigures(
        rank,
        phases,
        simulation.busy(rank),
        simulation.idle(rank),
        plan.peak_in_flight(rank),
        peak_in_flight_formula(plan.config, rank),
        max(gaps, key=lambda gap: gap.length, default=None),
    )


def gap_words(simulation: Simulation, gap: Gap, noun: str = "rank") -> str:
    """Why the rank computes nothing in this gap. A picture calls it a stage: `noun`.

    >>> from minimegatron.planner.plan import plan
    >>> from minimegatron.planner.simulator import simulate
    >>> step = simulate(plan("1f1b", 2, 2))
    >>> [gap_words(step, gap) for gap in step.gaps(0)]
    ['2 for B0 on rank 1', '1 for B1 on rank 1']
    """
    length = number_words(gap.length)
    if gap.before is None:
        return f"{length} at the end"
    if gap.waits_for is None:
        return f"{length} for messages"
    action = simulation.action(gap.waits_for)
    has_chunks = simulation.plan.config.num_model_chunks > 1
    work = " & ".join(_short_words(part, has_chunks) for part in parts_of(action))
    where = "" if gap.waits_for[0] == gap.rank else f" on {noun} {gap.waits_for[0]}"
    return f"{length} for {work}{where}" if where else f"{length} for messages after its own {work}"


def _short_words(action: Action, has_chunks: bool) -> str:
    words = f"{KINDS[action.kind].letter}{action.microbatch}"
    return f"{words} (chunk {action.chunk})" if has_chunks else words


# -- The all-to-alls and hops of layers --


def exposed_words(lanes: LayerTimeline) -> str:
    """How long the all-to-alls, or hops, of a timeline are, and how much of that nothing hides.

    >>> from minimegatron.planner.layer_plan import LayerCosts
    >>> exposed_words(one_stage(4, [LayerCosts(2, 2, 1, 1)] * 4))
    'all-to-all 64, exposed 14'
    """
    return "; ".join(
        f"{LANE_WORDS[lane]} {number_words(lanes.busy(lane))}, "
        f"exposed {number_words(lanes.exposed_on(lane))}"
        for lane in lanes.hidden_lanes or [ALL_TO_ALL]
    )


def ways_table(simulation: Simulation) -> list[list[str]]:
    """Rows, the first one the head: the step ordinary, combined, and with delayed weight gradients.

    Empty where its costs know no all-to-alls, for an evaluation, and for other schedules than these.
    """
    config = simulation.plan.config
    is_written = config.schedule in (NO_PIPELINING, INTERLEAVED, COMBINED) and config.wire is None
    if not has_exchanges(simulation) or config.forward_only or not is_written:
        return []
    head = ["", "length", "computes", ALL_TO_ALL, "exposed"]
    where = [] if config.pp_size == 1 else ["of rank"]
    rows = [head + where]
    for name, way in ways_of(simulation):
        of_ranks = [lanes_of(way, rank) for rank in range(config.pp_size)]
        worst = max(range(config.pp_size), key=lambda rank: of_ranks[rank].exposed)
        rows.append(
            [name, *_lane_words(way.makespan, of_ranks[worst]), *([str(worst)] * len(where))]
        )
    if config.pp_size == 1:
        layers = simulation.costs.layers[0]
        for delay, name in ((False, "combined"), (True, "combined, weights delayed")):
            lanes = one_stage(config.num_microbatches, layers, delay_wgrad=delay)
            rows.append([f"{name}, turns not joined", *_lane_words(lanes.total, lanes)])
    return rows


def ring_table(simulation: Simulation) -> list[list[str]]:
    """Rows, the first one the head: the attention of one layer, as it is and in two worse ways.

    Empty where its layers have no rings.
    """
    rows = []
    for ring in rings_of(simulation):
        head = f"attention of a layer, {ring.num_ranks} ranks"
        rows += [[head, "length", "computes", LANE_WORDS[RING_HOP], "exposed"]]
        for words, costs, overlap in (
            ("", ring, True),
            (", each hop waited for", ring, False),
            (", split in order", replace(ring, in_order=True), True),
        ):
            for kind in (FORWARD, BACKWARD):
                lanes = one_ring(costs, kind, overlap)
                rows.append([f"{kind}{words}", *_lane_words(lanes.total, lanes)])
    return rows


def _lane_words(total: Time, lanes: LayerTimeline) -> list[str]:
    return [number_words(x) for x in (total, lanes.compute, lanes.communication, lanes.exposed)]


# -- Numbers in words --


def number_words(value: Time) -> str:
    """A number with at most three decimals.

    >>> number_words(Fraction(99, 8)), number_words(33), number_words(2 / 3), number_words(0.00012)
    ('12.375', '33', '0.667', '0.00012')
    """
    if value == int(value):
        return str(int(value))
    if abs(value) < 0.01:
        return f"{float(value):.3g}"
    return f"{float(value):.3f}".rstrip("0").rstrip(".")


def percent(value: Time) -> str:
    """
    >>> percent(Fraction(3, 11))
    '27.3%'
    """
    return f"{100 * float(value):.1f}%"


def tick_step(least: Time) -> Time:
    """The smallest of 1, 2, 5, 10, 20, 50, ... (and 0.1, 0.2, ...) that is at least `least`."""
    power = Fraction(1)
    while power > least:
        power /= 10
    while power * 10 <= least:
        power *= 10
    return next(power * factor for factor in (1, 2, 5, 10) if power * factor >= least)


def _range_words(value: Time | Sequence[Time]) -> str:
    if not isinstance(value, Sequence):
        return number_words(value)
    low, high = min(value), max(value)
    return number_words(low) if low == high else f"{number_words(low)} to {number_words(high)}"


def _count(number: int, noun: str, plural: str = "s") -> str:
    return f"{number} {noun}{'' if number == 1 else plural}"
