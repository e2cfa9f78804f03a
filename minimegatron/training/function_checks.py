"""Whether a program's functions take the arguments that `pretrain` gives them.

Megatron has no counterpart: there a function with other arguments fails where it is first called,
on every rank, with a traceback.
"""

import inspect
from collections.abc import Callable
from typing import Any

import torch

from minimegatron.training.config import Arguments


def check_functions(
    needed: tuple[Callable, Callable, Callable],
    others: tuple[Callable | None, ...],
    args: Arguments,
) -> None:
    """Raises ValueError, with the remedy, for the first function that cannot be called.

    Args:
        needed: the model provider, the provider of data sets, the forward step.
        others: in the order of `OTHERS`; None where one is not given.

    A function whose arguments Python does not know, such as one of C, is not looked at.
    """
    model_provider, train_valid_test_dataset_provider, forward_step_func = needed
    given, note = ["pre_process", "post_process"], "these two by name"
    num_chunks = args.virtual_pipeline_model_parallel_size
    if num_chunks is not None or takes(model_provider, "vp_stage"):
        given.append("vp_stage")
    if num_chunks is not None:
        note = f"these by name: a rank has {num_chunks} chunks, and the model is told which by vp_stage"
    _check("the model provider", model_provider, 0, given, note)
    numbers = "one argument, the three numbers of samples"
    stage = ["vp_stage"] if takes(train_valid_test_dataset_provider, "vp_stage") else []
    _check("the provider of data sets", train_valid_test_dataset_provider, 1, stage, numbers)
    _check("the forward step", forward_step_func, 2, [], "two arguments, data_iterator and model")
    for (name, called), function in zip(OTHERS.items(), others, strict=True):
        if function is not None:
            _check(name, function, *called)


OTHERS: dict[str, tuple[int, list[str], str]] = {
    "process_non_loss_data_func": (3, [], "three arguments, data, iteration and writer"),
    "non_loss_data_func": (1, [], "one argument, the chunks of the model"),
    "get_embedding_ranks": (1, [], "one argument, the ranks of a pipeline"),
    "get_position_embedding_ranks": (1, [], "one argument, the ranks of a pipeline"),
}
"""How many arguments by position, which by name, and these in words."""


def check_args_provider(extra_args_provider: Callable | None) -> None:
    """Raises ValueError where it cannot be called with a parser."""
    if isinstance(extra_args_provider, dict):
        raise ValueError(
            f"extra_args_provider is {extra_args_provider!r:.60}, not a function; if these are "
            "defaults of arguments, give them by name, args_defaults=: their place in pretrain is "
            "another today"
        )
    if extra_args_provider is not None:
        _check("extra_args_provider", extra_args_provider, 1, [], "one argument, the parser")


def check_chunk(chunk: Any) -> None:
    """Raises ValueError where a model provider has returned no model."""
    if not isinstance(chunk, torch.nn.Module):
        raise ValueError(
            f"the model provider returned a {type(chunk).__name__}; return one module, the chunk of "
            "the model that was asked for"
        )


def check_datasets(datasets: Any) -> tuple:
    """The three data sets of a provider. Raises ValueError for anything else."""
    if isinstance(datasets, (tuple, list)) and len(datasets) == 3:
        odd = [x for x in datasets if not (x is None or hasattr(x, "__getitem__"))]
        if not odd:
            return tuple(datasets)
        what = f"an entry of type {type(odd[0]).__name__}"
    elif isinstance(datasets, (tuple, list)):
        what = f"{len(datasets)} values"
    else:
        what = "None" if datasets is None else f"a {type(datasets).__name__}"
    raise ValueError(
        f"the provider of data sets returned {what}; return three: for training, validation and test, "
        "each a data set or None"
    )


def takes(function: Callable, name: str) -> bool:
    """Whether `function` takes an argument of that name; False where Python does not know.

    >>> takes(lambda a, b=None: a, "b"), takes(lambda **a: a, "b"), takes(lambda a: a, "b")
    (True, True, False)
    """
    by_name = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return any(
        x.kind is inspect.Parameter.VAR_KEYWORD or (x.name == name and x.kind in by_name)
        for x in _parameters(function) or ()
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
        called = getattr(function, "__name__", type(function).__name__)
        given = f"{' and '.join(names)} by name" if names else f"{num_positional} by position"
        raise ValueError(
            f"{who}, {called}{signature}, is called with {given}: {reason}; let it take {note}"
        ) from None
