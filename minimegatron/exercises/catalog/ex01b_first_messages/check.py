"""Checks a sum and a message on two ranks, and that the third function hangs as it should."""

import contextlib
import functools
import inspect
import itertools
import random
import signal
from collections.abc import Callable, Iterator, Sequence
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist

from minimegatron.core.collectives import Done
from minimegatron.exercises.bench.feedback import num_of
from minimegatron.exercises.bench.known_mistakes import check_known
from minimegatron.exercises.check import Case, Result, Wrong, data_seed

WORLD = 2
SUM, MESSAGE, HANG = "the sum", "the message", "the hang"
RECEIVES = {"recv": "src", "irecv": "src"}
SENDS = {"send": "dst", "isend": "dst"}
OTHERS = ("all_reduce", "barrier", "broadcast", "reduce", "all_gather")
TICK_SECONDS, MOST_TICKS = 0.4, 5
"""A rank that has had so many ticks, and does not wait yet, does something else. Ticks are counted, and
not seconds: a rank that gets no time on a busy machine gets no ticks either."""


def cases(seed: int) -> list[Case]:
    """Each function once; the last one hangs."""
    data = data_seed(seed)
    draw = random.Random(seed)
    sizes = [draw.choice([2, 3, 5]), draw.choice([4, 6, 7])] if seed else [3, 4]
    found = [
        Case(f"{part} of {n} numbers", part=part, n=n, seed=data)
        for part, n in zip((SUM, MESSAGE), sizes, strict=True)
    ]
    table = Case(f"{MESSAGE} of 2 x 3 numbers, float32", part=MESSAGE, n=3, rows=2, seed=data)
    return [*found, table, Case("both receive first", part=HANG, hangs=True, n=2, seed=data)]


def run(student: ModuleType, case: Case) -> dict[str, Any] | None:
    """One function, on this rank's numbers."""
    rank = dist.get_rank()
    value = _values(case)[rank]
    given = value.clone()
    if case.part == HANG:
        _rehearse(student, given)
        _wait_for_ever(student, given)
        raise Wrong(
            f"rank {rank}: wait_for_ever returned\nEach rank must wait for a message that the other "
            "one sends only afterwards. Which of its calls does each of yours wait in?"
        )
    function = student.sum_of_all if case.part == SUM else student.hand_over
    called: list[str] = []

    def look(name: str, peer: int, tensor: Any) -> None:
        called.append(name)
        _check_message(name, peer, tensor, value, is_sender=case.part == MESSAGE and rank == 0)

    with _looked_at(student, look):
        return {"returned": function(given), "given": given, "called": called}


def _own_words(rank: int, times: int) -> str:
    what = "this rank's own value" if times == 1 else "this rank's own value, twice"
    return (
        f"That is {what}. Rank {1 - rank} has another one, and this rank cannot know it: nothing has "
        "come from there. Which of the tools brings it?"
    )


def judge(case: Case, answers: Sequence[Any]) -> Result | None:
    """What both ranks returned."""
    values = _values(case)
    for rank, answer in enumerate(answers):
        name, wanted = (
            ("sum_of_all", values.sum(0)) if case.part == SUM else ("hand_over", values[0])
        )
        known = [(times * values[rank], _own_words(rank, times)) for times in (1, 2)]
        check_known(f"{name}(value)", answer["returned"], wanted, known, rank, {"world": 2})
        if not torch.equal(answer["given"], values[rank]):
            raise Wrong(
                f"rank {rank}: {case.part}: the tensor that was given has changed\nall_reduce and "
                "recv write into the tensor that they are given. Whose is it here, and who still "
                "needs it?"
            )
    if case.part == MESSAGE:
        _check_sent([answer["called"] for answer in answers])
    return Result({"result": [round(x, 3) for x in answers[0]["returned"].flatten().tolist()]})


