"""What mirrors `megatron.core`.

The names that Megatron offers here are looked up on first use: many modules below load without torch.
"""

from minimegatron.exports import lazily

__version__ = "0.16.1"
"""Of `megatron.core`, whose names and meanings these are; programs for Megatron compare it."""

__getattr__, __dir__ = lazily(
    __name__,
    {
        "DistributedDataParallel": "minimegatron.core.distributed:DistributedDataParallel",
        "ModelParallelConfig": "minimegatron.core.model_parallel_config:ModelParallelConfig",
        "Timers": "minimegatron.core.timers:Timers",
        "mpu": "minimegatron.core.parallel_state",
        "parallel_state": "minimegatron.core.parallel_state",
        "tensor_parallel": "minimegatron.core.tensor_parallel",
        "utils": "minimegatron.core.utils",
    },
)
