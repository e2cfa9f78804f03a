"""From an order of forwards and backwards to a schedule: puts the messages where they belong.

Torch-free. Megatron has no counterpart.
"""

from collections.abc import Iterator, Sequence

from minimegatron.planner.actions import Action
from minimegatron.planner.stage import Stage


def with_messages(stage: Stage, order: str) -> Iterator[Action]:
    """The stage's work in the given order, and one exchange of messages between any two pieces of it.

    `order` is a string such as "FFBFBB": F is the next microbatch's forward, B the next one's backward.
    Each exchange sends what has just been made and receives what comes next.

    >>> from minimegatron.planner.stage import PlanConfig
    >>> last = Stage(PlanConfig("mine", pp_size=2, num_microbatches=2), pp_rank=1)
    >>> [action.call or action.kind for action in with_messages(last, "FBFB")][:5]
    ['recv_forward', 'forward', 'send_forward_recv_backward', 'backward', 'send_backward_recv_forward']

    Raises ValueError unless there are as many F's and B's as microbatches.
    """
    work = _numbered(stage, order)
    yield stage.recv_forward(work[0][1]) if work[0][0] == "F" else stage.recv_backward(work[0][1])
    for here, after in zip(work, [*work[1:], None], strict=True):
        kind, i = here
        yield stage.forward(i) if kind == "F" else stage.backward(i)
        if after is None:
            yield stage.send_forward(i) if kind == "F" else stage.send_backward(i)
            continue
        sends = "forward" if kind == "F" else "backward"
        receives = "forward" if after[0] == "F" else "backward"
        yield getattr(stage, f"send_{sends}_recv_{receives}")(i, after[1])


def _numbered(stage: Stage, order: str) -> list[tuple[str, int]]:
    M = stage.num_microbatches
    for letter, word in (("F", "forwards"), ("B", "backwards")):
        if order.count(letter) != M or set(order) - {"F", "B"}:
            raise ValueError(
                f"the order {order!r} of stage {stage.pp_rank} has {order.count(letter)} {word}; "
                f"with M = {M} it needs {M} F's, {M} B's, and nothing else"
            )
    counts = {"F": 0, "B": 0}
    work = []
    for letter in order:
        work.append((letter, counts[letter]))
        counts[letter] += 1
    return work


def shortened_1f1b(num_warmups: Sequence[int], rank: int, num_microbatches: int) -> str:
    """1F1B's order on one stage with a given number of warm-up forwards.

    >>> shortened_1f1b([1, 0], rank=0, num_microbatches=3)
    'FFBFBB'
    """
    num_warmup = min(num_warmups[rank], num_microbatches)
    return "F" * num_warmup + "FB" * (num_microbatches - num_warmup) + "B" * num_warmup
