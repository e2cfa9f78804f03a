"""Each stage warms up as far as its own room allows, whatever its neighbours do.

Expected: This is 1F1B with warm-ups of 1, 1, 1, 0 forwards. With a shorter warm-up on stage 2 the step
gets shorter.
"""

from minimegatron.exercises.bench.schedule_of_order import with_messages


def schedule(stage, caps):
    M = stage.num_microbatches
    num_warmup = min(stage.pp_size - stage.pp_rank - 1, caps[stage.pp_rank] - 1, M)
    yield from with_messages(stage, "F" * num_warmup + "FB" * (M - num_warmup) + "B" * num_warmup)