def _values(case: Case) -> torch.Tensor:
    generator = torch.Generator().manual_seed(case.seed + 5)
    if rows := case.values.get("rows"):
        return torch.randn(WORLD, rows, case.n, generator=generator)
    return torch.randn(WORLD, case.n, dtype=torch.float64, generator=generator)


def _check_sent(called: Sequence[Sequence[str]]) -> None:
    """Raises Wrong where the value has come by no message from rank 0, or a message is left over."""
    for rank, (names, wanted) in enumerate(zip(called, (SENDS, RECEIVES), strict=True)):
        if not any(name in wanted for name in names):
            doing = "sends" if wanted is SENDS else "receives"
            by = ", ".join(f"dist.{name}" for name in dict.fromkeys(names))
            raise Wrong(
                f"rank {rank}: the value is right, but this rank {doing} no message"
                + (f": it calls {by}" if by else "")
                + "\nA collective is for what all ranks know or need. Here one rank has something, and "
                "one other lacks it. Which tool is made for two?"
            )
    num_sent, num_received = (
        sum(name in kind for names in called for name in names) for kind in (SENDS, RECEIVES)
    )
    if num_sent != num_received:
        raise Wrong(
            f"the ranks send {num_of(num_sent, 'message')} and receive {num_received}\n"
            "A message is one send on one rank and one receive on the other. What would the next "
            "receive get?"
        )


# -- The hang --


def _wait_for_ever(student: ModuleType, value: torch.Tensor) -> None:
    """Lets the student's ranks hang. Raises Wrong where it is not the hang that is wanted."""

    def look(name: str, peer: int, tensor: Any) -> None:
        if name in RECEIVES:
            _check_message(name, peer, None, value)
            signal.setitimer(signal.ITIMER_REAL, 0)
        elif signal.getitimer(signal.ITIMER_REAL)[0]:
            raise Wrong(
                f"rank {dist.get_rank()}: wait_for_ever calls dist.{name} before dist.recv\n"
                "That is another hang, or none. Which call must both ranks be in, if nobody ever comes "
                "to the other one?"
            )

    with _looked_at(student, look), _ticking():
        student.wait_for_ever(value)


def _rehearse(student: ModuleType, value: torch.Tensor) -> None:
    """What the student's ranks would call if each receive were over at once."""
    called: list[str] = []
    with _looked_at(student, lambda name, *_: called.append(name), is_real=False), _ticking():
        student.wait_for_ever(value.clone())
    names = [name for name in called if name in RECEIVES or name in SENDS]
    if names and names[0] in RECEIVES and not any(name in SENDS for name in names):
        raise Wrong(
            f"rank {dist.get_rank()}: wait_for_ever receives, and would never send: if a message "
            "came, none would go out\nThe hang that you meet most often has all its calls, in the "
            "wrong order. What stands behind the receive?"
        )


