"""The gradient norm across ranks: everything once, nothing twice, the same number everywhere."""

from minimegatron.exercises.exercise import Exercise

EXERCISE = Exercise(
    name="ex13_gradient_norm",
    title="The gradient norm across ranks",
    tier="core",
    minutes=30,
    num_ranks=4,
    mirrors="minimegatron.core.optimizer.clip_grads.get_grad_norm_fp32",
    summary="Compute the norm of the whole model's gradient from ranks that each hold a part of it.",
    real=("minimegatron.core.optimizer.clip_grads.get_grad_norm_fp32",),
    question=(
        "Every rank must get the same norm, to the last bit. What would become of the weights "
        "if two ranks clipped by slightly different numbers?"
    ),
)
