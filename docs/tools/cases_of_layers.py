"""Cases of layers of experts: the nodes of a step on two lanes, as pictures and numbers.

Called by: `macros`, which evaluates expressions with these names. Calls: the planner's two-lane clock.
`nodes` are the times of attention, mlp, dispatch and combine of one layer, forward.
"""

from collections.abc import Sequence
from fractions import Fraction

from case_words import table
from cases import _without_style

from minimegatron.planner.actions import BACKWARD, FORWARD
from minimegatron.planner.layer_costs import LayeredCosts, lanes_of, ways_of
from minimegatron.planner.layer_plan import (
    Half,
    LayerCosts,
    LayerTimeline,
    one_stage,
    run_lanes,
    step_nodes,
)
from minimegatron.planner.plan import plan
from minimegatron.planner.plan_report import exposed_words, number_words
from minimegatron.planner.render_layers import render_layers
from minimegatron.planner.render_svg import render_svg
from minimegatron.planner.simulator import Simulation, simulate

Nodes = Sequence[object]

WAYS = {
    "ordinary": {"overlap": False},
    "combined": {},
    "combined, weights delayed": {"delay_wgrad": True},
}


def _layer(nodes: Nodes) -> LayerCosts:
    return LayerCosts(*map(Fraction, nodes))


def _picture(svg: str) -> str:
    return f'<div class="mm-timeline">{_without_style(svg)}</div>'


def layer_way(
    way: str = "combined",
    m: int = 4,
    layers: int = 4,
    nodes: Nodes = (2, 2, 1, 1),
    joined: bool = False,
) -> LayerTimeline:
    """A step without a pipeline; on GPUs, whose streams run on, unless `joined`."""
    return one_stage(m, [_layer(nodes)] * layers, joined=joined, **WAYS[way])


def layer_pair(nodes: Nodes = (2, 2, 1, 1), delay_wgrad: bool = False) -> str:
    """The forward of one layer beside the backward of another."""
    layers = [_layer(nodes)]
    pair = Half(FORWARD, 1, 0, layers), Half(BACKWARD, 0, 0, layers)
    lanes = run_lanes([step_nodes(*pair, delay_wgrad)])
    return _picture(
        render_layers([("one pair", lanes)], "A pair of layers: forward F1, backward B0")
    )


def layer_timeline(
    m: int = 2,
    layers: int = 2,
    nodes: Nodes = (2, 2, 1, 1),
    ways: Sequence[str] = ("ordinary", "combined"),
    joined: bool = False,
) -> str:
    """The same step in several ways, on one clock."""
    rows = [(way, layer_way(way, m, layers, nodes, joined)) for way in ways]
    return _picture(render_layers(rows, f"One stage, {layers} layers, {m} microbatches"))


def layer_words(*args: object, **kwargs: object) -> str:
    """`206, all-to-all 64, exposed 14`."""
    lanes = layer_way(*args, **kwargs)
    return f"{number_words(lanes.total)}, {exposed_words(lanes)}"


def layered_step(
    pp: int = 2,
    m: int = 4,
    vpp: int | None = 2,
    layers: int = 2,
    nodes: Nodes = (2, 2, 1, 1),
    schedule: str = "combined",
    delay_wgrad: bool = False,
) -> Simulation:
    """A simulated step whose chunks are `layers` layers each."""
    step = plan(schedule, pp, m, None if pp == 1 else vpp)
    chunks = [[_layer(nodes)] * layers] * step.config.num_virtual_stages
    return simulate(step, LayeredCosts.of_layers(chunks, delay_wgrad=delay_wgrad))


def layered_timeline(*args: object, **kwargs: object) -> str:
    """It as a picture, two lanes for each rank."""
    return _picture(render_svg(layered_step(*args, **kwargs)))


def ways_table(*args: object, **kwargs: object) -> str:
    """The step ordinary, combined, and with delayed weight gradients; of its first rank."""
    rows = []
    for name, way in ways_of(layered_step(*args, **kwargs)):
        lanes = lanes_of(way, 0)
        figures = (way.makespan, lanes.compute, lanes.communication, lanes.exposed)
        rows.append([name, *map(number_words, figures)])
    return table(["", "step", "computes", "all-to-all", "exposed"], rows)
