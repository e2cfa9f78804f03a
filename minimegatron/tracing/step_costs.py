"""What the work of a recorded step costs: its pace, or what it took on average.

Torch-free. Megatron has no counterpart.

In a paced run only computation is padded, and all-to-alls have a length of their own, so what a piece
of work takes depends on how many of them it has: within an ordinary forward or backward each is waited
for; in combined 1F1B, and where ranks share sequences on a ring, the lanes of `planner.layer_plan` say
what is left to wait for.
"""

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from minimegatron.core.orders.work import ALL_TO_ALL, RING_HOP
from minimegatron.planner.actions import BACKWARD_WEIGHT, KINDS, Event, parts_of
from minimegatron.planner.imagined_transport import cost_key
from minimegatron.planner.layer_costs import LayeredCosts, lanes_of
from minimegatron.planner.layer_plan import DISPATCH, LayerCosts, one_ring
from minimegatron.planner.links import LAYER_NODE
from minimegatron.planner.ring_costs import RingCosts
from minimegatron.planner.simulator import Costs
from minimegatron.planner.stage import PlanConfig
from minimegatron.tracing.rank_trace import paced_ms


@dataclass(frozen=True)
class MeasuredCosts(Costs):
    """Costs from what a run took; pairs have their own."""

    pairs: dict[tuple, float] = field(default_factory=dict)
    """(rank, kinds and chunks of the two parts) -> microseconds."""

    def pair_time(
        self, config: PlanConfig, rank: int, key: tuple[tuple[str, int], ...], parts: list[Any]
    ) -> Any:
        """What such pairs took on this rank; where it had none, one part after the other."""
        return self.pairs.get((rank, key), sum(parts))


def costs_of(step: Any) -> Costs:
    """The costs that a plan of this `Step` has at the step's own speed. Microseconds."""
    pace = step.pace
    if pace is None:
        return _measured(step)
    if has_nodes(step):
        return costs_of_nodes(step)
    if not {"all_to_all_ms", "ring_hop_ms"} & pace.keys():
        return Costs(**{KINDS[k].cost: 1e3 * paced_ms(pace, k) for k in step.all_kinds})
    waited = _waited_by_stage(step)
    return Costs(
        **{
            KINDS[kind].cost: [
                1e3 * paced_ms(pace, kind) + waited.get((kind, stage), 0)
                for stage in range(step.config.placement.num_stages)
            ]
            for kind in step.all_kinds
        }
    )


def planned_exposure(step: Any, rank: int, lane: str = ALL_TO_ALL) -> float | None:
    """How long a stage should wait for all-to-alls, or hops, at the step's pace; None without one."""
    if PACES[lane] not in (step.pace or {}):
        return None
    if lane == ALL_TO_ALL and has_nodes(step):
        return float(lanes_of(step.simulation, rank).exposed_on(lane))
    events = (event for event in step.events[rank].values() if event.name == lane)
    return sum(_planned_wait(step, event) for event in events)


PACES = {ALL_TO_ALL: "all_to_all_ms", RING_HOP: "ring_hop_ms"}


def _planned_wait(step: Any, event: Event) -> float:
    """What an all-to-all, or the ring whose first hop this is, adds to its work by the pace."""
    length = 1e3 * step.pace.get(PACES[event.name], 0)
    if event.name == ALL_TO_ALL:
        return length * is_of_tokens(event)
    told = event.attributes
    if (told["hop"], told["payload"]) != (0, "kv"):
        return 0.0
    block = 1e3 * step.pace.get("ring_block_ms", 0)
    ring = RingCosts(told["group_size"], block, length)
    return float(one_ring(ring, told["direction"]).exposed)


def paced_lengths(step: Any) -> Iterator[tuple[Event, float]]:
    """(piece of work, how long it should take) for a paced step. Microseconds."""
    times = costs_of(step).of_plan(step.plan)
    for rank, index in step.all_work():
        event = step.events[rank][index]
        of_rank = times.get(event.action.kind, {rank: {}})[rank]
        if (key := cost_key(event.action)) in of_rank:
            yield event, float(of_rank[key])


