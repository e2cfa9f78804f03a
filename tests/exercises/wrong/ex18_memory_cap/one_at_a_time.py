"""Within any cap, and as slow as one process.

Expected: the step takes 96, and may take 48
"""

from minimegatron.exercises.bench.schedule_of_order import with_messages


def schedule(stage, caps):
    M = stage.num_microbatches
    yield from with_messages(stage, "FB" * M)
