"""Who am I, and who are my peers: this process's groups, and the getters everybody asks.

Only the edges of the package ask; code between takes its groups as arguments
(`ProcessGroupCollection`). Counterpart:
`megatron.core.parallel_state`, under the same names. `RankGenerator` and the two functions that pick
ranks for embeddings live in `rank_generator`; they are importable here, where Megatron has them.

One process group stands for each distinct set of ranks: with tp=1, the model group and the pipeline
group are the same object. A group of all ranks is made anew beside the default group. Megatron makes
one group per kind; each costs connections, and with gloo threads. Where the default group is gloo's,
these are `minimegatron.backend`'s: small tensors go through memory that the ranks share.
"""

from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta

import torch.distributed as dist

from minimegatron import backend
from minimegatron.core.group_checks import check_new_groups, refuse_absence, refuse_chunk
from minimegatron.core.orders.placement import (
    Placement,
    fitting,
    ranks_of_ends,
    ranks_of_first,
    usual_placement,
)
from minimegatron.core.rank_generator import DEFAULT_ORDER, all_groups
from minimegatron.core.utils import barrier
from minimegatron.exports import all_of

# What no training step calls: getters, setters, `destroy_model_parallel`.
__getattr__, __dir__ = all_of(__name__, "minimegatron.core.parallel_getters")


@dataclass(frozen=True)
class _ParallelState:
    """This rank's view: per kind of group, the group it is in; None if it is in none."""

    groups: dict[str, dist.ProcessGroup | None]
    places: dict[str, int]
    """This rank's, in each group that it is in."""
    created: list[dist.ProcessGroup]
    placement: Placement
    """Which rank of this rank's pipeline holds which stage of the model."""


_state: _ParallelState | None = None
_virtual_size: int | None = None
_virtual_rank: int | None = None
sizes_set_by_hand: dict[str, int | None] = {}
ranks_set_by_hand: dict[str, int | None] = {}
"""By kind of group. They go before what the groups say."""


# -- Making the groups --


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
    pipeline_sizes = (pipeline_model_parallel_size, virtual_pipeline_model_parallel_size)
    check_new_groups(
        is_initialized(), *pipeline_sizes, distributed_timeout_minutes, pipeline_placement
    )
    groups = all_groups(
        world_size=dist.get_world_size(),
        tp=tensor_model_parallel_size,
        pp=pipeline_model_parallel_size,
        cp=context_parallel_size,
        ep=expert_model_parallel_size,
        etp=expert_tensor_parallel_size,
        order=order,
        get_embedding_ranks=get_embedding_ranks or ranks_of_ends(pipeline_placement),
        get_position_embedding_ranks=get_position_embedding_ranks
        or ranks_of_first(pipeline_placement),
    )
    timeout = timedelta(minutes=distributed_timeout_minutes)
    over = backend.in_place_of(dist.get_backend())
    placement = pipeline_placement or usual_placement(*pipeline_sizes)
    _state = _create_groups(groups, timeout, placement, over)
    _virtual_size = virtual_pipeline_model_parallel_size
    _virtual_rank = None if _virtual_size is None else 0


def _create_groups(
    groups: dict[str, list[list[int]]],
    timeout: timedelta,
    placement: Placement,
    over: str | None = None,
) -> _ParallelState:
    """Makes one process group per distinct set of ranks, the same calls in the same order on all.

    `new_group` is collective over the whole world: a rank that skipped the groups it is not a
    member of would leave the others waiting. The default group serves for none of them, so that
    after a failure all can be made anew.
    """
    me = dist.get_rank()
    kinds_of: dict[tuple[int, ...], list[str]] = {}
    for name, of_kind in groups.items():
        for ranks in of_kind:
            kinds_of.setdefault(tuple(sorted(ranks)), []).append(name)

    by_kind: dict[str, dist.ProcessGroup | None] = dict.fromkeys(groups)
    created = []
    for ranks, names in kinds_of.items():
        group = dist.new_group(
            list(ranks), timeout=timeout, backend=over, group_desc="+".join(names)
        )
        if me in ranks:
            if len(ranks) > 1:
                # The group connects now. With gloo, a rank that destroys a group breaks connections
                # that other ranks are still making; with NCCL, its first step would wait for them.
                barrier(group)
            created.append(group)
            by_kind |= dict.fromkeys(names, group)
    places = {kind: group.rank() for kind, group in by_kind.items() if group is not None}
    return _ParallelState(by_kind, places, created, placement)


def is_initialized() -> bool:
    """Whether the groups exist."""
    return _state is not None


