"""Messages between the stages of a pipeline: one verb, `exchange`, and Megatron's nine methods.

Counterpart: `megatron.core.pipeline_parallel.p2p_communication.P2PCommunicator`, the same nine
methods.

Each of the nine says where a stage's neighbours are: outputs go to the next rank, gradients to the
previous one, in a ring, because with interleaving the last rank passes its early chunks' outputs to
the first. It makes a list of messages from that and gives it to `exchange`. An order that was lowered
for another placement gives its own list, with its own peers.

How a stage keeps computing while messages travel: a send returns at once (on NCCL with
`overlap_p2p_comm` only), unless its channel (peer, payload, chunk) is full; `send_limits` says what
full is, and why. The communicator keeps the tensor's storage until the message is out, so a schedule
may free an output right after sending it. Between stages on one host a message is in shared memory by
then (`local_transport`), and there when the receiver asks for it. Otherwise it travels from when both
have asked; on NCCL the order of calls is the order on the wire, and `wait` makes the stream wait, not
the program.
"""

import weakref
from collections import defaultdict, deque
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from minimegatron.core.local_host import LENT, get_timeout
from minimegatron.core.model_parallel_config import ModelParallelConfig, other_num_stages
from minimegatron.core.pipeline_parallel.local_transport import LocalTransport, make_transport
from minimegatron.core.pipeline_parallel.orders import INTERLEAVED, placement_of
from minimegatron.core.pipeline_parallel.send_limits import SendPlan
from minimegatron.core.pipeline_parallel.transport import (
    ACTIVATION,
    GRADIENT,
    LANES,
    Handle,
    Peers,
    TensorMessage,
    Transport,
)
from minimegatron.core.tracing import traced
from minimegatron.core.utils import get_device

Shape = list[int] | tuple[int, ...] | torch.Size


def is_single_shape(x: Any) -> bool:
    """True for one shape ([s, b, h]), False for a list of shapes and for everything else.

    >>> [is_single_shape(x) for x in ([4, 2, 8], [[4, 2, 8]], (), 5)]
    [True, False, False, False]
    """
    if isinstance(x, torch.Size):
        return True
    return isinstance(x, (list, tuple)) and len(x) > 0 and all(isinstance(n, int) for n in x)


class Receive:
    """A message that is on its way to this stage. `tensor` is what it will be in."""

    def __init__(self, message: TensorMessage, work: Handle, stage: int, number: int):
        self.message, self.tensor = message, message.tensor
        self._work, self._stage, self._number = work, stage, number

    def wait(self) -> torch.Tensor:
        """The tensor, once it is there. Raises ConnectionError, naming both stages, if it is not."""
        if self._work is not None:
            peer, payload = self.message.peer, self.message.payload
            where = (self._stage, peer, payload, "receiving", self.tensor.shape, self._number)
            _wait_for(self._work, *where)
            self._work = None
        return self.tensor


_transports: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()


def get_transport(group: dist.ProcessGroup, links: Iterable[tuple[int, int]] = ()) -> Transport:
    """The transport of `group`, made on first use, by all its ranks together.

    `links` are more pairs of ranks that exchange messages, beside the neighbours in the ring. Pairs
    that are not connected yet are connected now, again by all ranks together.
    """
    transport = _transports.get(group)
    if transport is None or (links and not transport.has_links(links)):
        transport = _transports[group] = make_transport(group, transport, links)
    if isinstance(transport, LocalTransport):
        seconds = get_timeout(group)
        for connection in transport.connections.values():
            connection.set_timeout(seconds)
    return transport


def links_of(config: ModelParallelConfig) -> list[tuple[int, int]]:
    """Pairs of ranks that the placement of the model's schedule makes neighbours, beside the ring."""
    if config.pipeline_schedule is None:
        return []
    placement = placement_of(config)
    return [(r, peer) for r in range(placement.pp_size) for peer in placement.peers_of(r)]


def sends_shapes(config: ModelParallelConfig) -> bool:
    """Whether the shape goes ahead of every message: lengths vary, or are longer behind a stage of
    its own for further tokens."""
    return config.variable_seq_lengths or config.mtp_standalone


