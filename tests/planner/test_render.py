"""The four formats: golden text, well-formed and readable SVG, trace-event JSON."""

import json
import re
import xml.etree.ElementTree as ElementTree
from collections import Counter
from fractions import Fraction
from itertools import pairwise, product
from pathlib import Path

import pytest

from minimegatron.__main__ import main
from minimegatron.core.orders.work import pair
from minimegatron.planner.actions import BACKWARD, COMMUNICATE, FORWARD, KINDS
from minimegatron.planner.plan import Plan, plan
from minimegatron.planner.render import FORMATS, render
from minimegatron.planner.render_text import render_text
from minimegatron.planner.simulator import Costs, simulate
from minimegatron.planner.svg_shapes import contrast, shade, text_colour
from tests.planner.known_orders import PUBLISHED, registered

GOLDEN = Path(__file__).parent / "golden"
SVG = "{http://www.w3.org/2000/svg}"

COMMANDS = {
    "1f1b.txt": "--pp 4 --microbatches 8",
    "gpipe.txt": "--pp 4 --microbatches 8 --schedule gpipe",
    "interleaved.txt": "--pp 4 --microbatches 8 --vpp 2",
    "imbalance.txt": "--pp 3 --microbatches 12 --imbalance 1,3/2,1 --comm-time 0.25",
    "forward_only.txt": "--pp 2 --microbatches 4 --vpp 2 --forward-only",
    "no_pipelining.txt": "--pp 1 --microbatches 3",
}

SIZES = [
    ("1f1b", 4, 8),
    ("gpipe", 3, 12),
    ("interleaved", 4, 8, 2),
    ("interleaved", 2, 6, 4, 3),
    ("interleaved", 3, 3, 2, 3, True),
    ("no-pipelining", 1, 1),
]


def simulated(arguments, costs=None):
    step = plan(*arguments)
    return simulate(step, costs or Costs.of_stages(1, 2, step.config.num_model_chunks))


# -- Text --


@pytest.mark.parametrize("name", COMMANDS)
def test_golden_text(name, capsys):
    """If a change is meant: python -m minimegatron plan ARGUMENTS > tests/planner/golden/NAME."""
    assert main(["plan", *COMMANDS[name].split()]) == 0
    assert capsys.readouterr().out == (GOLDEN / name).read_text()


@pytest.mark.parametrize("arguments", [*SIZES, ("1f1b", 8, 32), ("interleaved", 4, 16, 4)])
@pytest.mark.parametrize("width", [60, 100, 200])
def test_timeline_fits_its_width(arguments, width):
    text = render_text(simulated(arguments), width)
    rows = [line for line in text.splitlines() if re.match(r"(rank|time| +chunk)", line)]
    bars = [line for line in rows if not re.search(r"\d [FB] |- +\d| = |not ", line)]
    assert len(bars) >= arguments[1]
    assert max(map(len, bars)) <= width


def test_the_default_fits_a_hundred_columns():
    for arguments in SIZES[:3]:
        assert max(map(len, render_text(simulated(arguments)).splitlines())) <= 100


def test_each_bar_has_its_length_and_number():
    text = render_text(simulated(("1f1b", 2, 3)), 100)
    rank_0 = next(line for line in text.splitlines() if line.startswith("rank 0"))
    bars = re.findall(r"[FB]\d[-=]*|·+", rank_0)
    assert [(bar[:2], len(bar)) for bar in bars] == [
        *(("F0", 3), ("F1", 3), ("··", 6), ("B0", 6), ("F2", 3), ("B1", 6), ("··", 3), ("B2", 6))
    ]


def test_colour_adds_nothing_but_colour():
    simulation = simulated(("interleaved", 4, 8, 2))
    coloured = render_text(simulation, colour=True)
    assert "\033[" in coloured
    assert re.sub(r"\033\[[\d;]*m", "", coloured) == render_text(simulation)


def test_a_schedule_without_phases_or_formulas():
    def mine(stage):
        for i in range(stage.num_microbatches):
            yield stage.forward(i)
            yield stage.backward(i)

    text = render_text(simulate(plan(mine, 1, 2)))
    assert text.startswith("mine, 1 stage, 2 microbatches\n")
    assert "warm-up" not in text
    assert "min(M" not in text


# -- SVG --


