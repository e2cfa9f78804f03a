"""The cool-down is one backward too short.

Expected: rank 0, microbatch 7: backward is never done
"""

from minimegatron.exercises.bench.schedule_of_order import with_messages


def schedule(stage, caps):
    M = stage.num_microbatches
    num_warmup = min(stage.pp_size - stage.pp_rank - 1, caps[stage.pp_rank] - 1, M)
    order = "F" * num_warmup + "FB" * (M - num_warmup) + "B" * num_warmup
    actions = list(with_messages(stage, order))
    yield from actions[:-2] if stage.pp_rank == 0 else actions
