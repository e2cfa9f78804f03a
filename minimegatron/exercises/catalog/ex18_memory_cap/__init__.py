"""A schedule of your own, for stages whose memory is too small for 1F1B."""

from minimegatron.exercises.exercise import Exercise

EXERCISE = Exercise(
    name="ex18_memory_cap",
    title="Design a schedule under a memory cap",
    tier="stretch",
    minutes=45,
    num_ranks=4,
    mirrors="",
    summary="Write a schedule that fits a memory cap; the shorter the step, the better the score.",
    question=(
        "Your order holds fewer microbatches than 1F1B does. Which stage waits longer than in "
        "1F1B now, and for which other stage?"
    ),
)
