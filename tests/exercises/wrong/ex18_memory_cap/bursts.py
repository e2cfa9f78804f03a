"""Each stage fills its room and empties it, whatever its neighbours do.

Expected: deadlock: rank 1 does B2 before F3, and rank 2 does F3 before B2
"""

from minimegatron.exercises.bench.schedule_of_order import with_messages


def schedule(stage, caps):
    M = stage.num_microbatches
    cap, order = caps[stage.pp_rank], ""
    for first in range(0, M, cap):
        burst = min(cap, M - first)
        order += "F" * burst + "B" * burst
    yield from with_messages(stage, order)
