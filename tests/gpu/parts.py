"""The thirteen parts in their order: each needs what those before it have shown.

Read by: `__main__`, and tests/gpu/test_parts.py.
"""

from tests.gpu import eight_gpus, one_gpu, two_gpus
from tests.gpu.report import Part

PARTS = (
    Part("inventory: versions, GPUs, their modes and links", 1, one_gpu.inventory),
    Part("one step in float32, beside the CPU", 1, one_gpu.against_the_cpu),
    Part("bf16, recompute, checkpoints", 1, one_gpu.in_bf16),
    Part("where the program waits for the GPU", 1, one_gpu.host_syncs),
    Part("speed: a large product, utilisation beside others, tracing", 1, one_gpu.speed),
    Part("four ranks on one GPU", 1, one_gpu.sharing),
    Part("collectives, messages, interleaving", 2, two_gpus.messages),
    Part("reductions and messages beside products", 2, two_gpus.overlap),
    Part("planted hangs are named", 2, two_gpus.planted_hangs),
    Part("notebooks", 1, two_gpus.notebooks),
    Part("eight ranks: layouts, bubble, bandwidth", 8, eight_gpus.many_layouts),
    Part("one visible GPU for each process", 8, eight_gpus.one_visible),
    Part("two machines, one of them killed", 2, eight_gpus.two_nodes),
)
