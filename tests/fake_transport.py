"""A transport without processes that forgives nothing: each rank is a thread, messages have no tags.

The n-th send from a to b meets the n-th receive at b from a, and neither ends before the other is
there. Unlike gloo, so a wrong order deadlocks or delivers the wrong tensor here. When every rank
waits, the run ends with a report of who waits for whom. Data are copied when the two meet, as late
as a real network might, so a tensor freed too early arrives damaged.
"""

import threading
from collections import deque
from dataclasses import dataclass

import torch

from minimegatron.core.pipeline_parallel.transport import Message


class Deadlock(Exception):
    """Every rank that has not finished waits for a message."""


@dataclass
class FakeGroup:
    """A process group as far as schedules look at it."""

    my_rank: int = 0
    my_size: int = 1

    def rank(self) -> int:
        return self.my_rank

    def size(self) -> int:
        return self.my_size


class _Pending:
    def __init__(self, network, message: Message, rank: int):
        self.network, self.message, self.rank = network, message, rank
        self.done = False

    def wait(self) -> bool:
        self.network.wait_for([self])
        return True

    def __str__(self) -> str:
        verb = "send to" if self.message.is_send else "receive from"
        return f"rank {self.rank} waits: {verb} rank {self.message.peer} ({self.message.payload})"


class Network:
    """All links between `size` ranks. `blocking`: a single start returns only when it is matched."""

    def __init__(self, size: int, blocking: bool = True):
        self.size, self.blocking = size, blocking
        self.changed = threading.Condition()
        self.queues: dict[tuple[int, int, bool], deque] = {}
        self.waiting: dict[int, list[_Pending]] = {}
        self.finished: set[int] = set()
        self.failure: BaseException | None = None
        self.log: list[list[tuple]] = [[] for _ in range(size)]

    def post(self, message: Message, rank: int) -> _Pending:
        with self.changed:
            pending = _Pending(self, message, rank)
            link = (rank, message.peer) if message.is_send else (message.peer, rank)
            kind = "send" if message.is_send else "receive"
            size = message.tensor.numel() * message.tensor.element_size()
            self.log[rank].append((kind, message.peer, message.payload, size))
            others = self.queues.setdefault((*link, not message.is_send), deque())
            if others:
                self._meet(pending, others.popleft())
            else:
                self.queues.setdefault((*link, message.is_send), deque()).append(pending)
            return pending

    def _meet(self, one: _Pending, other: _Pending) -> None:
        send, receive = (one, other) if one.message.is_send else (other, one)
        target = receive.message.tensor.detach()
        if target.shape != send.message.tensor.shape:
            self.failure = self.failure or AssertionError(
                f"rank {send.rank} sent shape {tuple(send.message.tensor.shape)}, "
                f"rank {receive.rank} expected {tuple(target.shape)}"
            )
        else:
            target.copy_(send.message.tensor)
        one.done = other.done = True
        self.changed.notify_all()

    def wait_for(self, pendings: list[_Pending]) -> None:
        rank = pendings[0].rank
        with self.changed:
            while not all(pending.done for pending in pendings):
                if self.failure is not None:
                    raise self.failure
                self.waiting[rank] = [pending for pending in pendings if not pending.done]
                self._check_deadlock()
                if self.failure is None:
                    self.changed.wait(timeout=60)
                self.waiting.pop(rank, None)
        if self.failure is not None:
            raise self.failure

    def _check_deadlock(self) -> None:
        really = [r for r, ops in self.waiting.items() if not all(op.done for op in ops)]
        if self.failure is None and len(really) + len(self.finished) == self.size:
            report = "; ".join(str(op) for r in sorted(really) for op in self.waiting[r])
            self.failure = Deadlock(report)
            self.changed.notify_all()

    def finish(self, rank: int, failure: BaseException | None) -> None:
        with self.changed:
            self.finished.add(rank)
            if failure is not None and self.failure is None:
                self.failure = failure
            elif len(self.finished) < self.size:
                self._check_deadlock()
            self.changed.notify_all()

    def leftovers(self) -> list[str]:
        return [str(pending) for queue in self.queues.values() for pending in queue]


class FakeTransport:
    """One rank's end of a `Network`."""

    matches_by_tag = False

    def __init__(self, network: Network, rank: int):
        self.network, self.rank = network, rank

    def start(self, message: Message) -> _Pending:
        pending = self.network.post(message, self.rank)
        if self.network.blocking:
            pending.wait()
        return pending

    def start_batch(self, messages: list[Message]) -> list[_Pending]:
        return [self.network.post(message, self.rank) for message in messages]


def run_threads(network: Network, function) -> list:
    """`function(rank)` in one thread per rank; returns the results or raises the first failure."""
    results: list = [None] * network.size

    def body(rank: int) -> None:
        failure = None
        try:
            results[rank] = function(rank)
        except BaseException as error:
            failure = error
        network.finish(rank, failure)

    threads = [threading.Thread(target=body, args=(r,), daemon=True) for r in range(network.size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=120)
        if thread.is_alive():
            raise TimeoutError("a fake rank did not return within 120 s")
    if network.failure is not None:
        raise network.failure
    return results


class Identified(torch.autograd.Function):
    """A stage's computation that only checks which message it got and says which one it is.

    An activation is [microbatch, virtual stage]; a gradient is [-1 - microbatch, virtual stage].
    """

    @staticmethod
    def forward(ctx, tensor, microbatch, stage, num_stages):
        ctx.identity = (microbatch, stage, num_stages)
        if stage > 0:
            expected = [float(microbatch), float(stage - 1)]
            if tensor.flatten().tolist() != expected:
                raise AssertionError(
                    f"forward of microbatch {microbatch} on virtual stage {stage} expected "
                    f"activation {expected}, got {tensor.flatten().tolist()}"
                )
        return tensor.new_tensor([[[microbatch, stage]]])

    @staticmethod
    def backward(ctx, grad):
        microbatch, stage, num_stages = ctx.identity
        if stage < num_stages - 1:
            expected = [-1.0 - microbatch, float(stage + 1)]
            if grad.flatten().tolist() != expected:
                raise AssertionError(
                    f"backward of microbatch {microbatch} on virtual stage {stage} expected "
                    f"gradient {expected}, got {grad.flatten().tolist()}"
                )
        return grad.new_tensor([[[-1.0 - microbatch, stage]]]), None, None, None
