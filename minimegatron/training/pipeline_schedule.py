"""`--pipeline-schedule`: which order of work the run follows, and where it puts the model's stages.

A program that names its schedule itself calls `get_planned_forward_backward_func`. Megatron has no
counterpart: its schedule follows from the sizes.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from minimegatron import launching, planner
from minimegatron.core.orders import lowering, orders, planned_schedule, runnable
from minimegatron.core.orders.placement import Placement
from minimegatron.core.orders.work import INTERLEAVED, NO_PIPELINING, ONE_F_ONE_B
from minimegatron.core.pipeline_parallel.schedules import get_forward_backward_func
from minimegatron.training import captured_step
from minimegatron.training.global_vars import get_args

FLAG = "--pipeline-schedule"

_files: dict[str, str] = {}
"""A user's schedule by name -> FILE.py:FUNCTION."""


def registered_name(schedule: str) -> str:
    """The name of a registered order: `schedule` itself, or what FILE.py:FUNCTION registers.

    Raises ValueError, listing the known names or saying what the file lacks, if there is none.
    """
    if ":" not in schedule:
        try:
            return orders.get_schedule(schedule).name
        except ValueError as error:
            raise ValueError(
                f"{FLAG}: {error}; FILE.py:FUNCTION names one of your own, which it registers"
            ) from None
    function = launching.user_file.load_user_function(schedule, FLAG, "user_schedule")
    found = orders.schedule_of(function)
    if found.order is not function:
        raise ValueError(
            f"{FLAG} {schedule}: the function is not registered as an order of work; put "
            '@register_order("NAME") before it (a schedule that names its messages is passed to '
            "get_forward_backward_func by a program)"
        )
    _files[found.name] = schedule
    return found.name


def pipeline_placement(args: Any) -> Placement | None:
    """Where the schedule puts the model's stages; None if nobody asked for one."""
    return None if args.pipeline_schedule is None else orders.placement_of(args)


def schedule_of_run() -> Callable:
    """What runs this run's steps outside of `train`; see `get_forward_backward_func`."""
    return in_wrappers(get_forward_backward_func(pipeline_schedule=get_args().pipeline_schedule))


def in_wrappers(schedule: Callable, wrap: Callable[[Callable], Callable] | None = None) -> Callable:
    """The schedule itself; with `--cuda-graph-impl full_iteration` in a `FullCudaGraphWrapper`; and in
    what `wrap`, if it is given, puts around that."""
    if get_args().cuda_graph_impl != "none":
        schedule = captured_step.captured(schedule)
    return schedule if wrap is None else wrap(schedule)


def smallest_num_microbatches() -> int:
    """The fewest that a step of this run can have."""
    args = get_args()
    if is_interleaved(args):
        # It needs a whole group of microbatches.
        return args.microbatch_group_size_per_vp_stage or args.pipeline_model_parallel_size
    return smallest_of_order(args)


def is_interleaved(args: Any) -> bool:
    """Whether the run follows Megatron's interleaved schedule, because it must or was told to."""
    if args.pipeline_schedule is None:
        return args.virtual_pipeline_model_parallel_size is not None
    return args.pipeline_schedule == INTERLEAVED


def check_order(args: Any, num_microbatches: int, forward_only: bool = False) -> None:
    """Raises ValueError for an order of one's own that no step could follow, and says where.

    So it is known before anything is started. What only a run can see is left to the run.
    """
    name = args.pipeline_schedule
    if name in (None, NO_PIPELINING, ONE_F_ONE_B, INTERLEAVED):
        return
    placement = orders.placement_of(args)
    config = orders.PlanConfig(
        name,
        args.pipeline_model_parallel_size,
        num_microbatches,
        placement.num_model_chunks,
        args.microbatch_group_size_per_vp_stage,
        forward_only,
        placement=placement,
        wire=orders.TAGGED,
    )
    try:
        runnable.require_runnable(lowering.common_order(config))
    except Exception as error:  # the order is the user's: it may raise anything
        line = launching.user_file.place_in(error, _files.get(name))
        cause = str(error) if line is None else f"{line}: {type(error).__name__}: {error}"
        raise ValueError(
            f"{FLAG} {name} over --pipeline-model-parallel-size {config.pp_size} with "
            f"{num_microbatches} microbatches: {cause}"
        ) from error


def smallest_of_order(args: Any) -> int:
    """The fewest microbatches that the named order can do, as it was registered."""
    smallest = None
    if args.pipeline_schedule is not None:
        smallest = orders.get_schedule(args.pipeline_schedule).smallest
    return 1 if smallest is None else smallest(args.pipeline_model_parallel_size)


def get_planned_forward_backward_func(
    name_or_function: str | Callable,
) -> Callable:
    """A function like those of `get_forward_backward_func`, in the order of a planned schedule.

    Args:
        name_or_function: what `register_schedule` or `register_order` registered, or the function
            itself. A schedule that names its messages runs with these, also if it has an order.

    The returned function takes the same keyword arguments; `adjust_tensor_shapes_fn` must be None.
    It raises `planner.plan_check.ScheduleError` (a ValueError), naming rank and microbatch, if the
    schedule could not work: before any message is sent, and on every rank alike.
    """
    is_name = isinstance(name_or_function, str)
    found = (
        orders.get_schedule(name_or_function) if is_name else orders.schedule_of(name_or_function)
    )
    if found.messages is None:
        return planned_schedule.get_named_forward_backward_func(found.name)
    return planned_schedule.get_messages_forward_backward_func(
        replace(found, make_step=planner.unreceived.make_step)
    )
