"""What a step costs if its layers have nodes: chunk after chunk, and a pair by its two lanes.

Megatron has no counterpart.

>>> from minimegatron.planner.plan import plan
>>> from minimegatron.planner.simulator import simulate
>>> costs = LayeredCosts.of_layers([[LayerCosts(2, 2, 1, 1)] * 2] * 4)
>>> step = simulate(plan("combined", 2, 4, vpp=2), costs)
>>> step.makespan, simulate(plan("interleaved", 2, 4, vpp=2), costs).makespan
(248, 288)
>>> lanes = lanes_of(step, rank=0)
>>> lanes.compute, lanes.communication, lanes.exposed
(192, 64, 40)
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from minimegatron.core.orders.orders import COMBINED, INTERLEAVED, NO_PIPELINING
from minimegatron.core.orders.placement import Placement
from minimegatron.planner.actions import (
    BACKWARD,
    CALL,
    COMMUNICATE,
    FORWARD,
    PAIR,
    Action,
    Event,
    Time,
    event_to_json,
    parts_of,
)
from minimegatron.planner.imagined_transport import CostKey
from minimegatron.planner.layer_plan import (
    Half,
    LayerCosts,
    LayerTimeline,
    Node,
    TimedNode,
    run_lanes,
    step_nodes,
)
from minimegatron.planner.links import LAYER_NODE
from minimegatron.planner.plan import Plan, plan
from minimegatron.planner.ring_costs import RingCosts
from minimegatron.planner.simulator import Costs, Simulation, kinds_of, simulate
from minimegatron.planner.stage import PlanConfig


@dataclass(frozen=True)
class LayeredCosts(Costs):
    """Costs of chunks that are made of layers: `of_layers` makes them.

    A pair takes as long as its two lanes, which start and end together. With delayed weight gradients
    those of a turn are computed within it, also the last.
    """

    layers: tuple[tuple[LayerCosts, ...], ...] = ()
    """Of each virtual stage, in model order."""
    delay_wgrad: bool = False
    blocking: bool = False
    """Of a program on a CPU; see `layer_plan.run_lanes`."""

    @classmethod
    def of_layers(
        cls,
        layers: Sequence[Sequence[LayerCosts]],
        latency: Time = 0,
        bandwidth: Time | None = None,
        delay_wgrad: bool = False,
        blocking: bool = False,
    ) -> "LayeredCosts":
        """Costs from the layers of each virtual stage, in model order."""
        forward = [_lone(FORWARD, of_stage) for of_stage in layers]
        backward = [_lone(BACKWARD, of_stage, delay_wgrad, blocking) for of_stage in layers]
        given = tuple(map(tuple, layers))
        more = {"layers": given, "delay_wgrad": delay_wgrad, "blocking": blocking}
        return cls(forward, backward, latency, bandwidth, **more)

    def of_plan(self, plan: Plan) -> dict[str, list[dict[CostKey, Time]]]:
        """As `Costs.of_plan`. Raises ValueError for other work than forwards and backwards."""
        if other := sorted(kinds_of(plan) - {FORWARD, BACKWARD, PAIR}):
            raise ValueError(
                f"schedule {plan.config.schedule} has work of the kind {other[0]}, but layers have "
                "times for forwards and backwards; give the times of a stage"
            )
        return super().of_plan(plan)

    def pair_time(
        self, config: PlanConfig, rank: int, key: tuple[tuple[str, int], ...], parts: list[Time]
    ) -> Time:
        """The length of the two lanes of a pair."""
        # Its two halves are of different microbatches, whichever they are.
        halves = [self.half_of(config.placement, rank, k, n, c) for n, (k, c) in enumerate(key)]
        return self.run(self._nodes(halves)).total

    def run(self, nodes: list[Node]) -> LayerTimeline:
        """The two lanes of one turn."""
        return run_lanes([nodes], blocking=self.blocking)

    def half_of(
        self, placement: Placement, rank: int, kind: str, microbatch: int, chunk: int
    ) -> Half:
        """One piece of work, with the layers of its chunk."""
        return Half(kind, microbatch, chunk, self.layers[placement.stage_of(rank, chunk)])

    def nodes_of(self, config: PlanConfig, action: Action) -> list[Node]:
        """The nodes of a piece of work, or of a pair, in the order of their calls."""
        placement, rank = config.placement, action.rank
        return self._nodes(
            [self.half_of(placement, rank, x.kind, x.microbatch, x.chunk) for x in parts_of(action)]
        )

    def _nodes(self, halves: list[Half]) -> list[Node]:
        of_kind = {half.kind: half for half in halves}
        if len(of_kind) == len(halves):
            return step_nodes(of_kind.get(FORWARD), of_kind.get(BACKWARD), self.delay_wgrad)
        # Two forwards, or two backwards: Megatron has no such turn, so one follows the other.
        return [node for half in halves for node in LayeredCosts._nodes(self, [half])]


def _lone(
    kind: str, layers: Sequence[LayerCosts], delay_wgrad: bool = False, blocking: bool = False
) -> Time:
    half = Half(kind, 0, 0, layers)
    nodes = step_nodes(half) if kind == FORWARD else step_nodes(None, half, delay_wgrad)
    return run_lanes([nodes], blocking=blocking).total


# -- The lanes of a simulated rank --


def has_lanes(simulation: Simulation) -> bool:
    """Whether the simulation knows the nodes of layers, with all-to-alls or hops among them."""
    return has_exchanges(simulation) or bool(rings_of(simulation))


def has_exchanges(simulation: Simulation) -> bool:
    """Whether there are all-to-alls among them."""
    return any(layer.dispatch is not None for layer in _all_layers(simulation))


def rings_of(simulation: Simulation) -> list[RingCosts]:
    """The rings of its layers, each kind once."""
    rings = [layer.ring for layer in _all_layers(simulation)]
    return list(dict.fromkeys(ring for ring in rings if ring is not None and ring.num_ranks > 1))


def _all_layers(simulation: Simulation) -> Iterator[LayerCosts]:
    return (x for of_stage in getattr(simulation.costs, "layers", ()) for x in of_stage)


def lanes_of(simulation: Simulation, rank: int) -> LayerTimeline:
    """The nodes of all of a rank's work, with the times of the simulation."""
    return LayerTimeline([timed for _, timed in _nodes_of(simulation, rank)])


