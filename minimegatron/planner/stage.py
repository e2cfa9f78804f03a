"""One stage of a pipeline that is being planned: the vocabulary a schedule function speaks.

Counterpart: the methods carry the names of
`megatron.core.pipeline_parallel.p2p_communication.P2PCommunicator`, which the run calls.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from minimegatron.core.orders.loop_recorder import messages_of_calls, order_of_messages
from minimegatron.core.orders.orders import PlanConfig, PlannedRank
from minimegatron.core.orders.p2p_methods import METHODS, OVERLAP
from minimegatron.planner.actions import (
    ACTIVATION,
    BACKWARD,
    COMMUNICATE,
    FORWARD,
    GRADIENT,
    PAIR,
    RECEIVE,
    SEND,
    Action,
    Message,
)

__all__ = ["PlanConfig", "Stage", "Unit"]

Unit = int | tuple[int, int]
"""The work on one microbatch in one chunk: (microbatch, chunk), or the microbatch for chunk 0."""


@dataclass
class Stage(PlannedRank):
    """One stage, handed to a schedule function; its methods make the actions to yield.

    A schedule may be a generator function of one `Stage`, in place of a loop over actors. Pipelining
    with all forwards first:

    >>> def all_forwards_first(stage):
    ...     for i in range(stage.num_microbatches):
    ...         yield stage.recv_forward(i)
    ...         yield stage.forward(i)
    ...         yield stage.send_forward(i)
    ...     for i in range(stage.num_microbatches):
    ...         yield stage.recv_backward(i)
    ...         yield stage.backward(i)
    ...         yield stage.send_backward(i)
    >>> last = Stage(PlanConfig("mine", pp_size=2, num_microbatches=1), pp_rank=1)
    >>> for action in all_forwards_first(last):
    ...     print(action)
    recv_forward(receive activation of microbatch 0, chunk 0 from rank 0)
    forward of microbatch 0, chunk 0
    send_forward()
    recv_backward()
    backward of microbatch 0, chunk 0
    send_backward(send gradient of microbatch 0, chunk 0 to rank 0)

    As in the run, the last virtual stage's output and the first one's input gradient go nowhere:
    the call is made, without a message. Set `phase` to name what the following actions belong to.
    """

    _moves: dict = field(init=False, repr=False)
    _first_chunk: int | None = field(init=False, repr=False)
    _last_chunk: int | None = field(init=False, repr=False)

    def __post_init__(self) -> None:
        # The chunk of this stage at either end of the model, if it has one.
        self._first_chunk = 0 if self.pp_rank == 0 else None
        self._last_chunk = self.num_model_chunks - 1 if self.is_last_stage else None
        order = order_of_messages(self.config, self.pp_rank)
        self._moves = messages_of_calls(self.pp_rank, self.pp_size, order)

    # -- Where this stage stands --

    @property
    def forward_only(self) -> bool:
        """True where no backward must be run."""
        return self.config.forward_only

    @property
    def is_last_stage(self) -> bool:
        """True on stage p - 1."""
        return self.pp_rank == self.pp_size - 1

    def is_first_virtual_stage(self, chunk: int) -> bool:
        """True for the chunk that starts from data."""
        return chunk == self._first_chunk

    def is_last_virtual_stage(self, chunk: int) -> bool:
        """True for the chunk that ends in the loss."""
        return chunk == self._last_chunk

    # -- Work --

    def forward(self, microbatch: int, chunk: int = 0) -> Action:
        """The forward of one microbatch through one chunk."""
        return Action(FORWARD, self.pp_rank, self.phase, microbatch, chunk)

    def backward(self, microbatch: int, chunk: int = 0) -> Action:
        """Its backward."""
        return Action(BACKWARD, self.pp_rank, self.phase, microbatch, chunk)

    def pair(self, first: Action, second: Action) -> Action:
        """Two pieces of work that start and end together; see `work.pair`."""
        unit = (first.microbatch, first.chunk)
        return Action(PAIR, self.pp_rank, self.phase, *unit, parts=(first, second))

    # -- Messages: the nine methods of P2PCommunicator --
    # `recv_forward(receives)`, `send_forward(output)`, `send_forward_recv_backward(output, receives)`
    # and so on name a unit for each message that they move, in the order of the method's name.
    # `output` is the forward whose output is sent, `input` the backward whose input gradient is;
    # `receives...` names the work that the received tensor is for. None: nothing to move.

    def communicate(self, call: str, units: list["Unit | None"], overlap: bool = False) -> Action:
        """One call of the communicator, by its name; a unit for each message that it moves."""
        needed = dict(zip(_moved_by(call), units, strict=True))
        messages = [
            Message(direction, payload, peer, *unit, size)
            for direction, payload, peer, _ in self._moves[call]
            if (unit := self._unit(direction, payload, needed[direction, payload])) is not None
            for size in self._sizes_of(direction, payload, unit[1])
        ]
        return Action(
            COMMUNICATE, self.pp_rank, self.phase, None, None, call, tuple(messages), overlap
        )

    def _unit(self, direction: str, payload: str, unit: Unit | None) -> tuple[int, int] | None:
        if isinstance(unit, int):
            unit = (unit, 0)
        is_to_next = (direction == SEND) == (payload == ACTIVATION)
        end = self._last_chunk if is_to_next else self._first_chunk
        return None if unit is None or unit[1] == end else unit

    def _sizes_of(self, direction: str, payload: str, chunk: int) -> tuple[int, ...]:
        """Sizes of the messages of one kind: after the chunk's stage, or before it."""
        stage = self.placement.stage_of(self.pp_rank, chunk)
        is_behind = (direction == SEND) == (payload == ACTIVATION)
        return self.config.sizes_behind(stage - (not is_behind))


def _moved_by(call: str) -> list[tuple[str, str]]:
    """(direction, payload) of what a call moves, in the order of its name."""
    sends = [(SEND, payload) for _, payload in METHODS[call].sends]
    return sends + [(RECEIVE, payload) for payload in METHODS[call].receives]


_NAMES = {
    (SEND, ACTIVATION): "output",
    (SEND, GRADIENT): "input",
    (RECEIVE, ACTIVATION): "receives_forward",
    (RECEIVE, GRADIENT): "receives_backward",
}
"""What a method calls its units."""


def _method(call: str) -> Callable[..., Action]:
    names = [_NAMES[moved] for moved in _moved_by(call)]
    if len(METHODS[call].receives) == 1:
        names = ["receives" if name.startswith("receives") else name for name in names]

    def method(self: Stage, *units: "Unit | None", overlap: bool = False, **given: Any) -> Action:
        found = dict(zip(names, units, strict=False))
        if len(units) == len(names) + 1 and OVERLAP in METHODS[call].parameters:
            overlap = units[-1]
        elif len(units) > len(names) or found.keys() & given.keys() or {*found, *given} != {*names}:
            raise TypeError(f"{call} takes {', '.join(names)}")
        found |= given
        return self.communicate(call, [found[name] for name in names], overlap)

    method.__name__, method.__qualname__ = call, f"Stage.{call}"
    method.__doc__ = f"What `P2PCommunicator.{call}` moves; takes {', '.join(names)}."
    return method


for _call in METHODS:
    setattr(Stage, _call, _method(_call))
