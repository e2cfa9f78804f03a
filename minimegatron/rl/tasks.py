"""What a model is rewarded for: prompts, and a function that says how good an answer is.

A task is plain Python, and knows no ranks. `--rl-task FILE.py:FUNCTION` names a function of your own
that returns one. Counterpart: the agents and environments of `megatron.rl.agent`.
"""

import itertools
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from numbers import Real

from minimegatron.core.datasets.utils import DataError
from minimegatron.launching.user_file import load_user_function

Tokens = tuple[int, ...]


@dataclass(frozen=True)
class Task:
    """Prompts and their reward. All tokens are numbers below `vocab_size`.

    `reward(prompt, answer)` is larger for a better answer, `is_right(prompt, answer)` is what people
    are told. An answer has `answer_length` tokens at most, and ends with `end` unless that was never
    drawn.
    """

    prompts: Sequence[Tokens]
    """To be trained on."""
    held_out: Sequence[Tokens]
    """Never trained on: what an evaluation asks."""
    answer_length: int
    end: int
    vocab_size: int
    reward: Callable[[Tokens, Tokens], float]
    is_right: Callable[[Tokens, Tokens], bool]

    def rewarded(self, prompt: Tokens, answer: Tokens) -> float:
        """The reward. Raises DataError if it is no finite number."""
        found = self.reward(prompt, answer)
        if not (isinstance(found, Real) and math.isfinite(found)):
            raise DataError(
                f"the task's reward of {list(answer)} for the prompt {list(prompt)} is {found!r}; "
                "return a finite number"
            )
        return float(found)


def sort_digits(num_digits: int = 3, base: int = 6) -> Task:
    """To sort digits: after `3 1 2 =` comes `1 2 3 .`, where `=` is token `base` and `.` the next one.

    A token in its place is worth a part of one half, all of them together another half. A fifth of the
    prompts is held out, drawn by lot.
    """
    equals, end = base, base + 1
    everything = [(*digits, equals) for digits in itertools.product(range(base), repeat=num_digits)]

    def wanted(prompt: Tokens) -> Tokens:
        return (*sorted(prompt[:-1]), end)

    def is_right(prompt: Tokens, answer: Tokens) -> bool:
        return tuple(answer) == wanted(prompt)

    def reward(prompt: Tokens, answer: Tokens) -> float:
        in_place = sum(here == there for here, there in zip(answer, wanted(prompt), strict=False))
        return 0.5 * in_place / (num_digits + 1) + 0.5 * is_right(prompt, answer)

    held_out = set(random.Random(7).sample(everything, len(everything) // 5))
    return Task(
        prompts=[prompt for prompt in everything if prompt not in held_out],
        held_out=[prompt for prompt in everything if prompt in held_out],
        answer_length=num_digits + 1,
        end=end,
        vocab_size=base + 2,
        reward=reward,
        is_right=is_right,
    )


TASKS: dict[str, Callable[[], Task]] = {"sort_digits": sort_digits}


def load_task(name: str) -> Task:
    """The task of that name, or what FILE.py:FUNCTION returns. Raises ValueError if there is none."""
    if ":" not in name:
        if name not in TASKS:
            raise ValueError(
                f"--rl-task {name!r} is unknown; use {', '.join(TASKS)}, or FILE.py:FUNCTION for one "
                "of your own"
            )
        return TASKS[name]()
    task = load_user_function(name, "--rl-task", "user_task")()
    if not isinstance(task, Task):
        raise ValueError(
            f"--rl-task {name} returned {task!r:.40}; return a minimegatron.rl.tasks.Task"
        )
    return task
