"""The loss contract: by what is a loss divided, where, and when?"""

from minimegatron.exercises.exercise import Exercise

EXERCISE = Exercise(
    name="ex08_loss_contract",
    title="The loss contract: tokens, microbatches, data parallel",
    tier="core",
    minutes=40,
    num_ranks=4,
    mirrors="minimegatron.core.pipeline_parallel.steps.forward_step_calc_loss",
    summary="Scale each microbatch's loss, and at the end the gradients, by the right numbers.",
    real=(
        "minimegatron.core.pipeline_parallel.steps.forward_step_calc_loss",
        "minimegatron.core.distributed.token_division._divide_by_num_tokens",
    ),
    question=(
        "Which of the divisors (tokens, microbatches, context-parallel ranks) is left to the "
        "end of the step with `calculate_per_token_loss`, and why can it not be known "
        "earlier?"
    ),
)
