"""Where ranks find each other, swept clean of the ranks that were there before.

Megatron has no counterpart.

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

import os
import secrets
import socket
import time
from datetime import timedelta

import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

POLL_SECONDS = 0.01
ANSWER_SECONDS = 5.0
"""How long it may take until a machine says whether somebody listens at an address of its."""


def find_each_other(rank: int, world_size: int, timeout: timedelta) -> dist.Store:
    """A store for `init_process_group`, from what the launcher has put into the environment.

    Raises ConnectionError if torchrun, which serves the store, is gone already.
    """
    if world_size == 1:
        # A process started alone has no launcher that would serve a store.
        return dist.HashStore()
    _ask_torchrun()
    store, _, _ = next(rendezvous("env://", rank, world_size, timeout=timeout))
    return fresh_store(store, rank, world_size, timeout)


def _ask_torchrun() -> None:
    """Raises if torchrun's store is gone. torch would try until the time-out, by default 10 minutes."""
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != str(True):
        return  # rank 0 serves the store, and may come later
    host, port = os.environ.get("MASTER_ADDR", ""), os.environ.get("MASTER_PORT", "")
    try:
        socket.create_connection((host, int(port)), ANSWER_SECONDS).close()
    except ConnectionRefusedError:
        message = f"nobody listens at {host}:{port}, where torchrun did: it is gone"
        raise ConnectionError(message) from None
    except (OSError, ValueError):
        return  # torch tries too, and says what is wrong with the address


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
