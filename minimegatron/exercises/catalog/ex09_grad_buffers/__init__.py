"""Grad buffers: where gradients lie, the hook that fills them, the bucket that leaves in time."""

from minimegatron.exercises.exercise import Exercise

EXERCISE = Exercise(
    name="ex09_grad_buffers",
    title="Grad buffers with hooks and buckets",
    tier="stretch",
    minutes=45,
    num_ranks=2,
    mirrors="minimegatron.core.distributed.buffer_layout.lay_out_buffer",
    summary="Lay out the gradients, accumulate them in a hook, and send buckets during backward.",
    real=(
        "minimegatron.core.distributed.buffer_layout.lay_out_buffer",
        "minimegatron.core.distributed.distributed_data_parallel.DistributedDataParallel._after_grad",
        "minimegatron.core.distributed.param_and_grad_buffer._ParamAndGradBucketGroup"
        ".register_grad_ready",
    ),
    question=(
        "With ZeRO-1 the real layout has padding: each bucket's size is a multiple of a number. Which "
        "number is it, and which part of the step needs that?"
    ),
)
