"""Who am I, and who are my peers: this process's groups, and the getters everybody asks.

Everything between takes its groups as arguments (`ProcessGroupCollection`). Counterpart:
`megatron.core.parallel_state`, under the same names. `RankGenerator` and the two functions that pick
ranks for embeddings live in `rank_generator` and are imported here, where Megatron has them.

One process group stands for each distinct set of ranks: with tp=1, the model group and the pipeline
group are the same object. A group of all ranks is made anew beside the default group. Megatron makes
one group per kind; each costs connections, and with gloo threads. Where the default group is gloo's,
these are `minimegatron.backend`'s: small tensors go through memory that the ranks share.
"""

from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from functools import partial

import torch.distributed as dist

from minimegatron import backend
from minimegatron.core.collectives import is_tagged
from minimegatron.core.left_out import accepts_left_out
from minimegatron.core.pipeline_parallel.placement import Placement, usual_placement
from minimegatron.core.rank_generator import (
    DEFAULT_ORDER,
    GROUP_KINDS,
    RankGenerator,  # noqa: F401
    all_groups,
    default_embedding_ranks,  # noqa: F401
    default_position_embedding_ranks,  # noqa: F401
)
from minimegatron.core.utils import barrier


@dataclass(frozen=True)
class _ParallelState:
    """This rank's view: per kind of group, the group it is in (None if none) and the members."""

    groups: dict[str, dist.ProcessGroup | None]
    ranks: dict[str, list[int] | None]
    created: list[dist.ProcessGroup]
    placement: Placement | None
    """The stages on this rank's pipeline, if they are not placed as usual."""


_state: _ParallelState | None = None
_virtual_size: int | None = None
_virtual_rank: int | None = None
_sizes_set_by_hand: dict[str, int | None] = {}
_ranks_set_by_hand: dict[str, int | None] = {}
"""By kind of group. They go before what the groups say."""


# -- Making and freeing the groups --


@accepts_left_out
def initialize_model_parallel(
    tensor_model_parallel_size: int = 1,
    pipeline_model_parallel_size: int = 1,
    virtual_pipeline_model_parallel_size: int | None = None,
    *,
    context_parallel_size: int = 1,
    expert_model_parallel_size: int = 1,
    expert_tensor_parallel_size: int | None = None,
    distributed_timeout_minutes: int = 30,
    order: str = DEFAULT_ORDER,
    get_embedding_ranks: Callable[[list[int]], list[int]] | None = None,
    get_position_embedding_ranks: Callable[[list[int]], list[int]] | None = None,
    pipeline_placement: Placement | None = None,
) -> None:
    """Makes this rank's process groups; every rank must call it with the same arguments.

    The data-parallel size is what is left of the world:
    world_size / (tensor * context * pipeline). `expert_tensor_parallel_size` None means
    `tensor_model_parallel_size`. `order` numbers the ranks, the fastest-changing dimension first;
    see `RankGenerator`. Whoever waits longer than `distributed_timeout_minutes` for another rank of
    a group gives up. The two functions pick, from the global ranks of one pipeline, those that
    hold word and position embeddings; by default those of the first and the last stage of the model,
    and that of the first. `pipeline_placement` says which rank of a pipeline holds which stage; None
    for a line or, with several chunks, a loop.

    `python -m minimegatron groups` prints the groups without making them. With 16 ranks, tensor
    size 2 and pipeline size 4 there are 8 tensor groups (0-1, 2-3, ...), 4 pipelines (0-4-8-12,
    ...) and 8 data groups (0-2, 1-3, 4-6, ...).

    Raises ValueError for sizes or an order that do not fit the world (before any group is made),
    RuntimeError without `torch.distributed` or if the groups exist already.
    Source: `megatron.core.parallel_state.initialize_model_parallel`.
    """
    global _state, _virtual_size, _virtual_rank
    if not dist.is_initialized():
        raise RuntimeError("call torch.distributed.init_process_group() first")
    if _state is not None:
        raise RuntimeError("model parallel groups exist already; call destroy_model_parallel()")
    _check_virtual_size(virtual_pipeline_model_parallel_size, pipeline_model_parallel_size)
    if distributed_timeout_minutes <= 0:
        raise ValueError(
            f"distributed_timeout_minutes is {distributed_timeout_minutes}; give more than 0"
        )
    if pipeline_placement is not None:
        _check_placement(
            pipeline_placement, pipeline_model_parallel_size, virtual_pipeline_model_parallel_size
        )
        get_embedding_ranks = get_embedding_ranks or partial(_ranks_of_ends, pipeline_placement)
        get_position_embedding_ranks = get_position_embedding_ranks or partial(
            _ranks_of_first_stage, pipeline_placement
        )
    groups = all_groups(
        world_size=dist.get_world_size(),
        tp=tensor_model_parallel_size,
        pp=pipeline_model_parallel_size,
        cp=context_parallel_size,
        ep=expert_model_parallel_size,
        etp=expert_tensor_parallel_size,
        order=order,
        get_embedding_ranks=get_embedding_ranks,
        get_position_embedding_ranks=get_position_embedding_ranks,
    )
    timeout = timedelta(minutes=distributed_timeout_minutes)
    _state = _create_groups(groups, timeout, pipeline_placement)
    _virtual_size = virtual_pipeline_model_parallel_size
    _virtual_rank = None if _virtual_size is None else 0


