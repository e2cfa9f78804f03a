"""What no training step calls of `parallel_state`: further getters, what is set by hand, the end.

Counterpart: `megatron.core.parallel_state`, where they stand among the others. They are importable from
`minimegatron.core.parallel_state` too.
"""

import torch.distributed as dist

from minimegatron.core import parallel_state
from minimegatron.core.parallel_state import (
    get_data_parallel_group,
    get_group,
    get_pipeline_placement,
    is_initialized,
    is_pipeline_first_stage,
    is_pipeline_last_stage,
    rank_of,
    size_of,
)
from minimegatron.core.rank_generator import (
    RankGenerator,
    default_embedding_ranks,
    default_position_embedding_ranks,
)

__all__ = [
    "RankGenerator",
    "default_embedding_ranks",
    "default_position_embedding_ranks",
    "destroy_model_parallel",
    "get_all_ranks",
    "get_amax_reduction_group",
    "get_context_parallel_global_ranks",
    "get_context_parallel_rank",
    "get_context_parallel_world_size",
    "get_data_parallel_group_gloo",
    "get_data_parallel_src_rank",
    "get_embedding_group",
    "get_expert_data_parallel_group",
    "get_expert_data_parallel_group_gloo",
    "get_expert_data_parallel_rank",
    "get_expert_data_parallel_world_size",
    "get_expert_model_parallel_group",
    "get_expert_model_parallel_rank",
    "get_expert_model_parallel_src_rank",
    "get_expert_model_parallel_world_size",
    "get_expert_tensor_and_model_parallel_group",
    "get_expert_tensor_and_model_parallel_rank",
    "get_expert_tensor_and_model_parallel_world_size",
    "get_expert_tensor_model_pipeline_parallel_group",
    "get_expert_tensor_parallel_group",
    "get_expert_tensor_parallel_rank",
    "get_expert_tensor_parallel_world_size",
    "get_global_ranks",
    "get_model_parallel_src_rank",
    "get_pipeline_model_parallel_first_rank",
    "get_pipeline_model_parallel_last_rank",
    "get_pipeline_model_parallel_next_rank",
    "get_pipeline_model_parallel_prev_rank",
    "get_position_embedding_group",
    "get_tensor_and_context_parallel_group",
    "get_tensor_and_context_parallel_rank",
    "get_tensor_and_context_parallel_world_size",
    "get_tensor_and_data_parallel_group",
    "get_tensor_model_parallel_src_rank",
    "get_tensor_model_parallel_world_size",
    "get_virtual_pipeline_model_parallel_rank",
    "is_rank_in_embedding_group",
    "is_rank_in_position_embedding_group",
    "model_parallel_is_initialized",
    "set_data_parallel_rank",
    "set_expert_model_parallel_rank",
    "set_expert_model_parallel_world_size",
    "set_expert_tensor_parallel_rank",
    "set_expert_tensor_parallel_world_size",
    "set_pipeline_model_parallel_rank",
    "set_pipeline_model_parallel_world_size",
    "set_tensor_model_parallel_rank",
    "set_tensor_model_parallel_world_size",
    "set_virtual_pipeline_model_parallel_world_size",
]

# -- Freeing the groups --


def destroy_model_parallel() -> None:
    """Frees every group that `initialize_model_parallel` made, and forgets what was set by hand.

    The default group stays. Waits for nobody, so that a rank that failed may call it too.
    """
    state = parallel_state._state
    if state is not None and dist.is_initialized():
        for group in state.created:
            dist.destroy_process_group(group)
    parallel_state._state = parallel_state._virtual_size = parallel_state._virtual_rank = None
    parallel_state.sizes_set_by_hand.clear()
    parallel_state.ranks_set_by_hand.clear()


# -- Groups --


def get_embedding_group(check_initialized: bool = True) -> dist.ProcessGroup:
    """The stages of this pipeline that hold the word embedding: each a copy, all one gradient."""
    return get_group("embd", check_initialized)


def get_position_embedding_group(check_initialized: bool = True) -> dist.ProcessGroup:
    """The stages of this pipeline that hold the position embedding."""
    return get_group("pos_embd", check_initialized)


def get_tensor_and_data_parallel_group(
    check_initialized: bool = True, with_context_parallel: bool = False
) -> dist.ProcessGroup:
    """All ranks of this stage; without context, only those with the same piece of the sequence."""
    return get_group("tp_dp_cp" if with_context_parallel else "tp_dp", check_initialized)


def get_tensor_and_context_parallel_group(check_initialized: bool = True) -> dist.ProcessGroup:
    """The ranks of this stage that work on the same samples."""
    return get_group("tp_cp", check_initialized)


def get_amax_reduction_group(
    with_context_parallel: bool = False, tp_only_amax_red: bool = False
) -> dist.ProcessGroup:
    """All ranks of this stage; with `tp_only_amax_red`, those that work on the same samples.

    Without context, only those with the same piece of the sequence. Libraries that compute in fp8
    find the largest absolute value (amax) over this group; nothing in this package does.
    """
    if tp_only_amax_red:
        return get_group("tp_cp" if with_context_parallel else "tp")
    return get_group("tp_dp_cp" if with_context_parallel else "tp_dp")


