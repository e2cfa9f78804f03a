"""Two tensors on the wire: what a decoder stage hands on, and both gradients on the way back."""

from minimegatron.exercises.exercise import Exercise

EXERCISE = Exercise(
    name="ex24_two_tensor_backward",
    title="Two tensors between stages, and both gradients",
    tier="stretch",
    minutes=30,
    num_ranks=3,
    mirrors="minimegatron.core.pipeline_parallel.steps.backward_step",
    summary="Hand the encoder's output on from decoder stage to decoder stage, and its gradient back.",
    real=(
        "minimegatron.core.pipeline_parallel.steps.all_outputs",
        "minimegatron.core.pipeline_parallel.steps.ModelChunk.free_output",
        "minimegatron.core.pipeline_parallel.steps.backward_step",
    ),
    question=(
        "The real `all_outputs` has no argument that says which stages are decoders. Who decides there "
        "what is handed on?"
    ),
)
