"""One HTML page with an interactive timeline: zoom, hover, and for each call its stack and source.

Torch-free. Megatron has no counterpart.

The page needs no network and no other file. Everything it shows is in it as JSON; the keys are one
or two letters long, since there are thousands of events:

* an event: `i` index, `p` parent, `k` kind, `n` name, `a` short name of an action, `m` microbatch,
  `c` chunk, `ph` phase, `s` start, `l` length, `w` waiting, `t` transfer (all us), `x` further words,
  `st` stack, `so` source, `ln` its first line;
* a gap: `s`, `l`, `w`, `t`, `o` own work, `b` index of the action that ends it, `f` [stage, index] of
  what it waited for, `x` words;
* a message: `a` [stage, index, time] of its start, `b` the same of its arrival, `d` index of the work
  that made it, `u` of the work that used it, `x` words;
* an all-to-all or a hop: `i` index, `n` short name, `s`, `l`, `w` exposed part of it, `x` words;
* a bar of the plan: `k`, `a`, `c`, `s`, `l`; of a pair, `h` [its place, how many there are].
"""

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from minimegatron.core.datasets.atomic_file import write_atomically
from minimegatron.core.json_text import json_for_html
from minimegatron.core.orders.work import HIDDEN
from minimegatron.planner.actions import COMMUNICATE, KINDS, Event, parts_of
from minimegatron.planner.svg_shapes import shade, text_colour
from minimegatron.tracing.compare import compare_with_plan, wrong_messages
from minimegatron.tracing.lanes import Bar, exposed_of, in_flight
from minimegatron.tracing.rank_trace import RankTrace
from minimegatron.tracing.run import Run
from minimegatron.tracing.step import Step, TracedGap, Transfer
from minimegatron.tracing.trace_words import (
    action_name,
    communicator_words,
    function_name,
    gap_words,
    late_words,
    lines_words,
    message_words,
    milliseconds,
    moved_words,
    pace_words,
    percent,
    shape_words,
    step_title,
)

ASSETS = Path(__file__).parent / "assets"
MAX_EVENTS = 60_000
"""A page with more would be slow to open; later steps are then left out, and the page says so."""


def write_html(run: Run, path: str | os.PathLike, steps: Iterable[int] | None = None) -> None:
    """Writes the page. `steps`: which schedule runs; None for as many as fit."""
    write_atomically(path, html_page(run, steps).encode(), makes_folder=False)


def html_page(run: Run, steps: Iterable[int] | None = None) -> str:
    """The page's text. Raises ValueError if the run has no whole pipeline to show."""
    data = json_for_html(page_data(run, steps))
    page = (ASSETS / "timeline.html").read_text(encoding="utf-8")
    for name, text in (
        ("/*STYLE*/", (ASSETS / "timeline.css").read_text(encoding="utf-8")),
        ("/*PROGRAM*/", (ASSETS / "timeline.js").read_text(encoding="utf-8")),
        ("/*DATA*/", data),
    ):
        page = page.replace(name, text, 1)
    return page


def page_data(run: Run, steps: Iterable[int] | None = None) -> dict[str, Any]:
    """Everything the page shows."""
    pipelines = [pipeline for pipeline in run.pipelines() if run.is_whole(**pipeline)]
    if not pipelines or run.num_steps == 0:
        raise ValueError(
            "the recording has no schedule run of a whole pipeline, so there is no timeline to "
            "draw; record a training step on every rank"
        )
    texts = _Texts()
    shown: list[dict[str, Any]] = []
    num_events, num_left_out = 0, 0
    for number in range(run.num_steps) if steps is None else steps:
        for pipeline in pipelines:
            step = run.step(number, **pipeline)
            num_events += sum(map(len, step.indices))
            if steps is None and num_events > MAX_EVENTS and shown:
                num_left_out += 1
                continue
            shown.append(_step_data(step, pipeline, len(pipelines) > 1, texts))
    return {
        "clock": run.clock_words,
        "steps": shown,
        "leftOut": num_left_out,
        "stacks": texts.stacks,
        "sources": texts.sources,
    }


class _Texts:
    """Stacks and sources of all ranks, each once."""

    def __init__(self):
        self.stacks: list[list[list]] = []
        self.sources: dict[str, dict[str, str]] = {}
        self._numbers: dict[tuple, int] = {}

    def add_stack(self, stage: RankTrace, event: Event) -> int:
        frames = tuple(stage.stack(event))
        if frames not in self._numbers:
            self._numbers[frames] = len(self.stacks)
            self.stacks.append([list(frame) for frame in frames])
            for key, _ in frames:
                self.add_source(stage, key)
        return self._numbers[frames]

    def add_source(self, stage: RankTrace, key: str) -> str:
        if key not in self.sources and key in stage.sources:
            source = stage.sources[key]
            self.sources[key] = {"n": source.name, "t": source.text}
        return key


def _step_data(
    step: Step, pipeline: dict[str, int], names_pipeline: bool, texts: _Texts
) -> dict[str, Any]:
    where = ", ".join(f"{axis} {value}" for axis, value in pipeline.items())
    ranks = range(len(step.stages))
    v = step.config.num_model_chunks
    return {
        "label": f"step {step.number}" + (f" ({where})" if names_pipeline else ""),
        "title": step_title(step.config, step.run),
        "paced": "; ".join(
            filter(None, (pace_words(step.pace), late_words(step), lines_words(step)))
        ),
        "chunks": v,
        "colours": {
            kind: [
                [colour, text_colour(colour)] for colour in (shade(kind, c, v) for c in range(v))
            ]
            for kind in step.all_kinds
        },
        "words": {kind: KINDS[kind].words for kind in step.all_kinds},
        "figures": _figures(step),
        "length": _us(max(step.makespan, float(step.simulation.makespan))),
        "ranks": [
            {
                "rank": step.stages[rank].rank,
                "events": [_event(step, rank, index, texts) for index in step.indices[rank]],
                "gaps": [_gap(step, gap) for gap in step.gaps(rank)],
                "plan": _planned(step, rank),
                "flights": _flights(step, rank),
            }
            for rank in ranks
        ],
        "messages": [_message(step, message) for message in step.transfers],
    }


