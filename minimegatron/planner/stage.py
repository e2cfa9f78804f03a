"""One stage of a pipeline that is being planned: the vocabulary a schedule function speaks.

Counterpart: the methods carry the names of
`megatron.core.pipeline_parallel.p2p_communication.P2PCommunicator`, which the run calls.
"""

from dataclasses import dataclass, field

from minimegatron.core.pipeline_parallel.orders import PlanConfig, PlannedRank
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


# -- The order in which one call starts its messages --
# A batch lists the previous stage's first, as Megatron's `_batched_p2p_ops` does. Separate sends
# and receives may each block until the partner is there. Were all stages to send first, a ring of
# them would wait for ever, so odd stages receive first (`_p2p_ops`).
_SEND_NEXT, _RECV_PREV, _SEND_PREV, _RECV_NEXT = range(4)
BATCHED_ORDER = (_SEND_PREV, _RECV_PREV, _SEND_NEXT, _RECV_NEXT)
EVEN_ORDER = (_SEND_NEXT, _RECV_PREV, _SEND_PREV, _RECV_NEXT)
ODD_ORDER = (_RECV_PREV, _SEND_NEXT, _RECV_NEXT, _SEND_PREV)


@dataclass
class Stage(PlannedRank):
    """One stage, handed to a schedule function; its methods make the actions to yield.

    A schedule is a generator function of one `Stage`. Pipelining with all forwards first:

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

    _ends: tuple = field(init=False, repr=False)
    _order: tuple = field(init=False, repr=False)
    _first_chunk: int | None = field(init=False, repr=False)
    _last_chunk: int | None = field(init=False, repr=False)

    def __post_init__(self) -> None:
        next_rank = (self.pp_rank + 1) % self.pp_size
        prev_rank = (self.pp_rank - 1) % self.pp_size
        self._ends = (
            (SEND, ACTIVATION, next_rank),
            (RECEIVE, ACTIVATION, prev_rank),
            (SEND, GRADIENT, prev_rank),
            (RECEIVE, GRADIENT, next_rank),
        )
        # The chunk of this stage at either end of the model, if it has one.
        self._first_chunk = 0 if self.pp_rank == 0 else None
        self._last_chunk = self.num_model_chunks - 1 if self.is_last_stage else None
        if self.config.batch_p2p_comm:
            self._order = BATCHED_ORDER
        else:
            self._order = ODD_ORDER if self.pp_rank % 2 else EVEN_ORDER

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
    # `output` is the forward whose output is sent, `input` the backward whose input gradient is;
    # `receives_...` names the work that the received tensor is for. None: nothing to move.

    def recv_forward(self, receives: Unit) -> Action:
        """Receives the input of a forward."""
        return self._exchange("recv_forward", recv_prev=self._unless_first(receives))

    def recv_backward(self, receives: Unit) -> Action:
        """Receives the output gradient of a backward."""
        return self._exchange("recv_backward", recv_next=self._unless_last(receives))

    def send_forward(self, output: Unit) -> Action:
        """Sends the output of a forward."""
        return self._exchange("send_forward", send_next=self._unless_last(output))

    def send_backward(self, input: Unit) -> Action:
        """Sends the input gradient of a backward."""
        return self._exchange("send_backward", send_prev=self._unless_first(input))

    def send_forward_recv_backward(self, output: Unit, receives: Unit) -> Action:
        """Sends an output to the next stage, receives an output gradient from it."""
        return self._exchange(
            "send_forward_recv_backward",
            send_next=self._unless_last(output),
            recv_next=self._unless_last(receives),
        )

    def send_backward_recv_forward(self, input: Unit, receives: Unit) -> Action:
        """Sends an input gradient to the previous stage, receives an input from it."""
        return self._exchange(
            "send_backward_recv_forward",
            send_prev=self._unless_first(input),
            recv_prev=self._unless_first(receives),
        )

    def send_forward_recv_forward(
        self, output: Unit | None, receives: Unit | None, overlap: bool = False
    ) -> Action:
        """Sends an output onwards and receives an input."""
        return self._exchange(
            "send_forward_recv_forward",
            send_next=self._unless_last(output),
            recv_prev=self._unless_first(receives),
            overlap=overlap,
        )

    def send_backward_recv_backward(
        self, input: Unit | None, receives: Unit | None, overlap: bool = False
    ) -> Action:
        """Sends an input gradient back and receives an output gradient."""
        return self._exchange(
            "send_backward_recv_backward",
            send_prev=self._unless_first(input),
            recv_next=self._unless_last(receives),
            overlap=overlap,
        )

    def send_forward_backward_recv_forward_backward(
        self,
        output: Unit | None,
        input: Unit | None,
        receives_forward: Unit | None,
        receives_backward: Unit | None,
    ) -> Action:
        """All four at once."""
        return self._exchange(
            "send_forward_backward_recv_forward_backward",
            send_next=self._unless_last(output),
            recv_prev=self._unless_first(receives_forward),
            send_prev=self._unless_first(input),
            recv_next=self._unless_last(receives_backward),
        )

    def _unless_first(self, unit: Unit | None) -> tuple[int, int] | None:
        if isinstance(unit, int):
            unit = (unit, 0)
        return None if unit is None or unit[1] == self._first_chunk else unit

    def _unless_last(self, unit: Unit | None) -> tuple[int, int] | None:
        if isinstance(unit, int):
            unit = (unit, 0)
        return None if unit is None or unit[1] == self._last_chunk else unit

    def _sizes_of(self, part: int, chunk: int) -> tuple[int, ...]:
        """Sizes of the messages of one kind: behind the chunk's stage, or before it."""
        stage = self.placement.stage_of(self.pp_rank, chunk)
        return self.config.sizes_behind(stage - (part in (_RECV_PREV, _SEND_PREV)))

    def _exchange(
        self,
        call: str,
        send_next: tuple[int, int] | None = None,
        recv_prev: tuple[int, int] | None = None,
        send_prev: tuple[int, int] | None = None,
        recv_next: tuple[int, int] | None = None,
        overlap: bool = False,
    ) -> Action:
        units = (send_next, recv_prev, send_prev, recv_next)
        ends, config = self._ends, self.config
        has_one_size = config.message_factors is None and config.message_sizes is None
        one_size = (config.message_bytes,)
        messages = [
            Message(*ends[part], *units[part], size)
            for part in self._order
            if units[part] is not None
            for size in (one_size if has_one_size else self._sizes_of(part, units[part][1]))
        ]
        return Action(
            COMMUNICATE, self.pp_rank, self.phase, None, None, call, tuple(messages), overlap
        )