def node_events(simulation: Simulation, rank: int) -> list[Event]:
    """The same as events, each nested in its work: what a recording of the run has too."""
    return [
        Event(
            Action(CALL, rank, None, node.microbatch, node.chunk),
            start,
            end,
            name=LAYER_NODE,
            parent=index,
            attributes={
                "node": node.name,
                "direction": node.kind,
                "layer": node.layer,
                "lane": node.lane,
            },
        )
        for index, (node, start, end) in _nodes_of(simulation, rank)
    ]


def _nodes_of(simulation: Simulation, rank: int) -> Iterator[tuple[int, TimedNode]]:
    config, costs = simulation.plan.config, simulation.costs
    for index, action in enumerate(simulation.plan.ranks[rank]):
        if action.kind == COMMUNICATE:
            continue
        begin = simulation.starts[rank][index]
        for node, start, end in costs.run(costs.nodes_of(config, action)).nodes:
            yield index, TimedNode(node, begin + start, begin + end)


def simulation_to_json(simulation: Simulation) -> dict[str, Any]:
    """`Simulation.to_json`, with the nodes of each rank after its actions."""
    data = simulation.to_json()
    if has_lanes(simulation):
        for rank, events in enumerate(data["ranks"]):
            events += map(event_to_json, node_events(simulation, rank))
    return data


# -- The three ways to run it --


def ways_of(simulation: Simulation) -> list[tuple[str, Simulation]]:
    """The same step (name, simulation) ordinary, combined, and with delayed weight gradients."""
    config = simulation.plan.config
    has_chunks = config.pp_size > 1
    found = []
    for name, is_combined, delay_wgrad in (
        ("ordinary", False, False),
        ("combined", True, False),
        ("combined, weights delayed", True, True),
    ):
        ordinary = INTERLEAVED if has_chunks else NO_PIPELINING
        step = plan(
            COMBINED if is_combined else ordinary,
            config.pp_size,
            config.num_microbatches,
            config.num_model_chunks if has_chunks else None,
            config.microbatch_group_size_per_vp_stage,
            overlap_p2p_comm=config.overlap_p2p_comm,
            batch_p2p_comm=config.batch_p2p_comm,
            message_bytes=config.message_bytes,
            message_factors=config.message_factors,
        )
        given = simulation.costs
        costs = LayeredCosts.of_layers(given.layers, given.latency, given.bandwidth, delay_wgrad)
        found.append((name, simulate(step, costs, simulation.transport)))
    return found
