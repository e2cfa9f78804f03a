"""Conjugate collectives, and the tensor-parallel MLP that stands between them."""

from minimegatron.exercises.exercise import Exercise

EXERCISE = Exercise(
    name="ex02_conjugate_collectives",
    title="Conjugate collectives and a column/row-parallel MLP",
    tier="core",
    minutes=35,
    num_ranks=4,
    mirrors="minimegatron.core.transformer.mlp.MLP.forward",
    summary="Write copy and reduce with their backwards, then an MLP cut over the ranks.",
    real=("minimegatron.core.transformer.mlp.MLP.forward",),
    question=(
        "The real MLP has no collective in its `forward`. Where are they, and how many of "
        "them does one layer's backward make?"
    ),
)
