"""Stage 0 holds one, stages behind it want two before they begin with a backward.

Expected: deadlock: rank 0 does B0 before F1, and rank 1 does F1 before B0
"""

from minimegatron.exercises.bench.schedule_of_order import with_messages


def schedule(stage, caps):
    M = stage.num_microbatches
    num_warmup = 0 if stage.pp_rank == 0 else min(caps[stage.pp_rank] - 1, M)
    yield from with_messages(stage, "F" * num_warmup + "FB" * (M - num_warmup) + "B" * num_warmup)
