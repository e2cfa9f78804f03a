"""The table is made, and not returned.

Expected: get_schedule_table(5, 2, 3) returned None (was `return` forgotten?)
"""

from minimegatron.core.pipeline_parallel.schedule_table import RankMicrobatches


def get_schedule_table(num_microbatches, num_model_chunks, microbatch_group_size_per_vp_stage):
    M, v, G = num_microbatches, num_model_chunks, microbatch_group_size_per_vp_stage
    table = [
        (microbatch, chunk)
        for first in range(0, M, G)
        for chunk in range(v)
        for microbatch in range(first, min(first + G, M))
    ]
    table.sort()


def count_rank_microbatches(
    pp_size,
    pp_rank,
    num_microbatches,
    num_model_chunks,
    microbatch_group_size_per_vp_stage,
    is_interleaved=True,
    forward_only=False,
    overlap_moe_expert_parallel_comm=False,
):
    total = num_microbatches * num_model_chunks
    num_following = pp_size - pp_rank - 1
    group_size = microbatch_group_size_per_vp_stage
    if forward_only:
        num_warmup = total
    elif pp_size == 1:
        num_warmup = 0
    elif not is_interleaved:
        num_warmup = num_following
    else:
        num_warmup = (num_model_chunks - 1) * group_size + 2 * num_following
    are_all_in_warmup = num_warmup >= total
    num_warmup = min(num_warmup, total)
    return RankMicrobatches(total, are_all_in_warmup, num_warmup, total - num_warmup)
