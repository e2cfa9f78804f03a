"""Tensors between two processes of one host, through shared memory: one copy, no polling thread.

Called by: `local_collectives` and `pipeline_parallel.local_transport`, which take gloo's place
between ranks on one host. Calls: the operating system. Megatron needs no such module: NCCL does
the same for GPUs of one host.

A gloo message between two processes of one host goes through the kernel's network code twice, and
wakes two threads in turn. Here a message is a *slot* of memory that both processes have mapped:

1. The sender copies the tensor into a free slot, and writes the slot's number to a socket.
2. The receiver, asleep in a read of that socket, wakes. The slot's memory itself becomes the
   received tensor.
3. When the last user of that tensor has let go of it, the receiver marks the slot as free.

So a send returns when its copy is made, a message travels whether or not its receive has been
asked for, and the tensor that was sent may be freed at once. A process that dies closes its
sockets, which its peers notice at once. The idea is NCCL's and MPI's; the mechanism is Linux's.
"""

import mmap
import os
import secrets
import socket
import struct
import sys
import time
import weakref
from collections import deque

import torch
import torch.distributed as dist

TIMEOUT_SECONDS = 30 * 60
_HEADER = struct.Struct("=IQd")  # slot number, bytes, time of sending on the host's clock
_CALLER = struct.Struct("=I")
# A slot begins with its mark: one byte, and room up to where tensors may begin.
_FREE, _IN_USE, _MARK_BYTES = 0, 1, 64

Connections = dict[int, socket.socket]


def connect(
    group: dist.ProcessGroup, callees: list[int], num_callers: int, timeout: float = TIMEOUT_SECONDS
) -> tuple[Connections, Connections] | None:
    """Connects ranks of `group` with each other, if all of them can share memory and sockets.

    Collective over `group`; ranks are those within it. This rank calls `callees`, and is called by
    `num_callers` others. Returns both kinds of connections by rank, or None on every rank if the
    group spans hosts or containers, or runs on another system than Linux. Raises TimeoutError if a
    callee does not answer.
    """
    if not sys.platform.startswith("linux"):
        return None
    name = "\0minimegatron-" + secrets.token_hex(16)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.settimeout(timeout)
        listener.bind(name)
        listener.listen(max(1, num_callers))
        everyone: list = [None] * group.size()
        dist.all_gather_object(everyone, (_host(), name), group=group)
        if len({host for host, _ in everyone}) > 1:
            return None
        called, callers = {}, {}
        for rank in callees:
            called[rank] = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            called[rank].connect(everyone[rank][1])
            called[rank].sendall(_CALLER.pack(group.rank()))
        for _ in range(num_callers):
            connection, _ = listener.accept()
            callers[_CALLER.unpack(connection.recv(_CALLER.size))[0]] = connection
    for connection in (*called.values(), *callers.values()):
        _set_timeout(connection, timeout)
    return called, callers


def _host() -> tuple:
    """The same for two processes only if they can share memory and sockets."""
    with open("/proc/sys/kernel/random/boot_id") as file:
        boot = file.read()
    spaces = (os.stat(f"/proc/self/ns/{kind}").st_ino for kind in ("net", "ipc"))
    return (boot, *spaces, os.getuid())


class Outgoing:
    """The sending end of a connection; makes the slots, as many as are in use at a time."""

    def __init__(self, connection: socket.socket):
        self._connection = connection
        self._slots: list[mmap.mmap] = []
        # Each slot as the tensor it carried last: most messages have the shape of the one before.
        self._shaped: list[torch.Tensor] = []

    def send(self, tensor: torch.Tensor) -> None:
        """Copies `tensor` into a slot and tells the receiver. Raises ConnectionError if it died."""
        num_bytes = tensor.numel() * tensor.element_size()
        number = self._find_free(num_bytes)
        descriptor = None
        if number is None:
            number, descriptor = self._make_slot(num_bytes)
        self._slots[number][0] = _IN_USE
        slot = self._shaped[number]
        if slot.shape != tensor.shape or slot.dtype != tensor.dtype:
            slot = _payload(self._slots[number], num_bytes, tensor.dtype).view(tensor.shape)
            self._shaped[number] = slot
        slot.copy_(tensor.detach())
        self._connection.sendall(_HEADER.pack(number, num_bytes, time.monotonic()))
        if descriptor is not None:  # a slot that the receiver does not know yet
            socket.send_fds(self._connection, [b"\0"], [descriptor])
            os.close(descriptor)

    def _find_free(self, num_bytes: int) -> int | None:
        for number, slot in enumerate(self._slots):
            if slot[0] == _FREE and len(slot) >= _MARK_BYTES + num_bytes:
                return number
        return None

    def _make_slot(self, num_bytes: int) -> tuple[int, int]:
        # The file has no name: it is gone once both processes are, however they end.
        size = _MARK_BYTES + num_bytes
        descriptor = os.memfd_create("minimegatron-message")
        os.ftruncate(descriptor, size)
        self._slots.append(_map(descriptor, size))
        self._shaped.append(torch.empty(0))
        return len(self._slots) - 1, descriptor


