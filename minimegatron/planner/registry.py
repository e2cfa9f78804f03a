"""The schedules that `plan` knows by name, and how to add one.

Called by: `schedules` (registers the built-in ones), users, `plan`. Calls nothing. Megatron has no
counterpart: there a schedule is a function that runs.
"""

from collections.abc import Callable, Iterable

from minimegatron.planner.actions import Action
from minimegatron.planner.stage import Stage

ScheduleFunction = Callable[[Stage], Iterable[Action]]
"""Yields everything that one stage does in a step, in order."""

_SCHEDULES: dict[str, ScheduleFunction] = {}


def register_schedule(name: str) -> Callable[[ScheduleFunction], ScheduleFunction]:
    """Makes a schedule function known as `name`: to `plan`, the command line and the runtime.

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
        known = _SCHEDULES.get(name)
        if known not in (None, function) and _place(known) != _place(function):
            raise ValueError(
                f"the schedule name {name!r} is taken by {known.__module__}.{known.__qualname__}; "
                "choose another"
            )
        _SCHEDULES[name] = function
        return function

    return register


def _place(function: ScheduleFunction) -> tuple[str, str]:
    return function.__module__, function.__qualname__


def unregister_schedule(name: str) -> None:
    """Forgets a name again; for tests and notebooks. Raises ValueError for an unknown one."""
    get_schedule(name)
    del _SCHEDULES[name]


def get_schedule(name: str) -> ScheduleFunction:
    """The function registered under `name`. Raises ValueError, listing all names, if none is."""
    if name not in _SCHEDULES:
        raise ValueError(
            f"unknown schedule {name!r}; known are {', '.join(schedule_names())}, "
            "and @register_schedule adds one"
        )
    return _SCHEDULES[name]


def schedule_names() -> list[str]:
    """All registered names, in the order of registration."""
    return list(_SCHEDULES)
