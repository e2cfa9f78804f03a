"""Timelines and orders that stand in a page as text: each is what the planner finds.

Pages of the site take theirs from macros. The pages of exercises are read in a terminal too, so theirs
are text, and this is what holds them.
"""

import re
from fractions import Fraction
from pathlib import Path

import pytest

from minimegatron.planner.actions import ACTIVATION, COMMUNICATE, FORWARD, SEND, Action
from minimegatron.planner.plan import plan
from minimegatron.planner.simulator import Costs, simulate

ROOT = Path(__file__).parents[2]
FENCE = re.compile(r"^```[^\n]*\n(.*?)^```", re.MULTILINE | re.DOTALL)
ROW = re.compile(r"^(?:rank|stage) (\d+) +((?:(?:[FB]\d+|\.) *)+)$", re.MULTILINE)
ORDER = re.compile(r"(?:\b[FB]\d+\b[\s,|]*){4,}")

TIMELINES = {"ex05_predict_1f1b/page.md": (2, 3, 1), "ex18_memory_cap/page.md": (2, 3, 2)}
"""p, M and the length of a backward, in forwards."""
ORDERS = {
    "ex05_predict_1f1b/hints.md": [(3, 4, 0)],
    "ex05_predict_1f1b/stub.py": [(3, 4, 2)],
    "ex10_wrong_gradient_sync/hints.md": [(2, 3, 0), (2, 3, 1)],
    "ex10_wrong_gradient_sync/page.md": [(2, 3, 0), (2, 3, 1)],
}
"""p, M and the stage of every order in a sentence or a table."""


def texts() -> dict[str, str]:
    """Everything to be read: pages, hints and stubs of exercises, the site's pages, notebooks."""
    catalog = ROOT / "minimegatron" / "exercises" / "catalog"
    found = [path for name in ("page.md", "hints.md", "stub.py") for path in catalog.rglob(name)]
    found += [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
    words = {str(path.relative_to(ROOT)): path.read_text() for path in found}
    for path in (ROOT / "notebooks").glob("*.py"):
        prose = [line for line in path.read_text().splitlines() if line.startswith("# ")]
        words[str(path.relative_to(ROOT))] = "\n".join(line.removeprefix("# ") for line in prose)
    return {name.removeprefix("minimegatron/exercises/catalog/"): words[name] for name in words}


TEXTS = texts()


def cells(pp: int, m: int, backward: int) -> list[list[str]]:
    """What each stage does in every unit of time; "." where it is idle."""
    planned = plan("1f1b", pp, m)
    costs = Costs.of_stages(Fraction(1), Fraction(backward), 1, None, Fraction(0), None)
    simulation = simulate(planned, costs)
    rows = []
    for of_rank in zip(planned.ranks, simulation.starts, simulation.ends, strict=True):
        row = ["."] * int(simulation.makespan)
        for action, start, end in zip(*of_rank, strict=True):
            if action.kind != COMMUNICATE:
                word = f"{'F' if action.kind == FORWARD else 'B'}{action.microbatch}"
                row[int(start) : int(end)] = [word] * int(end - start)
        rows.append(row)
    return rows


def test_a_timeline_is_the_planners():
    found = {
        name: [(int(rank), row.split()) for rank, row in ROW.findall(block)]
        for name, text in TEXTS.items()
        for block in FENCE.findall(text)
        if ROW.search(block)
    }
    assert set(found) == set(TIMELINES)
    for name, rows in found.items():
        assert rows == list(enumerate(cells(*TIMELINES[name]))), name


def orders(text: str) -> list[list[str]]:
    """Orders in sentences and in tables, without the timelines."""
    text = FENCE.sub(lambda block: "" if ROW.search(block[0]) else block[0], text)
    # In a table of phases, the last column says again which backward is the last.
    text = re.sub(r"\| *[FB]\d+, in the [^|\n]*\|", "|", text)
    return [re.findall(r"[FB]\d+", found) for found in ORDER.findall(text)]


def test_an_order_in_a_sentence_is_the_planners():
    found = {name: orders(text) for name, text in TEXTS.items()}
    assert {name for name, of_page in found.items() if of_page} == set(ORDERS)
    for name, expected in ORDERS.items():
        planned = []
        for pp, m, rank in expected:
            actions = plan("1f1b", pp, m).work(rank)
            planned.append([f"{action.kind[0].upper()}{action.microbatch}" for action in actions])
        assert found[name] == planned, name


def line_of(action: Action) -> str:
    """One line of the table of calls in exercise 6, blanks left out."""
    if action.kind != COMMUNICATE:
        step = f"forward_step({action.microbatch})"
        return step if action.kind == FORWARD else "backward_step"
    words = []
    for message in action.messages:
        forwards = message.payload == ACTIVATION
        what = ("output" if message.direction == SEND else "input") if forwards else "gradient"
        words.append(f"{'F' if forwards else 'B'}{message.microbatch}'s {what}")
    return action.call + (", ".join(words) or "nothing")


@pytest.mark.parametrize("stage", [0, 1])
def test_exercise_6_lists_the_calls_that_the_planner_lists(stage):
    (block,) = [b for b in FENCE.findall(TEXTS["ex06_one_f_one_b/page.md"]) if "stage 1" in b]
    head, *lines = block.splitlines()
    middle = head.index("stage 1")
    calls: list[str] = []
    for line in lines:
        cell = line[:middle] if stage == 0 else line[middle:]
        if cell.startswith("  ") and cell.strip():  # what stands below a call belongs to it
            calls[-1] += cell.strip()
        elif cell.strip():
            calls.append(re.sub(r" {2,}", "", cell).strip())
    assert calls.pop() == "..."
    actions = [line_of(action) for action in plan("1f1b", 2, 3).ranks[stage]]
    assert len(calls) > 7 and calls == actions[: len(calls)]
