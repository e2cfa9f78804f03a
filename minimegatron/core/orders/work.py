"""What a rank does in a step, as data: the kinds of work, one piece of work, one message.

Torch-free. Megatron has no counterpart.

Whoever must know what a kind of work needs, holds, or looks like asks `KINDS`. A new kind is a new row:

| kind              | letter | after          | takes          | gives            | holds   |
|-------------------|--------|----------------|----------------|------------------|---------|
| `FORWARD`         | F      |                | the input      | the output       | +1      |
| `BACKWARD`        | B      | forward        | its gradient   | the input's      | -1      |
| `BACKWARD_INPUT`  | I      | forward        | its gradient   | the input's      | -1 + w  |
| `BACKWARD_WEIGHT` | W      | backward-input |                |                  | -w      |
| `PAIR`            |        | what its two parts need, take, give and hold                   |

`BACKWARD` computes both gradients in one go. `BACKWARD_INPUT` computes the one that the stage before
waits for, `BACKWARD_WEIGHT` the one that nobody waits for; w is the share of a microbatch's
activations that must be kept between the two, 1 unless said otherwise.
"""

from dataclasses import dataclass
from fractions import Fraction
from typing import NamedTuple

FORWARD = "forward"
BACKWARD = "backward"
BACKWARD_INPUT = "backward-input"
BACKWARD_WEIGHT = "backward-weight"
PAIR = "pair"
COMMUNICATE = "communicate"

SEND = "send"
RECEIVE = "receive"
ACTIVATION = "activation"
GRADIENT = "gradient"

NO_PIPELINING, ONE_F_ONE_B, INTERLEAVED = "no-pipelining", "1f1b", "interleaved"
"""Schedules that are written out."""

SEND_LIMIT, FORWARD_ONLY_SEND_LIMIT = 2, 4
"""How many messages may lie unreceived, at least: while one is used, the next one travels. In a
forward-only step nothing comes back that would hold the first stage."""

WARMUP = "warmup"
STEADY = "steady"
COOLDOWN = "cooldown"

COMPUTE, MESSAGES, COLLECTIVES = "compute", "messages", "collectives"
ALL_TO_ALL, RING_HOP = "all-to-all", "ring-hop"
"""Lanes: what one rank does at the same time as something else. The last two are apart from the
other collectives, because work hides them: a combined turn hides the all-to-alls of its experts, one
after the other; a block of attention hides the hop that brings the next keys and values."""
HIDDEN = (ALL_TO_ALL, RING_HOP)
"""These two. Each has the name that its collective is traced under."""


@dataclass(frozen=True)
class Kind:
    """One kind of work."""

    name: str
    letter: str
    """Its short name in a plan."""
    words: str
    """Its name in a sentence: "forward of microbatch 0"."""
    after: tuple[str, ...] = ()
    """What must be done before, on the same microbatch and chunk; one of these kinds."""
    takes: str | None = None
    """The payload that it needs from a neighbour, except at an end of the model."""
    gives: str | None = None
    """The payload that it makes for a neighbour, except at an end of the model."""
    holds: int = 0
    """Microbatches whose activations are held from then on, without the share."""
    holds_share: int = 0
    """Likewise, in units of the share that must be kept for the weight gradients."""
    computes: frozenset[str] = frozenset()
    """What it computes: "output", "input gradient", "weight gradient"; each once per microbatch."""
    cost: str = ""
    """The field of `Costs` that says how long it takes."""
    lane: str = COMPUTE
    shades: tuple[str, str, str] = ("#3c4650", "#7b8794", "#d5dbe1")
    """Its colour: dark, plain, light."""
    fill: str = "-"
    """The character that fills its bars in a picture without colours."""
    terminal: str = "\033[47;30m"
    """Its colour in a terminal."""

    def held(self, share: int | Fraction = 1) -> int | Fraction:
        """By how much it changes the number of microbatches whose activations are held."""
        return self.holds + self.holds_share * share


OUTPUT, INPUT_GRADIENT, WEIGHT_GRADIENT = "output", "input gradient", "weight gradient"

