"""Schedules with their messages, by name: how one is added, and which exist.

Megatron has no counterpart: there a schedule is a function that runs.
"""

from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial

from minimegatron.core.orders import orders
from minimegatron.core.orders.loop_recorder import is_loop, record_loop
from minimegatron.core.orders.orders import Schedule, schedule_names
from minimegatron.planner.actions import Action
from minimegatron.planner.stage import Stage
from minimegatron.planner.unreceived import make_step

__all__ = [
    "ScheduleFunction",
    "get_schedule",
    "register_schedule",
    "schedule_names",
    "unregister_schedule",
]

ScheduleFunction = Callable[[Stage], Iterable[Action]] | Callable[..., None]
"""Yields everything that one stage does in a step, in order; or does it, as a loop over actors."""


def register_schedule(name: str) -> Callable[[ScheduleFunction], ScheduleFunction]:
    """Makes a schedule function known as `name`: to `plan`, the command line and the runtime.

    A function that says what is sent and received, and when: a generator of a stage's actions, or a
    loop over a chunk and a communicator as those of training (`core.pipeline_parallel.loops`). If the
    messages can be left to `lowering`, the order alone is enough:
    `core.orders.orders.register_order`.

    >>> @register_schedule("one-at-a-time")
    ... def one_at_a_time(stage):
    ...     for i in range(stage.num_microbatches):
    ...         yield stage.recv_forward(i)
    ...         yield stage.forward(i)
    ...         yield stage.send_forward(i)
    ...         yield stage.recv_backward(i)
    ...         yield stage.backward(i)
    ...         yield stage.send_backward(i)
    >>> "one-at-a-time" in schedule_names()
    True
    >>> unregister_schedule("one-at-a-time")

    A function that is defined again, as when a notebook's cell runs twice, takes its own place. Raises
    ValueError when another function has the name.
    """

    def register(function: ScheduleFunction) -> ScheduleFunction:
        orders.add_schedule(Schedule(name, messages=function, make_step=make_step))
        return function

    return register


def unregister_schedule(name: str) -> None:
    """Forgets a name again; for tests and notebooks. Raises ValueError for an unknown one."""
    orders.unregister(name)


def get_schedule(name: str) -> ScheduleFunction:
    """The function registered under `name`: one with messages or, if there is none, the order.

    Of one that is a loop over actors, a function of a stage that returns what the loop does. Raises
    ValueError, listing all names, if nothing is.
    """
    schedule = orders.get_schedule(name)
    if schedule.messages is not None and is_loop(schedule.messages):
        return partial(_recorded, schedule)
    return schedule.messages or schedule.order


def _recorded(schedule: Schedule, stage: Stage) -> list[Action]:
    config = replace(stage.config, schedule=schedule.name)
    return record_loop(schedule.messages, config, stage.pp_rank)
