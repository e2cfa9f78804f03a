"""The actions are made, but not yielded.

Expected: schedule returned None; it must yield actions: yield from with_messages(stage, order)
"""

from minimegatron.exercises.bench.schedule_of_order import with_messages


def schedule(stage, caps):
    M = stage.num_microbatches
    with_messages(stage, "FB" * M)
