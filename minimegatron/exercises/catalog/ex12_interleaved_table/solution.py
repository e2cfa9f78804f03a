"""The interleaved schedule, solved.

Called by: the check, in place of `schedule_table`'s own; the real schedule and the planner then read
their order from here.
"""

from minimegatron.core.pipeline_parallel.schedule_table import RankMicrobatches


def get_schedule_table(
    num_microbatches: int, num_model_chunks: int, microbatch_group_size_per_vp_stage: int
) -> list[tuple[int, int]]:
    """The order of all forwards of a stage: rows (microbatch, chunk)."""
    M, v, G = num_microbatches, num_model_chunks, microbatch_group_size_per_vp_stage
    return [
        (microbatch, chunk)
        for first in range(0, M, G)
        for chunk in range(v)
        for microbatch in range(first, min(first + G, M))
    ]


def count_rank_microbatches(
    pp_size: int,
    pp_rank: int,
    num_microbatches: int,
    num_model_chunks: int,
    microbatch_group_size_per_vp_stage: int,
    is_interleaved: bool = True,
    forward_only: bool = False,
    overlap_moe_expert_parallel_comm: bool = False,
) -> RankMicrobatches:
    """How a stage's M * v forwards divide over warm-up and steady state."""
    total = num_microbatches * num_model_chunks
    num_following = pp_size - pp_rank - 1
    if forward_only:
        num_warmup = total
    elif pp_size == 1:
        num_warmup = 0
    elif not is_interleaved:
        num_warmup = num_following
    else:
        # (v - 1) G forwards fill the earlier chunks. Then the first group runs on the last chunk,
        # and one exchange moves activations and gradients of neighbours together: towards the end of
        # the pipeline and back again each link costs one more of them.
        num_warmup = (num_model_chunks - 1) * microbatch_group_size_per_vp_stage + 2 * num_following
    are_all_in_warmup = num_warmup >= total
    num_warmup = min(num_warmup, total)
    return RankMicrobatches(total, are_all_in_warmup, num_warmup, total - num_warmup)


if __name__ == "__main__":
    from minimegatron.exercises.check import main

    main(__file__)
