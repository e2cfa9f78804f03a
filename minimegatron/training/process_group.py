"""The default process group: the ranks find each other, agree on a device, and are connected.

Nothing here runs where somebody has made the group before. Megatron has this in
`megatron.training.initialize`.
"""

import contextlib
import os
import signal
import sys
import time
from collections.abc import Iterator
from datetime import timedelta
from typing import NoReturn

import torch
import torch.distributed as dist

from minimegatron.backend import in_place_of
from minimegatron.core.device_choice import set_device
from minimegatron.core.network import (
    check_interfaces,
    gloo_address_note,
    keep_to_loopback,
    loopback_address,
)
from minimegatron.doctor import flight_recorder, session
from minimegatron.training import failures
from minimegatron.training.captured_step import check_ranks_of_graph
from minimegatron.training.config import Arguments
from minimegatron.training.devices import agree_on_device, name_of_gpu
from minimegatron.training.ending import end_properly
from minimegatron.training.rendezvous import find_each_other, ranks_of_environment

BAD_ARGUMENTS = 2
"""Exit code where the arguments cannot work; nothing has been started then."""


def init_process_group(args: Arguments) -> None:
    """Makes it, after everything that must be settled before. Ends the process as `refuse` does where
    the ranks cannot find each other or have not what `args` asks for.
    """
    timeout = timedelta(minutes=args.distributed_timeout_minutes)
    try:
        if args.world_size == args.local_world_size:
            loopback_address()
            keep_to_loopback(os.environ)
        else:
            check_interfaces(os.environ)
        store = find_each_other(args.rank, args.world_size, timeout)
    except (ValueError, ConnectionError, RuntimeError) as reason:
        refuse(reason, speaker="LOCAL_RANK")
    if args.tensor_model_parallel_size > 1:
        # The GPU then begins kernels in the order in which they were queued: a collective of tensor
        # parallelism before the products that shall hide it. CUDA reads this when it is first used.
        os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    gpu = "" if args.device == "cpu" else name_of_gpu(args.local_rank)
    try:
        chosen = agree_on_device(
            store, args.rank, args.world_size, gpu, args.device, args.distributed_backend
        )
        check_ranks_of_graph(args, chosen.device, chosen.backend)
    except ValueError as reason:
        refuse(reason)
    set_device(chosen.device, args.local_rank)
    if chosen.device == "cuda":
        torch.set_float32_matmul_precision("high" if args.tf32 else "highest")
    if args.hang_timeout is not None:
        flight_recorder.turn_on_recorder(os.environ)
    if "gloo" in chosen.backend and args.world_size > args.local_world_size:
        note = gloo_address_note(os.environ, os.environ.get("MASTER_ADDR", ""))
        if note is not None and args.local_rank == 0:
            print(f"minimegatron: {note}", file=sys.stderr, flush=True)
    dist.init_process_group(
        in_place_of(chosen.backend),
        rank=args.rank,
        world_size=args.world_size,
        timeout=timeout,
        store=store,
    )


@contextlib.contextmanager
def connected(args: Arguments) -> Iterator[None]:
    """Around the making of all other groups. Where somebody has made the default group, it is theirs.

    Before: how this process ends, who watches its launcher, the default group. After: the other ranks
    are watched, and what they wait for.
    """
    if dist.is_initialized():
        yield
        return
    end_properly()
    failures.watch_launcher()
    init_process_group(args)
    yield
    failures.watch_peers()
    if args.hang_timeout is not None:
        session.watch_ranks(args.hang_timeout, os.environ.get("MASTER_ADDR", "localhost"))


@contextlib.contextmanager
def refused_by_all() -> Iterator[None]:
    """Within it, a ValueError ends every rank as `refuse` does."""
    try:
        yield
    except ValueError as reason:
        refuse(reason)


def refuse(reason: Exception, speaker: str = "RANK") -> NoReturn:
    """Ends with exit code 2. Says why, once: on the rank whose variable `speaker` is 0."""
    if not dist.is_torchelastic_launched():
        # Nobody says that another rank 0 is there to speak.
        note = ""
        if os.environ.get("WORLD_SIZE", "1") != "1":
            note = f" ({ranks_of_environment()})"
        print(f"minimegatron: {reason}{note}", file=sys.stderr, flush=True)
    elif os.environ.get(speaker, "0") == "0":
        print(f"minimegatron: {reason}", file=sys.stderr, flush=True)
    else:
        # torchrun ends all ranks when the first one exits. The one that prints should be that; so
        # wait for torchrun's signal, or as long as that rank may need to come this far.
        signal.signal(signal.SIGTERM, lambda *_: os._exit(BAD_ARGUMENTS))
        time.sleep(30)
    sys.exit(BAD_ARGUMENTS)
