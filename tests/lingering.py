"""A message that a thread of gloo's still frees when its rank comes to its end.

Used by: files that tests start as ranks. The thread runs Python's own code then, and so needs Python's
lock; without care the process aborts with "terminate called without an active exception".
"""

import atexit
import sys
import threading
import time

import torch
import torch.distributed as dist

SECONDS = 1.0
"""How long the thread goes on when its process has come to the end."""


class Slow(bytearray):
    """Memory that takes long to free: until the process ends, and a little longer."""

    freeing: threading.Event
    at_exit: threading.Event

    def __del__(self):
        self.freeing.set()
        while not self.at_exit.is_set():
            pass
        end = time.monotonic() + SECONDS
        while time.monotonic() < end:
            pass


def linger() -> None:
    """Leaves such a message behind on rank 0. Every one of two ranks must call it."""
    group = dist.new_group(backend="gloo")
    sys.lingering_group = group  # somebody refers to it, so nobody waits for its threads
    if dist.get_rank() == 1:
        time.sleep(0.3)
        dist.all_reduce(torch.zeros(16), group=group)
        return
    memory = Slow(64)
    memory.freeing, memory.at_exit = threading.Event(), threading.Event()
    freeing = memory.freeing
    atexit.register(memory.at_exit.set)
    tensor = torch.frombuffer(memory, dtype=torch.float32)
    dist.all_reduce(tensor, group=group, async_op=True)
    # The other rank is late: when the sum is there, only gloo's thread has the tensor.
    del tensor, memory
    assert freeing.wait(60)
