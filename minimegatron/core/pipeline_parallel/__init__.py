"""Stages, the order of their work, and the messages between them.

Counterpart: `megatron.core.pipeline_parallel`. The order of work loads without torch.
"""

from minimegatron.exports import lazily

_SCHEDULES = "minimegatron.core.pipeline_parallel.schedules"

__getattr__, __dir__ = lazily(
    __name__, {"get_forward_backward_func": f"{_SCHEDULES}:get_forward_backward_func"}
)