def _check_virtual_size(virtual_size: int | None, pipeline_size: int) -> None:
    if virtual_size is None:
        return
    if virtual_size < 1:
        raise ValueError(
            f"virtual_pipeline_model_parallel_size is {virtual_size}; give 1 or more, or None"
        )
    if pipeline_size < 2:
        raise ValueError(
            f"virtual_pipeline_model_parallel_size={virtual_size} needs a pipeline, but "
            f"pipeline_model_parallel_size is {pipeline_size}; use 2 or more stages"
        )


def _check_placement(placement: Placement, pipeline_size: int, virtual_size: int | None) -> None:
    sizes = (placement.pp_size, placement.num_model_chunks)
    if sizes != (pipeline_size, virtual_size or 1):
        raise ValueError(
            f"placement {placement.name} has {sizes[1]} chunks on each of {sizes[0]} ranks, but "
            f"pipeline_model_parallel_size is {pipeline_size} and "
            f"virtual_pipeline_model_parallel_size is {virtual_size}; make them equal"
        )


def _ranks_of_ends(placement: Placement, pp_ranks: list[int]) -> list[int]:
    """The ranks of a pipeline that hold word embeddings: one if both ends are there."""
    return [pp_ranks[rank] for rank in dict.fromkeys((placement.first_rank, placement.last_rank))]


def _ranks_of_first_stage(placement: Placement, pp_ranks: list[int]) -> list[int]:
    return [pp_ranks[placement.first_rank]]


def _create_groups(
    groups: dict[str, list[list[int]]], timeout: timedelta, placement: Placement | None
) -> _ParallelState:
    """Makes one process group per distinct set of ranks, the same calls in the same order on all.

    `new_group` is collective over the whole world: a rank that skipped the groups it is not a
    member of would leave the others waiting. The default group serves for none of them, so that
    after a failure all can be made anew.
    """
    me, over = dist.get_rank(), backend.in_place_of(dist.get_backend())
    kinds_of: dict[tuple[int, ...], list[str]] = {}
    for kind in GROUP_KINDS:
        for ranks in groups[kind.name]:
            kinds_of.setdefault(tuple(sorted(ranks)), []).append(kind.name)

    by_kind: dict[str, dist.ProcessGroup | None] = {kind.name: None for kind in GROUP_KINDS}
    created = []
    for ranks, names in kinds_of.items():
        group = dist.new_group(list(ranks), timeout, over, group_desc="+".join(names))
        if me in ranks:
            if len(ranks) > 1:
                # The group connects now. With gloo, a rank that destroys a group breaks connections
                # that other ranks are still making; with NCCL, its first step would wait for them.
                barrier(group)
            created.append(group)
            by_kind |= dict.fromkeys(names, group)
    mine = {
        name: next((ranks for ranks in of_kind if me in ranks), None)
        for name, of_kind in groups.items()
    }
    return _ParallelState(by_kind, mine, created, placement)


def destroy_model_parallel() -> None:
    """Frees every group that `initialize_model_parallel` made, and forgets what was set by hand.

    The default group stays. Waits for nobody, so that a rank that failed may call it too.
    """
    global _state, _virtual_size, _virtual_rank
    if _state is not None and dist.is_initialized():
        for group in _state.created:
            dist.destroy_process_group(group)
    _state = _virtual_size = _virtual_rank = None
    _sizes_set_by_hand.clear()
    _ranks_set_by_hand.clear()


