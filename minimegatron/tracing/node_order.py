"""Did a step of combined 1F1B run its layers' nodes in the order of its plan?

Torch-free. Megatron has no counterpart.

Of each stage, the nodes that compute in their order, and the all-to-alls in theirs: all ranks of an
expert group must start these in one order, or they wait for ever. How the two orders interleave is the
program's own affair: on a CPU it starts an all-to-all before the computation that is to hide it.
"""

from minimegatron.core.orders.work import ALL_TO_ALL, COMPUTE
from minimegatron.planner.actions import COMMUNICATE, KINDS, Event
from minimegatron.planner.layer_plan import ATTENTION, COMBINE, DISPATCH, MLP
from minimegatron.planner.links import LAYER_NODE
from minimegatron.tracing.step import Step
from minimegatron.tracing.step_costs import costs_of_nodes, has_nodes, layers_of

PLANNED = (ATTENTION, DISPATCH, MLP, COMBINE)
"""Others, such as the addition of the residual, belong to one of these."""


def wrong_nodes(step: Step) -> list[str]:
    """Where each lane of each stage first departs from the plan.

    Empty for a step that did just what was planned, and for one that was not run in nodes.
    """
    if not has_nodes(step):
        return []
    costs, numbers = costs_of_nodes(step), _Numbers(step)
    problems = []
    for rank, events in enumerate(step.events):
        work = [action for action in step.plan.ranks[rank] if action.kind != COMMUNICATE]
        planned = [node for action in work for node in costs.nodes_of(step.config, action)]
        found = [e for e in events.values() if e.name == LAYER_NODE]
        for lane in (COMPUTE, ALL_TO_ALL):
            wanted = [_words(*node[:5]) for node in planned if node.lane == lane]
            done = [
                numbers.words(event, rank)
                for event in found
                if event.attributes["lane"] == lane and event.attributes["node"] in PLANNED
            ]
            if wanted != done:
                place = next(
                    (
                        n
                        for n, pair in enumerate(zip(wanted, done, strict=False))
                        if len({*pair}) > 1
                    ),
                    min(len(wanted), len(done)),
                )
                expected, instead = (_at(nodes, place) for nodes in (wanted, done))
                problems.append(
                    f"stage {rank}, {lane}, node {place}: expected {expected}, found {instead}"
                )
    return problems


class _Numbers:
    """The place of each layer within its chunk: recordings number them within the model."""

    def __init__(self, step: Step):
        self.placement = step.config.placement
        self.places = {
            (stage, layer): place
            for stage, layers in layers_of(step).items()
            for place, layer in enumerate(layers)
        }

    def words(self, event: Event, rank: int) -> str:
        told, action = event.attributes, event.action
        stage = self.placement.stage_of(rank, action.chunk or 0)
        place = self.places[stage, told.get("layer", 0)]
        return _words(told["node"], told["direction"], place, action.microbatch, action.chunk or 0)


def _words(name: str, kind: str, layer: int, microbatch: int | None, chunk: int) -> str:
    work = f"{KINDS[kind].words} of microbatch {microbatch}, chunk {chunk}"
    return f"{name} of layer {layer}, {work}"


def _at(nodes: list[str], place: int) -> str:
    return nodes[place] if place < len(nodes) else "nothing more"
