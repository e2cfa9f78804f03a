"""The interleaved schedule: which chunk runs which microbatch when, and how long to warm up.

Started by: you, and `minimegatron exercises check`. With v chunks per stage, a stage does M * v
forwards and M * v backwards. Two small functions decide their order. The check puts yours in place
of ours: the planner looks for deadlocks, and then 4 real ranks run a step in your order.

Letters: p stages, r this stage, v chunks per stage, M microbatches, G microbatches per group.
Chunk c of stage r is virtual stage c * p + r: every microbatch goes round the ring of stages v times.
"""

from minimegatron.core.pipeline_parallel.schedule_table import RankMicrobatches


def get_schedule_table(
    num_microbatches: int, num_model_chunks: int, microbatch_group_size_per_vp_stage: int
) -> list[tuple[int, int]]:
    """The order of all forwards of a stage, the same on every stage: rows (microbatch, chunk).

    Microbatches go in groups of G. A group visits chunk 0, all its microbatches in turn, then chunk 1,
    and so on; then comes the next group. The last group may be smaller.
    """
    raise NotImplementedError(
        "Write get_schedule_table: groups, in each the chunks, in each the microbatches"
    )


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
    """How a stage's M * v forwards divide over warm-up and steady state.

    Return RankMicrobatches(total, are_all_in_warmup, num_warmup, num_remaining):

        total                 M * v
        num_warmup            forwards of the warm-up, at most total; the steady state begins with
                              one more, if any is left
        are_all_in_warmup     True where there is nothing left for the steady state
        num_remaining         forwards that are each followed by a backward

    forward_only: everything is warm-up. pp_size 1: no warm-up. Not interleaved: as plain 1F1B,
    p - r - 1. Interleaved: count yourself; the page helps. The last argument is False here.
    """
    raise NotImplementedError(
        "Write count_rank_microbatches: how many forwards must a stage do before its first gradient "
        "can be there?"
    )


if __name__ == "__main__":
    from minimegatron.exercises.check import main

    main(__file__)
