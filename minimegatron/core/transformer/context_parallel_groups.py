"""The ranks that share each sequence, for whoever builds attention; an attention that cannot use them.

Ours: Megatron hands `pg_collection` on, and its `DotProductAttention` asserts that nobody shares.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from minimegatron.core.process_groups_config import ProcessGroupCollection
from minimegatron.core.transformer import context_parallel
from minimegatron.core.transformer.activation_config import (
    check_comm_type,
    comm_type_of_layer,
)
from minimegatron.core.transformer.layer_parts import takes


def context_parallel_group(
    config: Any, groups: ProcessGroupCollection | None
) -> dist.ProcessGroup | None:
    """The group over which attention goes; None if a sequence lies on one rank.

    Raises:
        ValueError: it has not `config.context_parallel_size` ranks.
    """
    c = config.context_parallel_size
    if groups is None or not hasattr(groups, "cp"):
        if c == 1:
            return None
        groups = ProcessGroupCollection.use_mpu_process_groups(["cp"])
    size = groups.cp.size()
    if size != c:
        raise ValueError(
            f"context_parallel_size is {c}, but the cp group has {size} ranks; give the same number to "
            "TransformerConfig and to initialize_model_parallel"
        )
    return None if size == 1 else groups.cp


def way_to_attend(
    attend_here: Callable[..., torch.Tensor],
    core: Any,
    cp_comm_type: str | None,
    groups: ProcessGroupCollection | None,
) -> tuple[str, dist.ProcessGroup | None, Callable[..., torch.Tensor]]:
    """For `DotProductAttention`, `core`: how ranks attend that share a sequence, who they are, and the
    function that attends; without such ranks it is `attend_here`.

    Raises:
        ValueError: the way is unknown or does not fit the heads, or as `context_parallel_group`.
    """
    way = cp_comm_type or comm_type_of_layer(core.config, core.layer_number)
    check_comm_type(core.config, way)
    group = context_parallel_group(core.config, groups)
    return (
        way,
        group,
        attend_here if group is None else partial(context_parallel.attend_over_ranks, attend_here),
    )


def options_of_core(
    config: Any, core_attention: Any, cp_comm_type: str | None, groups: ProcessGroupCollection
) -> dict[str, Any]:
    """What a core attention is given of context parallelism: those arguments that it takes.

    Raises:
        ValueError: a sequence lies on several ranks, and the core attention takes no groups.
    """
    offered = {"cp_comm_type": cp_comm_type, "pg_collection": groups}
    taken = {name: given for name, given in offered.items() if takes(core_attention, name)}
    if config.context_parallel_size > 1 and "pg_collection" not in taken:
        name = getattr(core_attention, "module", core_attention).__name__
        raise ValueError(
            f"core attention {name} takes no pg_collection, so it cannot reach the tokens of the other "
            f"{config.context_parallel_size - 1} context-parallel ranks; use DotProductAttention"
        )
    return taken


def check_part_of_sequence(model: Any, tokens: torch.Tensor) -> None:
    """Raises ValueError if a rank's tokens [b, s/c] cannot be two equal chunks, or are too many.

    The model knows its longest sequence and, if a schedule has told it, how long those of the step are.
    """
    length, num_ranks = tokens.size(1), model.cp_group.size()
    if num_ranks > 1 and length == model.whole_length:
        raise ValueError(
            f"each of {num_ranks} context-parallel ranks has {length} tokens of each sequence, and not "
            f"{length // num_ranks}: they are all that the step's seq_length says; give the model "
            "get_batch_on_this_cp_rank(batch), or the schedule the whole sequence's seq_length"
        )
    if length % 2:
        raise ValueError(
            f"a rank's part of a sequence has {length} tokens, which are not two equal chunks; use "
            f"sequences of a multiple of 2 x {num_ranks} = {2 * num_ranks} tokens"
        )
    if length * num_ranks > model.max_sequence_length:
        raise ValueError(
            f"{length} tokens on each of {num_ranks} context-parallel ranks make a sequence of "
            f"{length * num_ranks}, but max_sequence_length is {model.max_sequence_length}; give the "
            "model get_batch_on_this_cp_rank(batch), not the whole batch"
        )