class P2PCommunicator:
    """Point-to-point communication of one stage with others of `pp_group`.

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
        if config.pipeline_model_parallel_size != pp_group.size():
            raise other_num_stages(config, pp_group.size())
        self.pp_group, self.config = pp_group, config
        self.world_size, self.curr_rank_in_pg = pp_group.size(), pp_group.rank()
        self.next_rank = (self.curr_rank_in_pg + 1) % self.world_size
        self.prev_rank = (self.curr_rank_in_pg - 1) % self.world_size
        self.virtual_pipeline_model_parallel_size = config.virtual_pipeline_model_parallel_size
        if config.pipeline_schedule in (None, INTERLEAVED):
            self.refuse_a_ring_of_two()
        self.device = get_device()
        links = links_of(config)
        if transport is None:
            transport = get_transport(pp_group, links) if links else get_transport(pp_group)
        self.transport = transport
        self._connections = getattr(self.transport, "connections", None) or Peers(self.transport)
        # What lies in shared memory is safe there, and may wait for its receiver beyond the step.
        self._may_outlive_step = self.transport.matches_by_tag and self.transport.keeps_messages
        self._unfinished_sends: dict[tuple, deque] = (
            self.transport.unfinished_sends if self._may_outlive_step else defaultdict(deque)
        )
        self._forget_step(SendPlan())

    def refuse_a_ring_of_two(self) -> None:
        """Raises ValueError where the nine methods could swap activations and gradients.

        The messages of an order have one order, and are not swapped.
        """
        has_chunks = (self.virtual_pipeline_model_parallel_size or 1) > 1
        if self.world_size == 2 and has_chunks and self.config.batch_p2p_comm:
            raise ValueError(
                "interleaving over 2 pipeline stages with batched messages can swap activations "
                "and gradients: each rank is both neighbours of the other, and a batch pairs "
                "messages by position only; set batch_p2p_comm=False (overlap_p2p_comm may then "
                "be on or off), or use more than 2 stages"
            )

    # -- The edges of a step --

    def begin_step(self, sends: SendPlan | None = None) -> None:
        """Leaves behind what a failed step left; `sends` says how many messages may lie unreceived.

        Every rank of the group must call it, before the first message of a step.
        """
        if not self._may_outlive_step:
            self._unfinished_sends.clear()
        self._forget_step(sends or SendPlan())
        for part in self._parts_in_step():
            part.begin_step()

    def end_step(self) -> None:
        """The step has ended well on this stage."""
        for part in self._parts_in_step():
            part.end_step()

    def abandon(self, reason: str) -> None:
        """The step has failed here; tells the stages it is connected with, where the transport can."""
        if self._may_outlive_step:
            self._unfinished_sends.clear()
        for part in self._parts_in_step():
            part.abandon(reason)

    def _parts_in_step(self) -> Iterable[Any]:
        if not self.transport.matches_by_tag:
            return ()
        is_local = isinstance(self.transport, LocalTransport)
        return self._connections.values() if is_local else (self.transport,)

    def _forget_step(self, sends: SendPlan) -> None:
        self._sends = sends
        # How many messages there were: sent by payload; and started, by direction, payload and peer.
        self._num_sends = {ACTIVATION: 0, GRADIENT: 0}
        self._num_started: dict[tuple[bool, str, int], int] = defaultdict(int)

    # -- What plain 1F1B calls --

    @traced("forward-recv")
    def recv_forward(self, tensor_shapes: Shape | list[Shape], is_first_stage: bool) -> Any:
        """The input of this stage's next forward, from the previous stage; None on the first.

        `tensor_shapes` is one shape, or a list of shapes; then a list comes back, of tensors or None.
        """
        shapes = [] if is_first_stage else _as_shapes(tensor_shapes)
        started = self.exchange(self._in_order(recv_prev=shapes))
        return _as_asked(started, tensor_shapes)

    @traced("backward-recv")
    def recv_backward(self, tensor_shapes: Shape | list[Shape], is_last_stage: bool) -> Any:
        """The gradient of this stage's next backward, from the next stage; None on the last."""
        shapes = [] if is_last_stage else _as_shapes(tensor_shapes)
        started = self.exchange(self._in_order(recv_next=shapes))
        return _as_asked(started, tensor_shapes)

    @traced("forward-send")
    def send_forward(self, output_tensors: Any, is_last_stage: bool) -> None:
        """Sends an output (or a list of them) to the next stage; nothing on the last."""
        outputs = [] if is_last_stage else _as_list(output_tensors)
        self.exchange(self._in_order(send_next=outputs))

    @traced("backward-send")
    def send_backward(self, input_tensor_grads: Any, is_first_stage: bool) -> None:
        """Sends the gradient of an input to the previous stage; nothing on the first."""
        gradients = [] if is_first_stage else _as_list(input_tensor_grads)
        self.exchange(self._in_order(send_prev=gradients))

    @traced("forward-send-backward-recv")
    def send_forward_recv_backward(
        self, output_tensors: Any, tensor_shapes: Shape | list[Shape], is_last_stage: bool
    ) -> Any:
        """Sends an output to the next stage and waits for a gradient from it; None on the last."""
        outputs = [] if is_last_stage else _as_list(output_tensors)
        shapes = [] if is_last_stage else _as_shapes(tensor_shapes)
        started = self.exchange(self._in_order(send_next=outputs, recv_next=shapes))
        return _as_asked(started, tensor_shapes)

    @traced("backward-send-forward-recv")
    def send_backward_recv_forward(
        self, input_tensor_grads: Any, tensor_shapes: Shape | list[Shape], is_first_stage: bool
    ) -> Any:
        """Sends a gradient to the previous stage, waits for an input from it; None on the first."""
        gradients = [] if is_first_stage else _as_list(input_tensor_grads)
        shapes = [] if is_first_stage else _as_shapes(tensor_shapes)
        started = self.exchange(self._in_order(send_prev=gradients, recv_prev=shapes))
        return _as_asked(started, tensor_shapes)

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
        messages = self._in_order(
            send_next=_unless_none(output_tensor), recv_prev=[tensor_shape] * recv_prev
        )
        started = self.exchange(messages)
        if overlap_p2p_comm:
            handles = _by_name(messages, started)
            return handles["recv_prev"].tensor if recv_prev else None, handles
        return _first(_waited(started))

    @traced("backward-send-backward-recv")
    def send_backward_recv_backward(
        self,
        input_tensor_grad: torch.Tensor | None,
        recv_next: bool,
        tensor_shape: Shape,
        overlap_p2p_comm: bool = False,
    ) -> Any:
        """Sends a gradient back (unless None) and receives one (if `recv_next`). See above."""
        messages = self._in_order(
            send_prev=_unless_none(input_tensor_grad), recv_next=[tensor_shape] * recv_next
        )
        started = self.exchange(messages)
        if overlap_p2p_comm:
            handles = _by_name(messages, started)
            return handles["recv_next"].tensor if recv_next else None, handles
        return _first(_waited(started))

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
        messages = self._in_order(
            send_next=_unless_none(output_tensor),
            send_prev=_unless_none(input_tensor_grad),
            recv_prev=[tensor_shape] * recv_prev,
            recv_next=[tensor_shape] * recv_next,
        )
        handles = _by_name(messages, self.exchange(messages))
        from_prev, from_next = handles.get("recv_prev"), handles.get("recv_next")
        return from_prev and from_prev.wait(), from_next and from_next.wait()

    def _in_order(
        self,
        send_next: Sequence = (),
        recv_prev: Sequence = (),
        send_prev: Sequence = (),
        recv_next: Sequence = (),
    ) -> list[TensorMessage]:
        """The messages of one call, tensors to send and shapes to receive, as they must be started."""
        before, after = self.prev_rank, self.next_rank
        parts = {
            "send_next": [self._sending(tensor, after, ACTIVATION) for tensor in send_next],
            "recv_prev": [TensorMessage(False, None, before, ACTIVATION, 0, s) for s in recv_prev],
            "send_prev": [self._sending(tensor, before, GRADIENT) for tensor in send_prev],
            "recv_next": [TensorMessage(False, None, after, GRADIENT, 0, s) for s in recv_next],
        }
        if self.config.batch_p2p_comm:
            # To and from the previous stage first, as in Megatron. The order has a meaning where
            # one stage is both neighbours: NCCL pairs messages by their places.
            order = ["send_prev", "recv_prev", "send_next", "recv_next"]
        elif self.curr_rank_in_pg % 2:
            # Started one by one, where each may block until its partner is there. Were all stages
            # to send first, a ring of them would wait for ever; so odd stages receive first.
            order = ["recv_prev", "send_next", "recv_next", "send_prev"]
        else:
            order = ["send_next", "recv_prev", "send_prev", "recv_next"]
        return [message for name in order for message in parts[name]]

    def _sending(self, tensor: torch.Tensor, peer: int, payload: str) -> TensorMessage:
        # The nine methods are not told which chunk made a tensor: the plan knows the order of all.
        number = self._num_sends[payload]
        self._num_sends[payload] += 1
        chunks = self._sends.chunks.get(payload, ())
        return TensorMessage(
            True, tensor, peer, payload, chunks[number] if number < len(chunks) else 0
        )

    # -- The exchange itself --

    def exchange(self, messages: Sequence[TensorMessage], overlap: bool = False) -> list[Any]:
        """Starts messages, in this order; returns a handle for each.

        Args:
            messages: each with its peer (a rank of the group), payload and chunk; a send with its
                tensor, a receive with the shape that it will have.
            overlap: whether the program goes on although nobody has received what it sends. On a
                tagged wire, and with `overlap_p2p_comm`, it always does.

        The handle of a receive is a `Receive`. Nobody needs to wait for a send: it waits here for room
        in its channel, and `finish` waits for what has not left. With `batch_p2p_comm` an untagged
        wire gets all messages as one batch. Raises ConnectionError, naming both stages, if a peer has
        gone.
        """
        if sends_shapes(self.config):
            messages = self._with_shapes(messages, overlap)
        messages = [self._prepared(message) for message in messages]
        may_run_on = overlap or self.transport.matches_by_tag or self.config.overlap_p2p_comm
        if may_run_on:
            self._wait_for_room(messages)
        works: list[Handle] = []
        message = None
        try:
            if self.config.batch_p2p_comm and not self.transport.matches_by_tag:
                if messages:  # NCCL refuses an empty batch
                    works = self.transport.start_batch(messages)
            else:
                for message in messages:
                    connection, lane = self._connections[message.peer], LANES[message.payload]
                    if message.is_send:
                        channel = (message.payload, message.chunk)
                        works.append(connection.send(message.tensor, channel, lane))
                    else:
                        works.append(connection.expect(message.tensor, LENT, lane))
        except (RuntimeError, OSError) as error:
            message = message or messages[0]
            raise ConnectionError(
                f"stage {self.curr_rank_in_pg} lost stage {message.peer} while starting a message "
                f"({message.payload}): {error}"
            ) from error
        return [self._handle(m, work, may_run_on) for m, work in zip(messages, works, strict=True)]

    def _prepared(self, message: TensorMessage) -> TensorMessage:
        """The message with the tensor that the transport reads or fills."""
        if message.is_send:
            # A view of its own: freeing the output's `.data` must not touch what is being sent.
            tensor = message.tensor.detach().contiguous()
        elif message.tensor is not None:
            return message
        else:
            # The input must require a gradient, or backward would stop at the stage's first layer.
            tensor = torch.empty(
                tuple(message.shape),
                dtype=self.config.pipeline_dtype,
                device=self.device,
                requires_grad=message.payload == ACTIVATION,
            )
        return message._replace(tensor=tensor)

    def _handle(self, message: TensorMessage, work: Handle, may_run_on: bool) -> Any:
        kind = (message.is_send, message.payload, message.peer)
        number = self._num_started[kind]
        self._num_started[kind] += 1
        if not message.is_send:
            return Receive(message, work, self.curr_rank_in_pg, number)
        # What is in shared memory is copied already; elsewhere the tensor must live until it is out.
        kept = None if self._may_outlive_step else message.tensor
        peer, payload, shape = message.peer, message.payload, message.tensor.shape
        send = _UnfinishedSend(work, peer, payload, shape, number, kept)
        if may_run_on:
            self._unfinished_sends[peer, payload, message.chunk].append(send)
        else:
            self._finish_send(send)
        return work

    def _wait_for_room(self, messages: list[TensorMessage]) -> None:
        """Before a send: waits while its channel holds K messages that nobody has received."""
        for message in messages:
            if message.is_send:
                limits, least = self._sends.limits, self._sends.least_limit
                payload, chunk = message.payload, message.chunk
                unfinished = self._unfinished_sends[message.peer, payload, chunk]
                while len(unfinished) >= limits.get((payload, chunk), least):
                    self._finish_send(unfinished.popleft())

    def _finish_send(self, send: "_UnfinishedSend") -> None:
        # Observers count the waits of a step; one for an earlier step's message is not among them.
        wait = _await if send.is_old else _wait_for
        where = (self.curr_rank_in_pg, send.peer, send.payload, "sending", send.shape, send.number)
        wait(send.work, *where)

    def _with_shapes(
        self, messages: Sequence[TensorMessage], overlap: bool
    ) -> Sequence[TensorMessage]:
        # Three int64 per message, so tensors between stages must have three dimensions.
        if all(message.payload not in (ACTIVATION, GRADIENT) for message in messages):
            return messages  # none, or these are the shapes
        handles = self.exchange([self._size_message(message) for message in messages], overlap)
        return [
            message if message.is_send else message._replace(shape=handle.wait().tolist())
            for message, handle in zip(messages, handles, strict=True)
        ]

    def _size_message(self, message: TensorMessage) -> TensorMessage:
        if not message.is_send:
            sizes = torch.empty(3, dtype=torch.int64, device=self.device)
        elif message.tensor.dim() == 3:
            sizes = torch.tensor(message.tensor.shape, dtype=torch.int64, device=self.device)
        else:
            raise ValueError(
                f"three sizes are sent ahead of a message, but this stage's tensor has shape "
                f"{tuple(message.tensor.shape)}; make it [sequence, batch, hidden]"
            )
        return message._replace(tensor=sizes, payload=f"{message.payload} shape")

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

    work: Handle
    peer: int
    payload: str
    shape: Shape
    number: int
    tensor: torch.Tensor | None
    is_old: bool = False
    """It was sent in an earlier step."""