def is_initialized() -> bool:
    """Whether the groups exist."""
    return _state is not None


def model_parallel_is_initialized() -> bool:
    """Whether the groups exist; Megatron's longer name."""
    return is_initialized()


# -- The four questions behind every getter --


def get_group(kind: str, check_initialized: bool = True) -> dist.ProcessGroup | None:
    """This rank's group of a kind of `GROUP_KINDS`.

    Raises RuntimeError without `initialize_model_parallel`, and for a rank that is in no such group
    (a middle stage has no embedding group); with `check_initialized=False` returns None instead.
    """
    group = None if _state is None else _state.groups[kind]
    if group is None and check_initialized:
        _explain_absence(kind)
    return group


def get_global_ranks(kind: str) -> list[int]:
    """The global ranks of this rank's group of a kind, in group order. Raises as `get_group`."""
    ranks = None if _state is None else _state.ranks[kind]
    if ranks is None:
        _explain_absence(kind)
    return ranks


def _explain_absence(kind: str) -> None:
    title = next(entry.title for entry in GROUP_KINDS if entry.name == kind)
    if _state is None:
        raise RuntimeError(f"the {title} group does not exist; call initialize_model_parallel()")
    raise RuntimeError(f"rank {dist.get_rank()} is in no {title} group")


def _size(kind: str) -> int:
    by_hand = _sizes_set_by_hand.get(kind)
    return get_group(kind).size() if by_hand is None else by_hand


def _rank(kind: str) -> int:
    by_hand = _ranks_set_by_hand.get(kind)
    return get_group(kind).rank() if by_hand is None else by_hand


def _on_gloo(group: dist.ProcessGroup, title: str) -> dist.ProcessGroup:
    """`group`, if it sends the CPU's tensors."""
    if not is_tagged(group):
        config = str(dist.get_backend_config(group))
        raise RuntimeError(
            f"the {title} group sends over {config}, and no second group over gloo is made; call "
            'torch.distributed.new_group(ranks, backend="gloo") on all ranks and use that group'
        )
    return group


# -- Groups --


def get_model_parallel_group(check_initialized: bool = True) -> dist.ProcessGroup:
    """The ranks that hold one copy of the model: tensor and pipeline together."""
    return get_group("mp", check_initialized)


def get_tensor_model_parallel_group(check_initialized: bool = True) -> dist.ProcessGroup:
    """The ranks that share each layer."""
    return get_group("tp", check_initialized)


def get_pipeline_model_parallel_group(check_initialized: bool = True) -> dist.ProcessGroup:
    """The ranks of this rank's pipeline; `get_pipeline_placement` says which stages each holds."""
    return get_group("pp", check_initialized)


@accepts_left_out
def get_data_parallel_group(with_context_parallel: bool = False) -> dist.ProcessGroup:
    """The ranks with the same weights and other samples; with context parallelism, also those with
    another piece of the same sequences, which is the group that gradients are reduced over."""
    return get_group("dp_cp" if with_context_parallel else "dp")


@accepts_left_out
def get_data_parallel_group_gloo(with_context_parallel: bool = False) -> dist.ProcessGroup:
    """The group of `get_data_parallel_group`, for tensors on the CPU.

    Megatron makes a second group; here it is the same one. Raises RuntimeError as `get_group`, and
    if that group sends over NCCL.
    """
    return _on_gloo(get_data_parallel_group(with_context_parallel), "data")


def get_context_parallel_group(check_initialized: bool = True) -> dist.ProcessGroup:
    """The ranks that share each sequence."""
    return get_group("cp", check_initialized)


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


@accepts_left_out
def get_expert_data_parallel_group(check_initialized: bool = True) -> dist.ProcessGroup:
    """The ranks with the same experts: the group that expert gradients are reduced over."""
    return get_group("expt_dp", check_initialized)


@accepts_left_out
def get_expert_data_parallel_group_gloo() -> dist.ProcessGroup:
    """As `get_data_parallel_group_gloo`, of `get_expert_data_parallel_group`."""
    return _on_gloo(get_expert_data_parallel_group(), "expert data")


def get_expert_tensor_and_model_parallel_group(check_initialized: bool = True) -> dist.ProcessGroup:
    """The ranks that hold one full set of a layer's experts."""
    return get_group("tp_ep", check_initialized)


