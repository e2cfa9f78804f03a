"""Messages between neighbouring stages: activations to the next, gradients to the previous.

Called by: the pipeline schedules, and nobody else. Calls: a `Transport`. Counterpart:
`megatron.core.pipeline_parallel.p2p_communication.P2PCommunicator`, the same nine methods.

The nine are one exchange, `_communicate`, with different parts left out. A stage may send its
output to the next stage and a gradient to the previous one, and receive an input from the previous
stage and a gradient from the next. Stages form a ring, because with interleaving the last stage
passes its early chunks' outputs to the first.

How a stage keeps computing while messages travel: a send returns at once, unless its channel
(neighbour, payload, chunk) is full; `send_limits` says what full is, and why. The communicator keeps
the tensor's storage until the message is out, so a schedule may free an output right after sending
it. Between stages on one host a message is in shared memory by then (`local_transport`), and there
when the receiver asks for it. Otherwise it travels from when both have asked; on NCCL the order of
calls is the order on the wire, and `wait` makes the stream wait, not the program.
"""

from collections import defaultdict, deque
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from minimegatron.core.model_parallel_config import ModelParallelConfig
from minimegatron.core.pipeline_parallel.local_transport import get_transport
from minimegatron.core.pipeline_parallel.send_limits import Channel, SendPlan
from minimegatron.core.pipeline_parallel.transport import (
    ACTIVATION,
    GRADIENT,
    Message,
    Transport,
    Work,
)
from minimegatron.core.tracing import traced
from minimegatron.core.utils import get_device

Shape = list[int] | tuple[int, ...] | torch.Size


def is_single_shape(x: Any) -> bool:
    """True for one shape ([s, b, h]), False for a list of shapes.

    >>> is_single_shape([4, 2, 8]), is_single_shape([[4, 2, 8]]), is_single_shape(())
    (True, False, True)
    """
    return isinstance(x, torch.Size) or all(isinstance(size, int) for size in x)


class Receive:
    """A tensor that is on its way, and which stage sends it."""

    def __init__(self, tensor: torch.Tensor, work: Work, stage: int, peer: int, payload: str):
        self.tensor, self._work = tensor, work
        self.stage, self.peer, self.payload = stage, peer, payload

    def wait(self) -> torch.Tensor:
        """The tensor, once it is there. Raises ConnectionError, naming both stages, if it is not."""
        if self._work is not None:
            shape = self.tensor.shape
            _wait_for(self._work, self.stage, self.peer, self.payload, "receiving", shape)
            self._work = None
        return self.tensor


