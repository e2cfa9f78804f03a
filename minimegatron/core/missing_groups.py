"""Sizes, places and logging that also work where no process group has been made.

Counterpart: these functions of `megatron.core.utils`.
"""

import logging
from typing import Any

import torch.distributed as dist


def get_pg_size(group: dist.ProcessGroup | None = None) -> int:
    """Ranks in `group`; 1 without `torch.distributed` or without a group."""
    return 1 if group is None or not dist.is_initialized() else group.size()


def get_pg_rank(group: dist.ProcessGroup | None = None) -> int:
    """Our place in `group`; 0 without `torch.distributed` or without a group."""
    return 0 if group is None or not dist.is_initialized() else group.rank()


def get_pg_src_rank(group: dist.ProcessGroup | None = None) -> int:
    """Global rank of the first member of `group`; 0 without a group."""
    if group is None or not dist.is_initialized():
        return 0
    return dist.get_process_group_ranks(group)[0]


def log_single_rank(
    logger: logging.Logger, level: int, message: str, *args: Any, rank: int = 0
) -> None:
    """Logs on one global rank only; without `torch.distributed`, always."""
    if not dist.is_initialized() or dist.get_rank() == rank:
        logger.log(level, message, *args)


def log_on_each_pipeline_stage(
    logger: logging.Logger,
    level: int,
    message: str,
    *args: Any,
    tp_group: dist.ProcessGroup | None,
    dp_cp_group: dist.ProcessGroup | None,
) -> None:
    """Logs on one rank of every stage: the first of its tensor and data groups."""
    if get_pg_rank(tp_group) == 0 and get_pg_rank(dp_cp_group) == 0:
        logger.log(level, message, *args)
