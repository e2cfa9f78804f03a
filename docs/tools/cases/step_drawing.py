"""The one drawing of 1F1B: the same small step on each page of the hour, with this page's part marked.

Called by: the pages, as `step_drawing(...)` in a figure. Calls: the planner's simulation, `pictures`.

    step_drawing("phases")                     the three phases of each stage, named
    step_drawing("work", ("forward", 2, 3))    one action: kind, stage, microbatch
    step_drawing("messages", 1, 2)             what stages 1 and 2 say to each other in the steady state
    step_drawing("end")                        what each rank does after its last backward

All that is not marked is faint.
"""

from collections.abc import Iterator

from cases import cases
from minimegatron.planner.actions import COMMUNICATE, COOLDOWN, STEADY, WARMUP, Action
from minimegatron.planner.svg_shapes import label, rect, shade, text_colour
from pictures.pictures import svg
from source.page_words import say

LEFT, TOP, BAR, UNIT = 62, 14, 28, 19
ROW = {"phases": 50, "work": 42, "messages": 64, "end": 38}
"""From one stage to the next."""
FINALIZE, UPDATE = 146, 96
AFTER = FINALIZE + UPDATE + 8
"""Room for what comes after the schedule."""
PHASES = {WARMUP: "phase.warmup", STEADY: "phase.steady", COOLDOWN: "phase.cooldown"}
WORKS = {"forward": "kind.forward", "backward": "kind.backward"}
ENDS = ("finalize_model_grads", "optimizer.step")

Place = tuple[int, Action, int, int]
"""Stage, action, start, end."""


def step_drawing(about: str, *which: object) -> str:
    """1F1B with four stages and eight microbatches; see the head of this file."""
    return _Drawing(about).draw(*which)


def _bars(step: cases.Simulation) -> Iterator[Place]:
    for stage, actions in enumerate(step.plan.ranks):
        for index, action in enumerate(actions):
            if action.kind != COMMUNICATE:
                yield stage, action, int(step.starts[stage][index]), int(step.ends[stage][index])


def _find(bars: list[Place], kind: str, stage: int, microbatch: int) -> Place:
    wanted = (kind, stage, microbatch)
    return next(b for b in bars if (b[1].kind, b[0], b[1].microbatch) == wanted)


# -- What is marked, and the picture's title --


def _all(bars: list[Place]) -> tuple[list[Place], str]:
    return bars, say("page.step.phases")


def _one(bars: list[Place], work: tuple[str, int, int]) -> tuple[list[Place], str]:
    kind, stage, microbatch = work
    words = say("page.step.work", kind=say(WORKS[kind]), mb=microbatch, rank=stage)
    return [_find(bars, *work)], words


def _pair(bars: list[Place], first: int, second: int) -> tuple[list[Place], str]:
    """A forward on the first stage, and the backward that sends a gradient back to it."""
    stages = (first, second)
    steady = [b for b in bars if b[0] in stages and b[1].phase == STEADY]
    return steady, say("page.step.messages", first=first, second=second)


def _last(bars: list[Place]) -> tuple[list[Place], str]:
    last = [max((b for b in bars if b[0] == stage), key=lambda b: b[3]) for stage in range(4)]
    return last, say("page.step.end", names=say("name.and").join(ENDS))


_MARKS = {"phases": _all, "work": _one, "messages": _pair, "end": _last}


# -- Shapes --


