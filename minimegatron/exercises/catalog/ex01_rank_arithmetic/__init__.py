"""Rank arithmetic: from a rank's number to its coordinates, and to the groups it is in."""

from minimegatron.exercises.exercise import Exercise

EXERCISE = Exercise(
    name="ex01_rank_arithmetic",
    title="Rank arithmetic",
    tier="warm-up",
    minutes=20,
    num_ranks=0,
    mirrors="minimegatron.core.rank_generator.RankGenerator",
    summary="Find a rank's coordinates, and list the ranks of every group.",
    real=(
        "minimegatron.core.rank_generator.RankGenerator.coordinates",
        "minimegatron.core.rank_generator.RankGenerator.get_ranks",
    ),
    question=(
        "The real `coordinates` reads `self.stride`. What is the stride of a word, and why is "
        "that of the first word 1?"
    ),
)
