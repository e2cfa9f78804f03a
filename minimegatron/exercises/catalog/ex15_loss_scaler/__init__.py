"""The loss scale: how large it may be, and how all ranks come to agree on a skipped step."""

from minimegatron.exercises.exercise import Exercise

EXERCISE = Exercise(
    name="ex15_loss_scaler",
    title="Loss scale: all ranks skip, or none",
    tier="core",
    minutes=30,
    num_ranks=4,
    mirrors="minimegatron.core.optimizer.grad_scaler.DynamicGradScaler.update",
    summary="Undo the loss scale, agree on overflow over all ranks, and move the scale.",
    real=("minimegatron.core.optimizer.grad_scaler.DynamicGradScaler.update",),
    question=(
        "The real optimizer asks all ranks for an overflow before it computes the norm. What "
        "would go wrong the other way round?"
    ),
)
