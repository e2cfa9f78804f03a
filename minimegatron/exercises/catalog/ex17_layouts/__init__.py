"""Layouts: which stage holds which layers, where embedding and loss are not free."""

from minimegatron.exercises.exercise import Exercise

EXERCISE = Exercise(
    name="ex17_layouts",
    title="A layout for an unbalanced model",
    tier="core",
    minutes=30,
    num_ranks=0,
    mirrors=(
        "minimegatron.core.transformer.pipeline_parallel_layer_layout.PipelineParallelLayerLayout"
    ),
    summary="Divide the layers over the stages so that the slowest stage is as fast as possible.",
    real=(
        "minimegatron.core.transformer.pipeline_parallel_layer_layout.PipelineParallelLayerLayout.validate_layer_layout",
    ),
    question=(
        "The real class checks a layout and does not choose one. Which of its checks refuses "
        "a layout without a loss?"
    ),
)
