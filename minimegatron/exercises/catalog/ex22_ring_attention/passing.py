"""The ring that a student's functions are given; before each hop it asks whether all ranks make it.

Megatron has no counterpart.
"""

import contextlib
import inspect
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist

from minimegatron.core import collectives
from minimegatron.exercises.bench.feedback import num_of
from minimegatron.exercises.bench.sent_bytes import SentTensors, all_sent_counted
from minimegatron.exercises.catalog.ex22_ring_attention.company import Company
from minimegatron.exercises.check import Wrong

MOST_TENSORS, MOST_DIMS = 6, 4
OVER = -1
"""In place of a hop's number: this rank has come out of the function."""


class Handle:
    """What comes from the previous rank, for `wait`."""

    def __init__(self, ring: "Ring", number: int, sent: tuple, came: list[torch.Tensor]):
        self._ring, self._number, self._sent, self._came = ring, number, sent, came
        self._as_sent = [tensor.clone() for tensor in sent]
        self.is_waited = self.has_company = self.has_keys = False

    def __iter__(self) -> Iterator[torch.Tensor]:
        raise Wrong(
            f"{self._ring}: what pass_on gives was unpacked; it is a handle\n"
            "Tensors come from its wait()."
        )

    def wait(self) -> list[torch.Tensor]:
        """The tensors that came; Wrong if those that are under way were changed meanwhile."""
        for place, (now, then) in enumerate(zip(self._sent, self._as_sent, strict=True)):
            if not self.is_waited and not torch.equal(now, then):
                raise Wrong(
                    f"{self._ring}: tensor {place} of hop {self._number} was changed in place while "
                    "it was under way\nThe next rank may get some of it old and some of it new. Make a "
                    "new tensor, or change it after wait."
                )
        self.is_waited = True
        return self._came


class Ring:
    """This rank's place among the ranks of a group, and the hops that it has made in one function."""

    def __init__(self, group: Any, words: str):
        self._group, self._words = group, words
        self.rank, self.size = group.rank(), group.size()
        self.num_sent = 0
        """Numbers of tensors passed on so far."""
        self._handles: list[Handle] = []
        self._sent = SentTensors()
        self._company: Company | None = None

    def __str__(self) -> str:
        return f"rank {dist.get_rank()}: in {self._words}"

    @property
    def num_beside(self) -> int:
        """Hops of keys and values that were under way while a block was computed."""
        hops = sum(handle.has_company and handle.has_keys for handle in self._handles)
        return min(hops, self._company.num_hidden) if self._company else 0

    @property
    def pairs(self) -> list[int]:
        """Scores made of keys that had made 0, 1, ... hops; 0 where nobody could tell."""
        return [self._company.num_scores[hop] for hop in range(self.size)] if self._company else []

    @property
    def num_hops(self) -> int:
        """Calls of `pass_on`."""
        return len(self._handles)

    def pass_on(self, *tensors: torch.Tensor) -> Handle:
        """Sends to the next rank; what comes from the one before has the same shapes."""
        number = self.num_hops
        given = self._agreed(number, tensors)
        came = [self._exchange(tensor) for tensor in given]
        self.num_sent += sum(tensor.numel() for tensor in given)
        handle = Handle(self, number, tensors, came)
        if self._company:
            handle.has_keys = self._company.arrive(tensors, came)
        self._handles.append(handle)
        return handle

    def end(self) -> None:
        """The function is over on this rank. Wrong if others go on, or a hop was not waited for."""
        self._ask(OVER, ())
        for number, handle in enumerate(self._handles):
            if not handle.is_waited:
                raise Wrong(
                    f"{self}: nobody has waited for hop {number} (counted from 0)\nUse what it brings, "
                    "or leave it out. A function may not return while something is under way."
                )

    def _agreed(self, number: int, tensors: tuple) -> list[torch.Tensor]:
        if not tensors:
            raise Wrong(f"{self}: pass_on was called without a tensor")
        for tensor in tensors:
            if not isinstance(tensor, torch.Tensor):
                raise Wrong(
                    f"{self}: pass_on got a {type(tensor).__name__}; it takes tensors, one by one"
                )
            if tensor.dim() > MOST_DIMS or tensor.dtype != torch.float64:
                raise Wrong(
                    f"{self}: pass_on got a tensor of shape {list(tensor.shape)} and {tensor.dtype}; "
                    "what travels here is float64, as everything that you are given"
                )
        if len(tensors) > MOST_TENSORS:
            raise Wrong(
                f"{self}: pass_on got {num_of(len(tensors), 'tensor')}; no more than four need to "
                f"travel"
            )
        told = self._ask(number, tensors)
        before = told[(self.rank - 1) % self.size]
        if before != told[self.rank]:
            raise Wrong(
                f"{self}, hop {number} sends {_shapes(told[self.rank])}, while the rank before sends "
                f"{_shapes(before)}\nEvery rank passes on the same things in the same order. Keys and "
                "values travel whole: which half of them it looks at, the next rank decides."
            )
        return list(tensors)

    def _ask(self, number: int, tensors: tuple) -> list[list[int]]:
        """What every rank of the ring is about to do."""
        mine = [number, len(tensors)]
        for tensor in tensors:
            mine += [tensor.dim(), *tensor.shape, *[0] * (MOST_DIMS - tensor.dim())]
        mine += [0] * (2 + MOST_TENSORS * (MOST_DIMS + 1) - len(mine))
        every = torch.empty(self.size * len(mine), dtype=torch.int64)
        with self._sent.uncounted():
            inspect.unwrap(collectives.all_gather)(every, torch.tensor(mine), self._group)
        told = every.view(self.size, -1).tolist()
        hops = [row[0] for row in told]
        if any(hop != number for hop in hops):
            raise Wrong(self._different(hops))
        return told

    def _different(self, hops: list[int]) -> str:
        words = ", ".join(
            f"rank {place} of the ring "
            + ("has come out" if hop == OVER else f"begins hop {hop} (counted from 0)")
            for place, hop in enumerate(hops)
        )
        return (
            f"{self}, the ranks do not make the same hops: {words}\nEvery rank passes on equally "
            "often. Look at an `if` or a loop that depends on the rank."
        )

    def _exchange(self, tensor: torch.Tensor) -> torch.Tensor:
        """One tensor, by an all-to-all in which only neighbours have something to send."""
        sent, came = [0] * self.size, [0] * self.size
        sent[(self.rank + 1) % self.size] = came[(self.rank - 1) % self.size] = tensor.numel()
        output = torch.empty(tensor.numel(), dtype=tensor.dtype)
        flat = tensor.detach().contiguous().reshape(-1)
        with self._sent.uncounted():
            inspect.unwrap(collectives.all_to_all)(output, flat, self._group, came, sent)
        return output.reshape(tensor.shape)

    # -- What is done beside the hops --

    @contextlib.contextmanager
    def watched(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> Iterator[SentTensors]:
        """Notes which hops have company inside the block, and yields what is sent past the ring."""
        self._company = Company(query, [key, value])
        self._company.under_way = self._handles
        with all_sent_counted(self._sent), self._company:
            yield self._sent


def _shapes(told: list[int]) -> str:
    """The shapes of a hop's tensors, as the ranks tell them to each other."""
    shapes = []
    for place in range(told[1]):
        begin = 2 + place * (MOST_DIMS + 1)
        shapes.append(str(told[begin + 1 : begin + 1 + told[begin]]))
    return " and ".join(shapes)
