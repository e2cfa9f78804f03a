"""What an exercise's check asks, and what it may say of an answer.

Torch-free. Megatron has no counterpart.
"""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


class Case:
    """One configuration to check: a name that students see, and the values behind it.

    `part` names the piece of the exercise that it checks ("the warm-up"); parts are reported one by
    one. A case that `hangs` is right when its ranks wait for each other for ever. Values are plain
    data (`plain_data`): they travel to the student's room.

    >>> case = Case("pp 4, 8 microbatches", part="the loop", pp=4, num_microbatches=8)
    >>> case.pp, case.values["num_microbatches"], str(case), case.part
    (4, 8, 'pp 4, 8 microbatches', 'the loop')
    """

    def __init__(self, name: str, *, part: str = "", hangs: bool = False, **values: Any):
        self.name, self.part, self.hangs, self.values = name, part, hangs, values

    def __getattr__(self, name: str) -> Any:
        try:
            return self.__dict__["values"][name]
        except KeyError:
            raise AttributeError(f"the case has no value {name!r}") from None

    def __str__(self) -> str:
        return self.name


def data_seed(seed: int) -> int:
    """The seed of a case's data. It goes to the student's room, from where `seed` cannot be told.

    >>> data_seed(0), data_seed(7) == data_seed(7) != 7
    (0, True)
    """
    digest = hashlib.sha256(f"data of {seed}".encode()).digest()
    return int.from_bytes(digest[:4], "big") if seed else 0


@dataclass
class Result:
    """What a case achieved, in words by what they are of; and the recording of its run, if any."""

    achieved: Mapping[str, Any] = field(default_factory=dict)
    recording: Any = None


class Wrong(Exception):
    """The student's code does not do what it should. The message is for the student.

    First line: which invariant broke, on which rank and microbatch. Below: how to see it. `part`
    where it is known better than by the case.
    """

    def __init__(self, text: str, part: str = ""):
        super().__init__(text)
        self.part = part
