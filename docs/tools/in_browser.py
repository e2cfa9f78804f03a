"""Plans and checks a schedule that a reader has typed; the answer is JSON for the page.

Run by: docs/javascripts/python_worker.mjs, in Pyodide, where only the standard library and the planner
are (see `browser_python`); tests/docs runs it as it is. Calls: `planner.plan`, `planner.plan_check`.
"""

import functools
import json
import traceback
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from minimegatron.planner.actions import ACTIVATION, COMMUNICATE, SEND, Action
from minimegatron.planner.plan import plan
from minimegatron.planner.plan_check import Problem, check

FILE = "schedule.py"
MAX_ACTIONS = 20_000
"""Of one stage. A loop without end would otherwise fill the page's memory."""

NOT_DRAWN = {"range", "peer"}
"""Problems with which a plan has work or messages that do not exist."""


def answer(source: str, p: int, M: int, v: int, G: int) -> str:
    """The plan and its problems, or the error and its line.

    >>> json.loads(answer("def idle(stage):\\n    yield stage.forword(0)", 1, 1, 1, 0))
    {'error': "AttributeError: 'Stage' object has no attribute 'forword'", 'line': 2}
    """
    try:
        function = schedule_of(source)
        chunks = {"vpp": v, "group_size": G} if v > 1 else {}
        step = plan(bounded(function), p, M, **chunks)
        problems = check(step)
    except Exception as error:
        return json.dumps(error_of(error))
    data: dict[str, Any] = {
        "name": function.__name__,
        "problems": [{"kind": x.kind, "text": words_of(x)} for x in problems],
        "batched": step.config.batch_p2p_comm,
    }
    if not NOT_DRAWN & {problem.kind for problem in problems}:
        data["ranks"] = [
            [action_data(action, index) for index, action in enumerate(actions)]
            for actions in step.ranks
        ]
    return json.dumps(data)


def words_of(problem: Problem) -> str:
    """The problem, with its place where the text does not give it."""
    if problem.kind == "deadlock":
        return problem.text
    return f"rank {problem.rank}, microbatch {problem.microbatch}: {problem.text}"


def schedule_of(source: str) -> Callable:
    """The last public function that the text defines."""
    namespace: dict[str, Any] = {"__name__": "schedule"}
    exec(compile(source, FILE, "exec"), namespace)
    functions = [
        x
        for name, x in namespace.items()
        if callable(x) and getattr(x, "__module__", "") == "schedule" and name[0] != "_"
    ]
    if not functions:
        raise ValueError("there is no function; write def my_schedule(stage): ...")
    return functions[-1]


def bounded(function: Callable) -> Callable:
    """The schedule, refused where it goes on and on."""

    @functools.wraps(function)
    def schedule(stage: Any) -> Any:
        yielded = function(stage)
        return first_actions(yielded, stage) if isinstance(yielded, Iterable) else yielded

    return schedule


def first_actions(yielded: Iterable, stage: Any) -> Iterator:
    for count, action in enumerate(yielded):
        if count == MAX_ACTIONS:
            raise ValueError(
                f"stage {stage.pp_rank} has yielded {MAX_ACTIONS} actions and goes on; end its loop"
            )
        yield action


def error_of(error: Exception) -> dict[str, Any]:
    """In words, with the line of the reader's text that it comes from."""
    if isinstance(error, SyntaxError):
        return {"error": f"{type(error).__name__}: {error.msg}", "line": error.lineno}
    lines = [f.lineno for f in traceback.extract_tb(error.__traceback__) if f.filename == FILE]
    is_ours = isinstance(error, ValueError) and not lines
    words = str(error) if is_ours else f"{type(error).__name__}: {error}"
    return {"error": words} | ({"line": lines[-1]} if lines else {})


def action_data(action: Action, index: int) -> dict[str, Any]:
    """An action as docs/javascripts/engine.js reads it."""
    data = {"rank": action.rank, "phase": action.phase, "index": index}
    if action.kind != COMMUNICATE:
        letter = action.kind[0].upper()
        return data | {"kind": letter, "mb": action.microbatch, "chunk": action.chunk}
    messages = [
        {
            "send": message.direction == SEND,
            "activation": message.payload == ACTIVATION,
            "peer": message.peer,
            "mb": message.microbatch,
            "chunk": message.chunk,
        }
        for message in action.messages
    ]
    return data | {
        "kind": "C",
        "call": action.call,
        "messages": messages,
        "overlap": action.overlap,
    }
