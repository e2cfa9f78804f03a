"""Gradients of experts: summed over other ranks than dense ones, divided by the same number."""

from minimegatron.exercises.exercise import Exercise

EXERCISE = Exercise(
    name="ex21_expert_gradients",
    title="Expert gradients over the right group",
    tier="stretch",
    minutes=40,
    num_ranks=4,
    mirrors="minimegatron.core.parameter.reduce_group",
    summary="Sum dense and expert gradients, each over its own ranks; then take one norm of both.",
    real=("minimegatron.core.parameter.kind_of", "minimegatron.core.parameter.reduce_group"),
    question=(
        "The real code asks a parameter for its kind, and a table for the kind's groups. What would a "
        "third kind of parameter have to say there, and what need not change?"
    ),
)
