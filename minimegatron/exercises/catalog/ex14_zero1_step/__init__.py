"""ZeRO-1: each data-parallel rank updates one shard of the parameters."""

from minimegatron.exercises.exercise import Exercise

EXERCISE = Exercise(
    name="ex14_zero1_step",
    title="A ZeRO-1 step",
    tier="stretch",
    minutes=45,
    num_ranks=4,
    mirrors="minimegatron.core.optimizer.distrib_optimizer.local_ranges",
    summary="Cut gradients, optimizer state and updates over the data-parallel ranks.",
)
