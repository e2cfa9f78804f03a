"""The default process group: the ranks find each other, agree on a device, and are connected.

Nothing here runs where somebody has made the group before. Megatron has this in
`megatron.training.initialize`.

Ranks meet in a key-value store, where each writes its address and reads the others'. Under
`torchrun --max-restarts` the store belongs to torchrun and outlives the ranks: after a restart, a
rank that is early reads the addresses of the dead and waits for them, or is refused (torch 2.13;
pytorch issues 135712 and 167288). torchrun's count of restarts cannot tell old keys from new, for
every machine counts for itself.

So the ranks first agree on a prefix that nobody has used:

    rank 0      writes a new "generation", and waits for every rank's reply to it
    rank r      writes its reply, "generation nonce"; again, as long as the generation may be an old one
    rank 0      writes the nonce back: only it knows the new generation, only rank r the new nonce
    rank r      sees its own nonce, and so knows that the generation it replied to is the new one
"""

import contextlib
import os
import secrets
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from typing import NoReturn

import torch
import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from minimegatron import doctor
from minimegatron.backend import in_place_of
from minimegatron.core.device_choice import set_device
from minimegatron.core.network import (
    check_interfaces,
    check_resolves,
    gloo_address_note,
    keep_to_loopback,
    loopback_address,
)
from minimegatron.training import captured_step, failures
from minimegatron.training.config import Arguments
from minimegatron.training.devices import agree_on_device, name_of_gpu
from minimegatron.training.ending import end_properly

BAD_ARGUMENTS = 2
"""Exit code where the arguments cannot work; nothing has been started then."""

POLL_SECONDS = 0.01
SILENT_SECONDS = 2.0
"""How long ranks may take to find each other before one says that it waits."""
ANSWER_SECONDS = 5.0
"""How long it may take until a machine says whether somebody listens at an address of its."""


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
        if args.cuda_graph_impl != "none":
            captured_step.check_ranks_of_graph(args, chosen.device, chosen.backend)
    except ValueError as reason:
        refuse(reason)
    set_device(chosen.device, args.local_rank)
    if chosen.device == "cuda":
        torch.set_float32_matmul_precision("high" if args.tf32 else "highest")
    if args.hang_timeout is not None:
        doctor.flight_recorder.turn_on_recorder(os.environ)
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
        doctor.session.watch_ranks(args.hang_timeout, os.environ.get("MASTER_ADDR", "localhost"))


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


# -- Where the ranks find each other, swept clean of the ranks that were there before --


def find_each_other(rank: int, world_size: int, timeout: timedelta) -> dist.Store:
    """A store for `init_process_group`, from what the launcher has put into the environment.

    Raises ValueError, at once, if the environment does not say where they are; ConnectionError if
    torchrun, which serves the store, is gone already, or if rank 0 cannot be reached; RuntimeError if
    a rank has not come within `timeout`.
    """
    if world_size == 1:
        # A process started alone has no launcher that would serve a store.
        return dist.HashStore()
    host, port = os.environ.get("MASTER_ADDR", ""), os.environ.get("MASTER_PORT", "")
    if not host or not port.isdecimal():
        raise ValueError(
            f"MASTER_ADDR is {host!r} and MASTER_PORT {port!r}, so nobody knows where rank 0 is; "
            "start with torchrun, which sets them"
        )
    check_resolves(host, port)
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == str(True):
        _ask_torchrun(host, int(port))
    try:
        with _told(rank, f"{host}:{port}", timeout):
            store, _, _ = next(rendezvous("env://", rank, world_size, timeout=timeout))
            return fresh_store(store, rank, world_size, timeout)
    except dist.DistError as error:
        first_line = str(error).partition("\n")[0]
        raise ConnectionError(
            f"rank 0 cannot be reached at MASTER_ADDR {host}, MASTER_PORT {port}: {first_line}"
        ) from None


def _ask_torchrun(host: str, port: int) -> None:
    """Raises if torchrun's store is gone. torch would try until the time-out, by default 10 minutes."""
    try:
        socket.create_connection((host, port), ANSWER_SECONDS).close()
    except ConnectionRefusedError:
        message = f"nobody listens at {host}:{port}, where torchrun did: it is gone"
        raise ConnectionError(message) from None
    except OSError:
        return  # torch tries too, and says what is wrong with the address


@contextlib.contextmanager
def _told(rank: int, where: str, timeout: timedelta) -> Iterator[None]:
    """Within it, a wait is told of as soon as it is one, unless torchrun has started the ranks.

    A program that was started alone may have the variables of a pod around it. To try the address
    would not tell: in some pods every connection is accepted, by what watches the network.
    """
    text = (
        f"minimegatron: rank {rank} waits for the others at {where}, for at most "
        f"{timeout.total_seconds() / 60:g} minutes; {ranks_of_environment()}\n"
    )
    timer = threading.Timer(SILENT_SECONDS, _print_now, [text])
    timer.daemon = True
    if not dist.is_torchelastic_launched():
        timer.start()
    try:
        yield
    finally:
        timer.cancel()
        if timer.is_alive():
            timer.join()


def _print_now(text: str) -> None:
    sys.stderr.write(text)
    sys.stderr.flush()


def ranks_of_environment() -> str:
    """Where the number of ranks comes from, and what to do if that was another program's."""
    rank, world_size = os.environ.get("RANK", "0"), os.environ.get("WORLD_SIZE", "1")
    return (
        f"the environment says RANK {rank}, WORLD_SIZE {world_size}: to train in one process, unset "
        "RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT"
    )


def fresh_store(store: dist.Store, rank: int, world_size: int, timeout: timedelta) -> dist.Store:
    """`store` under a prefix of this generation of ranks. Every rank must call it.

    Raises RuntimeError, naming a rank, if one has not come within `timeout`.
    """
    deadline = time.monotonic() + timeout.total_seconds()
    if rank == 0:
        generation = secrets.token_hex(8)
        store.set("generation", generation)
        for peer in range(1, world_size):
            while not (nonce := _reply(store, peer, generation)):
                _sleep(deadline, f"rank {peer} has not come")
            store.set(f"welcome/{peer}", nonce)
    else:
        nonce = secrets.token_hex(8)
        while True:
            generation = _read(store, "generation")
            store.set(f"reply/{rank}", f"{generation} {nonce}")
            if _read(store, f"welcome/{rank}") == nonce:
                break
            _sleep(deadline, "rank 0 has not come")
    return dist.PrefixStore(f"generation {generation}", store)


def _reply(store: dist.Store, peer: int, generation: str) -> str:
    """The nonce of `peer`, if it has replied to this generation; else empty."""
    replied_to, _, nonce = _read(store, f"reply/{peer}").partition(" ")
    return nonce if replied_to == generation else ""


def _read(store: dist.Store, key: str) -> str:
    return store.get(key).decode() if store.check([key]) else ""


def _sleep(deadline: float, what: str) -> None:
    if time.monotonic() > deadline:
        raise RuntimeError(f"{what} in time; see --distributed-timeout-minutes, and its own log")
    time.sleep(POLL_SECONDS)
