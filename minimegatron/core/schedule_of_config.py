"""What is refused of a configuration that names a schedule, or has other stages than there are ranks.

Megatron has no counterpart. Every `ModelParallelConfig` that is made after this module is imported is
checked when it is made; the module of `TransformerConfig` imports it. One that was made before is
checked by the pipeline's communicator.
"""

from typing import Any

from minimegatron.core.orders import orders
from minimegatron.core.orders.work import INTERLEAVED, NO_PIPELINING
from minimegatron.core.subject_fields import schedule_checks


def check_schedule(config: Any) -> None:
    """Raises ValueError where the schedule that `config` names does not fit its stages and chunks."""
    name, p = config.pipeline_schedule, config.pipeline_model_parallel_size
    v = config.virtual_pipeline_model_parallel_size
    orders.require_own_name(name)
    schedule = orders.get_schedule(name)
    if schedule.order is None:
        raise ValueError(
            f"pipeline_schedule {name} names its own messages and has no placement to build a "
            "model for; leave it out here and pass the name to get_forward_backward_func, or "
            "register an order of work (register_order)"
        )
    if name == NO_PIPELINING and p > 1:
        raise ValueError(
            f"pipeline_schedule {name} runs on one stage, but pipeline_model_parallel_size is "
            f"{p}; use 1 stage, or another schedule"
        )
    if name == INTERLEAVED and v is None:
        raise ValueError(
            f"pipeline_schedule {name} needs the number of chunks per stage; set "
            "virtual_pipeline_model_parallel_size to 2 or more"
        )
    try:
        placement = schedule.placed(p, v)
    except ValueError as error:
        raise ValueError(f"pipeline_schedule {name}: {error}") from None
    if placement.num_copies > 1:
        raise ValueError(
            f"pipeline_schedule {name} places {placement.num_copies} copies of the model, which "
            "can be planned but not trained; use another schedule"
        )
    if placement.pp_size != p:
        raise ValueError(
            f"pipeline_schedule {name} places the model on {placement.pp_size} ranks, but "
            f"pipeline_model_parallel_size is {p}; change the size or its placement"
        )
    if placement.num_model_chunks != (v or 1):
        raise ValueError(
            f"pipeline_schedule {name} has {placement.num_model_chunks} chunks per stage; set "
            f"virtual_pipeline_model_parallel_size={placement.num_model_chunks}, not {v}"
        )


schedule_checks.append(check_schedule)


def check_stages(config: Any, num_stages: int) -> None:
    """Raises ValueError where `config` has other stages than that, or a schedule that does not fit."""
    check_num_stages(config, num_stages)
    if config.pipeline_schedule is not None:
        check_schedule(config)


def check_num_stages(config: Any, num_stages: int) -> None:
    """Raises ValueError where `config` is for another number of stages than the pipeline group has."""
    if config.pipeline_model_parallel_size != num_stages:
        raise ValueError(
            "the configuration says pipeline_model_parallel_size="
            f"{config.pipeline_model_parallel_size}, but the pipeline group has {num_stages} ranks; "
            "make them equal"
        )
