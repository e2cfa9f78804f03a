"""Tied embeddings: one weight on two stages, and the sum of its two gradients."""

from minimegatron.exercises.exercise import Exercise

EXERCISE = Exercise(
    name="ex11_tied_embeddings",
    title="Tied embeddings",
    tier="core",
    minutes=20,
    num_ranks=4,
    mirrors=("minimegatron.core.distributed.finalize_model_grads._allreduce_word_embedding_grads"),
    summary="Add up the two gradients of a weight that the first and the last stage share.",
    real=("minimegatron.core.distributed.finalize_model_grads._allreduce_word_embedding_grads",),
    question=(
        "On most ranks the real function does nothing. How does a rank know that it has no "
        "copy, and what would happen if it called the all-reduce all the same?"
    ),
)