def _measured(step: Any) -> Costs:
    placement = step.config.placement
    times: dict[tuple, list[float]] = defaultdict(list)
    pairs: dict[tuple, list[float]] = defaultdict(list)
    for rank, index in step.all_work():
        event = step.events[rank][index]
        chunk = event.action.chunk or 0
        if event.action.parts:
            pairs[rank, cost_key(event.action)].append(event.end - event.start)
        elif 0 <= chunk < placement.num_model_chunks:
            of_stage = times[event.action.kind, placement.stage_of(rank, chunk)]
            of_stage.append(event.end - event.start)
    return MeasuredCosts(
        pairs={key: _mean(of_pair) for key, of_pair in pairs.items()},
        **{
            KINDS[kind].cost: [_mean(times[kind, s]) for s in range(placement.num_stages)]
            for kind in step.all_kinds
        },
    )


def _mean(lengths: list[float]) -> float:
    return sum(lengths) / max(len(lengths), 1)


# -- Steps with all-to-alls --


def has_nodes(step: Any) -> bool:
    """Whether the step was run in nodes of layers."""
    return any(event.name == LAYER_NODE for events in step.events for event in events.values())


def is_of_tokens(event: Event) -> bool:
    """Whether an all-to-all moves tokens, [n, h]; that of their probabilities goes with one."""
    return event.name == ALL_TO_ALL and len(event.attributes.get("shape", ())) > 1


def layers_of(step: Any) -> dict[int, dict[int, bool]]:
    """Virtual stage -> number of each layer that ran in nodes -> whether it has experts."""
    found: dict[int, dict[int, bool]] = defaultdict(dict)
    for rank, events in enumerate(step.events):
        for event in events.values():
            if event.name == LAYER_NODE:
                stage = step.config.placement.stage_of(rank, event.action.chunk or 0)
                layer = event.attributes.get("layer", 0)
                has_experts = event.attributes["node"] == DISPATCH
                found[stage][layer] = found[stage].get(layer, False) or has_experts
    return {stage: dict(sorted(layers.items())) for stage, layers in sorted(found.items())}


def costs_of_nodes(step: Any) -> LayeredCosts:
    """From the pace, and from the layers that the step ran.

    Without a pace the nodes take no time; their order is right.
    """
    pace, layers = step.pace or {}, layers_of(step)
    compute = (1e3 * pace.get("attention_ms", 0), 1e3 * pace.get("mlp_ms", 0))
    exchange = 1e3 * pace.get("all_to_all_ms", 0)
    nodes = (e for events in step.events for e in events.values() if e.name == LAYER_NODE)
    return LayeredCosts.of_layers(
        [
            [
                LayerCosts(*compute, *((exchange, exchange) if has_experts else ()))
                for has_experts in layers.get(stage, {}).values()
            ]
            for stage in range(step.config.placement.num_stages)
        ],
        delay_wgrad=any(node.attributes["direction"] == BACKWARD_WEIGHT for node in nodes),
        blocking=step.stages[0].device == "cpu",
    )


def _waited_by_stage(step: Any) -> dict[tuple[str, int], float]:
    """(kind of work, virtual stage) -> what its all-to-alls and hops add to it, on average."""
    placement = step.config.placement
    num_work: dict[tuple[str, int], int] = defaultdict(int)
    waited: dict[tuple[str, int], float] = defaultdict(float)
    for rank, events in enumerate(step.events):
        work = set(step.work(rank))
        for index, event in events.items():
            if index in work:
                around = index
            elif event.name in PACES:
                around = event.parent
                while around is not None and around not in work:
                    around = events[around].parent if around in events else None
            else:
                continue
            if around is None:
                continue
            for part in parts_of(events[around].action):
                stage = placement.stage_of(rank, part.chunk or 0)
                if index in work:
                    num_work[part.kind, stage] += 1
                else:
                    waited[part.kind, stage] += _planned_wait(step, event)
    return {key: waited[key] / number for key, number in num_work.items()}
