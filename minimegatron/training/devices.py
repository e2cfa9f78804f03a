"""Which device the ranks compute on, and with which backend: decided once, by rank 0, for all.

A rank cannot decide this alone. It sees the GPUs of its own machine, or the single one that Slurm
gave it, and not whether another rank was given the same one, nor what the other machines have. Two
ranks that choose different backends wait for each other until the time-out.

So before any process group exists, each rank writes the name of its GPU into the store where the
ranks meet, and rank 0 writes what all shall do. `initialize` calls this between the meeting and
`init_process_group`. It asks later whether the device has a fast kernel of attention. Megatron has no
counterpart: it always runs on CUDA.
"""

import contextlib
import json
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from minimegatron.core.utils import device_is_asynchronous, get_device
from minimegatron.training import captured_step
from minimegatron.training.utils import print_rank_0

FUSED = [
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.CUDNN_ATTENTION,
]
"""torch's kernels of attention that do not write all probabilities, [b, a, s, s], to memory."""
PART_TIME = timedelta(seconds=5)
"""How long rank 0 waits for the others to read that the job cannot be."""


class DeviceChoice(NamedTuple):
    """What every rank of the job uses."""

    device: str
    """"cpu" or "cuda"."""
    backend: str
    """"gloo" or "nccl"."""


def agree_on_device(
    store: dist.Store, rank: int, world_size: int, gpu: str, device: str, backend: str | None
) -> DeviceChoice:
    """`choose_device` for the GPUs of all ranks. Every rank must call it, with its own `gpu`.

    Raises ValueError where what was asked for cannot be, on every rank in the same words, and
    RuntimeError, naming the rank, if one does not answer within the store's time-out.
    """
    store.set(f"gpu/{rank}", gpu)
    if rank == 0:
        gpus = [_read(store, f"gpu/{peer}", peer) for peer in range(world_size)]
        try:
            answer = {"choice": choose_device(gpus, device, backend, dist.is_nccl_available())}
        except ValueError as reason:
            answer = {"refusal": str(reason)}
        store.set("device", json.dumps(answer))
    answer = json.loads(_read(store, "device", 0))
    if "refusal" in answer:
        _part(store, rank, world_size)
        raise ValueError(answer["refusal"])
    return DeviceChoice(*answer["choice"])


def _read(store: dist.Store, key: str, writer: int) -> str:
    try:
        return store.get(key).decode()
    except RuntimeError as error:  # torch's errors of a store are all of this kind
        message = f"rank {writer} has not said which device it can use: {error}"
        raise RuntimeError(message) from error


def _part(store: dist.Store, rank: int, world_size: int) -> None:
    """Before all ranks exit: rank 0, which may serve the store, waits until the others have read."""
    if rank != 0:
        store.set(f"read/{rank}", "")
    elif world_size > 1:
        with contextlib.suppress(RuntimeError):
            store.wait([f"read/{peer}" for peer in range(1, world_size)], PART_TIME)


def choose_device(
    gpus: Sequence[str], device: str, backend: str | None, has_nccl: bool = True
) -> DeviceChoice:
    """The device and the backend for ranks with these GPUs.

    Args:
        gpus: the name of each rank's GPU, rank 0 first; empty where a rank has none.
        device: "auto", "cpu" or "cuda", as asked for. "auto" is CUDA where each rank has a GPU of
            its own, so that nobody trains slowly on a shared one without having asked for it.
        backend: "nccl" or "gloo" if one was asked for.
        has_nccl: whether torch was built with NCCL.

    Raises ValueError, naming the ranks, for CUDA without GPUs and for NCCL without one GPU per rank;
    and for NCCL where torch has none.

    >>> choose_device(["GPU-a", "GPU-b"], "auto", None)
    DeviceChoice(device='cuda', backend='nccl')
    >>> choose_device(["GPU-a", "GPU-a"], "auto", None)
    DeviceChoice(device='cpu', backend='gloo')
    >>> choose_device(["GPU-a", "GPU-a"], "cuda", None)
    DeviceChoice(device='cuda', backend='gloo')
    """
    if device == "cpu":
        return DeviceChoice("cpu", "gloo")
    without = [rank for rank, gpu in enumerate(gpus) if not gpu]
    sharing = [rank for rank, gpu in enumerate(gpus) if gpu and gpus.count(gpu) > 1]
    asked = "--distributed-backend nccl" if backend == "nccl" else "--device cuda"
    if without and (backend == "nccl" or device == "cuda"):
        raise ValueError(
            f"{asked} needs a GPU for each of the {len(gpus)} ranks, but {_some(without)} no GPU "
            "that torch can use; start fewer ranks there, or use --device auto and gloo"
        )
    if sharing and backend == "nccl":
        raise ValueError(
            f"{asked} needs a GPU for each of the {len(gpus)} ranks, but {_some(sharing)} a GPU "
            "that another rank has too; start fewer ranks there, or use --distributed-backend gloo"
        )
    if backend == "nccl" and not has_nccl:
        raise ValueError(f"{asked}: this torch was built without NCCL; use gloo")
    if without or (sharing and device == "auto"):
        return DeviceChoice("cpu", "gloo")
    return DeviceChoice("cuda", backend or ("gloo" if sharing or not has_nccl else "nccl"))


