"""Whether a program's functions take the arguments that `pretrain` gives them.

Megatron has no counterpart: there a function with other arguments fails where it is first called,
on every rank, with a traceback.
"""

import inspect
from collections.abc import Callable

from minimegatron.training.config import Arguments


def check_functions(
    model_provider: Callable,
    train_valid_test_dataset_provider: Callable,
    forward_step_func: Callable,
    args: Arguments,
) -> None:
    """Raises ValueError, with the remedy, for the first function that cannot be called.

    A function whose arguments Python does not know, such as one of C, is not looked at.
    """
    given = ["pre_process", "post_process"]
    num_chunks = args.virtual_pipeline_model_parallel_size
    if num_chunks is not None:
        given.append("vp_stage")
        note = f"; each rank has {num_chunks} chunks of the model, and vp_stage says which is built"
    else:
        note = ""
    _check("the model provider", model_provider, 0, given, note)
    numbers = ": three numbers of samples"
    _check("the provider of data sets", train_valid_test_dataset_provider, 1, [], numbers)
    _check("the forward step", forward_step_func, 2, [], ": data_iterator and model")


def takes(function: Callable, name: str) -> bool:
    """Whether `name` may be given by name; True where Python does not know."""
    known = _parameters(function)
    if known is None:
        return True
    by_name = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return any(
        x.kind is inspect.Parameter.VAR_KEYWORD or (x.name == name and x.kind in by_name)
        for x in known
    )


def _parameters(function: Callable) -> list[inspect.Parameter] | None:
    try:
        return list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):
        return None


def _check(who: str, function: Callable, num_positional: int, names: list[str], note: str) -> None:
    """`function` is called with so many arguments by position, and with `names`."""
    if not callable(function):
        raise ValueError(f"{who} is {function!r:.80}, which cannot be called; give a function")
    if _parameters(function) is None:
        return
    signature = inspect.signature(function)
    try:
        signature.bind(*range(num_positional), **dict.fromkeys(names))
    except TypeError as reason:
        given = " and ".join([f"{num_positional} by position"] * (num_positional > 0) + names)
        called = getattr(function, "__name__", type(function).__name__)
        raise ValueError(
            f"{who}, {called}{signature}, cannot be called with {given}: {reason}{note}"
        ) from None
