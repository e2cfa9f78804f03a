"""What is refused around tensor-parallel layers: weights, cuts, random states, data to send.

Megatron has no counterpart.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch


def refuse_weight(weight: torch.Tensor | None, own_shape: tuple[int, int]) -> None:
    """Raises ValueError: a column-parallel layer has no weight, or was given one of another shape."""
    if weight is None:
        raise ValueError(
            "this ColumnParallelLinear was built with skip_weight_param_allocation and has "
            "no weight; pass weight= to forward"
        )
    raise ValueError(
        f"weight is {list(weight.shape)}, but this rank's rows of it are {list(own_shape)}; "
        "pass this rank's slice"
    )


def check_input_is_cut(sequence_parallel: bool, input_is_parallel: bool) -> None:
    """Raises ValueError where a row-parallel layer is to cut its input under sequence parallelism."""
    if sequence_parallel and not input_is_parallel:
        raise ValueError(
            "a row-parallel layer under sequence_parallel takes features that are cut "
            "already; set input_is_parallel=True or turn sequence_parallel off"
        )


def check_sections(dim: int, length: int, sizes: Sequence[int], tp_size: int) -> None:
    """Raises ValueError where dimension `dim`, of `length`, is no whole number of such matrices."""
    if length % (tp_size * sum(sizes)):
        raise ValueError(
            f"dimension {dim} has {length} elements, which cannot be "
            f"{len(sizes)} stacked matrices of sizes {':'.join(map(str, sizes))}, each cut over "
            f"{tp_size} ranks; make it a multiple of {tp_size * sum(sizes)} (partition_sizes are "
            "those of one rank's pieces)"
        )


# -- The tracker of random states, and dropout that differs between ranks --


def check_is_free(name: str, seed: int, names: Iterable[str], seeds: Iterable[int]) -> None:
    """Raises ValueError where a new state's name or seed is in use."""
    if seed in seeds:
        raise ValueError(f"seed {seed} is in use already; streams must differ, give another")
    if name in names:
        raise ValueError(f"random state {name!r} exists already; reset() the tracker first")


def refuse_unknown(name: str, names: Iterable[str]) -> None:
    """Raises ValueError for a name without a state."""
    raise ValueError(
        f"random state {name!r} is unknown (known: {sorted(names)}); call "
        "model_parallel_cuda_manual_seed(seed) before using dropout"
    )


def refuse_other_dropout(tp_group: Any) -> None:
    """Raises ValueError: the default generators of the group's ranks differ."""
    raise ValueError(
        f"rank {tp_group.rank()} of the {tp_group.size()} in group tp: torch's default generator "
        "is not at the same place on all of them, so dropout between layers (hidden_dropout) drops "
        "other activations on each; seed them alike, torch.manual_seed(seed), and draw alike: a "
        "DataLoader that some ranks alone have needs its own, generator=torch.Generator()"
    )


# -- Which tensors of a batch can be sent to other ranks --


MAX_DATA_DIM = 5

Shapes = list[tuple[int, ...]]
"""Of each key of a batch."""


def refuse_tensor(key: str, data: Mapping[str, torch.Tensor], datatype: torch.dtype) -> None:
    """Raises ValueError: `key` is missing, has another dtype or too many dimensions."""
    if key not in data:
        raise ValueError(f"the batch has no {key!r}; it has {sorted(data)}")
    if data[key].dtype != datatype:
        raise ValueError(
            f"{key!r} has dtype {data[key].dtype} but is to be broadcast as {datatype}; "
            "convert it or broadcast it in a call of its own"
        )
    raise ValueError(
        f"{key!r} has {data[key].dim()} dimensions; at most {MAX_DATA_DIM} can be sent"
    )
