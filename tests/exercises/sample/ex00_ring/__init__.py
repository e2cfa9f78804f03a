"""An exercise small enough to try the engine on: a sum around a ring."""

from minimegatron.exercises.exercise import Exercise

EXERCISE = Exercise(
    name="ex00_ring",
    title="A sum around a ring",
    tier="warm-up",
    minutes=1,
    num_ranks=2,
    mirrors="",
    summary="Write ring_sum: every rank ends with the sum of all ranks' values.",
    package="tests.exercises.sample",
)
