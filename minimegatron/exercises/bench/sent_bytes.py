"""Counts what a student's code sends, also past the package's own collectives.

Megatron has no counterpart.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from minimegatron.core.tracing import Call, observed_by
from minimegatron.exercises.bench.counted_collectives import COLLECTIVES, CountedCollective, Counter
from minimegatron.exercises.bench.noticed_methods import methods_noticed

BY_TORCH = "torch.distributed "
SPOKEN = {
    "allreduce": "all-reduce",
    "allgather": "all-gather",
    "all_gather": "all-gather",
    "reduce_scatter": "reduce-scatter",
    "alltoall": "all-to-all",
    "all_to_all": "all-to-all",
}
"""How torch begins the names of its operations and of groups' methods, and what they are called."""


class SentTensors(Counter):
    """Counts collectives of `core.collectives`, and also calls of torch.distributed beside them."""

    def __init__(self) -> None:
        super().__init__()
        self.depth = 0

    def start(self, call: Call) -> None:
        self.depth += call.name in COLLECTIVES
        super().start(call)

    def stop(self, call: Call) -> None:
        self.depth -= call.name in COLLECTIVES

    def notice(self, operation: str, given: dict[str, Any]) -> None:
        """torch.distributed was asked for an operation, with these arguments."""
        if self.depth:
            return
        inputs = [one for name, one in given.items() if name.startswith("input")]
        tensors = tree_leaves(inputs or list(given.values()))
        if size := sum(one.nbytes for one in tensors if isinstance(one, torch.Tensor)):
            self.calls.append(CountedCollective(BY_TORCH + _spoken(operation), size, ()))

    @contextmanager
    def uncounted(self) -> Iterator[None]:
        """What torch.distributed is given inside the block is not the student's."""
        self.depth += 1
        try:
            yield
        finally:
            self.depth -= 1


class _Noticing(TorchDispatchMode):
    """Notices what is given to torch.distributed, by whichever of its functions."""

    def __init__(self, sent: SentTensors):
        super().__init__()
        self.sent = sent

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None):
        if function.namespace.startswith("c10d"):
            self.sent.notice(function._opname, _by_name(function, args))
        return function(*args, **(kwargs or {}))


def _by_name(function: Any, args: Any) -> dict[str, Any]:
    return dict(zip((one.name for one in function._schema.arguments), args, strict=False))


def _spoken(operation: str) -> str:
    name = operation.strip("_")
    return next(
        (words for begin, words in SPOKEN.items() if name.startswith(begin)),
        name.replace("_", " "),
    )


@contextmanager
def all_sent_counted(sent: SentTensors | None = None) -> Iterator[SentTensors]:
    """Counts what is sent inside the block; more of it where `sent` has counted before."""
    sent = sent or SentTensors()
    with observed_by(sent), _Noticing(sent), methods_noticed(sent.notice):
        yield sent


class _NoticingGroups(TorchDispatchMode):
    """Notes which ranks take part in each collective."""

    def __init__(self, asked: list[list[int]]):
        super().__init__()
        self.asked = asked

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None):
        if function.namespace.startswith("c10d"):
            group = _by_name(function, args).get("process_group")
            if group is not None:
                self.note(dist.ProcessGroup.unbox(group))
        return function(*args, **(kwargs or {}))

    def note(self, group: dist.ProcessGroup) -> None:
        self.asked.append(sorted(dist.get_process_group_ranks(group)))


@contextmanager
def groups_noted() -> Iterator[list[list[int]]]:
    """Yields the ranks of each collective that is made inside the block, in order."""
    asked: list[list[int]] = []
    mode = _NoticingGroups(asked)
    with mode, methods_noticed(lambda _, given: mode.note(given["self"])):
        yield asked
