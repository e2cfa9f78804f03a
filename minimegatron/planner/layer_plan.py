"""Inside a turn: the nodes of its layers on two lanes, and how much of the all-to-alls is exposed.

Counterpart: `TransformerLayerSchedulePlan.run` of
`megatron.core.models.common.model_chunk_schedule_plan`, whose order of nodes this is.

A layer of experts is attention (with norms, router and permutation), dispatch, mlp (the experts) and
combine. Dispatch and combine are all-to-alls. Where a forward and a backward share a turn, their layers
go in pairs, the forward's i-th beside the backward's i-th from the end:

| #  | node               | lane       | waits for                   | runs beside |
|----|--------------------|------------|-----------------------------|-------------|
| 1  | backward combine   | all-to-all | the gradient                | 2           |
| 2  | forward attention  | compute    | the input                   | 1           |
| 3  | backward mlp       | compute    | 1                           | 4           |
| 4  | forward dispatch   | all-to-all | 2                           | 3           |
| 5  | weights of mlp     | compute    | 3; with delayed weights     | 6           |
| 6  | backward dispatch  | all-to-all | 3                           | 5, 7        |
| 7  | forward mlp        | compute    | 4                           | 6           |
| 8  | forward combine    | all-to-all | 7                           | 9           |
| 9  | backward attention | compute    | 6                           | 8           |
| 10 | weights, attention | compute    | 9; with delayed weights     | what follows|

Each lane does one node at a time, in this order. So a node starts when its lane is free and the node
before it, of its own microbatch, is done. Both ends of the model (embedding, loss) take no time here.

Where ranks share a sequence on a ring, an attention has blocks and hops too (`ring_costs`), after its
projections in a forward and before them in a backward. Hops have a third lane; beside each, the block
after it is computed.

A program that starts an all-to-all as soon as its input exists, and waits for it where it is used
(start 1, run 2, start 4, wait 1, run 3, start 6, wait 4, run 7, start 8, wait 6, run 9, wait 8) has the
same lanes; a CPU needs that order, since its program stands still while it computes.

>>> layers = [LayerCosts(attention=2, mlp=2, dispatch=1, combine=1)] * 4
>>> ordinary, combined = one_stage(4, layers, overlap=False), one_stage(4, layers)
>>> ordinary.total, combined.total, combined.compute, combined.exposed
(256, 206, 192, 14)
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import NamedTuple

from minimegatron.core.orders.work import ALL_TO_ALL, COMPUTE, HIDDEN, RING_HOP
from minimegatron.planner.actions import BACKWARD, BACKWARD_WEIGHT, FORWARD, Time
from minimegatron.planner.ring_costs import HOME, HOPS, RingCosts, ring_parts
from minimegatron.planner.simulator import divided

ATTENTION, DISPATCH, MLP, COMBINE = "attention", "dispatch", "mlp", "combine"
LANE_OF = {DISPATCH: ALL_TO_ALL, COMBINE: ALL_TO_ALL, **dict.fromkeys(HOPS, RING_HOP)}
"""Of a node by its name; all others compute."""


@dataclass(frozen=True)
class LayerCosts:
    """How long the nodes of one layer take. Those of all-to-alls take as long backward as forward.

    Raises ValueError for a negative time, and where one of the two all-to-alls alone is given.
    """

    attention: Time
    mlp: Time
    dispatch: Time | None = None
    combine: Time | None = None
    """None for both: a dense layer, which has no all-to-alls."""
    backward: Time = 2
    """A backward's computation over its forward's; half of it is that of weight gradients."""
    ring: RingCosts | None = None
    """Of its blocks of attention; `attention` is then the rest. None: they are in `attention`."""

    def __post_init__(self) -> None:
        for name in ("attention", "mlp", "dispatch", "combine", "backward"):
            time = getattr(self, name)
            if time is not None and not time >= 0:
                raise ValueError(f"{name} takes {time}, which is negative; give 0 or more")
        if (self.dispatch is None) != (self.combine is None):
            raise ValueError(
                f"dispatch takes {self.dispatch} and combine {self.combine}; give both, or neither "
                "for a dense layer"
            )


class Half(NamedTuple):
    """What a turn does of one microbatch: its forward, or its backward, through one chunk."""

    kind: str
    microbatch: int
    chunk: int
    layers: Sequence[LayerCosts]


class Node(NamedTuple):
    """One node of a layer; `kind` is that of its work."""

    name: str
    kind: str
    layer: int
    """Within the chunk."""
    microbatch: int
    chunk: int
    length: Time

    @property
    def lane(self) -> str:
        """Where it runs."""
        return LANE_OF.get(self.name, COMPUTE)


class TimedNode(NamedTuple):
    """A node with its times."""

    node: Node
    start: Time
    end: Time


# -- Which nodes a turn has, in the order of their calls --


def step_nodes(
    forward: Half | None, backward: Half | None = None, delay_wgrad: bool = False
) -> list[Node]:
    """The nodes of one turn: of a pair, of a lone forward, or of a lone backward (`forward` None).

    Where the chunks differ in length, the layers that are left come alone: the backward's first.
    """
    f_layers = [] if forward is None else list(_forward_nodes(forward))
    b_layers = [] if backward is None else list(_backward_nodes(backward, delay_wgrad))[::-1]
    num_pairs = min(len(f_layers), len(b_layers))
    nodes = [
        node
        for f, b in zip(f_layers[:num_pairs], b_layers[:num_pairs], strict=True)
        for nodes in (*b[:1], *f[:1], *b[1:2], *f[1:2], *b[2:4], *f[2:], *b[4:])
        for node in nodes
    ]
    rest = (*b_layers[num_pairs:], *f_layers[num_pairs:])
    return nodes + [node for layer in rest for nodes in layer for node in nodes]


def _forward_nodes(half: Half) -> Iterator[list[list[Node]]]:
    for number, layer in enumerate(half.layers):
        unit = (number, half.microbatch, half.chunk)
        attention = Node(ATTENTION, FORWARD, *unit, layer.attention)
        yield [
            [attention, *_ring(layer.ring, FORWARD, unit)],
            _exchange(DISPATCH, FORWARD, unit, layer.dispatch),
            [Node(MLP, FORWARD, *unit, layer.mlp)],
            _exchange(COMBINE, FORWARD, unit, layer.combine),
        ]


def _backward_nodes(half: Half, delay_wgrad: bool) -> Iterator[list[list[Node]]]:
    for number, layer in enumerate(half.layers):
        unit = (number, half.microbatch, half.chunk)
        mlp, attention = layer.mlp * layer.backward, layer.attention * layer.backward
        mlp_weights, attention_weights = [], []
        if delay_wgrad:
            mlp, attention = divided(mlp, 2), divided(attention, 2)
            mlp_weights = [Node(MLP, BACKWARD_WEIGHT, *unit, mlp)]
            attention_weights = [Node(ATTENTION, BACKWARD_WEIGHT, *unit, attention)]
        yield [
            _exchange(COMBINE, BACKWARD, unit, layer.combine),
            [Node(MLP, BACKWARD, *unit, mlp)],
            mlp_weights,
            _exchange(DISPATCH, BACKWARD, unit, layer.dispatch),
            [*_ring(layer.ring, BACKWARD, unit), Node(ATTENTION, BACKWARD, *unit, attention)],
            attention_weights,
        ]


def _exchange(name: str, kind: str, unit: tuple, time: Time | None) -> list[Node]:
    return [] if time is None else [Node(name, kind, *unit, time)]


def _ring(ring: RingCosts | None, kind: str, unit: tuple) -> list[Node]:
    return (
        [] if ring is None else [Node(x, kind, *unit, time) for x, time in ring_parts(ring, kind)]
    )


# -- When they run --


@dataclass(frozen=True)
class LayerTimeline:
    """Nodes with their times, in the order of their calls."""

    nodes: list[TimedNode]

    @property
    def total(self) -> Time:
        """When the last node is done."""
        return max((end for _, _, end in self.nodes), default=0)

    def busy(self, lane: str) -> Time:
        """How long a lane works."""
        return sum(node.length for node, _, _ in self.nodes if node.lane == lane)

    @property
    def compute(self) -> Time:
        """What the step takes if no all-to-all takes time."""
        return self.busy(COMPUTE)

    @property
    def hidden_lanes(self) -> list[str]:
        """The lanes, of those that work may hide, which have nodes."""
        found = {node.lane for node, _, _ in self.nodes}
        return [lane for lane in HIDDEN if lane in found]

    @property
    def communication(self) -> Time:
        """All all-to-alls and hops together."""
        return sum(map(self.busy, self.hidden_lanes))

    @property
    def exposed(self) -> Time:
        """How long an all-to-all or a hop runs and nothing is computed beside it."""
        length, until = 0, 0
        for start, end in sorted((start, end) for _, start, end in self.exposed_parts()):
            length += max(0, end - max(start, until))
            until = max(until, end)
        return length

    def exposed_on(self, lane: str) -> Time:
        """The same of one lane alone."""
        return sum(end - start for _, start, end in self.exposed_parts([lane]))

    def exposed_parts(
        self, lanes: Sequence[str] | None = None
    ) -> Iterator[tuple[TimedNode, Time, Time]]:
        """(all-to-all or hop, start, end) for each such stretch, lane after lane, in order."""
        gaps = list(self._idle())
        for lane in self.hidden_lanes if lanes is None else lanes:
            first = 0
            for timed in self.nodes:
                if timed.node.lane != lane or timed.start == timed.end:
                    continue
                while first < len(gaps) and gaps[first][1] <= timed.start:
                    first += 1
                for start, end in islice(gaps, first, None):
                    if start >= timed.end:
                        break
                    yield timed, max(start, timed.start), min(end, timed.end)

    def _idle(self) -> Iterator[tuple[Time, Time]]:
        """The stretches in which the compute lane stands still."""
        free_since: Time = 0
        for node, start, end in self.nodes:
            if node.lane == COMPUTE:
                if start > free_since:
                    yield free_since, start
                free_since = end
        if self.total > free_since:
            yield free_since, self.total


def run_lanes(
    steps: Iterable[Sequence[Node]],
    overlap: bool = True,
    joined: bool = False,
    blocking: bool = False,
) -> LayerTimeline:
    """The clock of all lanes.

    Args:
        overlap: False: no node starts before the one before it is done, whatever its lane.
        joined: no turn starts before the one before it is done. So it is where a turn's end is waited
            for: by a program that computes on a CPU, and in `simulator.simulate`. On a GPU the
            streams run on.
        blocking: the program stands still while it computes an attention's weight gradients, so the
            next combine of that backward starts after them. On a GPU it starts beside them.
    """
    lanes, done = dict.fromkeys((COMPUTE, *HIDDEN), 0), defaultdict(int)
    beside: dict[tuple, Time] = {}  # by unit, when the hops that its next node runs beside are over
    timed = []
    for nodes in steps:
        for node in nodes:
            unit = (node.microbatch, node.chunk)
            if not overlap:
                start = max(lanes.values())
            elif node.kind == BACKWARD_WEIGHT:  # on the same lane, right after what it belongs to
                start = lanes[COMPUTE]
            else:
                start = max(lanes[node.lane], done[unit])
            end = lanes[node.lane] = start + node.length
            if node.lane == RING_HOP and node.name != HOME:
                beside[unit] = end
            elif node.kind != BACKWARD_WEIGHT or (blocking and node.name == ATTENTION):
                done[unit] = max(end, beside.pop(unit, 0))
            timed.append(TimedNode(node, start, end))
        if joined:
            lanes = dict.fromkeys(lanes, max(lanes.values()))
    return LayerTimeline(timed)


def one_ring(ring: RingCosts, kind: str, overlap: bool = True) -> LayerTimeline:
    """The attention of one layer on a ring, forward or backward; each hop waited for without overlap.

    >>> ring = RingCosts(num_ranks=4, block=2, hop=1)
    >>> one_ring(ring, FORWARD).total, one_ring(ring, FORWARD, overlap=False).total
    (8, 11)
    >>> one_ring(ring, BACKWARD).total, one_ring(ring, BACKWARD).exposed
    (17, 1)
    """
    return run_lanes([_ring(ring, kind, (0, 0, 0))], overlap)


def one_stage(
    num_microbatches: int,
    layers: Sequence[LayerCosts],
    overlap: bool = True,
    delay_wgrad: bool = False,
    joined: bool = False,
) -> LayerTimeline:
    """All nodes of a step without a pipeline: combined, or (`overlap` False) one after the other."""
    forwards, backwards = (
        [Half(kind, i, 0, layers) for i in range(num_microbatches)] for kind in (FORWARD, BACKWARD)
    )
    if overlap:
        steps = zip([*forwards, None], [None, *backwards], strict=True)
    else:
        steps = (
            s for f, b in zip(forwards, backwards, strict=True) for s in ((f, None), (None, b))
        )
    nodes = [step_nodes(f, b, delay_wgrad) for f, b in steps]
    return run_lanes(nodes, overlap, joined)
