"""How many messages lie unreceived at a time, if nothing but the plan holds a rank back.

Megatron has no counterpart.
"""

from collections import defaultdict
from typing import Any

from minimegatron.core.orders.lowering import LoweredStep
from minimegatron.core.orders.orders import Schedule
from minimegatron.planner.actions import COMMUNICATE, KINDS, Time, parts_of
from minimegatron.planner.imagined_transport import BUFFERED, execute, match_messages
from minimegatron.planner.plan import Plan, plan
from minimegatron.planner.plan_check import require_valid
from minimegatron.planner.simulator import Costs


def make_step(schedule: Schedule, *args: Any, **sizes: Any) -> LoweredStep:
    """A step of a schedule that names its messages, ready to run; arguments as for `plan.plan`.

    Raises `ScheduleError`, a ValueError, if it could not work.
    """
    step = require_valid(plan(schedule, *args, **sizes))
    return LoweredStep(step.config, step.ranks, count_unreceived(step))


def count_unreceived(plan: Plan) -> list[int]:
    """Per rank, the most messages of a payload to a peer that are sent and not yet received.

    A forward takes one unit of time, a backward two, either half of it one, a message none, and no
    send waits. A message of an overlapped call counts until the work that needs it begins. What is
    sent and received at the same moment counts.

    >>> from minimegatron.planner.plan import plan
    >>> count_unreceived(plan("1f1b", 2, 4))
    [1, 1]
    """
    execution = execute(plan, Costs(1, 2).of_plan(plan), defaultdict(int), BUFFERED)
    needed = _needed_at(plan, execution.starts)
    changes: list[dict[tuple[str, int], list]] = [defaultdict(list) for _ in plan.ranks]
    for sends, receives in match_messages(plan).values():
        for send, receive in zip(sends, receives, strict=True):
            sender, index = send.place
            changed = changes[sender][send.message.payload, send.message.peer]
            changed.append((execution.starts[sender][index], 1))
            receiver, index = receive.place
            received, message = execution.ends[receiver][index], receive.message
            if plan.ranks[receiver][index].overlap:
                received = needed[receiver][message.payload, message.microbatch, message.chunk]
            changed.append((received, -1))
    return [max(map(_peak, mine.values()), default=0) for mine in changes]


def _needed_at(
    plan: Plan, starts: list[list[Time]]
) -> list[dict[tuple[str | None, int, int], Time]]:
    """Per rank: (payload, microbatch, chunk) -> when the work begins that takes it."""
    needed: list[dict[tuple[str | None, int, int], Time]] = [{} for _ in plan.ranks]
    for rank, actions in enumerate(plan.ranks):
        for action, start in zip(actions, starts[rank], strict=True):
            if action.kind != COMMUNICATE:
                for part in parts_of(action):
                    unit = (KINDS[part.kind].takes, part.microbatch, part.chunk)
                    needed[rank][unit] = start
    return needed


def _peak(changes: list[tuple[Time, int]]) -> int:
    held = peak = 0
    for _, change in sorted(changes, key=lambda at: (at[0], -at[1])):
        held += change
        peak = max(peak, held)
    return peak
