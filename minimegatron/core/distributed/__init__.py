"""Data parallelism: gradient buffers, their summation, and what else a gradient needs before a step.

Counterpart: `megatron.core.distributed`.
"""

from minimegatron.core.distributed.distributed_data_parallel import DistributedDataParallel
from minimegatron.core.distributed.distributed_data_parallel_config import (
    DistributedDataParallelConfig,
)
from minimegatron.core.distributed.finalize_model_grads import finalize_model_grads
from minimegatron.exports import lazily

__all__ = [
    "DistributedDataParallel",
    "DistributedDataParallelConfig",
    "TorchDistributedDataParallel",
    "finalize_model_grads",
]

_TORCH = "minimegatron.core.distributed.torch_ddp"
__getattr__, __dir__ = lazily(
    __name__, {"TorchDistributedDataParallel": f"{_TORCH}:TorchDistributedDataParallel"}
)