def get_expert_model_parallel_group(check_initialized: bool = True) -> dist.ProcessGroup:
    """The ranks that share the experts of a layer."""
    return get_group("ep", check_initialized)


def get_expert_tensor_parallel_group(check_initialized: bool = True) -> dist.ProcessGroup:
    """The ranks that share each expert."""
    return get_group("expt_tp", check_initialized)


def get_expert_tensor_and_model_parallel_group(check_initialized: bool = True) -> dist.ProcessGroup:
    """The ranks that hold one full set of a layer's experts."""
    return get_group("tp_ep", check_initialized)


def get_expert_tensor_model_pipeline_parallel_group(
    check_initialized: bool = True,
) -> dist.ProcessGroup:
    """The ranks that hold one full set of all layers' experts."""
    return get_group("tp_ep_pp", check_initialized)


def _on_gloo(group: dist.ProcessGroup, title: str) -> dist.ProcessGroup:
    """`group`, if it sends the CPU's tensors."""
    config = str(dist.get_backend_config(group))
    if "cpu:gloo" not in config and "cpu:shm" not in config:
        raise RuntimeError(
            f"the {title} group sends over {config}, and no second group over gloo is made; call "
            'torch.distributed.new_group(ranks, backend="gloo") on all ranks and use that group'
        )
    return group


def get_data_parallel_group_gloo(with_context_parallel: bool = False) -> dist.ProcessGroup:
    """The group of `get_data_parallel_group`, for tensors on the CPU.

    Megatron makes a second group; here it is the same one. Raises RuntimeError as `get_group`, and
    if that group sends over NCCL.
    """
    return _on_gloo(get_data_parallel_group(with_context_parallel), "data")


def get_expert_data_parallel_group(check_initialized: bool = True) -> dist.ProcessGroup:
    """The ranks with the same experts: the group that expert gradients are reduced over."""
    return get_group("expt_dp", check_initialized)


def get_expert_data_parallel_group_gloo() -> dist.ProcessGroup:
    """As `get_data_parallel_group_gloo`, of `get_expert_data_parallel_group`."""
    return _on_gloo(get_expert_data_parallel_group(), "expert data")


# -- Sizes --


def get_expert_data_parallel_world_size() -> int:
    """Copies of each expert."""
    return size_of("expt_dp")


def get_tensor_model_parallel_world_size() -> int:
    """Ranks that share each layer."""
    return size_of("tp")


def get_context_parallel_world_size() -> int:
    """Pieces of each sequence."""
    return size_of("cp")


def get_tensor_and_context_parallel_world_size() -> int:
    """Ranks of a stage that work on the same samples."""
    return size_of("tp_cp")


def get_expert_model_parallel_world_size() -> int:
    """Ranks that share the experts of a layer."""
    return size_of("ep")


def get_expert_tensor_parallel_world_size() -> int:
    """Ranks that share each expert."""
    return size_of("expt_tp")


def get_expert_tensor_and_model_parallel_world_size() -> int:
    """Ranks that hold one full set of a layer's experts."""
    return size_of("tp_ep")


# -- This rank's place --


def model_parallel_is_initialized() -> bool:
    """Whether the groups exist; Megatron's longer name."""
    return is_initialized()


def get_virtual_pipeline_model_parallel_rank() -> int | None:
    """The chunk last announced by `set_virtual_pipeline_model_parallel_rank`; None without
    interleaving. Prefer to pass `vp_stage` along."""
    return parallel_state._virtual_rank


def get_context_parallel_rank() -> int:
    """Place in the context group: which piece of each sequence is ours."""
    return rank_of("cp")


def get_tensor_and_context_parallel_rank() -> int:
    """Place in the tensor-and-context group."""
    return rank_of("tp_cp")


def get_expert_model_parallel_rank() -> int:
    """Place in the expert group: which experts are ours."""
    return rank_of("ep")


def get_expert_tensor_parallel_rank() -> int:
    """Place in the expert-tensor group."""
    return rank_of("expt_tp")


def get_expert_tensor_and_model_parallel_rank() -> int:
    """Place in the expert-tensor-and-expert group."""
    return rank_of("tp_ep")


def get_expert_data_parallel_rank() -> int:
    """Place among the copies of our experts."""
    return rank_of("expt_dp")


def get_all_ranks() -> str:
    """Our places, as "tensor_data_context_pipeline_expert", to name files and threads after."""
    return "_".join(str(rank_of(kind)) for kind in ("tp", "dp", "cp", "pp", "ep"))


def is_rank_in_embedding_group(ignore_virtual: bool = True, vp_stage: int | None = None) -> bool:
    """Whether we hold a word embedding and, unless `ignore_virtual`, whether `vp_stage` does.

    A rank that holds both ends of the model has two chunks that do. Raises ValueError as
    `is_pipeline_first_stage`; False without groups.
    """
    if get_group("embd", check_initialized=False) is None:
        return False
    if ignore_virtual or not (is_pipeline_first_stage() or is_pipeline_last_stage()):
        return True
    where = {"ignore_virtual": False, "vp_stage": vp_stage}
    return is_pipeline_first_stage(**where) or is_pipeline_last_stage(**where)


