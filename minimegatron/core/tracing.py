"""The one observation seam: `@traced` on the links of the call chain, and who may watch them.

Megatron has no such module; there, `if config.timers is not None: config.timers(...).start()`
stands in each function instead.

Torch-free: the planner and the documentation import the names below without torch.
"""

import functools
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol


@dataclass(slots=True)
class Call:
    """One call of a traced function, as observers see it.

    `name` is the timer name Megatron uses for this link ("forward-compute", "forward-send", ...),
    `symbol` the function's dotted path, `file` and `line` where it is defined. `attributes` holds
    what the link's `describe` function read from the arguments: microbatch, peer, bytes, ...

    `arguments` (by parameter name) and `result` (None until the call has ended) are the objects
    themselves: an observer recognises a message by the tensor that a forward step returned. They
    are cleared when the last observer has been told, so that watching keeps no tensor alive.
    """

    name: str
    symbol: str
    file: str
    line: int
    attributes: dict[str, Any] = field(default_factory=dict)
    arguments: dict[str, Any] = field(default_factory=dict, repr=False)
    result: Any = field(default=None, repr=False)


class Observer(Protocol):
    """What `add_observer` takes: told of each traced call when it begins and when it ends."""

    def start(self, call: Call) -> None: ...

    def stop(self, call: Call) -> None: ...


_observers: list[Observer] = []
_innermost: list[Observer] = []


def add_observer(observer: Observer, innermost: bool = False) -> None:
    """Tells `observer` of every traced call of this process from now on.

    Observers enclose each other in the order in which they were added. One that is `innermost`
    stays within all others: what it does when a call begins or ends counts, for them, as part of
    the call. Pacing is done so.
    """
    num_outer = sum(known not in _innermost for known in _observers)
    _observers.insert(len(_observers) if innermost else num_outer, observer)
    if innermost:
        _innermost.append(observer)


def remove_observer(observer: Observer) -> None:
    """Ends what `add_observer` began. Raises ValueError if `observer` was never added."""
    _observers.remove(observer)
    if observer in _innermost:
        _innermost.remove(observer)


@contextmanager
def observed_by(observer: Observer | None) -> Iterator[None]:
    """Adds `observer` for the length of a `with` block; does nothing for None."""
    if observer is None or observer in _observers:
        yield
        return
    add_observer(observer)
    try:
        yield
    finally:
        remove_observer(observer)


def traced(name: str, describe: Callable[[dict[str, Any]], dict[str, Any]] | None = None):
    """Marks a function as a link of the chain, visible to observers.

    `describe` maps the call's bound arguments to the attributes of its `Call`. It runs only while
    somebody watches; with no observer the decorated function costs one list check more.
    """

    def decorate(function):
        code = inspect.unwrap(function).__code__  # under `torch.no_grad()` and the like
        symbol = f"{function.__module__}.{function.__qualname__}"
        file, line, bind = code.co_filename, code.co_firstlineno, _binder(function)

        @functools.wraps(function)
        def link(*args, **kwargs):
            if not _observers:
                return function(*args, **kwargs)
            arguments = bind(args, kwargs)
            attributes = {} if describe is None else describe(arguments)
            call = Call(name, symbol, file, line, attributes, arguments)
            return _watch(call, function, args, kwargs)

        link.decorate = decorate  # so that another function can take this link's place
        return link

    return decorate


def _binder(function: Callable) -> Callable[[tuple, dict[str, Any]], dict[str, Any]]:
    """Arguments of a call -> arguments by name, defaults included."""
    signature = inspect.signature(function)
    parameters = list(signature.parameters.values())
    names = [parameter.name for parameter in parameters]
    defaults = {p.name: p.default for p in parameters if p.default is not p.empty}
    is_plain = all(p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY) for p in parameters)

    def bind(args: tuple, kwargs: dict[str, Any]) -> dict[str, Any]:
        if is_plain:
            arguments = {**defaults, **dict(zip(names, args, strict=False)), **kwargs}
            if len(arguments) == len(names):
                return arguments
        # Slower by an order of magnitude, but right for everything, and for errors.
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        return dict(bound.arguments)

    return bind