def _us(value: float) -> float:
    return round(value, 1)


def _figures(step: Step) -> list[dict[str, Any]]:
    """What stands above the timeline: label, value, remark, and whether it is good."""
    problems = [*map(str, compare_with_plan(step) if step.has_plan else ()), *wrong_messages(step)]
    num_actions = sum(len(step.actions(rank)) for rank in range(len(step.stages)))
    ideal = float(step.simulation.makespan)
    measured = percent(step.bubble_over_total)
    bubble = f"plan {percent(float(step.simulation.bubble_over_total))}"
    if len(step.stages) == 1:
        measured, bubble = "no pipeline", f"{measured} of the time lies between its calls"
    elif step.formulas is not None:
        bubble = f"{step.formulas[1].text} = {percent(step.formulas[1].value)}"
    followed = "followed exactly" if step.has_plan else "this run's own order"
    return [
        {
            "label": "step",
            "value": milliseconds(step.makespan),
            "remark": f"{100 * (step.makespan / ideal - 1):+.1f} % over the plan with free messages, "
            f"{milliseconds(ideal)}",
        },
        {
            "label": "bubble, of all time",
            "value": measured,
            "remark": bubble,
        },
        {
            "label": "plan",
            "value": "NOT followed" if problems else followed,
            "remark": problems[0]
            if problems
            else f"{num_actions} actions, {len(step.transfers)} messages",
            "bad": bool(problems),
        },
    ]


def _event(step: Step, rank: int, index: int, texts: _Texts) -> dict[str, Any]:
    event, stage = step.events[rank][index], step.stages[rank]
    action, v = event.action, step.config.num_model_chunks
    data: dict[str, Any] = {
        "i": index,
        "k": action.kind,
        "n": function_name(event),
        "s": _us(event.start - step.start),
        "l": _us(event.end - event.start),
        "st": texts.add_stack(stage, event),
        "so": texts.add_source(stage, f"{event.file}:{event.line}"),
    }
    words = [message_words(message, v) for message in action.messages]
    if action.kind == COMMUNICATE and not words:
        words = ["nothing to move here"]
    words += [moved_words(event), communicator_words(event), shape_words(event)]
    if event.attributes.get("unfinished"):
        words.append("not finished")
    optional = {
        "q": [[part.kind, part.microbatch, part.chunk] for part in action.parts] or None,
        "p": event.parent if event.parent in step.events[rank] else None,
        "a": action_name(action, v) if action.kind in (*KINDS, COMMUNICATE) else None,
        "m": action.microbatch,
        "c": action.chunk,
        "ph": action.phase,
        "w": _us(event.wait) or None,
        "t": _us(event.attributes.get("transfer", 0.0)) or None,
        "x": [word for word in words if word] or None,
    }
    return data | {key: value for key, value in optional.items() if value is not None}


def _gap(step: Step, gap: TracedGap) -> dict[str, Any]:
    return {
        "s": _us(gap.start - step.start),
        "l": _us(gap.length),
        "w": _us(gap.waiting),
        "t": _us(gap.transfer),
        "o": _us(gap.other),
        "b": gap.before,
        "f": list(gap.waits_for) if gap.waits_for is not None else None,
        "x": gap_words(step, gap),
    }


def _flights(step: Step, rank: int) -> list[dict[str, Any]]:
    index_of = {id(event): index for index, event in step.events[rank].items()}
    return [
        {"i": index_of[id(bar.events[0])], **_flight(step, bar)}
        for lane in HIDDEN
        for bar in in_flight(step.events[rank], lane)
    ]


def _flight(step: Step, bar: Bar) -> dict[str, Any]:
    """An all-to-all or a hop, from its start to the end of the wait, and how long that wait was."""
    start, end = exposed_of(bar)
    length = milliseconds(bar.end - bar.start)
    return {
        "n": bar.label,
        "s": _us(bar.start - step.start),
        "l": _us(bar.end - bar.start),
        "w": _us(end - start),
        "x": f"{bar.events[0].name}, {moved_words(bar.events[0])}: in flight {length}, exposed "
        f"{milliseconds(end - start)}",
    }


def _planned(step: Step, rank: int) -> list[dict[str, Any]]:
    simulation, v = step.simulation, step.config.num_model_chunks
    return [
        {
            "k": part.kind,
            "a": action_name(part, v),
            "c": part.chunk,
            "s": _us(float(start)),
            "l": _us(float(end - start)),
            **({"h": [place, len(action.parts)]} if action.parts else {}),
        }
        for action, start, end in zip(
            simulation.plan.ranks[rank], simulation.starts[rank], simulation.ends[rank], strict=True
        )
        if action.kind != COMMUNICATE
        for place, part in enumerate(parts_of(action))
    ]


def _message(step: Step, message: Transfer) -> dict[str, Any]:
    arrival = message.waited[-1] if message.waited else message.received_by
    made_by, used_by = step.maker(message), step.user(message)
    return {
        "a": [*message.sent_by, _us(message.sent_at - step.start)],
        "b": [*arrival, _us(message.arrived_at - step.start)] if arrival is not None else None,
        "d": made_by[1] if made_by is not None else None,
        "u": used_by[1] if used_by is not None else None,
        "x": f"{message.payload} of microbatch {message.sent_unit[0]}",
    }
