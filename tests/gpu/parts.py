"""The parts of the check, in their order: the most telling ones first.

Read by: `__main__` and `report`, tests/gpu/test_parts.py, docs/tools/cases/gpu_page.py. It imports
nothing of the project and no torch.
"""

from typing import NamedTuple


class Part(NamedTuple):
    """One part of the check; it runs in a process of its own."""

    name: str
    title: str
    run: str
    """Module and function, below tests.gpu: takes a `Place`, yields `Finding`s."""
    num_gpus: int = 1
    """How many it needs."""
    seconds: float = 120.0
    """After so long it is ended. On one H100 a part is expected to need a third of this."""
    packages: tuple[str, ...] = ()
    """What it needs besides torch and numpy, by the name that one imports."""


JUPYTER = ("ipyparallel", "jupytext", "nbclient", "matplotlib")

PARTS = (
    Part("step", "one step in float32, beside the CPU", "one_gpu:against_the_cpu", 1, 60),
    Part("bf16", "bf16, recompute, random numbers, checkpoints", "one_gpu:in_bf16", 1, 120),
    Part("nccl", "NCCL in a world of one", "one_gpu:world_of_one", 1, 90),
    Part("sharing", "four ranks on one GPU, beside one rank", "one_gpu:sharing", 1, 90),
    Part("policy", "reinforcement learning, beside the CPU", "policy:beside_the_cpu", 1, 90),
    Part("captured", "a captured step, beside eager ones", "captured:beside_eager", 1, 90),
    Part("waits", "where the program waits for the GPU", "one_gpu:host_waits", 1, 90),
    Part("gpt2", "GPT-2 124M beside plain PyTorch", "speed:gpt2", 1, 150),
    Part("tracing", "what tracing costs", "speed:tracing", 1, 60),
    Part("inventory", "GPUs, their modes and links", "one_gpu:inventory", 1, 30),
    Part("peers", "beside megatron-core", "speed:peers", 1, 90, ("megatron.core",)),
    Part("messages", "collectives, messages, interleaving", "two_gpus:messages", 2, 120),
    Part("overlap", "reductions and messages beside products", "two_gpus:overlap", 2, 60),
    Part("hangs", "planted hangs are named", "two_gpus:planted_hangs", 2, 120),
    Part("layouts", "eight ranks: layouts, bubble, bandwidth", "eight_gpus:many_layouts", 8, 240),
    Part("visible", "one visible GPU for each process", "eight_gpus:one_visible", 8, 120),
    Part("nodes", "two machines, one of them killed", "eight_gpus:two_nodes", 2, 150),
    Part("notebooks", "notebooks", "two_gpus:notebooks", 1, 900, JUPYTER),
)