def _some(ranks: Sequence[int]) -> str:
    names = ", ".join(map(str, ranks[:8])) + (", ..." if len(ranks) > 8 else "")
    return f"rank {names} has" if len(ranks) == 1 else f"{len(ranks)} of them ({names}) have"


def name_of_gpu(local_rank: int) -> str:
    """The GPU that `set_device` would take for this local rank, by a name that no other GPU has.

    Empty where there is none that this build of torch can compute on. Of n visible GPUs it is number
    `local_rank` mod n: a rank that is shown one GPU takes that one, whichever its local rank is.
    """
    if torch.cuda.device_count() == 0 or not torch.cuda.is_available():
        return ""
    properties = torch.cuda.get_device_properties(local_rank % torch.cuda.device_count())
    capability = (properties.major, properties.minor)
    return str(properties.uuid) if is_supported(capability, torch.cuda.get_arch_list()) else ""


def is_supported(capability: tuple[int, int], architectures: Sequence[str]) -> bool:
    """Whether torch, built for these architectures, has kernels for a GPU of this capability.

    Code for sm_80 runs on 8.0 and on a later 8.x; compute_80 is translated for all later ones.
    ROCm names its architectures otherwise; there torch is taken at its word.

    >>> is_supported((8, 6), ["sm_70", "sm_80"]), is_supported((6, 1), ["sm_70", "sm_80"])
    (True, False)
    """
    for name in architectures:
        kind, _, digits = name.partition("_")
        digits = digits.rstrip("af")  # sm_90a: for this very architecture
        if kind not in ("sm", "compute") or not digits.isdigit():
            return True
        built = (int(digits[:-1]), int(digits[-1]))
        if built <= capability and (kind == "compute" or built[0] == capability[0]):
            return True
    return not architectures


def has_fused_attention(head_size: int, dtype: torch.dtype) -> bool:
    """Whether torch has such a kernel on this rank's device for heads of `head_size` elements.

    Without one, torch computes the same in several kernels, many times slower, and says nothing.
    """
    query = torch.zeros(1, 1, 16, head_size, dtype=dtype, device=get_device())
    try:
        with sdpa_kernel(FUSED):
            F.scaled_dot_product_attention(query, query, query, is_causal=True)
    except RuntimeError:  # "No available kernel"
        return False
    return True


def describe_device(args: Any, dtype: torch.dtype) -> None:
    """Prints, once, what is slow on this device, and what a CPU has in place of a CUDA graph."""
    warn_of_slow_attention(args.hidden_size // args.num_attention_heads, dtype)
    if args.cuda_graph_impl != "none":
        captured_step.describe_graph(args)


def warn_of_slow_attention(head_size: int, dtype: torch.dtype) -> None:
    """Prints a line where torch computes attention in several kernels on this device."""
    if device_is_asynchronous() and not has_fused_attention(head_size, dtype):
        print_rank_0(
            f"> attention: torch has no fused kernel here for heads of {head_size} elements in "
            f"{dtype}, so it is slow; choose --hidden-size and --num-attention-heads whose quotient "
            "is a multiple of 8, and at most 256"
        )


def give_memory_back(*_: Any) -> None:
    """Gives the GPU memory that torch keeps for later tensors back to the GPU; see
    `--empty-unused-memory-level`."""
    if device_is_asynchronous():
        torch.cuda.empty_cache()
