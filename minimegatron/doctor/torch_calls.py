"""Calls of `torch.distributed` that do not go through `core.collectives`: a student's own send, say.

Megatron has no counterpart.

While a rank is recorded, the blocking functions of `torch.distributed` are replaced by ones that note
themselves first. What the package itself calls is noted by its own links already, and passed through.
"""

import functools
import inspect
from collections.abc import Callable
from typing import Any, Protocol

import torch
import torch.distributed as dist

from minimegatron.core.tracing import Call
from minimegatron.doctor.records import RECEIVING, SENDING
from minimegatron.doctor.situation import TORCH_COLLECTIVES

MESSAGES = {"send": (SENDING, "dst"), "recv": (RECEIVING, "src")}
TENSORS = ("tensor", "input_tensor", "input", "output")
"""Parameters, of which one holds the tensor whose size all ranks must agree on."""


class TorchCallRecorder(Protocol):
    """Who is told."""

    def start(self, call: Call) -> None: ...

    def stop(self, call: Call) -> None: ...

    def is_communicating(self) -> bool: ...


def note_torch_calls(recorder: TorchCallRecorder) -> None:
    """From now on, tells `recorder` of every call of such a function."""
    for name in (*MESSAGES, *TORCH_COLLECTIVES):
        function = getattr(dist, name, None)
        if function is not None:
            setattr(dist, name, _noting(name, function, recorder))


def _noting(name: str, function: Callable, recorder: TorchCallRecorder) -> Callable:
    signature = inspect.signature(function)

    @functools.wraps(function)
    def noted(*args: Any, **kwargs: Any) -> Any:
        if not dist.is_initialized() or recorder.is_communicating():
            return function(*args, **kwargs)
        try:
            arguments = dict(signature.bind(*args, **kwargs).arguments)
        except TypeError:
            return function(*args, **kwargs)  # which says what is wrong
        group = arguments.get("group") or dist.group.WORLD
        if not isinstance(group, dist.ProcessGroup):
            return function(*args, **kwargs)  # not a member
        call = Call(f"torch.distributed.{name}", f"torch.distributed.{name}", "", 0)
        describe = _describe_message if name in MESSAGES else _describe_collective
        describe(call, name, arguments, group)
        recorder.start(call)
        try:
            return function(*args, **kwargs)
        finally:
            recorder.stop(call)

    return noted


def _describe_message(call: Call, name: str, arguments: dict[str, Any], group: Any) -> None:
    doing, parameter = MESSAGES[name]
    call.attributes = {"doing": doing, "peer": _rank(parameter, arguments, group)}
    # The peer is a rank of the job already, not a place in the group.
    call.arguments = {"group": None, "tensor": arguments.get("tensor")}


def _describe_collective(call: Call, name: str, arguments: dict[str, Any], group: Any) -> None:
    call.attributes = {"group_size": group.size()}
    call.arguments = {"group": group}
    root = "dst" if name in ("reduce", "gather", "gather_object") else "src"
    if root in arguments or f"group_{root}" in arguments:
        preposition = "to" if root == "dst" else "from"
        call.attributes["op"] = f"{preposition} rank {_rank(root, arguments, group)}"
    elif "op" in arguments or name == "all_reduce":
        op = arguments.get("op", dist.ReduceOp.SUM)
        call.attributes["op"] = getattr(op, "name", "").lower()
    tensor = next((arguments[name] for name in TENSORS if name in arguments), None)
    if isinstance(tensor, torch.Tensor):
        call.attributes["shape"] = tuple(tensor.shape)
        call.attributes["dtype"] = str(tensor.dtype).removeprefix("torch.")
        call.attributes["bytes"] = tensor.numel() * tensor.element_size()


def _rank(parameter: str, arguments: dict[str, Any], group: Any) -> int:
    """The rank that `dst` or `group_dst` (or `src`) names; -1 for any."""
    if arguments.get(f"group_{parameter}") is not None:
        return dist.get_global_rank(group, arguments[f"group_{parameter}"])
    rank = arguments.get(parameter)
    return -1 if rank is None else rank
