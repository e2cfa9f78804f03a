"""How ranks on one host find and trust each other, before they share memory.

It asks `torch.distributed`, or its store, once: to tell the ranks of a group each other's address and
secret. Then it asks the operating system. Megatron has no counterpart.

The address is a socket that every process on the host can see and call, also one of another user.
So a caller counts as a rank only if the kernel says that its process belongs to the same user, and
if it knows the secret that the called rank made for this one handshake. The secret travels in the
gathering that tells the address, over the group's own network, never in arguments or environment.
Everybody else is turned away, by name, and does not keep the ranks from finding each other.

The network over which the group itself was made (torchrun's rendezvous, gloo's connections) is
trusted, here as in `torch.distributed`.
"""

import contextlib
import hmac
import os
import secrets
import select
import socket
import struct
import sys
import time
import warnings
from collections.abc import Callable
from typing import NamedTuple

_SECRET_BYTES = 16
_HELLO = struct.Struct(f"=I{_SECRET_BYTES}s")  # the caller's rank, the called rank's secret
_CREDENTIALS = struct.Struct("=iII")  # process, user, group
_WELCOME = b"\1"
_MAX_CALLS = 128
_MAX_SILENT = 64
_SECONDS_TO_NEXT_CALL = 0.01


class Met(NamedTuple):
    """A rank that has shaken hands: the connection to it, and the descriptor of its memory."""

    connection: socket.socket
    descriptor: int


class _Address(NamedTuple):
    host: tuple
    name: str
    secret: bytes


def meet(
    rank: int,
    gather: Callable[[list], list[list]],
    callees: list[int],
    callers: list[int],
    descriptor: int | None,
    timeout: float,
) -> tuple[dict[int, Met], dict[int, Met]] | None:
    """Connects this rank with others of its group, if all of them are on one host.

    Collective over the group; ranks are those within it. `gather` gives every rank what each has
    said, lists of plain values. This rank calls `callees`, is called by `callers`, and gives each of
    them `descriptor`: None where it has no memory to share. Returns both by rank, or None on every
    rank if the group spans hosts or containers, or if a rank has no memory. Raises ConnectionError,
    naming the ranks, if some have not come within `timeout` seconds.
    """
    if descriptor is None:
        gather([[], "", ""])
        return None
    secret, name = secrets.token_bytes(_SECRET_BYTES), "\0minimegatron-" + secrets.token_hex(16)
    deadline = time.monotonic() + timeout
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind(name)
        listener.listen(_MAX_CALLS)
        said = gather([list(_host()), name, secret.hex()])
        everyone = [_Address(tuple(host), name, bytes.fromhex(told)) for host, name, told in said]
        if len({address.host for address in everyone}) > 1:
            return None
        # First everybody calls, then everybody listens, and last everybody reads the answers: so
        # nobody waits for a rank that waits for somebody else.
        with contextlib.ExitStack() as if_it_fails:
            called = {}
            for callee in callees:
                called[callee] = _call(everyone[callee], callee, rank, descriptor, deadline)
                if_it_fails.callback(called[callee].close)
            came: dict[int, Met] = {}
            if_it_fails.callback(_close_all, came)
            _listen(listener, secret, callers, descriptor, deadline, came)
            answered: dict[int, Met] = {}
            if_it_fails.callback(_close_all, answered)
            for callee, call in called.items():
                answered[callee] = Met(call, _read_answer(call, callee, deadline))
            if_it_fails.pop_all()
    return answered, came


def _close_all(met: dict[int, Met]) -> None:
    for connection, descriptor in met.values():
        connection.close()
        os.close(descriptor)


def _host(proc: str = "/proc") -> tuple:
    """The same for two processes only if they can share memory and sockets.

    Some containers hide what tells that. There the answer is like no other, and ranks use gloo.
    """
    try:
        with open(f"{proc}/sys/kernel/random/boot_id") as file:
            boot = file.read()
        spaces = [os.stat(f"{proc}/self/ns/{kind}").st_ino for kind in ("net", "ipc")]
    except OSError:
        return ("unknown", secrets.token_hex(16))
    return (boot, *spaces, os.geteuid())


# -- The calling side --


