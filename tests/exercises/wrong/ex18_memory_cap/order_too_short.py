"""The order has too few letters.

Expected: it needs 8 F's, 8 B's
"""

from minimegatron.exercises.bench.schedule_of_order import with_messages


def schedule(stage, caps):
    M = stage.num_microbatches
    yield from with_messages(stage, "FB" * (M - 1))
