"""The router and its auxiliary loss: which experts a token goes to, and what keeps their load even."""

from minimegatron.exercises.exercise import Exercise

EXERCISE = Exercise(
    name="ex19_router",
    title="A router and its auxiliary loss",
    tier="core",
    minutes=40,
    num_ranks=1,
    mirrors="minimegatron.core.transformer.moe.moe_utils.topk_routing_with_score_function",
    summary="Choose experts for each token, weigh them, and add the loss that keeps their load even.",
    real=(
        "minimegatron.core.transformer.moe.moe_utils.topk_routing_with_score_function",
        "minimegatron.core.transformer.moe.moe_utils.switch_load_balancing_loss_func",
    ),
    question=(
        "Training ends with a layer in which one expert gets 60 % of all tokens. Which of your "
        "functions would you look at first, and which number would you print there?"
    ),
)
