"""All ranks of a group in one process: `play(4, fn, ...)` calls `fn(group, ...)` once per rank.

Each rank is a thread. One of them runs at a time, until it waits for what another has to send, so a
test repeats exactly; each has a random stream of its own. The collectives are the real ones, and
`torch.distributed` too; only the group that carries the tensors is another.
"""

import threading
from collections.abc import Callable
from functools import reduce
from typing import Any

import torch

from minimegatron.backend.calls import name_of
from minimegatron.backend.torch_names import with_torch_names

PATIENCE = 20
"""Seconds that a rank waits for the others."""


class Stage:
    """Where the ranks meet. Whoever runs holds `turn`."""

    def __init__(self, size: int):
        self.size, self.turn = size, threading.Condition()
        self.sent: dict[tuple[int, int, int], torch.Tensor] = {}
        self.error: BaseException | None = None


@with_torch_names
class PlayedGroup:
    """What `core.collectives` and `torch.distributed` need of a process group."""

    def __init__(self, stage: Stage, rank: int):
        self._stage, self._rank, self._count = stage, rank, 0

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return self._stage.size

    def _exchange(self, parts: list[torch.Tensor], finish: Callable) -> "Exchange":
        """`parts[j]` goes to rank j; `finish` gets what came, by rank."""
        stage, number = self._stage, self._count
        self._count += 1
        for peer, part in enumerate(parts):
            stage.sent[number, self._rank, peer] = part.detach().clone()
        stage.turn.notify_all()
        keys = [(number, peer, self._rank) for peer in range(stage.size)]
        return Exchange(stage, keys, finish)

    def all_to_all_single(self, output, input, output_splits, input_splits, opts=None):
        def finish(parts):
            assert [len(part) for part in parts] == list(output_splits)
            output.detach().copy_(torch.cat(parts))

        return self._exchange(list(input.split(list(input_splits))), finish)

    def all_gather_single(self, output, input, opts=None):
        parts = [input] * self.size()
        return self._exchange(parts, lambda parts: output.detach().copy_(torch.cat(parts)))

    def reduce_scatter_single(self, output, input, opts):
        return self._reduced(list(input.chunk(self.size())), output, opts)

    def allreduce(self, tensors, opts):
        (tensor,) = tensors
        return self._reduced([tensor] * self.size(), tensor, opts)

    def _reduced(self, parts, output, opts):
        combine = {"SUM": torch.add, "MAX": torch.maximum}[name_of(opts.reduceOp)]
        return self._exchange(parts, lambda parts: output.detach().copy_(reduce(combine, parts)))


class Exchange:
    """A handle: `wait` gives the turn away until all parts are there. To wait again changes nothing."""

    def __init__(self, stage: Stage, keys: list[tuple[int, int, int]], finish: Callable):
        self._stage, self._keys, self._finish = stage, keys, finish

    def wait(self) -> bool:
        if not self._keys:
            return True
        stage, random = self._stage, torch.get_rng_state()
        here = stage.turn.wait_for(
            lambda: stage.error or all(key in stage.sent for key in self._keys), PATIENCE
        )
        torch.set_rng_state(random)
        if stage.error or not here:
            raise RuntimeError("another rank failed, or sent nothing") from stage.error
        self._finish([stage.sent.pop(key) for key in self._keys])
        self._keys = []
        return True


def play(size: int, function: Callable[..., Any], *args: Any, seed: int = 1) -> list[Any]:
    """What `function(group, *args)` returns on each rank, or the first error that one raised."""
    stage, results = Stage(size), [None] * size

    def run(rank: int) -> None:
        with stage.turn:
            try:
                torch.manual_seed(seed)
                results[rank] = function(PlayedGroup(stage, rank), *args)
            except BaseException as error:
                stage.error = stage.error or error
                stage.turn.notify_all()

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(2 * PATIENCE)
    assert not any(thread.is_alive() for thread in threads), "a rank never ended"
    if stage.error is not None:
        raise stage.error
    return results
