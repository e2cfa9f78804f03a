"""1F1B as it is, whatever the room.

Expected: rank 0: with the forward of microbatch 3 it holds 4 microbatches, but has room for 3 its
order: FFFFBFBFBFBFBBBB ^ this forward
"""

from minimegatron.exercises.bench.schedule_of_order import with_messages


def schedule(stage, caps):
    M = stage.num_microbatches
    num_warmup = min(stage.pp_size - stage.pp_rank - 1, M)
    yield from with_messages(stage, "F" * num_warmup + "FB" * (M - num_warmup) + "B" * num_warmup)
