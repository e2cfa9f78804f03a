"""A normaliser: one gradient, whatever the layout and whatever the loss function returns."""

from minimegatron.exercises.exercise import Exercise

EXERCISE = Exercise(
    name="ex26_normaliser",
    title="A normaliser that no layout changes",
    tier="core",
    minutes=35,
    num_ranks=2,
    mirrors="minimegatron.train_rl.loss_func",
    summary="Return two values or three, so that each token weighs 1 / N in every layout.",
    real=("minimegatron.train_rl.loss_func",),
    question=(
        "The real loss function knows neither M nor d nor N. What must be switched on for that, and "
        "what would this function's gradient be without it?"
    ),
)
