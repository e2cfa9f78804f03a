"""Notes what a rank does while it does it: what it did until a hang can then be held against a plan.

Torch-free. Megatron has no counterpart.
"""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from minimegatron.core.tracing import Call, observed_by

_listeners: list[Callable[[Any], None]] = []


@contextlib.contextmanager
def noted_by(tell: Callable[[Any], None]) -> Iterator[None]:
    """Notes go to `tell` for the length of the block."""
    _listeners.append(tell)
    try:
        yield
    finally:
        _listeners.remove(tell)


def note(word: Any) -> None:
    """Notes one thing of the case that runs."""
    for tell in _listeners:
        tell(word)


class _Noting:
    """An observer that notes the links of the chain that `names` lists, as they begin."""

    def __init__(self, names: dict[str, str]):
        self._names = names

    def start(self, call: Call) -> None:
        if call.name in self._names:
            note([self._names[call.name], call.attributes.get("microbatch")])

    def stop(self, call: Call) -> None:
        """A call is noted when it begins: the one that hangs does not end."""


@contextlib.contextmanager
def noted(names: dict[str, str]) -> Iterator[None]:
    """Notes traced calls inside the block: `{"forward-compute": "F"}`."""
    with observed_by(_Noting(names)):
        yield
