"""Stands for a CUDA graph where there is no GPU: records a step's tensor operations, and repeats them.

Megatron has no counterpart; its graphs are torch's `torch.cuda.CUDAGraph`. What a graph of a GPU keeps,
and what it forbids, is so here too:

* Only operations on tensors are kept, with the memory that they read and write. Python does not run
  again: a list that grew during the capture does not grow in a replay, and a number stays what it was.
* The capture changes nothing: memory that was there before is put back at its end, and so are random
  numbers; memory that was made by it is filled with NaN, or with -1. What counts is the first replay.
* A replay writes its results to the same memory as all others.
* Whatever a program on a GPU would have to wait for is refused during the capture (`HostReadError`).

Unlike a GPU's, its memory is not used twice: a recorded step keeps every intermediate result. It sees
one thread. An extension's operation that torch does not dispatch is not recorded.
"""

import contextlib
import os
import sys
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, NoReturn

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from minimegatron.core.utils import Recording


class HostReadError(RuntimeError):
    """A captured step asked for a number: a program on a GPU would wait for work that is not done."""


READS = {
    "_local_scalar_dense": "the number in a tensor",
    "is_nonzero": "the number in a tensor",
    "equal": "whether all numbers are equal",
    "allclose": "whether all numbers are close",
    "nonzero": "the places of numbers that are not 0, and so their count",
    "masked_select": "the numbers under a mask, and so their count",
    "_unique2": "how many numbers differ",
    "unique_dim": "how many numbers differ",
    "bincount": "the largest number",
    "repeat_interleave": "the sum of the repetitions",
}
"""Operations whose result, or its size, the program must know before it goes on."""

LEAVES_TORCH = {
    "item": "the number in a tensor",
    "tolist": "all numbers of a tensor",
    "cpu": "a tensor's numbers in the CPU's memory",
    "numpy": "a tensor's numbers in the CPU's memory",
    "__array__": "a tensor's numbers in the CPU's memory",
    "__bool__": "whether a number is 0",
    "__int__": "the number in a tensor",
    "__float__": "the number in a tensor",
    "__index__": "the number in a tensor",
    "__contains__": "whether a number is in a tensor",
    "__format__": "the text of a tensor's numbers",
    "__repr__": "the text of a tensor's numbers",
}
"""Functions of torch that hand numbers to Python. On a CPU not all of them are dispatched."""

_OWN_FILES = (os.path.dirname(torch.__file__) + os.sep, __file__)


def _refuse(operation: str, what: str) -> NoReturn:
    """Raises HostReadError; it names the function that asked, not one of torch's or of this file."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_OWN_FILES):
        frame = frame.f_back
    file = os.path.basename(frame.f_code.co_filename)
    raise HostReadError(
        f"{operation} in {frame.f_code.co_name}, {file}:{frame.f_lineno}, asks for {what} while the "
        "step is captured: on a GPU, where it is not computed yet, the capture would fail; keep it a "
        "tensor and read it from what the call returns, or take a schedule that is not captured"
    )


class _Operation(NamedTuple):
    function: Any
    args: Any
    kwargs: Any
    outputs: Any


class _Recorder(TorchDispatchMode):
    """Within it, every operation is carried out and noted. `restore` undoes what it changed."""

    def __init__(self) -> None:
        super().__init__()
        self.operations: list[_Operation] = []
        self._made: dict[int, torch.UntypedStorage] = {}
        self._before: dict[int, tuple[torch.UntypedStorage, torch.UntypedStorage]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func.__name__.partition(".")[0]
        if name in READS and func is not torch.ops.aten.repeat_interleave.self_int:
            _refuse(func.name(), READS[name])
        if name.strip("_").startswith("index") and _counts_mask(args):
            _refuse(func.name(), "the places where a mask is True, and so their count")
        # An alias keeps its memory where `tensor.data = ...` gives the tensor another one.
        aliases = _each_tensor((args, kwargs), torch.Tensor.detach)
        read = {_place(tensor) for tensor in _tensors(aliases)}
        self._keep_what_is_written(func, args, kwargs)
        outputs = func(*args, **kwargs)
        noted = _each_tensor(outputs, torch.Tensor.detach)
        for tensor in _tensors(noted):
            if _place(tensor) not in read:
                self._made[_place(tensor)] = tensor.untyped_storage()
        if name == "lift_fresh":  # Python's own numbers: each replay begins with them
            func, aliases = torch.ops.aten.copy_.default, ((noted, noted.clone()), {})
        self.operations.append(_Operation(func, *aliases, noted))
        return outputs

    def _keep_what_is_written(self, func: Any, args: Any, kwargs: Any) -> None:
        for i, argument in enumerate(func._schema.arguments):
            if argument.alias_info is None or not argument.alias_info.is_write:
                continue
            given = args[i] if i < len(args) else kwargs.get(argument.name)
            for tensor in _tensors(given):
                place, storage = _place(tensor), tensor.untyped_storage()
                if place not in self._made and place not in self._before:
                    self._before[place] = (storage, storage.clone())

    def restore(self) -> None:
        """Old memory is as it was; new memory has no numbers."""
        for storage, before in self._before.values():
            storage.copy_(before)
        for place, storage in self._made.items():
            if place not in self._before:
                storage.fill_(0xFF)


class _Guard(TorchFunctionMode):
    """Within it, what hands numbers to Python is refused."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        is_of_tensor = bool(args) and isinstance(args[0], torch.Tensor)
        if name in LEAVES_TORCH and is_of_tensor:
            _refuse(f"Tensor.{name}()", LEAVES_TORCH[name])
        if name == "to" and is_of_tensor and "cpu" in (*args[1:], (kwargs or {}).get("device")):
            _refuse('Tensor.to("cpu")', LEAVES_TORCH["cpu"])
        if func is torch.tensor and (kwargs or {}).get("device") is not None:
            _refuse("torch.tensor(..., device=)", "a copy of Python's numbers on the GPU")
        return func(*args, **(kwargs or {}))


