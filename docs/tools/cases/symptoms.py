"""What the symptom pages and three tour pages show: recorded runs, and cases that are computed.

Called by: `cases`, where pages find it as `symptoms`. Calls: `one_gradient`, `why_times_two`; reads
restart.json and verdicts.json, which `records.restart` and `records.verdicts` write.
"""

import ast
import re
import textwrap
from fractions import Fraction
from functools import cache
from itertools import pairwise
from typing import Any

from cases.case_words import table
from cases.one_gradient import (  # noqa: F401  for pages
    COUNTS,
    LOSS_SCALE,
    SUMS,
    context_table,
    flow_figure,
    follow,
    number,
    outcome_table,
)
from cases.why_times_two import (  # noqa: F401  for pages
    exchange_figure,
    exchange_of,
    exchanges_table,
    held,
    is_stuck,
    num_warmups,
    stuck_in,
    verdicts_table,
    waits,
    who_waits,
)
from minimegatron.core.straggler_words import straggler_words
from minimegatron.doctor.advice import ADVICE
from minimegatron.exercises.exercise import find
from minimegatron.exercises.labs.faults import FAULTS
from minimegatron.exercises.labs.labs import LABS, find_lab, layout_words
from minimegatron.planner.plan import plan
from minimegatron.planner.simulator import Costs, simulate
from minimegatron.training import failures
from source.places import RECORDS, recorded

MEGATRON_TAG = "core_v0.16.1"
EXERCISES = "../exercises"
"""Seen from the pages of docs/symptoms and docs/tour."""


# -- A rank that died --


@cache
def restart() -> dict[str, Any]:
    """The recording."""
    return recorded("restart")


def step(which: str) -> int:
    """The step that was "saved", in which the rank "dies", or that was the "last"."""
    return restart()["steps"][which]


def restart_command(run: str) -> str:
    """What was typed, in lines that fit."""
    words = restart()["runs"][run]["command"]
    lines = textwrap.wrap(words, 84, break_on_hyphens=False, break_long_words=False)
    return _console(["$ " + " \\\n    ".join(lines)])


def restart_log(run: str, start: str, end: str) -> str:
    """What was printed, from the line with `start` to the next with `end`; some steps left out."""
    lines = restart()["runs"][run]["lines"]
    first = next(i for i, line in enumerate(lines) if start in line)
    last = next(i for i in range(first, len(lines)) if end in lines[i])
    shown = lines[first : last + 1]
    steps = [line for line in shown if line.startswith(" iteration ")]
    shown = [" ..." if line in steps[1:-1] else line for line in shown]
    shown = [line for line, before in zip(shown, ["", *shown], strict=False) if line != before]
    return _console([part for line in shown for part in _wrapped(line)])


def _wrapped(line: str) -> list[str]:
    return textwrap.wrap(line, 80, subsequent_indent="  ", break_on_hyphens=False) or [""]


def _console(lines: list[str]) -> str:
    return "\n".join(["```console", *lines, "```"])


def losses(run: str) -> list[dict[int, str]]:
    """Iteration -> loss as it was logged; one such dict per life of the run."""
    found: list[dict[int, str]] = [{}]
    for line in restart()["runs"][run]["lines"]:
        if line.startswith(" loaded checkpoint"):
            found.append({})
        match = re.match(r" iteration +(\d+)/\d+ \|(?: lm loss ([\d.]+))?", line)
        if match:
            found[-1][int(match[1])] = match[2] or "skipped"
    return found


def skipped(run: str) -> list[int]:
    """The steps since the checkpoint that the run skipped, in its last life."""
    return [n for n, loss in losses(run)[-1].items() if loss == "skipped" and n > step("saved")]


def more_updates(run: str) -> int:
    """How many updates more the run made than the one in which nobody died."""
    return len(skipped("whole")) - len(skipped(run))


def doubled(run: str) -> list[int]:
    """The steps after which the log has twice the loss scale of the step before."""
    lines = restart()["runs"][run]["lines"]
    found = [re.match(r" iteration +(\d+)/.* loss scale (\d+)", line) for line in lines]
    scales = [(int(match[1]), int(match[2])) for match in found if match]
    return [n for (_, before), (n, scale) in pairwise(scales) if scale == 2 * before]


