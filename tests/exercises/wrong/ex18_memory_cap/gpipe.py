"""All forwards first: as many microbatches as there are.

Expected: rank 0: with the forward of microbatch 3 it holds 4
"""

from minimegatron.exercises.bench.schedule_of_order import with_messages


def schedule(stage, caps):
    M = stage.num_microbatches
    yield from with_messages(stage, "F" * M + "B" * M)