@pytest.mark.parametrize("arguments", SIZES)
@pytest.mark.parametrize("critical_path", [False, True])
def test_svg_is_well_formed_and_complete(arguments, critical_path):
    simulation = simulated(arguments)
    text = render(simulation, "svg", critical_path=critical_path)
    root = ElementTree.fromstring(text)
    assert root.tag == f"{SVG}svg"
    x, y, width, height = map(float, root.get("viewBox").split())
    assert (x, y) == (0, 0)
    tips = [element.text for element in root.iter(f"{SVG}title")]
    ids = [element.get("id") for element in root.iter() if element.get("id")]
    assert len(ids) == len(set(ids))
    step: Plan = simulation.plan
    for rank in range(step.config.pp_size):
        for action in step.work(rank):
            chunk = f", chunk {action.chunk}" if step.config.num_model_chunks > 1 else ""
            tip = f"stage {rank}: {action.kind} of microbatch {action.microbatch}{chunk} ("
            assert sum(t.startswith(tip) for t in tips) == 1, tip
        idle = [t for t in tips if t.startswith(f"stage {rank} idle: ")]
        assert len(idle) == len(simulation.gaps(rank))
    for element in root.iter(f"{SVG}rect"):
        left, top = float(element.get("x", 0)), float(element.get("y", 0))
        assert left >= 0 and left + float(element.get("width")) <= width
        assert top >= 0 and top + float(element.get("height")) <= height
    for element in root.iter(f"{SVG}text"):
        assert 0 <= float(element.get("x")) <= width
        assert 0 <= float(element.get("y")) <= height


def test_bars_have_the_lengths_of_their_actions():
    simulation = simulated(("1f1b", 4, 8))
    root = ElementTree.fromstring(render(simulation, "svg"))
    for rank in range(4):
        group = next(g for g in root.iter(f"{SVG}g") if g.get("id") == f"rank-{rank}")
        bars = [
            g for g in group.iter(f"{SVG}g") if " of microbatch " in g.findtext(f"{SVG}title", "")
        ]
        widths = Counter(round(float(bar.find(f"{SVG}rect").get("width"))) for bar in bars)
        forward, backward = sorted(widths)
        # Half a pixel of paper on either side.
        assert (backward + 1) / (forward + 1) == pytest.approx(2, rel=0.05)
        assert widths[forward] == widths[backward] == 8
        labels = Counter(text.text for bar in bars for text in bar.iter(f"{SVG}text"))
        assert labels == {str(i): 2 for i in range(8)}


def test_svg_needs_nothing_from_elsewhere():
    text = render(simulated(("interleaved", 4, 8, 2)), "svg")
    addresses = re.findall(r"https?://[^\"' )]+", text)
    assert set(addresses) == {"http://www.w3.org/2000/svg"}
    for word in ("<script", "@import", "<image", "href", "<foreignObject"):
        assert word not in text
    assert "prefers-color-scheme: dark" in text


def shades(num_chunks):
    return {
        kind: [shade(kind, chunk, num_chunks) for chunk in range(num_chunks)]
        for kind in (FORWARD, BACKWARD)
    }


@pytest.mark.parametrize("num_chunks", [1, 2, 3, 4, 8])
def test_numbers_can_be_read_on_every_bar(num_chunks):
    for colours in shades(num_chunks).values():
        assert len(set(colours)) == num_chunks
        for colour in colours:
            assert contrast(colour, text_colour(colour)) >= 4.5, colour


# Machado, Oliveira and Fernandes 2009, severity 1, in linear RGB.
BLINDNESS = {
    "protan": (
        (0.152286, 1.052583, -0.204868),
        (0.114503, 0.786281, 0.099216),
        (-0.003882, -0.048116, 1.051998),
    ),
    "deutan": (
        (0.367322, 0.860646, -0.227968),
        (0.280085, 0.672501, 0.047413),
        (-0.011820, 0.042940, 0.968881),
    ),
    "tritan": (
        (1.255528, -0.076749, -0.178779),
        (-0.078411, 0.930809, 0.147602),
        (0.004733, 0.691367, 0.303900),
    ),
}


def seen(colour, matrix):
    linear = [(int(colour[i : i + 2], 16) / 255) ** 2.2 for i in (1, 3, 5)]
    mixed = [sum(m * c for m, c in zip(row, linear, strict=True)) for row in matrix]
    return [min(max(c, 0), 1) ** (1 / 2.2) for c in mixed]