def losses_table() -> str:
    """Steps 50 to 60 of the run that nobody disturbed, of the one that died, and of its heirs."""
    (whole,), (died, again), (_, other) = losses("whole"), losses("died"), losses("other")
    rows = [
        [n, whole[n], died.get(n, ""), again.get(n, ""), other.get(n, "")]
        for n in range(step("saved"), step("last") + 1)
    ]
    head = ["step", "nobody dies", "first life", "second life, same layout", "other layout"]
    return table(head, rows)


def difference(run: str, what: str = "weights") -> str:
    """The largest difference after the last step from the run in which nobody died."""
    value = restart()["differences"][run][what]
    return f"{value:.2g}" if value else "0"


def saved(path: str) -> str:
    """One number of the checkpoint: "optimizer.grad_scaler.scale"."""
    value: Any = restart()["saved"]
    for part in path.split("."):
        value = value[part]
    return f"{value:,.10g}"


def look_seconds() -> str:
    """How often a rank looks whether its peers live."""
    return f"{failures.LOOK_SECONDS:g}"


def patience_seconds() -> str:
    """How long it then waits for a message that says why."""
    return f"{failures.PATIENCE_SECONDS:g}"


def best_interval(save_seconds: float, seconds_between_deaths: float, unit: float = 1) -> str:
    """Between two checkpoints, where a step takes a second: least time for saving and repeating."""
    return f"{(2 * save_seconds * seconds_between_deaths) ** 0.5 / unit:,.0f}"


SAMPLES_PER_STEP = 16
"""Of the recorded run."""


def lost_steps() -> int:
    """Steps that were complete, and are done once more."""
    return step("dies") - 1 - step("saved")


def samples_of(first: int, last: int) -> str:
    """The training samples of some steps, counted from 0."""
    return f"{(first - 1) * SAMPLES_PER_STEP} to {last * SAMPLES_PER_STEP - 1}"


# -- Verdicts of the hang doctor --


@cache
def verdicts() -> dict[str, Any]:
    """The recording: name -> kind, command, lines."""
    return recorded("verdicts")["verdicts"]


def verdict(name: str) -> str:
    """The command, and what was printed; empty lines are left out where they only make it longer."""
    one = verdicts()[name]
    words = textwrap.wrap(one["command"], 84, break_on_hyphens=False, break_long_words=False)
    return _console(["$ " + " \\\n    ".join(words), "...", *one["lines"]])


def hanging_code(name: str) -> str:
    """The job itself, without its docstring."""
    text = (RECORDS / "hanging_ranks.py").read_text()
    (node,) = [one for one in ast.parse(text).body if getattr(one, "name", None) == name]
    lines = text.splitlines()[node.body[0].end_lineno : node.end_lineno]
    return "\n".join(["```python", *textwrap.dedent("\n".join(lines)).splitlines(), "```"])


def of_each_kind() -> dict[str, list[str]]:
    """Kind -> names of what was recorded of it, in the doctor's own order."""
    found: dict[str, list[str]] = {kind: [] for kind in ADVICE}
    for name, one in verdicts().items():
        found[one["kind"]].append(name)
    return {kind: names for kind, names in found.items() if names}


def anchor(name: str) -> str:
    """Of a verdict, on the page."""
    return name.replace("_", "-")


def kinds_table() -> str:
    """Every kind of verdict that has been recorded, and what was said of the first hang of its kind."""
    rows = [
        [f"[{kind}](#{anchor(names[0])})", _cause(names[0])]
        for kind, names in of_each_kind().items()
    ]
    return table(["verdict", "its *Why* begins"], rows)


def _cause(name: str) -> str:
    """The first sentence of a verdict's "Why"."""
    text = " ".join(" ".join(verdicts()[name]["lines"]).split())
    why = text.partition("Why: ")[2].partition(" What to do: ")[0].partition(" The circle:")[0]
    return re.split(r"(?<=[.;]) (?=[A-Z])| (?=Ranks \d[ ,\w]* wait for what)", why)[0]


