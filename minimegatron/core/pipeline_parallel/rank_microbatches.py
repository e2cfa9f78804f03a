"""How many microbatches of each phase this rank has, asked as Megatron asks it.

Counterpart: `megatron.core.pipeline_parallel.schedules`; the name can be imported from `schedules` too.
The schedules here ask `schedule_table` itself.
"""

from minimegatron.core import parallel_state
from minimegatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from minimegatron.core.pipeline_parallel.schedule_table import (
    RankMicrobatches,
    count_rank_microbatches,
)


def get_pp_rank_microbatches(
    num_microbatches: int,
    num_model_chunks: int,
    microbatch_group_size_per_vp_stage: int,
    forward_only: bool = False,
    overlap_moe_expert_parallel_comm: bool = False,
    p2p_communicator: P2PCommunicator | None = None,
) -> RankMicrobatches:
    """(total, are all in warm-up, warm-up, remaining) of this rank, in virtual microbatches.

    The rank is that of `p2p_communicator`, or else of `parallel_state`.
    """
    if p2p_communicator is None:
        pp_size = parallel_state.get_pipeline_model_parallel_world_size()
        pp_rank = parallel_state.get_pipeline_model_parallel_rank()
        vp_size = parallel_state.get_virtual_pipeline_model_parallel_world_size()
    else:
        pp_size = p2p_communicator.pp_group.size()
        pp_rank = p2p_communicator.pp_group.rank()
        vp_size = p2p_communicator.virtual_pipeline_model_parallel_size
    return count_rank_microbatches(
        pp_size,
        pp_rank,
        num_microbatches,
        num_model_chunks,
        microbatch_group_size_per_vp_stage,
        is_interleaved=vp_size is not None,
        forward_only=forward_only,
        overlap_moe_expert_parallel_comm=overlap_moe_expert_parallel_comm,
    )
