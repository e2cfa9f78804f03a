"""Predict 1F1B: what every stage does, in order, before any of it is run."""

from minimegatron.exercises.exercise import Exercise

EXERCISE = Exercise(
    name="ex05_predict_1f1b",
    title="Predict the order of 1F1B",
    tier="warm-up",
    minutes=20,
    num_ranks=0,
    mirrors="minimegatron.core.pipeline_parallel.loops.one_f_one_b",
    summary="Write down the order of three stages by hand, then as a function for any number.",
    real=("minimegatron.core.pipeline_parallel.loops.one_f_one_b",),
    question=(
        "The plan has calls between forwards and backwards. After which forward does a stage "
        "wait for a gradient for the first time?"
    ),
)
