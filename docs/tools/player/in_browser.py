"""Plans and checks what a reader has typed, a schedule or an order; the answer is JSON for the page.

Run by: docs/javascripts/python_worker.mjs, in Pyodide, where only the standard library, the planner
and `plan_words` are (see `browser_python`); tests/docs runs it as it is. Calls: `planner.plan`,
`planner.plan_check`.

A text may register what it defines (`register_order`, `register_schedule`): the last one counts, and is
forgotten afterwards. Else the last public function counts: of a `rank`, it is an order, whose
messages the planner adds; of a `chunk` and a `p2p`, a loop as training runs it; of a `stage` or
anything else, a schedule that yields its actions.
"""

import dataclasses
import functools
import inspect
import json
import sys
import traceback
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from minimegatron.core.orders.loop_recorder import is_loop, parameters_of
from minimegatron.core.orders.order_check import Problem, ScheduleError
from minimegatron.core.orders.orders import (
    COMBINED,
    INTERLEAVED,
    TAGGED,
    Schedule,
    get_schedule,
    schedule_names,
    unregister,
)
from minimegatron.core.orders.placement import LOOP, Rule
from minimegatron.core.orders.work import COMMUNICATE, KINDS, Action, Work, parts_of
from minimegatron.planner.plan import Plan, plan
from minimegatron.planner.plan_check import check
from player.plan_words import placement_data, row

FILE = "schedule.py"
MODULE = "schedule"
MAX_ACTIONS = 20_000
"""Of one stage. A loop without end would otherwise fill the page's memory."""

NOT_DRAWN = {"range", "peer"}
"""Problems with which a plan has work or messages that do not exist."""


@dataclass
class Followed:
    """What was seen while the reader's function ran."""

    lines: dict[int, list[int | None]] = field(default_factory=lambda: defaultdict(list))
    """Rank -> the line of the reader's text that each thing it yielded comes from."""
    has_chunks: bool = False
    """Whether anything belonged to another chunk than the first."""


class Refused(ValueError):
    """Words of docs/strings, `bench.error.NAME`, with what they fill in."""

    def __init__(self, name: str, line: int | None = None, **values: Any):
        super().__init__(name)
        self.name, self.line, self.values = name, line, values


def answer(source: str, p: int, M: int, v: int, G: int) -> str:
    """The plan and its problems, or the error and its line.

    >>> json.loads(answer("def idle(stage):\\n    yield stage.forword(0)", 1, 1, 1, 0))
    {'error': "AttributeError: 'Stage' object has no attribute 'forword'", 'line': 2}
    """
    seen = Followed()
    try:
        found = schedule_of(source)
        chunks = chunks_of(found, p, v, G)
        step, problems = planned(found, p, M, chunks, seen)
        if chunks and found.placement is None and not seen.has_chunks:
            # It knows of one chunk, whatever the page shows.
            seen = Followed()
            step, problems = planned(found, p, M, {}, seen)
    except Exception as error:
        return json.dumps(error_data(error, seen))
    data: dict[str, Any] = {"name": found.name, "problems": problem_data(problems, seen)}
    if step is not None and not NOT_DRAWN & {problem.kind for problem in problems}:
        data |= plan_data(step)
    return json.dumps(data)


def chunks_of(found: Schedule, p: int, v: int, G: int) -> dict[str, int]:
    """The chunks to ask for: those that the page shows, where the placement leaves a choice."""
    rule = found.placement
    if isinstance(rule, Rule) and rule.num_model_chunks is not None:
        return {}
    if found.name == COMBINED and p == 1:
        return {}
    asks_for_chunks = "chunks" in parameters_of(found.messages)
    if v == 1 and (rule is LOOP or asks_for_chunks or found.name in (INTERLEAVED, COMBINED)):
        v, G = 2, p
    return {"vpp": v, "group_size": G or p} if v > 1 else {}


def planned(
    found: Schedule, p: int, M: int, chunks: dict[str, int], seen: Followed
) -> tuple[Plan | None, list[Problem]]:
    """The plan and its problems. An order that cannot be done has no messages, so no plan."""
    try:
        step = plan(followed(found, seen), p, M, **chunks)
    except ScheduleError as error:
        return None, error.problems
    return step, check(step)


# -- What the text defines --


def schedule_of(source: str) -> Schedule:
    """What it registers, or else its last public function. The planner's names stay as they were."""
    known = {name: get_schedule(name) for name in schedule_names()}
    namespace: dict[str, Any] = {"__name__": MODULE}
    try:
        exec(compile(source, FILE, "exec"), namespace)
        registered = [get_schedule(name) for name in schedule_names() if name not in known]
    finally:
        for name in schedule_names():
            if name not in known:
                unregister(name)
    if registered:
        return registered[-1]
    functions = [
        x
        for name, x in namespace.items()
        if inspect.isfunction(x) and x.__module__ == MODULE and name[0] != "_"
    ]
    if not functions:
        raise Refused("none")
    function = functions[-1]
    kind = (
        "order" if next(iter(inspect.signature(function).parameters), "") == "rank" else "messages"
    )
    return Schedule(function.__name__, **{kind: function})