class Incoming:
    """The receiving end of a connection."""

    def __init__(self, connection: socket.socket):
        self._connection = connection
        self._slots: dict[int, mmap.mmap] = {}
        self._lent: dict[int, weakref.ref] = {}
        self._expected: deque[Arrival] = deque()

    def expect(self, tensor: torch.Tensor) -> "Arrival":
        """Notes that the next message not yet spoken for will become `tensor`."""
        receive = Arrival(self, tensor)
        self._expected.append(receive)
        return receive

    def complete(self, receive: "Arrival") -> None:
        """Takes messages, in the order in which they were asked for, up to that of `receive`."""
        while not receive.is_done:
            first = self._expected.popleft()
            number, num_bytes, first.sent_at = self._next_header()
            tensor = first.tensor
            wanted = tensor.numel() * tensor.element_size()
            if num_bytes != wanted:
                raise ConnectionError(
                    f"a message of {num_bytes} bytes came where {wanted} were expected, for shape "
                    f"{tuple(tensor.shape)} of {tensor.dtype}; both ranks must agree on it"
                )
            arrived = self._lend(number, num_bytes, tensor.dtype).view(tensor.shape)
            if tensor.is_cpu:
                tensor.data = arrived
            else:
                tensor.detach().copy_(arrived)
            first.is_done = True

    def _next_header(self) -> tuple[int, int, float]:
        header = b""
        while len(header) < _HEADER.size:
            header += self._read(_HEADER.size - len(header))
        number, num_bytes, sent_at = _HEADER.unpack(header)
        if number not in self._slots:
            _, (descriptor,), _, _ = socket.recv_fds(self._connection, 1, 1)
            self._slots[number] = _map(descriptor, os.fstat(descriptor).st_size)
            os.close(descriptor)
        return number, num_bytes, sent_at

    def _read(self, num_bytes: int) -> bytes:
        try:
            part = self._connection.recv(num_bytes)
        except BlockingIOError as error:
            raise ConnectionError("nothing came in time") from error
        if not part:
            raise ConnectionError("the sender has closed the connection")
        return part

    def _lend(self, number: int, num_bytes: int, dtype: torch.dtype) -> torch.Tensor:
        # The tensor's storage keeps `memory` alive. Its end says that nobody uses the slot any
        # more; the sender sees that without being told.
        slot, lent = self._slots[number], self._lent
        memory = memoryview(slot)[_MARK_BYTES : _MARK_BYTES + num_bytes]

        def give_back(_: weakref.ref) -> None:
            lent.pop(number, None)
            slot[0] = _FREE

        lent[number] = weakref.ref(memory, give_back)
        return torch.frombuffer(memory, dtype=dtype)


class Arrival:
    """The handle of a message to come. `sent_at`: when it was sent, on `time.monotonic`'s clock."""

    def __init__(self, channel: Incoming, tensor: torch.Tensor):
        self._channel, self.tensor = channel, tensor
        self.is_done, self.sent_at = False, None

    def wait(self) -> bool:
        if not self.is_done:
            self._channel.complete(self)
        return True


def _map(descriptor: int, size: int) -> mmap.mmap:
    return mmap.mmap(descriptor, size, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)


def _payload(slot: mmap.mmap, num_bytes: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.frombuffer(slot, dtype=torch.uint8, offset=_MARK_BYTES, count=num_bytes).view(
        dtype
    )


def _set_timeout(connection: socket.socket, seconds: float) -> None:
    # In the kernel, not in Python: a socket with a Python time-out polls before each read.
    connection.settimeout(None)
    limit = struct.pack("ll", int(seconds), 0)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
