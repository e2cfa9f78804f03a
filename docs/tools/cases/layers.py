"""Cases of layers of experts: the nodes of a step on two lanes, as pictures and numbers.

Called by: `macros`, which evaluates expressions with these names; `rings`. Calls: the planner's
two-lane clock; reads overlap.json, which `records.overlap` writes. `nodes` are the times of
attention, mlp, dispatch and combine of one layer, forward.
"""

from collections.abc import Sequence
from fractions import Fraction
from functools import cache
from typing import Any

from cases.case_words import table
from minimegatron.core.orders.work import parts_of
from minimegatron.core.pipeline_parallel.schedule_table import count_rank_microbatches
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
from minimegatron.planner.memory import peak_activation_bytes
from minimegatron.planner.plan import plan
from minimegatron.planner.plan_report import exposed_words, number_words
from minimegatron.planner.render_layers import render_layers
from minimegatron.planner.render_svg import render_svg
from minimegatron.planner.simulator import Simulation, simulate
from pictures.pictures import without_style
from source.places import recorded

Nodes = Sequence[object]

WAYS = {
    "ordinary": {"overlap": False},
    "combined": {},
    "combined, weights delayed": {"delay_wgrad": True},
}


def _layer(nodes: Nodes) -> LayerCosts:
    return LayerCosts(*map(Fraction, nodes))


def picture_of_lanes(svg: str) -> str:
    return f'<div class="mm-timeline">{without_style(svg)}</div>'


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
    return picture_of_lanes(
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
    return picture_of_lanes(render_layers(rows, f"One stage, {layers} layers, {m} microbatches"))


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
    return picture_of_lanes(render_svg(layered_step(*args, **kwargs)))


def ways_table(*args: object, **kwargs: object) -> str:
    """The step ordinary, combined, and with delayed weight gradients; of its first rank."""
    rows = []
    for name, way in ways_of(layered_step(*args, **kwargs)):
        lanes = lanes_of(way, 0)
        figures = (way.makespan, lanes.compute, lanes.communication, lanes.exposed)
        rows.append([name, *map(number_words, figures)])
    return table(["", "step", "computes", "all-to-all", "exposed"], rows)


# -- What it costs, and when it fits --


def fits_table(dispatches: Sequence[object] = (1, 2, 3, 4, 5, 6), m: int = 4) -> str:
    """What is exposed, by the length of a dispatch; the other nodes as everywhere."""
    rows = [
        [
            number_words(Fraction(d)),
            *(number_words(layer_way(way, m, nodes=(2, 2, d, 1)).exposed) for way in WAYS),
        ]
        for d in dispatches
    ]
    return table(["a dispatch takes", *WAYS], rows)


def hidden_up_to(way: str = "combined") -> str:
    """The longest dispatch that a pair hides whole, over the time of the experts' forward, 2."""
    found = Fraction(0)
    for eighths in range(1, 33):
        nodes = (2, 2, 2 * Fraction(eighths, 8), 1)
        few, many = (layer_way(way, m, nodes=nodes).exposed for m in (4, 16))
        if few < many:  # then each of the further pairs exposes some
            break
        found = Fraction(eighths, 8)
    return number_words(found)


def exposed(way: str = "combined", m: int = 4, layers: int = 4, nodes: Nodes = (2, 2, 1, 1)) -> str:
    return number_words(layer_way(way, m, layers, nodes).exposed)


def compute_time(m: int = 4, layers: int = 4, nodes: Nodes = (2, 2, 1, 1)) -> str:
    return number_words(layer_way("combined", m, layers, nodes).compute)


def step_time(
    way: str = "combined", m: int = 4, layers: int = 4, nodes: Nodes = (2, 2, 1, 1)
) -> str:
    return number_words(layer_way(way, m, layers, nodes).total)


def combined_order(pp: int, m: int, rank: int, vpp: int | None = None) -> str:
    """As code: F0 [F1 B0] B1, what a rank does, pairs in brackets."""
    words = []
    for action in plan("combined", pp, m, vpp).work(rank):
        parts = [
            f"{part.kind[0].upper()}{part.microbatch}" + (f".{part.chunk}" if vpp else "")
            for part in parts_of(action)
        ]
        words.append(f"[{' '.join(parts)}]" if len(parts) > 1 else parts[0])
    return f"`{' '.join(words)}`"


def warmup_of(pp: int, m: int, rank: int, vpp: int, is_combined: bool = False) -> int:
    counts = count_rank_microbatches(
        pp, rank, m, vpp, pp, overlap_moe_expert_parallel_comm=is_combined
    )
    return counts.num_warmup


def peak_layers(pp: int, m: int, rank: int, vpp: int, layers: int, is_combined: bool = True) -> str:
    """Layers whose activations a rank holds at most, with so many layers in a chunk."""
    name = "combined" if is_combined else "interleaved" if pp > 1 else "no-pipelining"
    step = plan(name, pp, m, vpp if pp > 1 else None)
    return number_words(peak_activation_bytes(step, rank, layers, bytes_per_layer=int(is_combined)))


def price_table(pp: int = 2, m: int = 4, vpp: int = 2, layers: int = 2) -> str:
    """Warm-up and activations of each rank, interleaved and combined."""
    rows = [
        [
            f"rank {rank}",
            combined_order(pp, m, rank, vpp),
            f"{warmup_of(pp, m, rank, vpp)} → {warmup_of(pp, m, rank, vpp, True)}",
            f"{peak_layers(pp, m, rank, vpp, layers, False)} → "
            f"{peak_layers(pp, m, rank, vpp, layers)}",
        ]
        for rank in range(pp)
    ]
    return table(["", "combined", "warm-up", "layers held"], rows)


# -- Paced, on real ranks --


@cache
def overlap() -> dict[str, Any]:
    return recorded("overlap")


def paced_table(num_stages: int = 1) -> str:
    """A recorded step of each way, beside the simulation; in ms."""
    rows = []
    for one in overlap()["runs"][str(num_stages)]:
        keys = ("length", "planned_length", "exposed", "planned_exposed")
        rows.append([one["name"], *(f"{one[key]:.1f}" for key in keys)])
    return table(["", "step, ms", "simulated", "exposed, ms", "simulated"], rows)


def paced_pace() -> str:
    """`40 ms for an attention or an mlp forward, 30 ms for an all-to-all`."""
    found = overlap()
    return (
        f"{found['pace_ms']:g} ms for an attention or an mlp forward, "
        f"{found['all_to_all_ms']:g} ms for an all-to-all"
    )


def paced_worst() -> str:
    """By how much a recorded step is longer than the simulated one, at most."""
    ran = [one for runs in overlap()["runs"].values() for one in runs]
    return f"{100 * max(one['length'] / one['planned_length'] - 1 for one in ran):.1f}%"
