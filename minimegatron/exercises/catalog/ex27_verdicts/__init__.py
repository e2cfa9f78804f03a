"""Verdicts: what a bad result is, from two or three runs of a step, and what all ranks do then."""

from minimegatron.exercises.exercise import Exercise

EXERCISE = Exercise(
    name="ex27_verdicts",
    title="Verdicts from two or three results",
    tier="core",
    minutes=30,
    num_ranks=2,
    mirrors="minimegatron.core.rerun.verdicts.ResultJudge.judge_again",
    summary="Judge a bad result by running the step again, and let all ranks decide together.",
    real=(
        "minimegatron.core.rerun.verdicts.ResultJudge.judge_again",
        "minimegatron.core.rerun.step_runs.StepRuns._after_rerun_in_place",
    ),
    question=(
        "The real function tells all ranks three wishes, not one number. What would it do after a "
        "second run in which no rank has a wish?"
    ),
)
