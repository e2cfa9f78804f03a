"""Re-sharding a checkpoint: every rank says which box of which tensor it holds."""

from minimegatron.exercises.exercise import Exercise

EXERCISE = Exercise(
    name="ex16_reshard",
    title="Re-sharding a checkpoint",
    tier="stretch",
    minutes=45,
    num_ranks=4,
    mirrors="minimegatron.core.dist_checkpointing.mapping.make_sharded_tensors",
    summary="Say where a rank's memory lies in the full model, so that any layout can load it.",
    real=("minimegatron.core.dist_checkpointing.mapping.make_sharded_tensors",),
    question=(
        "How can whoever loads a checkpoint find out that a box is missing, or that two boxes "
        "overlap?"
    ),
)
