"""Losses of tokens further on: shifted labels and masks, and how such a loss gets its gradient."""

from minimegatron.exercises.exercise import Exercise

EXERCISE = Exercise(
    name="ex23_predict_two_tokens",
    title="Predict two tokens: the loss and its scale",
    tier="core",
    minutes=35,
    num_ranks=1,
    mirrors="minimegatron.core.transformer.multi_token_prediction.process_mtp_loss",
    summary="Shift labels and mask once more for each further token, and attach its loss to the model.",
    real=(
        "minimegatron.core.transformer.multi_token_prediction.roll_tensor",
        "minimegatron.core.transformer.mtp_loss.MTPLossAutoScaler",
        "minimegatron.core.transformer.multi_token_prediction.process_mtp_loss",
    ),
    question=(
        "The real model hands the mask to the forward, though its own loss is made outside. Why must "
        "it, and what would its logs show if somebody forgot?"
    ),
)