KINDS: dict[str, Kind] = {
    kind.name: kind
    for kind in (
        Kind(
            FORWARD,
            "F",
            "forward",
            takes=ACTIVATION,
            gives=ACTIVATION,
            holds=1,
            computes=frozenset({OUTPUT}),
            cost="forward",
            shades=("#00507d", "#0072b2", "#b5def5"),
            fill="-",
            terminal="\033[44;97m",
        ),
        Kind(
            BACKWARD,
            "B",
            "backward",
            after=(FORWARD,),
            takes=GRADIENT,
            gives=GRADIENT,
            holds=-1,
            computes=frozenset({INPUT_GRADIENT, WEIGHT_GRADIENT}),
            cost="backward",
            shades=("#a86200", "#e69f00", "#ffe3b0"),
            fill="=",
            terminal="\033[43;30m",
        ),
        Kind(
            BACKWARD_INPUT,
            "I",
            "input gradient",
            after=(FORWARD,),
            takes=GRADIENT,
            gives=GRADIENT,
            holds=-1,
            holds_share=1,
            computes=frozenset({INPUT_GRADIENT}),
            cost="backward_input",
            shades=("#7f2704", "#c8450c", "#f2a07b"),
            fill="~",
            terminal="\033[41;97m",
        ),
        Kind(
            BACKWARD_WEIGHT,
            "W",
            "weight gradient",
            after=(BACKWARD_INPUT,),
            holds_share=-1,
            computes=frozenset({WEIGHT_GRADIENT}),
            cost="backward_weight",
            shades=("#7a3d63", "#cc79a7", "#efc6dd"),
            fill="+",
            terminal="\033[45;97m",
        ),
        Kind(PAIR, "", "pair", cost="pair"),
    )
}


class Work(NamedTuple):
    """One piece of work of one rank. A pair has two `parts`, and the first's microbatch and chunk.

    >>> str(Work(FORWARD, 3, 1)), str(pair(Work(FORWARD, 3), Work(BACKWARD, 0, 1)))
    ('F3 of chunk 1', 'F3 & B0 of chunk 1')
    """

    kind: str
    microbatch: int
    chunk: int = 0
    parts: tuple["Work", ...] = ()
    phase: str | None = None

    def __str__(self) -> str:
        if self.parts:
            return " & ".join(map(str, self.parts))
        of_chunk = f" of chunk {self.chunk}" if self.chunk else ""
        return f"{KINDS[self.kind].letter or self.kind}{self.microbatch}{of_chunk}"


def pair(first: Work, second: Work) -> Work:
    """Two pieces of work that start and end together. A runner that cannot do that runs one first.

    So the second must not need what the first gives. Raises ValueError where it would.
    """
    if first.parts or second.parts:
        raise ValueError(f"a pair has two parts, and ({first}) or ({second}) is a pair itself")
    unit = (first.microbatch, first.chunk)
    if unit == (second.microbatch, second.chunk):
        raise ValueError(
            f"({first}) and ({second}) are of one microbatch and chunk; one needs the other"
        )
    return Work(PAIR, *unit, (first, second), first.phase)


class Message(NamedTuple):
    """One tensor that a call sends or receives, as that call's own rank sees it.

    `microbatch` and `chunk` name the work of *this* rank that made the tensor (send) or will use it
    (receive). The two ends of a message may thus name different chunks: what chunk 0 of the last
    stage sends is the input of chunk 1 of the first.
    """

    direction: str
    """`SEND` or `RECEIVE`."""
    payload: str
    """`ACTIVATION` (goes to the next virtual stage) or `GRADIENT` (goes to the previous one)."""
    peer: int
    """The rank of the pipeline at the other end."""
    microbatch: int
    chunk: int
    num_bytes: int = 0
    """Size of the tensor; 0 where it is not known."""


class Action(NamedTuple):
    """One step of one rank.

    For a piece of work, `microbatch` and `chunk` say of what. For a communication, `call` is the name
    of the `P2PCommunicator` method and `messages` what it moves, in the order in which the messages
    are started. A call without messages (say, `recv_forward` on the first stage) is an action too: the
    schedule does make that call.
    """

    kind: str
    """A row of `KINDS`, or `COMMUNICATE`."""
    rank: int
    """The rank of the pipeline, `pp_rank`."""
    phase: str | None = None
    """`WARMUP`, `STEADY` or `COOLDOWN`; None where a schedule has no such phases."""
    microbatch: int | None = None
    chunk: int | None = None
    call: str | None = None
    messages: tuple[Message, ...] = ()
    overlap: bool = False
    """The call returned wait handles; whoever needs a received tensor waits for it there."""
    parts: tuple["Action", ...] = ()
    """The two actions of a pair."""

    def __str__(self) -> str:
        if self.parts:
            return " and ".join(map(str, self.parts))
        if self.kind != COMMUNICATE:
            words = KINDS[self.kind].words if self.kind in KINDS else self.kind
            return f"{words} of microbatch {self.microbatch}, chunk {self.chunk}"
        return f"{self.call}({'; '.join(map(describe_message, self.messages))})"


def parts_of(action: Action) -> tuple[Action, ...]:
    """The single pieces of work of an action: a pair's two, else the action itself."""
    return action.parts or (action,)


def describe_message(message: Message) -> str:
    """A message in words.

    >>> describe_message(Message(SEND, GRADIENT, 1, 5, 0))
    'send gradient of microbatch 5, chunk 0 to rank 1'
    """
    to_or_from = "to" if message.direction == SEND else "from"
    return (
        f"{message.direction} {message.payload} of microbatch {message.microbatch}, "
        f"chunk {message.chunk} {to_or_from} rank {message.peer}"
    )
