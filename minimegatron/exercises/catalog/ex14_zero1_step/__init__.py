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
    real=("minimegatron.core.optimizer.distrib_optimizer.local_ranges",),
    question=(
        "After the step every rank has all parameters, but only a part of Adam's state. What "
        "of it must a checkpoint collect from all ranks?"
    ),
)