def call_traced(name: str, function: Callable, *args: Any) -> Any:
    """Calls a link of the chain that a user wrote, and that therefore carries no decorator."""
    if not _observers:
        return function(*args)
    written = function
    while isinstance(written, functools.partial):
        written = written.func
    written = inspect.unwrap(written)
    if not hasattr(written, "__qualname__"):  # an object with a `__call__` of its own
        written = type(written).__call__
    code = getattr(written, "__code__", None)
    call = Call(
        name,
        f"{written.__module__}.{written.__qualname__}",
        "" if code is None else code.co_filename,
        0 if code is None else code.co_firstlineno,
    )
    return _watch(call, function, args, {})


def _watch(call: Call, function: Callable, args: tuple, kwargs: dict[str, Any]) -> Any:
    # Observers end in the reverse of the order in which they began, as nested `with` blocks would.
    watching = list(_observers)
    for observer in watching:
        observer.start(call)
    try:
        call.result = function(*args, **kwargs)
        return call.result
    finally:
        for observer in reversed(watching):
            observer.stop(call)
        call.arguments, call.result = {}, None


# -- What observers are told of a call: what a `@traced` link has as `describe` --


def of_forward(arguments: dict[str, Any]) -> dict[str, Any]:
    """Of `forward_step`."""
    return {
        "microbatch": arguments["current_microbatch"],
        "chunk": arguments["vp_stage"] or 0,
        "is_last_stage": arguments["is_last_stage"],
    }


def of_loss(arguments: dict[str, Any]) -> dict[str, Any]:
    """Of `forward_step_calc_loss`."""
    return {"chunk": arguments["vp_stage"] or 0}


def of_message(arguments: dict[str, Any]) -> dict[str, Any]:
    """Of a message that starts."""
    message = arguments["message"]
    return {
        "peer": message.peer,
        "payload": message.payload,
        "doing": _doing(message),
        "bytes": message.tensor.numel() * message.tensor.element_size(),
    }


def of_message_wait(arguments: dict[str, Any]) -> dict[str, Any]:
    """Of waiting for a message; `number` says how many like it came before in this step."""
    handle = arguments["handle"]
    return {
        "stage": handle.stage,
        "peer": handle.message.peer,
        "payload": handle.message.payload,
        "doing": _doing(handle.message),
        "number": handle.number,
    }


def _doing(message: Any) -> str:
    return "sending" if message.is_send else "receiving"


def of_collective(arguments: dict[str, Any]) -> dict[str, Any]:
    """Bytes, shape and dtype of its tensor, ranks of its group. Raises TypeError where one is None."""
    tensor, group = arguments.get("tensor", arguments.get("input")), arguments["group"]
    for name, value in (("tensor", tensor), ("group", group)):
        if value is None:
            raise TypeError(f"a collective needs a {name}, and got None")
    return {
        "bytes": tensor.numel() * tensor.element_size(),
        "shape": tuple(tensor.shape),
        "dtype": str(tensor.dtype).removeprefix("torch."),
        "group_size": group.size(),
    }


def of_bucket_launch(arguments: dict[str, Any]) -> dict[str, Any]:
    """Numbers of the group's buckets, bytes of their gradients, and how many parameters they have."""
    group = arguments["self"]
    return {
        "bucket": [bucket.bucket_id for bucket in group.buckets],
        "bytes": sum(b.grad_data.numel() * b.grad_data.element_size() for b in group.buckets),
        "num_params": len(group.params),
    }


def of_model_forward(arguments: dict[str, Any]) -> dict[str, Any]:
    """The chunk and the number of its layers."""
    model = arguments["self"]
    return {"chunk": model.vp_stage or 0, "layers": model.decoder.num_layers_per_pipeline_rank}


def of_layer_forward(arguments: dict[str, Any]) -> dict[str, Any]:
    """The layer's number in the whole model."""
    return {"layer": arguments["self"].layer_number}