def get_expert_tensor_model_pipeline_parallel_group(
    check_initialized: bool = True,
) -> dist.ProcessGroup:
    """The ranks that hold one full set of all layers' experts."""
    return get_group("tp_ep_pp", check_initialized)


# -- Sizes --


def get_tensor_model_parallel_world_size() -> int:
    """Ranks that share each layer."""
    return _size("tp")


def get_pipeline_model_parallel_world_size() -> int:
    """Ranks of a pipeline."""
    return _size("pp")


def get_virtual_pipeline_model_parallel_world_size() -> int | None:
    """Chunks per stage; None without interleaving."""
    return _virtual_size


@accepts_left_out
def get_data_parallel_world_size(with_context_parallel: bool = False) -> int:
    """Copies of the model (times pieces of each sequence)."""
    return _size("dp_cp" if with_context_parallel else "dp")


def get_context_parallel_world_size() -> int:
    """Pieces of each sequence."""
    return _size("cp")


def get_tensor_and_context_parallel_world_size() -> int:
    """Ranks of a stage that work on the same samples."""
    return _size("tp_cp")


def get_expert_model_parallel_world_size() -> int:
    """Ranks that share the experts of a layer."""
    return _size("ep")


def get_expert_tensor_parallel_world_size() -> int:
    """Ranks that share each expert."""
    return _size("expt_tp")


def get_expert_tensor_and_model_parallel_world_size() -> int:
    """Ranks that hold one full set of a layer's experts."""
    return _size("tp_ep")


@accepts_left_out
def get_expert_data_parallel_world_size() -> int:
    """Copies of each expert."""
    return _size("expt_dp")


# -- This rank's place --


def get_tensor_model_parallel_rank() -> int:
    """Place in the tensor group."""
    return _rank("tp")


def get_pipeline_model_parallel_rank() -> int:
    """Place in the pipeline."""
    return _rank("pp")


def get_virtual_pipeline_model_parallel_rank() -> int | None:
    """The chunk last announced by `set_virtual_pipeline_model_parallel_rank`; None without
    interleaving. Prefer to pass `vp_stage` along."""
    return _virtual_rank


def set_virtual_pipeline_model_parallel_rank(rank: int | None) -> None:
    """Announces which chunk is being built or run, for user code that asks globally."""
    global _virtual_rank
    _virtual_rank = rank


def set_virtual_pipeline_model_parallel_world_size(world_size: int | None) -> None:
    """Changes the number of chunks per stage; None turns interleaving off."""
    global _virtual_size
    _virtual_size = world_size


@accepts_left_out
def get_data_parallel_rank(with_context_parallel: bool = False) -> int:
    """Place in the data group: which share of the samples is ours."""
    return _rank("dp_cp" if with_context_parallel else "dp")


def get_context_parallel_rank() -> int:
    """Place in the context group: which piece of each sequence is ours."""
    return _rank("cp")


def get_tensor_and_context_parallel_rank() -> int:
    """Place in the tensor-and-context group."""
    return _rank("tp_cp")


def get_expert_model_parallel_rank() -> int:
    """Place in the expert group: which experts are ours."""
    return _rank("ep")


def get_expert_tensor_parallel_rank() -> int:
    """Place in the expert-tensor group."""
    return _rank("expt_tp")


def get_expert_tensor_and_model_parallel_rank() -> int:
    """Place in the expert-tensor-and-expert group."""
    return _rank("tp_ep")


@accepts_left_out
def get_expert_data_parallel_rank() -> int:
    """Place among the copies of our experts."""
    return _rank("expt_dp")


def get_all_ranks() -> str:
    """Our places, as "tensor_data_context_pipeline_expert", to name files and threads after."""
    return "_".join(str(_rank(kind)) for kind in ("tp", "dp", "cp", "pp", "ep"))


# -- Sizes and places set by hand --
# For a program that handles a layout without its processes, such as one that converts checkpoints. The
# getter, and whoever places layers by it, gets what was set last; None asks the group again. The groups
# themselves do not change, and neither does what is sent over them.


def set_tensor_model_parallel_world_size(world_size: int | None) -> None:
    """What `get_tensor_model_parallel_world_size` returns; None: the size of the group."""
    _sizes_set_by_hand["tp"] = world_size


def set_pipeline_model_parallel_world_size(world_size: int | None) -> None:
    """What `get_pipeline_model_parallel_world_size` returns; None: the size of the group."""
    _sizes_set_by_hand["pp"] = world_size


