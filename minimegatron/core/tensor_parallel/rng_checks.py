"""What the tracker of random states refuses, and dropout that differs between ranks, in words.

Megatron has no counterpart.
"""

from collections.abc import Iterable
from typing import Any


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
