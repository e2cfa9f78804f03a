"""The wrong gradient sync: three versions of one decision in 1F1B, of which one is right."""

from minimegatron.exercises.exercise import Exercise

EXERCISE = Exercise(
    name="ex10_wrong_gradient_sync",
    title="The wrong gradient sync",
    tier="core",
    minutes=20,
    num_ranks=4,
    mirrors="minimegatron.core.pipeline_parallel.step_frame.StepFrame.before_backward",
    summary="Of three versions of 1F1B's gradient sync, find the right one, and predict the others.",
    real=("minimegatron.core.pipeline_parallel.step_frame.StepFrame.before_backward",),
    question=(
        "In the real schedule the loop does not decide this. Who does, and from what does it "
        "know that a backward is a stage's last?"
    ),
)
