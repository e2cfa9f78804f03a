"""A ring of attention: keys and values travel from rank to rank, and their gradients come home."""

from minimegatron.exercises.exercise import Exercise

EXERCISE = Exercise(
    name="ex22_ring_attention",
    title="A ring of attention, and its backward",
    tier="stretch",
    minutes=45,
    num_ranks=4,
    mirrors="minimegatron.core.transformer.context_parallel.RingAttention",
    summary="Attend to a sequence cut over ranks: keys go round, and their gradients come home.",
    real=(
        "minimegatron.core.transformer.context_parallel.merge",
        "minimegatron.core.transformer.context_parallel.block_of",
        "minimegatron.core.transformer.context_parallel.RingAttention",
        "minimegatron.core.transformer.context_parallel.block_gradients",
    ),
    question=(
        "In the real ring, keys and values are under way while a block is computed. Which hop has "
        "nothing beside it that it could hide behind, and in which of the two directions?"
    ),
)
