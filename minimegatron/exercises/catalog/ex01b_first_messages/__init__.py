"""First messages: a sum over two ranks, a message, and a hang on purpose."""

from minimegatron.exercises.exercise import Exercise

EXERCISE = Exercise(
    name="ex01b_first_messages",
    title="First messages between two ranks",
    tier="warm-up",
    minutes=10,
    num_ranks=2,
    mirrors="",
    summary="Sum a tensor over two ranks, send one, and let two ranks wait for each other on purpose.",
    question=(
        "The hang report named a line of your file for each rank. Which two lines must change "
        "places, on which rank, so that both can go on?"
    ),
)