@pytest.mark.parametrize("blindness", BLINDNESS)
def test_forward_and_backward_differ_under_colour_blindness(blindness):
    matrix = BLINDNESS[blindness]
    for num_chunks in (1, 2, 4):
        colours = shades(num_chunks)
        for a, b in product(colours[FORWARD], colours[BACKWARD]):
            distance = sum(
                (x - y) ** 2 for x, y in zip(seen(a, matrix), seen(b, matrix), strict=True)
            )
            assert distance**0.5 > 0.15, (a, b)


# -- Perfetto --


@pytest.mark.parametrize("arguments", SIZES)
def test_chrome_trace(arguments):
    simulation = simulated(arguments, Costs(Fraction(1, 2), 1, latency=Fraction(1, 4)))
    trace = json.loads(render(simulation, "chrome"))
    events = trace["traceEvents"]
    p = simulation.plan.config.pp_size
    names = [e for e in events if e["ph"] == "M" and e["name"] == "process_name"]
    assert {(e["pid"], e["args"]["name"]) for e in names} == {(r, f"rank {r}") for r in range(p)}
    slices = [e for e in events if e["ph"] == "X"]
    assert len(slices) == sum(map(len, simulation.plan.ranks))
    for event in slices:
        assert event["dur"] >= 0 and event["ts"] >= 0
        assert {"name", "cat", "pid", "tid", "args"} <= set(event)
    for rank, tid in product(range(p), (0, 1)):
        track = sorted((e["ts"], e["dur"]) for e in slices if (e["pid"], e["tid"]) == (rank, tid))
        assert all(a + d <= b + 1e-6 for (a, d), (b, _) in pairwise(track))
    # Every message is an arrow from inside the work that made it to the start of what needs it.
    starts = {e["id"]: e for e in events if e["ph"] == "s"}
    ends = {e["id"]: e for e in events if e["ph"] == "f"}
    assert starts.keys() == ends.keys()
    assert len(starts) == sum(simulation.plan.message_counts().values())
    compute = {(e["pid"], e["ts"]): e for e in slices if e["tid"] == 0}
    for number, start in starts.items():
        end = ends[number]
        assert end["bp"] == "e"
        assert start["ts"] < end["ts"] and start["pid"] != end["pid"]
        target = compute[end["pid"], end["ts"]]
        assert target["cat"] == (FORWARD if end["name"] == "activation" else BACKWARD)
        assert any(
            e["pid"] == start["pid"] and e["ts"] <= start["ts"] < e["ts"] + e["dur"]
            for e in compute.values()
        )
    held = [e["args"]["held"] for e in events if e["ph"] == "C" and e["pid"] == 0]
    if not simulation.plan.config.forward_only:
        assert max(held) == simulation.plan.peak_in_flight(0)
        assert held[-1] == 0


# -- All --


def test_json_is_the_schema():
    simulation = simulated(("1f1b", 2, 2))
    assert json.loads(render(simulation, "json")) == simulation.to_json()
    kinds = {event["kind"] for rank in simulation.to_json()["ranks"] for event in rank}
    assert kinds == {FORWARD, BACKWARD, COMMUNICATE}


def test_unknown_format():
    with pytest.raises(ValueError, match=f"unknown format 'gif'; use one of {', '.join(FORMATS)}"):
        render(simulated(("1f1b", 2, 2)), "gif")


# -- Orders with split backwards and pairs --


def published(name: str, costs: Costs | None = None):
    order, placement, p, M = PUBLISHED[name]
    with registered(order, placement) as registered_name:
        return simulate(plan(registered_name, p, M), costs or Costs(1, 2))


def test_text_of_a_split_backward():
    text = render_text(published("zb-h1"))
    assert text.startswith(
        "of-a-test, 4 stages, 8 microbatches, tagged wire\n"
        "forward 1, input gradient 1, weight gradient 1\n"
    )
    lines = text.splitlines()
    assert next(line for line in lines if line.startswith("rank 3")).startswith(
        "rank 3  ·········F0-I0~F1-I1~F2-I2~F3-I3~W0+F4-"
    )
    assert (
        "F0 forward of microbatch 0, I0 its input gradient, W0 its weight gradient, · idle" in text
    )
    assert next(line for line in lines if line.startswith("makespan")).split() == ["makespan", "27"]
    for kind in ("forward", "backward-input", "backward-weight"):
        assert KINDS[kind].terminal in render_text(published("zb-h1"), colour=True)


