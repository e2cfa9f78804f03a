"""Where tensors live and how ranks talk: one GPU per rank, several ranks per GPU, or CPU only.

Called by: `training.initialize` and `launcher` (to choose), everything that makes tensors (to ask).
Calls: `torch.cuda`. Megatron has no such module: its tensors are on CUDA devices. Here every program
also runs on a laptop, so the device and the backend are chosen here.
"""

import torch
import torch.distributed as dist

_device: torch.device | None = None


def set_device(name: str = "auto", local_rank: int = 0) -> torch.device:
    """Chooses this process's device, once, before it makes tensors; returns the choice.

    "cpu" is the CPU, "cuda" a GPU, "auto" a GPU where there is one. Of n GPUs, local rank r takes
    GPU r mod n, so that ranks share when they outnumber the GPUs. Raises ValueError for another
    name, and for "cuda" on a machine without a usable GPU.
    """
    global _device
    if name not in ("auto", "cpu", "cuda"):
        raise ValueError(f'device is {name!r}; use "auto", "cpu" or "cuda"')
    if name == "cuda" and not torch.cuda.is_available():
        raise ValueError('device is "cuda" but torch finds no usable GPU here; use "cpu" or "auto"')
    if name == "cpu" or not torch.cuda.is_available():
        _device = torch.device("cpu")
    else:
        _device = torch.device("cuda", local_rank % torch.cuda.device_count())
        torch.cuda.set_device(_device)
    return _device


def get_device() -> torch.device:
    """This process's device; chosen as by `set_device("auto")` if nobody has chosen."""
    return set_device() if _device is None else _device


def choose_backend(local_world_size: int) -> str:
    """The `torch.distributed` backend for this machine's `local_world_size` ranks.

    "nccl" where each rank has a GPU of its own (NCCL refuses two ranks on one GPU), else "gloo".
    """
    own_gpu = get_device().type == "cuda" and torch.cuda.device_count() >= local_world_size
    return "nccl" if own_gpu and dist.is_nccl_available() else "gloo"
