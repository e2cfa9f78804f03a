"""Freed outputs: give back a sent output's memory, and still run its backward."""

from minimegatron.exercises.exercise import Exercise

EXERCISE = Exercise(
    name="ex07_freed_outputs",
    title="Freed outputs and custom_backward",
    tier="core",
    minutes=25,
    num_ranks=2,
    mirrors="minimegatron.core.pipeline_parallel.steps.custom_backward",
    summary="Free a stage's output once it is sent, and start backward from what is left of it.",
    real=(
        "minimegatron.core.pipeline_parallel.steps.deallocate_output_tensor",
        "minimegatron.core.pipeline_parallel.steps.custom_backward",
    ),
    question=(
        "Why does the real `deallocate_output_tensor` refuse a view, although PyTorch would "
        "take it?"
    ),
)