def set_expert_model_parallel_world_size(world_size: int | None) -> None:
    """What `get_expert_model_parallel_world_size` returns; None: the size of the group."""
    _sizes_set_by_hand["ep"] = world_size


def set_expert_tensor_parallel_world_size(world_size: int | None) -> None:
    """What `get_expert_tensor_parallel_world_size` returns; None: the size of the group."""
    _sizes_set_by_hand["expt_tp"] = world_size


def set_tensor_model_parallel_rank(rank: int | None) -> None:
    """What `get_tensor_model_parallel_rank` returns; None: the place in the group."""
    _ranks_set_by_hand["tp"] = rank


def set_pipeline_model_parallel_rank(rank: int | None) -> None:
    """What `get_pipeline_model_parallel_rank` returns; None: the place in the group."""
    _ranks_set_by_hand["pp"] = rank


def set_data_parallel_rank(rank: int | None) -> None:
    """What `get_data_parallel_rank` returns, with context parallelism or not; None: the place in the
    group."""
    _ranks_set_by_hand["dp"] = _ranks_set_by_hand["dp_cp"] = rank


def set_expert_model_parallel_rank(rank: int | None) -> None:
    """What `get_expert_model_parallel_rank` returns; None: the place in the group."""
    _ranks_set_by_hand["ep"] = rank


def set_expert_tensor_parallel_rank(rank: int | None) -> None:
    """What `get_expert_tensor_parallel_rank` returns; None: the place in the group."""
    _ranks_set_by_hand["expt_tp"] = rank


# -- Global ranks of peers, for calls that name a source or a destination --


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
    return _global_rank_of_stage((_rank("pp") + 1) % _size("pp"))


def get_pipeline_model_parallel_prev_rank() -> int:
    """Global rank of the place before ours in the pipeline; before the first comes the last."""
    return _global_rank_of_stage((_rank("pp") - 1) % _size("pp"))


def _global_rank_of_stage(place: int) -> int:
    ranks = get_global_ranks("pp")
    if place >= len(ranks):
        raise RuntimeError(
            f"place {place} of a pipeline of {_size('pp')}, as set by hand, has no rank: the pipeline "
            f"group has {len(ranks)}; set None, or make the groups of that size"
        )
    return ranks[place]


# -- Stages --
# The placement says which chunk of which rank begins the model, and which ends it.
# `ignore_virtual=True` asks whether any chunk of ours does.


def get_pipeline_placement() -> Placement:
    """Which rank of our pipeline holds which stage of the model.

    What `initialize_model_parallel` was given, as long as the sizes are the same; else a line or a
    loop.
    """
    size, chunks = _size("pp"), _virtual_size or 1
    given = None if _state is None else _state.placement
    if given is not None and (given.pp_size, given.num_model_chunks) == (size, chunks):
        return given
    return usual_placement(size, chunks)


def is_pipeline_first_stage(ignore_virtual: bool = True, vp_stage: int | None = None) -> bool:
    """Whether the model begins in our chunk `vp_stage` or, with `ignore_virtual`, in any of ours.

    Raises ValueError if the chunk matters and `vp_stage` is missing or out of range.
    """
    if ignore_virtual or _virtual_size is None:
        return get_pipeline_placement().is_first_rank(_rank("pp"))
    chunk = _chunk(vp_stage)
    return get_pipeline_placement().is_first(_rank("pp"), chunk)


def is_pipeline_last_stage(ignore_virtual: bool = True, vp_stage: int | None = None) -> bool:
    """Whether the model ends in our chunk `vp_stage` or, with `ignore_virtual`, in any of ours.

    Raises ValueError if the chunk matters and `vp_stage` is missing or out of range.
    """
    if ignore_virtual or _virtual_size is None:
        return get_pipeline_placement().is_last_rank(_rank("pp"))
    chunk = _chunk(vp_stage)
    return get_pipeline_placement().is_last(_rank("pp"), chunk)


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


def _chunk(vp_stage: int | None) -> int:
    if vp_stage is None or not 0 <= vp_stage < _virtual_size:
        raise ValueError(
            f"vp_stage is {vp_stage}; each stage has {_virtual_size} chunks, so pass "
            f"0..{_virtual_size - 1}, or ignore_virtual=True to ask about the stage"
        )
    return vp_stage