def is_rank_in_position_embedding_group() -> bool:
    """Whether we hold a position embedding; False without groups."""
    return get_group("pos_embd", check_initialized=False) is not None


# -- Sizes and places set by hand --
# For a program that handles a layout without its processes, such as one that converts checkpoints. The
# getter, and whoever places layers by it, gets what was set last; None asks the group again. The groups
# themselves do not change, and neither does what is sent over them.


def set_tensor_model_parallel_world_size(world_size: int | None) -> None:
    """What `get_tensor_model_parallel_world_size` returns; None: the size of the group."""
    parallel_state.sizes_set_by_hand["tp"] = world_size


def set_pipeline_model_parallel_world_size(world_size: int | None) -> None:
    """What `get_pipeline_model_parallel_world_size` returns; None: the size of the group."""
    parallel_state.sizes_set_by_hand["pp"] = world_size


def set_expert_model_parallel_world_size(world_size: int | None) -> None:
    """What `get_expert_model_parallel_world_size` returns; None: the size of the group."""
    parallel_state.sizes_set_by_hand["ep"] = world_size


def set_expert_tensor_parallel_world_size(world_size: int | None) -> None:
    """What `get_expert_tensor_parallel_world_size` returns; None: the size of the group."""
    parallel_state.sizes_set_by_hand["expt_tp"] = world_size


def set_virtual_pipeline_model_parallel_world_size(world_size: int | None) -> None:
    """Changes the number of chunks per stage; None turns interleaving off."""
    parallel_state._virtual_size = world_size


def set_tensor_model_parallel_rank(rank: int | None) -> None:
    """What `get_tensor_model_parallel_rank` returns; None: the place in the group."""
    parallel_state.ranks_set_by_hand["tp"] = rank


def set_pipeline_model_parallel_rank(rank: int | None) -> None:
    """What `get_pipeline_model_parallel_rank` returns; None: the place in the group."""
    parallel_state.ranks_set_by_hand["pp"] = rank


def set_data_parallel_rank(rank: int | None) -> None:
    """What `get_data_parallel_rank` returns, with context parallelism or not; None: the place in the
    group."""
    parallel_state.ranks_set_by_hand["dp"] = parallel_state.ranks_set_by_hand["dp_cp"] = rank


def set_expert_model_parallel_rank(rank: int | None) -> None:
    """What `get_expert_model_parallel_rank` returns; None: the place in the group."""
    parallel_state.ranks_set_by_hand["ep"] = rank


def set_expert_tensor_parallel_rank(rank: int | None) -> None:
    """What `get_expert_tensor_parallel_rank` returns; None: the place in the group."""
    parallel_state.ranks_set_by_hand["expt_tp"] = rank


# -- Global ranks of peers, for calls that name a source or a destination --


def get_global_ranks(kind: str) -> list[int]:
    """The global ranks of this rank's group of a kind, in group order. Raises as `get_group`."""
    return dist.get_process_group_ranks(get_group(kind))


def get_tensor_model_parallel_src_rank() -> int:
    """Global rank of the first member of our tensor group."""
    return get_global_ranks("tp")[0]


def get_model_parallel_src_rank() -> int:
    """Global rank of the first member of our model group."""
    return get_global_ranks("mp")[0]


def get_data_parallel_src_rank(with_context_parallel: bool = False) -> int:
    """Global rank of the first member of our data group."""
    return get_global_ranks("dp_cp" if with_context_parallel else "dp")[0]


def get_expert_model_parallel_src_rank() -> int:
    """Global rank of the first member of our expert group."""
    return get_global_ranks("ep")[0]


def get_context_parallel_global_ranks(check_initialized: bool = True) -> list[int] | None:
    """Global ranks of our context group, first piece first."""
    return get_global_ranks("cp") if check_initialized or is_initialized() else None


def get_pipeline_model_parallel_first_rank() -> int:
    """Global rank of our pipeline's first stage, where the model begins."""
    return _global_rank_of_stage(get_pipeline_placement().first_rank)


def get_pipeline_model_parallel_last_rank() -> int:
    """Global rank of our pipeline's last stage, where the model ends."""
    return _global_rank_of_stage(get_pipeline_placement().last_rank)


def get_pipeline_model_parallel_next_rank() -> int:
    """Global rank of the place after ours in the pipeline; after the last comes the first."""
    return _global_rank_of_stage((rank_of("pp") + 1) % size_of("pp"))


def get_pipeline_model_parallel_prev_rank() -> int:
    """Global rank of the place before ours in the pipeline; before the first comes the last."""
    return _global_rank_of_stage((rank_of("pp") - 1) % size_of("pp"))


def _global_rank_of_stage(place: int) -> int:
    ranks = get_global_ranks("pp")
    if place >= len(ranks):
        raise RuntimeError(
            f"place {place} of a pipeline of {size_of('pp')}, as set by hand, has no rank: the "
            f"pipeline group has {len(ranks)}; set None, or make the groups of that size"
        )
    return ranks[place]
