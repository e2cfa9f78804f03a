"""Tokens on their way to other ranks' experts and back, and their gradients on the way home."""

from minimegatron.exercises.exercise import Exercise

EXERCISE = Exercise(
    name="ex20_all_to_all",
    title="All-to-all with uneven splits, and its backward",
    tier="stretch",
    minutes=45,
    num_ranks=4,
    mirrors="minimegatron.core.tensor_parallel.uneven_rows.all_to_all",
    summary="Send each token to the ranks of its experts, and bring results and gradients back.",
    real=(
        "minimegatron.core.transformer.moe.permutation.permute",
        "minimegatron.core.transformer.moe.permutation.unpermute",
        "minimegatron.core.transformer.moe.permutation.sort_chunks_by_idxs",
    ),
    question=(
        "The real dispatcher has six steps, and only two of them exchange tokens. Why may a schedule "
        "want to start such a step, compute something else, and wait for it later?"
    ),
)