class P2PCommunicator:
    """Point-to-point communication of one stage with its two neighbours in `pp_group`.

    Args:
        pp_group: the ranks of one pipeline, stage 0 first. Anything with `rank()` and `size()` if
            `transport` is given.
        config: dtype (`pipeline_dtype`), batching, overlap, variable lengths.
        transport: carries the messages; None for the one that suits `pp_group`. The first
            communicator of a group is then made by all its ranks together.

    Raises ValueError for interleaving over two stages with batched messages: each rank is then both
    the next and the previous neighbour of the other, and in a batch nothing tells an activation from
    a gradient. NCCL would pair them by position, and positions differ between the two ranks.
    """

    def __init__(
        self,
        pp_group: dist.ProcessGroup,
        config: ModelParallelConfig,
        transport: Transport | None = None,
    ):
        self.pp_group, self.config = pp_group, config
        self.world_size, self.curr_rank_in_pg = pp_group.size(), pp_group.rank()
        self.next_rank = (self.curr_rank_in_pg + 1) % self.world_size
        self.prev_rank = (self.curr_rank_in_pg - 1) % self.world_size
        self.virtual_pipeline_model_parallel_size = config.virtual_pipeline_model_parallel_size
        if (
            self.world_size == 2
            and (self.virtual_pipeline_model_parallel_size or 1) > 1
            and config.batch_p2p_comm
        ):
            raise ValueError(
                "interleaving over 2 pipeline stages with batched messages can swap activations "
                "and gradients: each rank is both neighbours of the other, and a batch pairs "
                "messages by position only; set batch_p2p_comm=False (overlap_p2p_comm may then "
                "be on or off), or use more than 2 stages"
            )
        self.transport = transport or get_transport(pp_group)
        # What lies in shared memory is safe there, and may wait for its receiver beyond the step.
        self._may_outlive_step = self.transport.matches_by_tag and self.transport.keeps_messages
        self._unfinished_sends: dict[Channel, deque] = (
            self.transport.unfinished_sends if self._may_outlive_step else defaultdict(deque)
        )
        self._sends = SendPlan()
        self._num_sends = {ACTIVATION: 0, GRADIENT: 0}

    # -- The edges of a step --

    def begin_step(self, sends: SendPlan | None = None) -> None:
        """Leaves behind what a failed step left; `sends` says how many messages may lie unreceived.

        Every rank of the group must call it, before the first message of a step.
        """
        if not self._may_outlive_step:
            self._unfinished_sends.clear()
        self._sends = sends or SendPlan()
        self._num_sends = {ACTIVATION: 0, GRADIENT: 0}
        if self.transport.matches_by_tag:
            self.transport.begin_step()

    def end_step(self) -> None:
        """The step has ended well on this stage."""
        if self.transport.matches_by_tag:
            self.transport.end_step()

    def abandon(self, reason: str) -> None:
        """The step has failed here; tells both neighbours, where the transport can."""
        if self.transport.matches_by_tag:
            self.transport.abandon(reason)

    # -- What plain 1F1B calls --

    @traced("forward-recv")
    def recv_forward(self, tensor_shapes: Shape | list[Shape], is_first_stage: bool) -> Any:
        """The input of this stage's next forward, from the previous stage; None on the first.

        `tensor_shapes` is one shape, or a list of shapes; then a list of tensors comes back.
        """
        return self._each_shape(tensor_shapes, is_first_stage, lambda shape: self._recv_prev(shape))

    @traced("backward-recv")
    def recv_backward(self, tensor_shapes: Shape | list[Shape], is_last_stage: bool) -> Any:
        """The gradient of this stage's next backward, from the next stage; None on the last."""
        return self._each_shape(tensor_shapes, is_last_stage, lambda shape: self._recv_next(shape))

    @traced("forward-send")
    def send_forward(self, output_tensors: Any, is_last_stage: bool) -> None:
        """Sends an output (or a list of them) to the next stage; nothing on the last."""
        for tensor in [] if is_last_stage else _as_list(output_tensors):
            self._communicate(tensor_send_next=tensor)

    @traced("backward-send")
    def send_backward(self, input_tensor_grads: Any, is_first_stage: bool) -> None:
        """Sends the gradient of an input to the previous stage; nothing on the first."""
        for tensor in [] if is_first_stage else _as_list(input_tensor_grads):
            self._communicate(tensor_send_prev=tensor)

    @traced("forward-send-backward-recv")
    def send_forward_recv_backward(
        self, output_tensors: Any, tensor_shapes: Shape | list[Shape], is_last_stage: bool
    ) -> Any:
        """Sends an output to the next stage and waits for a gradient from it; None on the last."""
        outputs = iter(_as_list(output_tensors))
        return self._each_shape(
            tensor_shapes,
            is_last_stage,
            lambda shape: self._communicate(
                tensor_send_next=next(outputs), recv_next=True, tensor_shape=shape
            )[1].wait(),
        )

    @traced("backward-send-forward-recv")
    def send_backward_recv_forward(
        self, input_tensor_grads: Any, tensor_shapes: Shape | list[Shape], is_first_stage: bool
    ) -> Any:
        """Sends a gradient to the previous stage, waits for an input from it; None on the first."""
        gradients = iter(_as_list(input_tensor_grads))
        return self._each_shape(
            tensor_shapes,
            is_first_stage,
            lambda shape: self._communicate(
                tensor_send_prev=next(gradients), recv_prev=True, tensor_shape=shape
            )[0].wait(),
        )

    # -- What interleaved 1F1B calls --

    @traced("forward-send-forward-recv")
    def send_forward_recv_forward(
        self,
        output_tensor: torch.Tensor | None,
        recv_prev: bool,
        tensor_shape: Shape,
        overlap_p2p_comm: bool = False,
    ) -> Any:
        """Sends an output onwards (unless None) and receives an input (if `recv_prev`).

        Returns the input, or None. With `overlap_p2p_comm`, returns (input, wait handles) at once;
        the input is valid after `wait()` on the handle "recv_prev".
        """
        received, _, handles = self._communicate(
            tensor_send_next=output_tensor, recv_prev=recv_prev, tensor_shape=tensor_shape
        )
        if overlap_p2p_comm:
            return received and received.tensor, handles
        return received and received.wait()

    @traced("backward-send-backward-recv")
    def send_backward_recv_backward(
        self,
        input_tensor_grad: torch.Tensor | None,
        recv_next: bool,
        tensor_shape: Shape,
        overlap_p2p_comm: bool = False,
    ) -> Any:
        """Sends a gradient back (unless None) and receives one (if `recv_next`). See above."""
        _, received, handles = self._communicate(
            tensor_send_prev=input_tensor_grad, recv_next=recv_next, tensor_shape=tensor_shape
        )
        if overlap_p2p_comm:
            return received and received.tensor, handles
        return received and received.wait()

    @traced("forward-backward-send-forward-backward-recv")
    def send_forward_backward_recv_forward_backward(
        self,
        output_tensor: torch.Tensor | None,
        input_tensor_grad: torch.Tensor | None,
        recv_prev: bool,
        recv_next: bool,
        tensor_shape: Shape,
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """All four at once. Returns (input, output gradient), each None if not asked for."""
        from_prev, from_next, _ = self._communicate(
            tensor_send_next=output_tensor,
            tensor_send_prev=input_tensor_grad,
            recv_prev=recv_prev,
            recv_next=recv_next,
            tensor_shape=tensor_shape,
        )
        return from_prev and from_prev.wait(), from_next and from_next.wait()

    # -- The exchange itself --

    def _communicate(
        self,
        tensor_send_next: torch.Tensor | None = None,
        tensor_send_prev: torch.Tensor | None = None,
        recv_prev: bool = False,
        recv_next: bool = False,
        tensor_shape: Shape | None = None,
    ) -> tuple[Receive | None, Receive | None, dict[str, Any]]:
        """Starts up to four messages; returns what will come from prev and next, and all handles."""
        shape_prev = shape_next = tensor_shape
        chunk_next = self._next_chunk(ACTIVATION, tensor_send_next)
        chunk_prev = self._next_chunk(GRADIENT, tensor_send_prev)
        if self.config.variable_seq_lengths:
            shape_prev, shape_next = self._exchange_shapes(
                tensor_send_next, tensor_send_prev, recv_prev, recv_next, chunk_next, chunk_prev
            )
        parts: dict[str, Message] = {}
        if tensor_send_next is not None:
            parts["send_next"] = self._message(True, tensor_send_next, ACTIVATION, chunk_next)
        if recv_prev:
            parts["recv_prev"] = self._message(
                False, self._new_buffer(shape_prev, ACTIVATION), ACTIVATION
            )
        if tensor_send_prev is not None:
            parts["send_prev"] = self._message(True, tensor_send_prev, GRADIENT, chunk_prev)
        if recv_next:
            parts["recv_next"] = self._message(
                False, self._new_buffer(shape_next, GRADIENT), GRADIENT
            )

        handles: dict[str, Any] = {}
        for name, work in self._start(parts).items():
            message = parts[name]
            if message.is_send:
                self._keep_until_sent(message, work)
                handles[name] = work
            else:
                handles[name] = self._receive(message, work)
        return handles.get("recv_prev"), handles.get("recv_next"), handles

    def _start(self, parts: dict[str, Message]) -> dict[str, Work]:
        if not parts:
            return {}  # NCCL refuses an empty batch
        for message in parts.values():
            if message.is_send:
                self._wait_for_room(message)
        if self.config.batch_p2p_comm:
            # To and from the previous stage first, as in Megatron. The order has a meaning where
            # one stage is both neighbours: NCCL pairs messages by their places.
            order = ["send_prev", "recv_prev", "send_next", "recv_next"]
            parts = {name: parts[name] for name in order if name in parts}
            works = self._naming_stages(self.transport.start_batch, list(parts.values()))
            return dict(zip(parts, works, strict=True))
        # Started one by one, where each may block until its partner is there. Were all stages to
        # send first, a ring of them would wait for ever; so odd stages receive before they send.
        order = ["send_next", "recv_prev", "send_prev", "recv_next"]
        if self.curr_rank_in_pg % 2:
            order = ["recv_prev", "send_next", "recv_next", "send_prev"]
        return {
            name: self._naming_stages(self.transport.start, parts[name])
            for name in order
            if name in parts
        }

    def _naming_stages(self, start: Callable, messages: Any) -> Any:
        try:
            return start(messages)
        except (RuntimeError, OSError) as error:
            message = messages[0] if isinstance(messages, list) else messages
            raise ConnectionError(
                f"stage {self.curr_rank_in_pg} lost stage {message.peer} while starting a message "
                f"({message.payload}): {error}"
            ) from error

    def _message(
        self, is_send: bool, tensor: torch.Tensor, payload: str, chunk: int = 0
    ) -> Message:
        forwards = is_send == payload.startswith(ACTIVATION)
        peer = self.next_rank if forwards else self.prev_rank
        # A view of its own: freeing the output's `.data` must not touch what is being sent.
        if is_send:
            tensor = tensor.detach().contiguous()
        return Message(is_send, tensor, peer, payload, chunk)

    def _receive(self, message: Message, work: Work) -> Receive:
        return Receive(message.tensor, work, self.curr_rank_in_pg, message.peer, message.payload)

    def _new_buffer(self, shape: Shape, payload: str) -> torch.Tensor:
        # The input must require a gradient, or backward would stop at the stage's first layer.
        return torch.empty(
            tuple(shape),
            dtype=self.config.pipeline_dtype,
            device=get_device(),
            requires_grad=payload == ACTIVATION,
        )

    def _next_chunk(self, payload: str, tensor: torch.Tensor | None) -> int:
        """The chunk that made what is sent now: the plan knows the order of all sends."""
        if tensor is None:
            return 0
        number = self._num_sends[payload]
        self._num_sends[payload] += 1
        return self._sends.chunk(payload, number)

    @property
    def _may_run_on(self) -> bool:
        # On an untagged wire without overlap, each side waits for the other at each message.
        return self.transport.matches_by_tag or self.config.overlap_p2p_comm

    def _wait_for_room(self, message: Message) -> None:
        """Before a send: waits while its channel holds K messages that nobody has received."""
        channel = (message.payload, message.chunk)
        unfinished, limit = self._unfinished_sends[channel], self._sends.limit(channel)
        while self._may_run_on and len(unfinished) >= limit:
            self._finish_send(unfinished.popleft())

    def _keep_until_sent(self, message: Message, work: Work) -> None:
        # What is in shared memory is copied already; elsewhere the tensor must live until it is out.
        kept = None if self._may_outlive_step else message.tensor
        send = _UnfinishedSend(work, message.peer, message.payload, message.tensor.shape, kept)
        if self._may_run_on:
            self._unfinished_sends[message.payload, message.chunk].append(send)
        else:
            self._finish_send(send)

    def _finish_send(self, send: "_UnfinishedSend") -> None:
        # Observers count the waits of a step; one for an earlier step's message is not among them.
        wait = _await if send.is_old else _wait_for
        wait(send.work, self.curr_rank_in_pg, send.peer, send.payload, "sending", send.shape)

    def _exchange_shapes(
        self,
        tensor_send_next: torch.Tensor | None,
        tensor_send_prev: torch.Tensor | None,
        recv_prev: bool,
        recv_next: bool,
        chunk_next: int,
        chunk_prev: int,
    ) -> tuple[Shape | None, Shape | None]:
        # Three int64 per message, so tensors between stages must have three dimensions.
        parts = {}
        for name, tensor, payload, chunk in (
            ("send_next", tensor_send_next, ACTIVATION, chunk_next),
            ("send_prev", tensor_send_prev, GRADIENT, chunk_prev),
        ):
            if tensor is not None:
                if tensor.dim() != 3:
                    raise ValueError(
                        f"variable_seq_lengths sends three sizes, but this stage's tensor has "
                        f"shape {tuple(tensor.shape)}; make it [sequence, batch, hidden]"
                    )
                sizes = torch.tensor(tensor.shape, dtype=torch.int64, device=get_device())
                parts[name] = self._message(True, sizes, f"{payload} shape", chunk)
        for name, wanted, payload in (
            ("recv_prev", recv_prev, ACTIVATION),
            ("recv_next", recv_next, GRADIENT),
        ):
            if wanted:
                sizes = torch.empty(3, dtype=torch.int64, device=get_device())
                parts[name] = self._message(False, sizes, f"{payload} shape")
        shapes = {}
        for name, work in self._start(parts).items():
            if parts[name].is_send:
                self._keep_until_sent(parts[name], work)
            else:
                shapes[name] = self._receive(parts[name], work).wait().tolist()
        return shapes.get("recv_prev"), shapes.get("recv_next")

    def _recv_prev(self, shape: Shape) -> torch.Tensor:
        return self._communicate(recv_prev=True, tensor_shape=shape)[0].wait()

    def _recv_next(self, shape: Shape) -> torch.Tensor:
        return self._communicate(recv_next=True, tensor_shape=shape)[1].wait()

    @staticmethod
    def _each_shape(tensor_shapes: Shape | list[Shape], is_none: bool, exchange: Any) -> Any:
        single = is_single_shape(tensor_shapes)
        shapes = [tensor_shapes] if single else tensor_shapes
        tensors = [None if is_none else exchange(shape) for shape in shapes]
        return tensors[0] if single else tensors

    # -- After the step --

    def finish(self) -> None:
        """Waits until everything sent has left this stage. Raises ConnectionError if it cannot."""
        for channel, unfinished in self._unfinished_sends.items():
            if self._may_outlive_step:
                old = deque(send._replace(is_old=True) for send in unfinished)
                self._unfinished_sends[channel] = old
            else:
                while unfinished:
                    self._finish_send(unfinished.popleft())


class _UnfinishedSend(NamedTuple):
    """A message that has been sent and may not have been received."""

    work: Work
    peer: int
    payload: str
    shape: Shape
    tensor: torch.Tensor | None
    is_old: bool = False
    """It was sent in an earlier step."""


def _await(work: Work, stage: int, peer: int, payload: str, doing: str, shape: Shape) -> None:
    try:
        work.wait()
    except (RuntimeError, OSError) as error:
        raise ConnectionError(
            f"stage {stage} lost stage {peer} while {doing} an {payload} of shape "
            f"{tuple(shape)}: {error}"
        ) from error


_wait_for = traced("p2p-wait", lambda a: {k: a[k] for k in ("stage", "peer", "payload", "doing")})(
    _await
)


def _as_list(tensors: Any) -> list:
    return tensors if isinstance(tensors, list) else [tensors]
