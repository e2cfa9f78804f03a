"""How many messages lie unreceived at a time, if nothing but the plan holds a rank back.

Called by: the planned runner, whose sends wait beyond that number (see
`core.pipeline_parallel.send_limits`). Calls: `transport`. Megatron has no counterpart.
"""

from collections import defaultdict
from typing import Any

from minimegatron.core.pipeline_parallel.lowering import Step
from minimegatron.core.pipeline_parallel.orders import Schedule
from minimegatron.planner.actions import ACTIVATION, COMMUNICATE, FORWARD, GRADIENT, SEND, Time
from minimegatron.planner.check import require_valid
from minimegatron.planner.plan import Plan, plan
from minimegatron.planner.transport import BUFFERED, Execution, execute

Channel = tuple[str, int]
"""(payload, chunk that sends it), on one rank."""


def make_step(schedule: Schedule, *args: Any, **sizes: Any) -> Step:
    """A step of a schedule that names its messages, ready to run; arguments as for `plan.plan`.

    Raises `ScheduleError`, a ValueError, if it could not work.
    """
    step = require_valid(plan(schedule, *args, **sizes))
    return Step(step.config, step.ranks, count_unreceived(step))


def count_unreceived(plan: Plan) -> list[dict[Channel, int]]:
    """Per rank and channel, the most messages that are sent and not yet received, at any time.

    A forward takes one unit of time, a backward two, a message none, and no send waits. A message of
    an overlapped call counts until the work that needs it begins. What is sent and received at the
    same moment counts.

    >>> from minimegatron.planner.plan import plan
    >>> count_unreceived(plan("1f1b", 2, 4))
    [{('activation', 0): 1}, {('gradient', 0): 1}]
    """
    times = [[1] * plan.config.num_model_chunks] * plan.config.pp_size
    twice = [[2] * plan.config.num_model_chunks] * plan.config.pp_size
    execution = execute(plan, times, twice, defaultdict(int), BUFFERED)
    received = _receive_times(plan, execution)
    changes: list[dict[Channel, list]] = [defaultdict(list) for _ in plan.ranks]
    number: dict[tuple[int, int], int] = defaultdict(int)
    for rank, actions in enumerate(plan.ranks):
        for index, action in enumerate(actions):
            for message in action.messages:
                if message.direction != SEND:
                    continue
                pair = (rank, message.peer)
                channel = (message.payload, message.chunk)
                changes[rank][channel].append((execution.starts[rank][index], 1))
                changes[rank][channel].append((received[pair][number[pair]], -1))
                number[pair] += 1
    return [{channel: _peak(of) for channel, of in sorted(mine.items())} for mine in changes]


def _receive_times(plan: Plan, execution: Execution) -> dict[tuple[int, int], list[Time]]:
    """(sender, receiver) -> when each of its messages is received, in order."""
    received: dict[tuple[int, int], list[Time]] = defaultdict(list)
    for rank, actions in enumerate(plan.ranks):
        needed = {}
        for index, action in enumerate(actions):
            if action.kind != COMMUNICATE:
                payload = ACTIVATION if action.kind == FORWARD else GRADIENT
                unit = (payload, action.microbatch, action.chunk)
                needed[unit] = execution.starts[rank][index]
        for index, action in enumerate(actions):
            for message in action.messages:
                if message.direction == SEND:
                    continue
                at = execution.ends[rank][index]
                if action.overlap:
                    at = needed[message.payload, message.microbatch, message.chunk]
                received[message.peer, rank].append(at)
    return received


def _peak(changes: list[tuple[Time, int]]) -> int:
    held = peak = 0
    for _, change in sorted(changes, key=lambda at: (at[0], -at[1])):
        held += change
        peak = max(peak, held)
    return peak
