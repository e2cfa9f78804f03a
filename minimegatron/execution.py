"""Runs a planned schedule on real ranks: a user's order of work, with real tensors and gradients.

Called by: whoever wrote a schedule, as a `forward_backward_func` (pass it where
`get_forward_backward_func()` would stand). Calls: the runner of all schedules,
`core.pipeline_parallel.planned_schedule`. Megatron has no counterpart.
"""

from collections.abc import Callable
from dataclasses import replace

from minimegatron.core.pipeline_parallel.orders import OrderFunction, get_schedule, schedule_of
from minimegatron.core.pipeline_parallel.planned_schedule import (
    get_messages_forward_backward_func,
    get_named_forward_backward_func,
)
from minimegatron.planner.registry import ScheduleFunction
from minimegatron.planner.unreceived import make_step


def get_planned_forward_backward_func(
    name_or_function: str | ScheduleFunction | OrderFunction,
) -> Callable:
    """A function like those of `get_forward_backward_func`, in the order of a planned schedule.

    Args:
        name_or_function: what `register_schedule` or `register_order` registered, or the function
            itself. A schedule that names its messages runs with these, also if it has an order.

    The returned function takes the same keyword arguments; `adjust_tensor_shapes_fn` must be None.
    It raises `planner.check.ScheduleError` (a ValueError), naming rank and microbatch, if the
    schedule could not work: before any message is sent, and on every rank alike.
    """
    is_name = isinstance(name_or_function, str)
    found = get_schedule(name_or_function) if is_name else schedule_of(name_or_function)
    if found.messages is None:
        return get_named_forward_backward_func(found.name)
    return get_messages_forward_backward_func(replace(found, make_step=make_step))