def test_text_of_pairs():
    text = render_text(published("dualpipe-v", Costs(1, 2, pair=max)), width=140)
    assert "2 chunks per stage (placement v)" in text
    assert "pair 2\n" in text
    rank_0 = re.search(r"^rank 0 chunk 0  (.*)\n +chunk 1  (.*)$", text, re.MULTILINE)
    first, second = rank_0.groups()
    # The two parts, one in each chunk, stand one below the other.
    assert first.index("F7") == second.index("B3")
    assert "F4 (chunk 1) & B0 (chunk 0) on rank 1" in text


def test_a_pair_within_one_chunk_shares_its_bar():
    def one(rank):
        yield rank.forward(0)
        yield pair(rank.forward(1), rank.backward(0))
        yield rank.backward(1)

    with registered(one) as name:
        text = render_text(simulate(plan(name, 1, 2), Costs(2, 4)))
    bars = next(line for line in text.splitlines() if line.startswith("rank 0"))
    assert re.fullmatch(r"rank 0  F0-+F1-+B0=+B1=+", bars)
    widths = [len(bar) for bar in re.findall(r"[FB]\d[-=]+", bars)]
    assert widths[1] == pytest.approx(widths[2], abs=1)
    assert widths[1] + widths[2] == 3 * widths[0]


def test_svg_of_pairs_and_split_backwards():
    simulation = published("dualpipe-v")
    root = ElementTree.fromstring(render(simulation, "svg", critical_path=True))
    bars = [
        g
        for g in root.iter(f"{SVG}g")
        if " of microbatch " in g.findtext(f"{SVG}title", default="")
    ]
    tips = Counter(" and " in bar.findtext(f"{SVG}title") for bar in bars)
    num_pairs = sum(bool(a.parts) for actions in simulation.plan.ranks for a in actions)
    assert tips[True] == num_pairs > 0
    for bar in bars:
        shapes = [r for r in bar.iter(f"{SVG}rect") if r.get("class") is None]
        is_pair = " and " in bar.findtext(f"{SVG}title")
        assert len(shapes) == 1 + is_pair
        assert sum(float(shape.get("height")) for shape in shapes) == 26
        if is_pair:
            assert shapes[0].get("fill") != shapes[1].get("fill")
            assert float(shapes[1].get("y")) == float(shapes[0].get("y")) + 13
    texts = {text.text for text in root.iter(f"{SVG}text")}
    assert {"input gradient, chunk 0 to 1", "weight gradient, chunk 0 to 1"} <= texts


def test_legends_name_only_the_kinds_that_occur():
    for arguments, absent in ((("1f1b", 2, 2), "input gradient"), (SIZES[4], "backward")):
        assert absent not in render(simulated(arguments), "svg").partition('id="rank-0"')[2]


def test_chrome_trace_of_pairs():
    simulation = published("dualpipe-v")
    events = json.loads(render(simulation, "chrome"))["traceEvents"]
    slices = [e for e in events if e["ph"] == "X" and e["tid"] == 0]
    work = [a for rank in range(4) for a in simulation.plan.work(rank)]
    assert len(slices) == sum(len(a.parts) or 1 for a in work)
    assert {e["cat"] for e in slices} == {
        "forward",
        "backward",
        "backward-input",
        "backward-weight",
    }
    arrows = [e for e in events if e["ph"] == "s"]
    assert len(arrows) == sum(simulation.plan.message_counts().values())
    held = [e["args"]["held"] for e in events if e["ph"] == "C" and e["pid"] == 0]
    assert (max(held), held[-1]) == (9, 0)


def test_json_of_pairs_is_of_the_second_version():
    data = published("dualpipe-v").to_json()
    assert data["version"] == 2
    assert data["summary"]["makespan"] == 54
    assert Plan.from_json(data).config.placement.name == "v"


@pytest.mark.parametrize("name", [*PUBLISHED, "breadth-first"])
def test_every_format_draws_every_order(name):
    if name in PUBLISHED:
        simulation = published(name, Costs(1, 3, latency=Fraction(1, 4), pair=max))
    else:
        simulation = simulate(plan(name, 3, 6, 2))
    for format in FORMATS:
        for colour in (False, True):
            assert render(simulation, format, colour=colour, critical_path=colour)


def test_numbers_that_rounding_leaves_no_room_are_left_out():
    """Was: a bar one column too narrow was drawn wider, and in colour that ended in an error."""
    simulation = simulate(plan("gpipe", 3, 12), Costs(1, 3, latency=Fraction(1, 4)), "buffered")
    plain, coloured = (render_text(simulation, colour=colour) for colour in (False, True))
    assert re.sub("\033\\[[0-9;]*m", "", coloured) == plain
