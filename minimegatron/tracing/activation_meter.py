"""How many bytes autograd keeps for backward, measured: not by a formula, by asking for each tensor.

Megatron has no counterpart; on a GPU one reads `torch.cuda.max_memory_allocated`, which counts all
else too.

    with ActivationMeter(model) as meter:
        forward_backward_func(...)
    meter.peak, meter.after_each
"""

from collections import Counter
from collections.abc import Iterable
from types import TracebackType
from typing import NamedTuple

import torch

from minimegatron.core import tracing
from minimegatron.core.tracing import Call
from minimegatron.planner.links import COMBINED_STEP, KIND_OF_LINK


class Kept(NamedTuple):
    """A tensor that waits for its backward."""

    shape: tuple[int, ...]
    dtype: str
    num_bytes: int
    """Of its memory, which a view keeps whole."""


class ActivationMeter:
    """Counts the memory behind the tensors that autograd keeps while a `with` block runs.

    Memory that several tensors share counts once, that of parameters not at all: it is there anyway.
    What a recomputing layer makes in backward counts while it is there.

    Args:
        model: its parameters, or those of several chunks, are left out.
    """

    def __init__(self, model: torch.nn.Module | Iterable[torch.nn.Module]):
        chunks = [model] if isinstance(model, torch.nn.Module) else list(model)
        self._not_counted = {_memory(param) for chunk in chunks for param in chunk.parameters()}
        self._num_users: Counter[int] = Counter()
        self._kept: dict[int, Kept] = {}
        self.now = 0
        self.peak = 0
        self.after_each: list[int] = []
        """`now` at the end of each piece of work (`forward_step`, a combined turn, ...), in order."""

    def __enter__(self) -> "ActivationMeter":
        self._hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, _unpack)
        self._hooks.__enter__()
        tracing.add_observer(self)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        story: TracebackType | None,
    ) -> None:
        tracing.remove_observer(self)
        self._hooks.__exit__(kind, error, story)

    def kept(self) -> list[Kept]:
        """What is kept now, in the order in which forward made it."""
        return list(self._kept.values())

    # -- As an observer --

    def start(self, call: Call) -> None:
        """A traced call begins."""

    def stop(self, call: Call) -> None:
        """A traced call ends."""
        if call.name in KIND_OF_LINK or call.name == COMBINED_STEP:
            self.after_each.append(self.now)

    # -- As hooks --

    def _pack(self, tensor: torch.Tensor) -> "torch.Tensor | _HeldTensors":
        memory = _memory(tensor)
        return tensor if memory in self._not_counted else _HeldTensors(self, memory, tensor)

    def _take(self, memory: int, tensor: torch.Tensor) -> None:
        self._num_users[memory] += 1
        if self._num_users[memory] == 1:
            num_bytes = tensor.untyped_storage().nbytes()
            dtype = str(tensor.dtype).removeprefix("torch.")
            self._kept[memory] = Kept(tuple(tensor.shape), dtype, num_bytes)
            self.now += num_bytes
            self.peak = max(self.peak, self.now)

    def _drop(self, memory: int) -> None:
        self._num_users[memory] -= 1
        if self._num_users[memory] == 0:
            self.now -= self._kept.pop(memory).num_bytes


class _HeldTensors:
    """What the graph holds in a tensor's place. It dies with the graph's last need of it."""

    def __init__(self, meter: ActivationMeter, memory: int, tensor: torch.Tensor):
        self.meter, self.memory, self.tensor = meter, memory, tensor
        meter._take(memory, tensor)

    def __del__(self) -> None:
        self.meter._drop(self.memory)


def _unpack(packed: "torch.Tensor | _HeldTensors") -> torch.Tensor:
    return packed.tensor if isinstance(packed, _HeldTensors) else packed


def _memory(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
