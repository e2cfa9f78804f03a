"""Each stage warms up as far as its own room allows, whatever its neighbours do.

Expected: the step takes 69, and may take 54
"""

from minimegatron.exercises.bench_schedule import with_messages


def schedule(stage, caps):
    M = stage.num_microbatches
    num_warmup = min(stage.pp_size - stage.pp_rank - 1, caps[stage.pp_rank] - 1, M)
    yield from with_messages(stage, "F" * num_warmup + "FB" * (M - num_warmup) + "B" * num_warmup)
