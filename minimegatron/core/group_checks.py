"""What process groups refuse: arguments that cannot be, groups and chunks that do not exist.

Megatron has no counterpart: it asserts some of this in `megatron.core.parallel_state` and in
`megatron.core.process_groups_config`.
"""

from collections.abc import Iterable, Sequence

import torch.distributed as dist

from minimegatron.core.orders.placement import Placement
from minimegatron.core.rank_generator import GROUP_KINDS


def check_new_groups(
    exist: bool,
    pipeline_size: int,
    virtual_size: int | None,
    timeout_minutes: int,
    placement: Placement | None,
) -> None:
    """What `initialize_model_parallel` asks before the sizes are held against the world."""
    if not dist.is_initialized():
        raise RuntimeError("call torch.distributed.init_process_group() first")
    if exist:
        raise RuntimeError("model parallel groups exist already; call destroy_model_parallel()")
    if virtual_size is not None and virtual_size < 1:
        raise ValueError(
            f"virtual_pipeline_model_parallel_size is {virtual_size}; give 1 or more, or None"
        )
    if virtual_size is not None and pipeline_size < 2:
        raise ValueError(
            f"virtual_pipeline_model_parallel_size={virtual_size} needs a pipeline, but "
            f"pipeline_model_parallel_size is {pipeline_size}; use 2 or more stages"
        )
    if timeout_minutes <= 0:
        raise ValueError(f"distributed_timeout_minutes is {timeout_minutes}; give more than 0")
    if placement is None:
        return
    sizes = (placement.pp_size, placement.num_model_chunks)
    if sizes != (pipeline_size, virtual_size or 1):
        raise ValueError(
            f"placement {placement.name} has {sizes[1]} chunks on each of {sizes[0]} ranks, but "
            f"pipeline_model_parallel_size is {pipeline_size} and "
            f"virtual_pipeline_model_parallel_size is {virtual_size}; make them equal"
        )


def refuse_absence(kind: str, exist: bool) -> None:
    """This rank has no group of a kind: no rank has any, or all groups are of others."""
    title = next(entry.title for entry in GROUP_KINDS if entry.name == kind)
    if not exist:
        raise RuntimeError(f"the {title} group does not exist; call initialize_model_parallel()")
    raise RuntimeError(f"rank {dist.get_rank()} is in no {title} group")


def refuse_chunk(vp_stage: int | None, virtual_size: int) -> None:
    """A chunk matters, and `vp_stage` is none."""
    raise ValueError(
        f"vp_stage is {vp_stage}; each stage has {virtual_size} chunks, so pass "
        f"0..{virtual_size - 1}, or ignore_virtual=True to ask about the stage"
    )


def check_fields(names: Iterable[str], known: Sequence[str]) -> None:
    """A `ProcessGroupCollection` is made with fields that it has."""
    for name in names:
        if name not in known:
            raise ValueError(f"no process group is called {name!r}; use {', '.join(known)}")


def check_required(exist: bool, names: Sequence[str], known: Sequence[str]) -> None:
    """Groups exist, and those that are asked for are fields of `ProcessGroupCollection`."""
    if not exist:
        raise RuntimeError("no process groups exist; call initialize_model_parallel() first")
    unknown = [name for name in names if name not in known]
    if unknown:
        raise ValueError(
            f"Invalid process groups requested: {', '.join(map(repr, unknown))}; "
            f"use {', '.join(known)}"
        )