def _await(
    work: Handle, stage: int, peer: int, payload: str, doing: str, shape: Shape, number: int
) -> None:
    try:
        work.wait()
    except (RuntimeError, OSError) as error:
        raise ConnectionError(
            f"stage {stage} lost stage {peer} while {doing} an {payload} of shape "
            f"{tuple(shape)}: {error}"
        ) from error


_wait_for = traced(
    "p2p-wait", lambda a: {k: a[k] for k in ("stage", "peer", "payload", "doing", "number")}
)(_await)


# -- What the nine methods are given, and give back --


def _as_list(tensors: Any) -> list:
    return tensors if isinstance(tensors, list) else [tensors]


def _unless_none(tensor: torch.Tensor | None) -> list:
    return [] if tensor is None else [tensor]


def _as_shapes(tensor_shapes: Shape | list[Shape]) -> list[Shape]:
    return [tensor_shapes] if is_single_shape(tensor_shapes) else tensor_shapes


def _waited(started: list[Any]) -> list[torch.Tensor]:
    return [handle.wait() for handle in started if isinstance(handle, Receive)]


def _as_asked(started: list[Any], tensor_shapes: Shape | list[Shape]) -> Any:
    """The tensors received: one for one shape, a list for a list; None where nothing was."""
    tensors = _waited(started)
    if is_single_shape(tensor_shapes):
        return _first(tensors)
    return tensors or [None] * len(tensor_shapes)


def _first(tensors: list[torch.Tensor]) -> torch.Tensor | None:
    return tensors[0] if tensors else None


def _by_name(messages: Sequence[TensorMessage], started: list[Any]) -> dict[str, Any]:
    """Handles under Megatron's names for them."""
    names = {
        (True, ACTIVATION): "send_next",
        (False, ACTIVATION): "recv_prev",
        (True, GRADIENT): "send_prev",
        (False, GRADIENT): "recv_next",
    }
    return {
        names[message.is_send, message.payload]: handle
        for message, handle in zip(messages, started, strict=True)
    }
