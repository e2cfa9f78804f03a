"""The planner's picture of a step in the language of the page: the package draws it in English.

Called by: `cases.timeline`. Calls: `page_words`. On an English page the picture stays as it is. What is
in no row of the tables, such as the name of a schedule, stays too.
"""

import re

from source.page_words import DEFAULT, say, spoken

TEXT = re.compile(r"(?<=>)[^<>]*\w[^<>]*(?=<)")
KINDS = {"forward": "kind.forward", "backward": "kind.backward"}
PHASES = {"warm-up": "phase.warmup", "steady": "phase.steady", "cool-down": "phase.cooldown"}
NAMES = {
    "idle": "legend.idle",
    "in flight": "page.plan.in-flight",
    "time": "page.plan.time",
    "makespan": "page.makespan",
    "idle / computing": "page.plan.idle-of-computing",
    "idle / total": "page.idle-of-total",
    "in flight, peak": "page.plan.peak",
    "messages": "replay.messages",
    **KINDS,
    **PHASES,
}
"""Words of the picture -> their name."""
SENTENCES = {
    r"stage (?P<rank>\d+)": "timeline.stage",
    r"(?P<schedule>\w+), (?P<p>\d+) stages, (?P<M>\d+) microbatches": "page.plan.title",
    r"(?P<p>\d+) stages, (?P<M>\d+) microbatches · forward (?P<f>\S+), backward (?P<b>\S+)": (
        "page.plan.sizes"
    ),
    r"(?P<share>\S+) idle": "page.plan.idle",
    r"(?P<activations>\d+) activations, (?P<gradients>\d+) gradients": "page.plan.messages",
    r"(?P<formula>= .+) each way": "page.plan.each-way",
    r"stage (?P<rank>\d+): (?P<kind>\w+) of microbatch (?P<mb>\d+) "
    r"\((?P<phase>[\w-]+)\), (?P<start>\S+) to (?P<end>\S+)": "page.plan.bar",
    r"stage (?P<rank>\d+) idle: (?P<time>\S+) for (?P<what>\w+) on stage (?P<other>\d+)": (
        "page.plan.gap"
    ),
    r"stage (?P<rank>\d+) idle: (?P<time>\S+) at the end": "page.plan.gap.end",
}
"""Of sentences, the pattern -> their name; a part is what the string fills in."""


def in_own_words(svg: str) -> str:
    """The picture with its words in the language that is spoken."""
    return svg if spoken() == DEFAULT else TEXT.sub(lambda text: _own(text[0]), svg)


def _own(text: str) -> str:
    if text in NAMES:
        return say(NAMES[text])
    for pattern, name in SENTENCES.items():
        if found := re.fullmatch(pattern, text):
            parts = found.groupdict()
            return say(name, **{key: _part(part) for key, part in parts.items()})
    return text


def _part(part: str) -> str:
    names = KINDS | PHASES
    return say(names[part]) if part in names else part
