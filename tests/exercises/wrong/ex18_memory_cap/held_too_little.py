"""Each stage holds one less than the stage before it.

Expected: This is 1F1B with warm-ups of 2, 1, 0, 0 forwards. With a longer warm-up on stage 2 the step
gets shorter.
"""

from minimegatron.exercises.bench.schedule_of_order import with_messages


def schedule(stage, caps):
    M = stage.num_microbatches
    p = stage.pp_size
    warmups = [min(p - 1, caps[0] - 1, M)]
    for rank in range(1, p):
        warmups.append(min(caps[rank] - 1, max(warmups[-1] - 1, 0)))
    num_warmup = warmups[stage.pp_rank]
    yield from with_messages(stage, "F" * num_warmup + "FB" * (M - num_warmup) + "B" * num_warmup)
