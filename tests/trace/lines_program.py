"""A training step without ranks, whose lines `test_line_recorder` knows. Each mark names a line."""

import contextlib
from collections.abc import Callable, Iterator
from functools import wraps

from minimegatron.core.tracing import traced

log: list[str] = []


@contextlib.contextmanager
def around() -> Iterator[None]:
    log.append("begun")  # enter
    try:
        yield
    finally:
        log.append("ended")  # exit


class Guard:
    """Its end is called after the block."""

    def __enter__(self) -> "Guard":
        return self

    def __exit__(self, *unused: object) -> None:
        log.append("left")  # left


def numbers(count: int) -> Iterator[int]:
    for number in range(count):
        log.append("one more")
        yield number  # yielded
    log.append("no more")  # no more


def is_even(number: int) -> bool:
    if number < 0:
        raise ValueError("negative")  # never
    return number % 2 == 0  # asked


def half(number: int) -> int:
    if is_even(number):
        return number // 2  # of even ones
    return number  # of odd ones


def described(arguments: dict) -> dict:
    log.append("described")  # of watchers
    return {"microbatch": arguments["number"], "chunk": 0}


@traced("layer", described)
def forward(number: int) -> int:
    """A link of the chain."""
    doubled = [double(n) for n in (number, number)]
    return sum(doubled)


def double(number: int) -> int:
    return 2 * number


def handing_on(function):
    @wraps(function)
    def call(*args):
        return function(*args)

    return call


@handing_on
def decorated(number: int) -> int:
    return number + 1


def fails() -> None:
    raise KeyError("expected")  # raised


def seldom(number: int) -> int:
    return -number  # seldom


def chosen(function: Callable[[int], int]) -> int:
    return function(1)


def often(is_last: bool) -> int:
    if is_last:
        return 1
    return 0


@traced("train-step")
def train_step(count: int) -> int:
    """All of it."""
    total = 0
    with around(), Guard():
        for number in numbers(count):
            total += half(number)
            total += forward(
                number,
            )
    with contextlib.suppress(KeyError):
        fails()
    if count > 100:
        total = decorated(total)  # not run
        total = 0
    else:
        total += decorated(total)
    total += often(False)
    total += often(True)
    total += chosen(is_even)
    total += chosen(seldom)
    ordered = sorted([2, 1], key=lambda n: -n)
    return total + ordered[0]


@traced("forward-backward")
def schedule(count: int) -> int:
    return half(count)
