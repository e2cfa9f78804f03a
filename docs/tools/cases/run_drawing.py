"""A recorded step of four processes above its plan, stage by stage: what a reader gets from a run.

Called by: Home, as `run_drawing()` in a figure. Calls: a recording, `pictures`.
"""

from collections.abc import Iterator
from typing import Any

from minimegatron.planner.svg_shapes import label, rect, shade, text_colour
from pictures.pictures import svg
from source.page_words import say
from source.places import RECORDINGS, read_json

RUN = "1f1b-paced"
LEFT, TOP, ROW, RUN_BAR, PLAN_BAR, WIDTH = 62, 26, 52, 24, 10, 640


def recorded_step() -> list[tuple[list[dict[str, Any]], list[dict[str, Any]]]]:
    """Of each rank: its forwards and backwards as they were, and as they were planned. Times in μs."""
    ranks = read_json(RECORDINGS / f"{RUN}.json")["steps"][0]["ranks"]
    kinds = ("forward", "backward")
    return [([e for e in r["events"] if e["k"] in kinds and "a" in e], r["plan"]) for r in ranks]


def run_drawing() -> str:
    """Two rows per stage: the run with its microbatches' numbers, and below it, thin, the plan."""
    ranks = recorded_step()
    span = max(e["s"] + e["l"] for both in ranks for row in both for e in row)
    scale = WIDTH / span
    parts = [label(LEFT, 16, say("page.run.below"), "quiet small")]
    for stage, (run, planned) in enumerate(ranks):
        y = TOP + stage * ROW
        parts.append(label(8, y + 17, say("timeline.stage", rank=stage), "bold"))
        parts.append(rect(LEFT, y, WIDTH, RUN_BAR, 'class="track"'))
        parts += _bars(run, y, RUN_BAR, scale)
        parts += _bars(planned, y + RUN_BAR + 3, PLAN_BAR, scale)
    picture = svg(LEFT + WIDTH + 10, TOP + 4 * ROW, say("page.run.title"), parts)
    return f'<div class="mm-timeline mm-step-drawing">{picture}</div>'


def _bars(events: list[dict[str, Any]], y: int, height: int, scale: float) -> Iterator[str]:
    for event in events:
        fill = shade(event["k"], 0, 1)
        x, width = LEFT + event["s"] * scale, event["l"] * scale
        yield rect(x + 0.5, y, width - 1, height, f'rx="2" fill="{fill}"')
        if height == RUN_BAR:
            yield (
                f'<text class="num" x="{x + width / 2:.1f}" y="{y + 16}" '
                f'style="fill:{text_colour(fill)}">{event["a"][1:]}</text>'
            )
