"""Which device a process takes, and which backend its ranks: chosen once, before it makes tensors.

Megatron has no counterpart: its tensors are on CUDA devices.
"""

import torch
import torch.distributed as dist

from minimegatron.core import utils


def set_device(name: str = "auto", local_rank: int = 0, num_ranks: int = 1) -> torch.device:
    """Chooses this process's device, once, before it makes tensors; returns the choice.

    "cpu" is the CPU, "cuda" a GPU, "auto" a GPU where this machine has one for each of its
    `num_ranks` ranks. With "cuda", local rank r takes GPU r mod n of n GPUs, so that ranks share when
    they outnumber the GPUs. Raises ValueError for another name, and for "cuda" on a machine without
    a usable GPU.
    """
    if name not in ("auto", "cpu", "cuda"):
        raise ValueError(f'device is {name!r}; use "auto", "cpu" or "cuda"')
    if name == "cuda" and not torch.cuda.is_available():
        raise ValueError('device is "cuda" but torch finds no usable GPU here; use "cpu" or "auto"')
    if name == "auto":
        enough = has_gpu_for_each(num_ranks) and torch.cuda.is_available()
        name = "cuda" if enough else "cpu"
    if name == "cpu":
        utils._device = torch.device("cpu")
    else:
        utils._device = torch.device("cuda", local_rank % torch.cuda.device_count())
        torch.cuda.set_device(utils._device)
    return utils._device


def has_gpu_for_each(num_ranks: int) -> bool:
    """Whether torch sees a GPU for each of this machine's ranks. Counting them takes none of their
    memory."""
    return torch.cuda.device_count() >= num_ranks


def choose_backend(local_world_size: int) -> str:
    """The `torch.distributed` backend for this machine's `local_world_size` ranks.

    "nccl" where each rank has a GPU of its own (NCCL refuses two ranks on one GPU), else "gloo", in
    whose place `minimegatron.backend.in_place_of` puts this package's own.
    """
    own_gpu = utils.get_device().type == "cuda" and has_gpu_for_each(local_world_size)
    return "nccl" if own_gpu and dist.is_nccl_available() else "gloo"
