"""An iterator that can give a step's microbatches once more.

Torch-free. Counterpart: `RerunDataIterator` of `megatron.core.rerun_state_machine`.
"""

from collections.abc import Iterable
from typing import Any

from minimegatron.core.rerun.current import get_rerun_state_machine
from minimegatron.core.rerun.states import RerunMode


class RerunDataIterator:
    """Gives what `iterable` gives; after `rewind`, what it gave since the last `advance` once more.

    Keeps what it gives for that, except in mode `disabled`.
    """

    def __init__(self, iterable: Iterable[Any]):
        self.iterable = iter(iterable)
        self.saved_microbatches: list[Any] = []
        self.replaying, self.replay_pos = False, 0

    def __iter__(self) -> "RerunDataIterator":
        return self

    def __next__(self) -> Any:
        """Raises RuntimeError where a repeated step reads more than its first run did."""
        if not self.replaying:
            microbatch, machine = next(self.iterable), get_rerun_state_machine()
            if machine is not None and machine.mode is not RerunMode.DISABLED:
                self.saved_microbatches.append(microbatch)
            return microbatch
        if self.replay_pos == len(self.saved_microbatches):
            raise RuntimeError(
                f"a repeated step reads more than the {self.replay_pos} microbatches of its first run; "
                "let the forward step read the same ones each time"
            )
        self.replay_pos += 1
        return self.saved_microbatches[self.replay_pos - 1]

    def rewind(self) -> None:
        """Back to the first microbatch of the step."""
        self.replaying, self.replay_pos = True, 0

    def advance(self) -> None:
        """A new step: what was kept is forgotten."""
        self.replaying, self.replay_pos, self.saved_microbatches = False, 0, []

    def state_dict(self) -> dict[str, Any]:
        """What is kept, and how much of it was given again."""
        names = ("saved_microbatches", "replaying", "replay_pos")
        return {name: vars(self)[name] for name in names}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Goes on from what `state_dict` returned."""
        vars(self).update(state_dict)


def iterators_of(data_iterator: Any) -> list[RerunDataIterator]:
    """Those of a step's chunks, given as one, a list or None. ValueError for one of another class."""
    given = data_iterator if isinstance(data_iterator, list) else [data_iterator]
    given = [iterator for iterator in given if iterator is not None]
    for iterator in given:
        if not isinstance(iterator, RerunDataIterator):
            raise ValueError(
                f"a step may be run again, but its data iterator is a {type(iterator).__name__}, which "
                "cannot go back; give RerunDataIterator(iterator), or --rerun-mode disabled"
            )
    return given