class _Drawing:
    def __init__(self, about: str):
        self.about, self.row = about, ROW[about]
        self.bars = list(_bars(cases.step("1f1b", 4, 8)))
        self.right = self.x(max(end for *_, end in self.bars))

    def draw(self, *which: object) -> str:
        marked, words = _MARKS[self.about](self.bars, *which)
        parts = [_arrow_head()]
        for stage in range(4):
            y = self.top(stage)
            parts.append(label(8, y + 19, say("timeline.stage", rank=stage), "bold"))
            parts.append(rect(LEFT, y, self.right - LEFT, BAR, 'class="track"'))
        parts += [self.bar(place, place in marked) for place in self.bars]
        beside = {
            "phases": self.phases,
            "work": self.ways,
            "messages": self.messages,
            "end": self.ends,
        }
        parts += beside[self.about](marked)
        width = self.right + 10 + AFTER * (self.about == "end")
        bottom = self.top(3) + BAR + (22 if self.about == "phases" else 10)
        title = say("page.step.title", p=4, M=8, words=words)
        picture = svg(width, bottom, title, parts)
        return f'<div class="mm-timeline mm-step-drawing">{picture}</div>'

    def top(self, stage: int) -> int:
        return TOP + stage * self.row

    def x(self, time: int) -> int:
        return LEFT + time * UNIT

    def bar(self, place: Place, is_marked: bool) -> str:
        stage, action, start, end = place
        fill = shade(action.kind, 0, 1)
        x, y, width = self.x(start), self.top(stage), (end - start) * UNIT
        number = (
            f'<text class="num" x="{x + width / 2:g}" y="{y + 18}" '
            f'style="fill:{text_colour(fill)}">{action.microbatch}</text>'
        )
        css = "" if is_marked else ' class="mm-faint"'
        kind = say(WORKS[action.kind])
        words = say("page.step.bar", rank=stage, kind=kind, mb=action.microbatch)
        tip = f"<title>{words}</title>"
        body = rect(x + 0.5, y, width - 1, BAR, f'rx="2" fill="{fill}"')
        return f"<g{css}>{tip}{body}{number}</g>"

    def phases(self, marked: list[Place]) -> Iterator[str]:
        for stage in range(4):
            y = self.top(stage) + BAR + 3
            for phase, name in PHASES.items():
                own = [b for b in marked if b[0] == stage and b[1].phase == phase]
                if not own:
                    continue
                start, end = self.x(own[0][2]) + 1, self.x(own[-1][3]) - 1
                yield f'<path class="mm-brace" d="M{start},{y} v3 H{end} v-3"/>'
                words = say(name)
                shown = words if end - start > 6.5 * _num_letters(words) - 8 else ""
                yield label((start + end) / 2, y + 14, shown, "quiet small middle")

    def ways(self, marked: list[Place]) -> Iterator[str]:
        """Where the work's input comes from, and where its output goes."""
        (place,) = marked
        stage, action, *_ = place
        ahead = 1 if action.kind == "forward" else -1
        for sender, receiver in ((stage - ahead, stage), (stage, stage + ahead)):
            ends = [_find(self.bars, action.kind, s, action.microbatch) for s in (sender, receiver)]
            yield self.arrow(*ends)

    def messages(self, marked: list[Place]) -> Iterator[str]:
        for sender in marked:
            kind, microbatch = sender[1].kind, sender[1].microbatch
            ahead = 1 if kind == "forward" else -1
            for receiver in marked:
                wanted = (sender[0] + ahead, kind, microbatch)
                if (receiver[0], receiver[1].kind, receiver[1].microbatch) == wanted:
                    yield self.arrow(sender, receiver)

    def arrow(self, sender: Place, receiver: Place) -> str:
        is_down = receiver[0] > sender[0]
        y1 = self.top(sender[0]) + (BAR if is_down else 0)
        y2 = self.top(receiver[0]) + (0 if is_down else BAR)
        return (
            f'<line class="mm-way" x1="{self.x(sender[3]) - 5}" y1="{y1}" '
            f'x2="{self.x(receiver[2]) + 5}" y2="{y2}" marker-end="url(#mm-tip)"/>'
        )

    def ends(self, marked: list[Place]) -> Iterator[str]:
        """The first and the last stage add up the tied embedding's gradient, and leave together.

        Those between them have nothing to wait for before `optimizer.step`.
        """
        first_name, next_name = ENDS
        update = self.right + 4 + FINALIZE
        own = update - 4 - (self.x(marked[0][3]) + 2)
        for stage, _, _, end in marked:
            left = self.x(end) + 2
            right = left + own if 0 < stage < 3 else update - 4
            waits = say("page.step.waits") if self.x(end) < self.right else ""
            words = f"{first_name}: {waits}" if stage == 3 else first_name
            yield from self.box(stage, left, right, words)
            yield from self.box(stage, update, update + UPDATE, next_name)
            if right < update - 4:
                y = self.top(stage) + BAR / 2
                yield label((right + update) / 2, y + 4, waits, "quiet small middle")

    def box(self, stage: int, left: int, right: int, words: str) -> Iterator[str]:
        y = self.top(stage)
        yield rect(left, y, right - left, BAR, 'rx="3" class="mm-module"')
        yield label((left + right) / 2, y + 18, words, "small middle")


def _num_letters(words: str) -> int:
    """A Chinese sign is as wide as two letters."""
    return sum(1 + (sign > "\u2e7f") for sign in words)


def _arrow_head() -> str:
    return (
        '<defs><marker id="mm-tip" viewBox="0 0 6 6" refX="5" refY="3" markerWidth="6" '
        'markerHeight="6" orient="auto"><path class="mm-tip" d="M0,0 L6,3 L0,6 z"/></marker></defs>'
    )