def all_verdicts() -> str:
    """A section for each: the job, folded, and what the doctor printed, folded."""
    parts = []
    for kind, names in of_each_kind().items():
        for name in names:
            is_lab = verdicts()[name]["command"].startswith("minimegatron exercises lab")
            what = "a training run" if name == STOPPED else name.replace("_", " ")
            title = f"{kind.capitalize()}: {what}"
            parts.append(f"### {title} {{ #{anchor(name)} }}")
            if is_lab:
                parts.append(f"The {lab(name)}.")
            elif name != STOPPED:
                code = textwrap.indent(hanging_code(name), "    ")
                parts.append(f'??? note "The job"\n\n{code}')
            printed = textwrap.indent(verdict(name), "    ")
            parts.append(f'??? example "What was printed"\n\n{printed}')
    return "\n\n".join(parts)


STOPPED = "stopped"
"""A training run; one of its ranks was stopped by a signal."""


# -- A stage that is slow --

SLOW_TIMES = {"forward": 10, "backward": 20}
SLOWER = Fraction(3, 2)
"""Milliseconds of a microbatch on a stage, and how many times as long it takes on the slow one."""


def slow_step(slow: int | None, pp: int = 4, num_microbatches: int = 8) -> tuple[list[int], int]:
    """Of 1F1B with a slow stage: milliseconds of each stage's forwards in a step, and of the step."""
    factors = [SLOWER if stage == slow else 1 for stage in range(pp)]
    costs = Costs.of_stages(**SLOW_TIMES, imbalance=factors)
    step_time = simulate(plan("1f1b", pp, num_microbatches), costs).makespan
    forwards = [int(factor * SLOW_TIMES["forward"] * num_microbatches) for factor in factors]
    return forwards, int(step_time)


def slow_stage_table() -> str:
    """What the detector shows of each stage, and the time of the step, wherever the slow one is."""
    even = slow_step(None)[1]
    rows = []
    for slow in (None, 0, 1, 2, 3):
        forwards, whole = slow_step(slow)
        shown = [f"**{ms}**" if stage == slow else ms for stage, ms in enumerate(forwards)]
        rows.append(["none" if slow is None else slow, *shown, whole, f"{whole / even:.2f}"])
    head = ["slow stage", *(f"stage {stage}" for stage in range(4)), "the step", "times as long"]
    return table(head, rows)


def slow_cost(slow: int) -> str:
    """How much longer a step takes because of that stage."""
    return f"{slow_step(slow)[1] / slow_step(None)[1] - 1:.0%}".replace("%", " %")


def slow_report() -> str:
    """What the detector prints where one of two ranks of stage 2 is slow."""
    of_stages = slow_step(None)[0]
    rows = [[float(ms), 0.1, stage, copy] for stage, ms in enumerate(of_stages) for copy in (0, 1)]
    rows[5][0] *= float(SLOWER)
    return _console(straggler_words(rows, ["stage", "dp"], 1).splitlines())


# -- Links to what one can do --


def lab(name: str) -> str:
    """A link to a lab, with its layout. Raises ValueError if there is none of that name."""
    return f"{lab_name(name)} ({layout_words(find_lab(name))})"


def lab_name(name: str) -> str:
    """The link without the layout."""
    return f"lab [`{find_lab(name).name}`]({EXERCISES}/index.md#break-it-on-purpose)"


def mistake(name: str) -> str:
    """The same for a known mistake that may have no lab. Raises ValueError for an unknown one."""
    _check_mistake(name)
    return lab(name) if _has_lab(name) else f"the mutation `{name}`"


def mistake_name(name: str) -> str:
    """The same without the layout, for the inside of a sentence."""
    _check_mistake(name)
    return lab_name(name) if _has_lab(name) else f"the mutation `{name}`"


def _has_lab(name: str) -> bool:
    return name in {one.name for one in LABS}


def _check_mistake(name: str) -> None:
    if name not in {fault.name for fault in FAULTS}:
        raise ValueError(f"no known mistake is called {name}")


def exercise(which: str) -> str:
    """A link to an exercise by its number."""
    found = find(which)
    return f"exercise [{found.number}, {found.title}]({EXERCISES}/{found.name}.md)"