def _call(
    address: _Address, rank: int, my_rank: int, descriptor: int, deadline: float
) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connection.settimeout(_left(deadline))
    try:
        _connect(connection, address.name, deadline)
        if (user := _peer(connection)[1]) != os.geteuid():
            raise ConnectionError(f"its address belongs to user {user}")
        socket.send_fds(connection, [_HELLO.pack(my_rank, address.secret)], [descriptor])
    except OSError as error:
        connection.close()
        raise ConnectionError(f"rank {rank} of the group cannot be called: {error}") from error
    return connection


def _connect(connection: socket.socket, name: str, deadline: float) -> None:
    while True:
        try:
            return connection.connect(name)
        except BlockingIOError:  # as many calls as the other rank takes wait already
            if time.monotonic() > deadline:
                raise
            time.sleep(_SECONDS_TO_NEXT_CALL)


def _read_answer(connection: socket.socket, rank: int, deadline: float) -> int:
    connection.settimeout(_left(deadline))
    try:
        answer, (descriptor,), _, _ = socket.recv_fds(connection, len(_WELCOME), 1)
    except (OSError, ValueError) as error:
        raise ConnectionError(f"rank {rank} of the group did not answer: {error}") from error
    assert answer == _WELCOME
    return descriptor


# -- The called side --


def _listen(
    listener: socket.socket,
    secret: bytes,
    callers: list[int],
    descriptor: int,
    deadline: float,
    came: dict[int, Met],
) -> None:
    """Accepts calls until all `callers` are in `came`. A stranger that says nothing delays nobody."""
    listener.settimeout(0)
    silent: list[socket.socket] = []
    try:
        while missing := set(callers) - set(came):
            ready = _readable([listener, *silent], _left(deadline))
            if not ready:
                raise ConnectionError(f"ranks {sorted(missing)} of the group did not call in time")
            for source in sorted(ready, key=lambda one: one is listener):
                if source is listener:
                    with contextlib.suppress(BlockingIOError):
                        silent.append(listener.accept()[0])
                    if len(silent) > _MAX_SILENT:  # of ranks none is silent for long
                        _turn_away(silent.pop(0))
                    continue
                silent.remove(source)
                rank, met = _check_caller(source, secret, missing)
                if met is not None:
                    socket.send_fds(source, [_WELCOME], [descriptor])
                    came[rank] = met
    finally:
        for connection in silent:
            _turn_away(connection)


def _readable(connections: list[socket.socket], seconds: float) -> list[socket.socket]:
    """Those that something can be read from, within `seconds`. `select` knows 1,024 files only."""
    waiting = select.poll()
    for connection in connections:
        waiting.register(connection, select.POLLIN)
    ready = {number for number, _ in waiting.poll(1000 * seconds)}
    return [connection for connection in connections if connection.fileno() in ready]


def _check_caller(
    connection: socket.socket, secret: bytes, expected: set[int]
) -> tuple[int, Met | None]:
    """The caller's rank and connection; no connection for a stranger, who is sent away by name."""
    descriptors: list[int] = []
    rank, told = -1, b""
    with contextlib.suppress(OSError, struct.error):
        hello, descriptors, _, _ = socket.recv_fds(connection, _HELLO.size, 1, socket.MSG_DONTWAIT)
        rank, told = _HELLO.unpack(hello)
    user = _peer(connection)[1]
    is_ours = user == os.geteuid() and hmac.compare_digest(told, secret) and len(descriptors) == 1
    if is_ours and rank in expected:
        return rank, Met(connection, descriptors[0])
    for descriptor in descriptors:
        os.close(descriptor)
    _turn_away(connection)
    return rank, None


def _turn_away(connection: socket.socket) -> None:
    process, user, _ = _peer(connection)
    connection.close()
    warnings.warn(
        f"process {process} ({_program(process)}) of user {user} called this rank "
        f"(process {os.getpid()}) as if it were a rank of the job, and was turned away",
        stacklevel=2,
    )


def _peer(connection: socket.socket) -> tuple[int, int, int]:
    """(process, user, group) at the other end, as the kernel knows them."""
    told = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return _CREDENTIALS.unpack(told)


def _program(process: int) -> str:
    try:
        with open(f"/proc/{process}/comm") as file:
            return file.read().strip()
    except OSError:
        return "ended"


def _left(deadline: float) -> float:
    return max(0.001, deadline - time.monotonic())


def is_supported() -> bool:
    """Whether this system has what shared memory between ranks needs: Linux has."""
    return sys.platform.startswith("linux")