# -- The three questions that every getter asks --


def get_group(kind: str, check_initialized: bool = True) -> dist.ProcessGroup | None:
    """This rank's group of a kind of `GROUP_KINDS`.

    Raises RuntimeError without `initialize_model_parallel`, and for a rank that is in no such group
    (a middle stage has no embedding group); with `check_initialized=False` returns None instead.
    """
    group = None if _state is None else _state.groups[kind]
    if group is None and check_initialized:
        refuse_absence(kind, is_initialized())
    return group


def size_of(kind: str) -> int:
    """Ranks in this rank's group of a kind, unless set by hand."""
    by_hand = sizes_set_by_hand.get(kind)
    return get_group(kind).size() if by_hand is None else by_hand


def rank_of(kind: str) -> int:
    """This rank's place in its group of a kind, unless set by hand."""
    place = ranks_set_by_hand.get(kind)
    if place is None and _state is not None:
        place = _state.places.get(kind)
    # Without a place there is no group either, and `get_group` raises.
    return get_group(kind).rank() if place is None else place


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


def get_data_parallel_group(with_context_parallel: bool = False) -> dist.ProcessGroup:
    """The ranks with the same weights and other samples; with context parallelism, also those with
    another piece of the same sequences, which is the group that gradients are reduced over."""
    return get_group("dp_cp" if with_context_parallel else "dp")


def get_context_parallel_group(check_initialized: bool = True) -> dist.ProcessGroup:
    """The ranks that share each sequence."""
    return get_group("cp", check_initialized)


# -- Sizes --


def get_pipeline_model_parallel_world_size() -> int:
    """Ranks of a pipeline."""
    return size_of("pp")


def get_virtual_pipeline_model_parallel_world_size() -> int | None:
    """Chunks per stage; None without interleaving."""
    return _virtual_size


def get_data_parallel_world_size(with_context_parallel: bool = False) -> int:
    """Copies of the model (times pieces of each sequence)."""
    return size_of("dp_cp" if with_context_parallel else "dp")


# -- This rank's place --


def get_tensor_model_parallel_rank() -> int:
    """Place in the tensor group."""
    return rank_of("tp")


def get_pipeline_model_parallel_rank() -> int:
    """Place in the pipeline."""
    return rank_of("pp")


def set_virtual_pipeline_model_parallel_rank(rank: int | None) -> None:
    """Announces which chunk is being built, for user code that asks globally."""
    global _virtual_rank
    _virtual_rank = rank


def get_data_parallel_rank(with_context_parallel: bool = False) -> int:
    """Place in the data group: which share of the samples is ours."""
    return rank_of("dp_cp" if with_context_parallel else "dp")


# -- Stages --
# The placement says which chunk of which rank begins the model, and which ends it.
# `ignore_virtual=True` asks whether any chunk of ours does.


def get_pipeline_placement() -> Placement:
    """Which rank of our pipeline holds which stage of the model.

    What `initialize_model_parallel` found, as long as the sizes are the same; else a line or a loop.
    """
    chunks = _virtual_size or 1
    given = None if _state is None else _state.placement
    if given is not None and given.num_model_chunks == chunks and "pp" not in sizes_set_by_hand:
        return given
    return fitting(given, size_of("pp"), chunks)


def is_pipeline_first_stage(ignore_virtual: bool = True, vp_stage: int | None = None) -> bool:
    """Whether the model begins in our chunk `vp_stage` or, with `ignore_virtual`, in any of ours.

    Raises ValueError if the chunk matters and `vp_stage` is missing or out of range.
    """
    if ignore_virtual or _virtual_size is None:
        return get_pipeline_placement().is_first_rank(rank_of("pp"))
    return get_pipeline_placement().is_first(rank_of("pp"), _chunk(vp_stage))


def is_pipeline_last_stage(ignore_virtual: bool = True, vp_stage: int | None = None) -> bool:
    """Whether the model ends in our chunk `vp_stage` or, with `ignore_virtual`, in any of ours.

    Raises ValueError if the chunk matters and `vp_stage` is missing or out of range.
    """
    if ignore_virtual or _virtual_size is None:
        return get_pipeline_placement().is_last_rank(rank_of("pp"))
    return get_pipeline_placement().is_last(rank_of("pp"), _chunk(vp_stage))


def _chunk(vp_stage: int | None) -> int:
    if vp_stage is None or not 0 <= vp_stage < _virtual_size:
        refuse_chunk(vp_stage, _virtual_size)
    return vp_stage
