"""GRPO's loss: which token, which sign, which mask, and what the loss function returns."""

from minimegatron.exercises.exercise import Exercise

EXERCISE = Exercise(
    name="ex25_grpo_loss",
    title="GRPO's loss, from logits to three values",
    tier="core",
    minutes=40,
    num_ranks=1,
    mirrors="minimegatron.rl.rl_utils.calculate_grpo_loss",
    summary="Write GRPO's log-probabilities, advantages and clipped loss, and return sums and counts.",
    real=(
        "minimegatron.rl.rl_utils.selective_log_softmax",
        "minimegatron.rl.rl_utils.calculate_grpo_advantages",
        "minimegatron.rl.rl_utils.calculate_grpo_loss",
        "minimegatron.train_rl.loss_func",
    ),
    question=(
        "The real loss function gets the loss of each token as the model's output, and only masks "
        "and sums it. Who divides by the number of tokens, and why not the loss function?"
    ),
)