@contextlib.contextmanager
def _ticking() -> Iterator[None]:
    """Raises Wrong inside the block if it takes long and does not stop the ticks."""
    ticks = itertools.count(1)
    before = signal.signal(signal.SIGALRM, lambda *_: _tick(next(ticks)))
    signal.setitimer(signal.ITIMER_REAL, TICK_SECONDS, TICK_SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def _tick(number: int) -> None:
    if number >= MOST_TICKS:
        raise Wrong(
            f"rank {dist.get_rank()}: wait_for_ever does not wait for a message: it is busy with "
            "something else\nThe stub names the two calls that it makes. No loop is needed."
        )


# -- What is called --


@contextlib.contextmanager
def _looked_at(
    student: ModuleType, look: Callable[[str, int, Any], None], is_real: bool = True
) -> Iterator[None]:
    """Calls `look(name, peer, tensor)` before each call of torch.distributed by the student.

    Without `is_real` the call itself is left out. Raises Wrong at the end if a message was begun that
    nobody has waited for.
    """
    places, begun = [], []
    for name in (*RECEIVES, *SENDS, *OTHERS):
        original = getattr(dist, name)
        wrapper = _looking(name, original if is_real else _nothing_of(original), look, begun)
        holders = [(dist, name)]
        holders += [(student, key) for key, value in vars(student).items() if value is original]
        for holder, key in holders:
            setattr(holder, key, wrapper)
            places.append((holder, key, original))
    try:
        yield
        _check_waited_for(begun)
    finally:
        for holder, key, original in places:
            setattr(holder, key, original)


def _nothing_of(function: Callable) -> Callable:
    """A function with the same arguments that does nothing; what it returns can be waited for."""

    @functools.wraps(function)
    def nothing(*_: Any, **__: Any) -> Done:
        return Done()

    return nothing


class _Handle:
    """The handle of a message; it knows whether somebody has waited for the message."""

    is_waited_for = False

    def __init__(self, work: Any):
        self._work = work

    def wait(self, *args: Any, **kwargs: Any) -> Any:
        self.is_waited_for = True
        return self._work.wait(*args, **kwargs)

    def is_completed(self) -> bool:
        self.is_waited_for |= self._work.is_completed()
        return self.is_waited_for

    def __getattr__(self, name: str) -> Any:
        return getattr(self._work, name)


def _check_waited_for(begun: Sequence[tuple[str, _Handle]]) -> None:
    """Raises Wrong for a handle whose wait() was not called, whether the message has come or not."""
    for name, handle in begun:
        if handle.is_waited_for:
            continue
        when = (
            "Until it has come, the tensor holds what was in its memory before: wait for it before you "
            "use the tensor."
            if name in RECEIVES
            else "It may leave much later: wait for it before you change the tensor, or return."
        )
        raise Wrong(
            f"rank {dist.get_rank()}: nobody waits for the message that dist.{name} has begun\n"
            f"dist.{name} only starts the message, and returns a handle. {when}"
        )


def _looking(
    name: str, function: Callable, look: Callable[[str, int, Any], None], begun: list
) -> Callable:
    """The function, looked at before each call; handles of messages go into `begun`."""
    signature = inspect.signature(function)

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            given = signature.bind(*args, **kwargs).arguments
        except TypeError:
            return function(*args, **kwargs)  # which says what is wrong
        peer = given.get({**RECEIVES, **SENDS}.get(name, ""))
        look(name, -1 if peer is None else peer, given.get("tensor"))
        found = function(*args, **kwargs)
        if name in ("isend", "irecv") and found is not None and not isinstance(found, Done):
            found = _Handle(found)
            begun.append((name, found))
        return found

    return call


def _check_message(
    name: str, peer: int, tensor: Any, value: torch.Tensor, is_sender: bool = False
) -> None:
    """Raises Wrong for a message to oneself, and for a tensor into which it does not fit."""
    rank = dist.get_rank()
    if name in RECEIVES and peer == rank and is_sender:
        raise Wrong(
            f"rank {rank}: dist.{name} waits for a message of this rank to itself\n"
            f"Only rank 1 receives here. Does rank {rank} return after its send?"
        )
    if name in (*RECEIVES, *SENDS) and peer == rank:
        doing, what = ("waits for", "src") if name in RECEIVES else ("sends", "dst")
        raise Wrong(
            f"rank {rank}: dist.{name} {doing} a message of this rank to itself\n"
            f"`{what}` is a rank's number. Whose, and what is it on this rank?"
        )
    if name not in RECEIVES or not isinstance(tensor, torch.Tensor):
        return
    if tensor.nbytes != value.nbytes:
        raise Wrong(
            f"rank {rank}: the message has {value.nbytes} bytes, but the tensor that receives it has "
            f"{tensor.nbytes}\n"
            f"It is {_kind(value)}, your tensor {_kind(tensor)}. A message carries neither a shape nor "
            "a type, so the receiver must have the right tensor ready. What does it know of it before "
            "anything has come?"
        )


def _kind(tensor: torch.Tensor) -> str:
    return f"{num_of(tensor.numel(), 'number')} of {str(tensor.dtype).removeprefix('torch.')}"