def _place(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _counts_mask(args: Any) -> bool:
    """One number for all places of a mask is written without a count of them."""
    masks = (torch.bool, torch.uint8)
    has_mask = len(args) > 1 and any(index.dtype in masks for index in _tensors(args[1]))
    return has_mask and not (len(args) > 2 and args[2].numel() == 1)


def _tensors(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, dict):
        value = list(value.values())
    return [t for one in value for t in _tensors(one)] if isinstance(value, list | tuple) else []


def _each_tensor(value: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    if isinstance(value, torch.Tensor):
        return change(value)
    if isinstance(value, dict):
        return {key: _each_tensor(one, change) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return type(value)([_each_tensor(one, change) for one in value])
    return value


def _random_state_is_asked(*_: Any) -> NoReturn:
    _refuse("a random generator's state", "how many random numbers were drawn")


@contextlib.contextmanager
def _random_states_unasked() -> Iterator[None]:
    """The CPU's generator stands for a GPU's, which tells nobody its state during a capture."""
    names = ("get_rng_state", "set_rng_state")
    asked = {name: getattr(torch, name) for name in names}
    state = torch.get_rng_state()
    for name in names:
        setattr(torch, name, _random_state_is_asked)
    try:
        yield
    finally:
        for name, function in asked.items():
            setattr(torch, name, function)
        torch.set_rng_state(state)


@contextlib.contextmanager
def _recording() -> Iterator[None]:
    Recording.is_on = True
    try:
        yield
    finally:
        Recording.is_on = False


class RecordedGraph:
    """What `RecordedGraphs.capture` has recorded."""

    def __init__(self, operations: list[_Operation]):
        self.operations = operations

    @torch.no_grad()
    def replay(self) -> None:
        """All operations again, in their order, on what their memory holds now."""
        for function, args, kwargs, outputs in self.operations:
            results = function(*args, **kwargs)
            read = {_place(tensor) for tensor in _tensors((args, kwargs))}
            for result, kept in zip(_tensors(results), _tensors(outputs), strict=True):
                if _place(result) not in read and kept.numel():  # else it has its memory already
                    kept.copy_(result)


class RecordedGraphs:
    """Makes graphs on the CPU; see `full_cuda_graph.GraphMaker`."""

    def capture(self, function: Callable[[], None]) -> RecordedGraph:
        """Runs `function` once and records it.

        Raises HostReadError for what a capture on a GPU forbids; what was changed is put back then too.
        """
        recorder = _Recorder()
        with _recording(), _random_states_unasked():
            try:
                with recorder, _Guard():
                    function()
            finally:
                recorder.restore()
        return RecordedGraph(recorder.operations)