# -- Running it, line by line --


def followed(schedule: Schedule, seen: Followed) -> Schedule:
    """The same, refused where it goes on and on; `seen` gets what it yields."""
    kind = "messages" if schedule.messages else "order"
    function = getattr(schedule, kind)
    if is_loop(function):
        return dataclasses.replace(schedule, messages=followed_loop(function, seen))

    @functools.wraps(function)
    def run(where: Any) -> Any:
        yielded = function(where)
        if not isinstance(yielded, Iterable) or isinstance(yielded, str | tuple):
            return yielded
        return first_actions(yielded, where.pp_rank, seen)

    return dataclasses.replace(schedule, **{kind: run})


def followed_loop(loop: Callable, seen: Followed) -> Callable:
    """The same loop; what its actors write down is followed."""

    @functools.wraps(loop)
    def run(*given: Any) -> None:
        actor = given[0][0] if isinstance(given[0], list) else given[0]
        actor.recording.done = Written(actor.recording.rank, seen)
        loop(*given)

    return run


class Written(list):
    """What actors write down, with the reader's line that made them."""

    def __init__(self, rank: int, seen: Followed):
        super().__init__()
        self.rank, self.seen, self.lines = rank, seen, seen.lines[rank]

    def append(self, entry: tuple) -> None:
        frame = sys._getframe(1)
        while frame is not None and frame.f_code.co_filename != FILE:
            frame = frame.f_back
        self.lines.append(None if frame is None else frame.f_lineno)
        if len(self) == MAX_ACTIONS:
            raise Refused("endless", self.lines[-1], rank=self.rank, n=MAX_ACTIONS)
        if entry[0] in KINDS:
            self.seen.has_chunks |= entry[1][1] != 0
        super().append(entry)

    def pop(self) -> tuple:
        self.lines.pop()
        return super().pop()


def first_actions(yielded: Iterable, rank: int, seen: Followed) -> Iterator:
    lines = seen.lines[rank]
    for count, action in enumerate(yielded):
        lines.append(line_of(yielded))
        if count == MAX_ACTIONS:
            raise Refused("endless", lines[-1], rank=rank, n=MAX_ACTIONS)
        yield action
        if not isinstance(action, Work | Action):
            return  # whoever takes it says so in words; it is the last thing that was seen
        chunks = [part.chunk for part in action.parts or (action,)]
        seen.has_chunks |= any(chunk not in (0, None) for chunk in chunks)


def line_of(yielded: Any) -> int | None:
    """Where a generator stands: the innermost line of the reader's text."""
    line = None
    while inspect.isgenerator(yielded):
        frame = yielded.gi_frame
        if frame is not None and frame.f_code.co_filename == FILE:
            line = frame.f_lineno
        yielded = yielded.gi_yieldfrom
    return line


# -- The answer --


def problem_data(problems: list[Problem], seen: Followed) -> list[dict[str, Any]]:
    found = []
    for problem in problems:
        data: dict[str, Any] = {"kind": problem.kind, "text": words_of(problem)}
        of_rank = seen.lines[problem.rank]
        if problem.index is not None and problem.index < len(of_rank):
            data["line"] = of_rank[problem.index]
        found.append(data)
    return found


def words_of(problem: Problem) -> str:
    """The problem, with its place where the text does not give it."""
    if problem.kind == "deadlock":
        return problem.text
    return f"rank {problem.rank}, microbatch {problem.microbatch}: {problem.text}"


def error_data(error: Exception, seen: Followed) -> dict[str, Any]:
    """In words, with the line of the reader's text that it comes from."""
    if isinstance(error, Refused):
        data: dict[str, Any] = {"say": error.name, "values": error.values, "line": error.line}
    elif isinstance(error, SyntaxError):
        data = {"error": f"{type(error).__name__}: {error.msg}", "line": error.lineno}
    else:
        own = [f.lineno for f in traceback.extract_tb(error.__traceback__) if f.filename == FILE]
        is_ours = isinstance(error, ValueError) and not own
        data = {"error": str(error) if is_ours else f"{type(error).__name__}: {error}"}
        data["line"] = own[-1] if own else last_line(seen, str(error))
    return {name: value for name, value in data.items() if value is not None}


def last_line(seen: Followed, words: str) -> int | None:
    """Where the planner refused what was yielded last."""
    found = [lines[-1] for lines in seen.lines.values() if lines]
    return found[-1] if found and " yielded " in words else None


def plan_data(step: Plan) -> dict[str, Any]:
    """The plan as docs/javascripts/engine.js reads it; see `plan_words`."""
    config, computed = step.config, set()
    for actions in step.ranks:
        for action in actions:
            if action.kind != COMMUNICATE:
                computed |= {part.kind for part in parts_of(action)}
    letters = "".join(kind.letter for kind in KINDS.values() if kind.name in computed)
    return {
        "rows": [row(actions) for actions in step.ranks],
        "placement": placement_data(config.placement, letters),
        "b": int(config.batch_p2p_comm),
        "w": int(config.wire == TAGGED),
        "n": int(step.pairs_go_by_layers),
        "v": config.num_model_chunks,
    }
