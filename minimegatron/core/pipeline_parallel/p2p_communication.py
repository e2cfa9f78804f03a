"""Messages between the stages of a pipeline: Megatron's nine methods over `torch.distributed`.

Counterpart: `megatron.core.pipeline_parallel.p2p_communication.P2PCommunicator`, the same nine
methods.

Each of the nine says where a stage's neighbours are: outputs go to the next rank, gradients to the
previous one, in a ring, because with interleaving the last rank passes its early chunks' outputs to
the first. It makes a list of messages from that and gives it to `exchange`. An order that was lowered
for another placement gives its own list, with its own peers.

Groups differ in what order they forgive:

* NCCL pairs the n-th send with the n-th receive of two ranks, and either blocks its stream until the
  other is there. Both sides must agree on the order of everything between them.
* gloo and shared memory pair by tag, and a send waits for nobody.

How a stage keeps computing while messages travel: a send returns at once (on NCCL with
`overlap_p2p_comm` only), unless `send_limit` messages of its payload to that peer lie unreceived. The
communicator keeps the tensor's storage until the message is out, so a schedule may free an output
right after sending it. What was sent through shared memory is safe there. On NCCL the order of calls
is the order on the wire, and `wait` makes the stream wait, not the program.
"""

import weakref
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Sequence
from datetime import timedelta
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist

from minimegatron.backend import get_timeout
from minimegatron.core import tracing
from minimegatron.core.collectives import is_tagged, num_begun
from minimegatron.core.model_parallel_config import ModelParallelConfig
from minimegatron.core.orders.work import ACTIVATION, GRADIENT, INTERLEAVED, SEND_LIMIT
from minimegatron.core.pipeline_parallel import p2p_checks
from minimegatron.core.pipeline_parallel.message_batches import MessageBatches
from minimegatron.core.process_groups_config import ProcessGroupCollection
from minimegatron.core.schedule_of_config import check_stages
from minimegatron.core.tracing import traced
from minimegatron.core.utils import get_device

Shape = list[int] | tuple[int, ...] | torch.Size

TAGS = {ACTIVATION: 1, GRADIENT: 2, f"{ACTIVATION} shape": 3, f"{GRADIENT} shape": 4}
"""What keeps the payloads between two ranks apart, where messages have tags."""
_TAGS_PER_STEP, _MAX_STEPS = 8, 1 << 24


class TensorMessage(NamedTuple):
    """One tensor to or from `peer` (a rank within the pipeline group)."""

    is_send: bool
    tensor: torch.Tensor | None
    """None for a receive, until there is memory for it."""
    peer: int
    payload: str
    """ACTIVATION or GRADIENT, or one of them followed by " shape"."""
    shape: Sequence[int] | None = None
    """Of a receive: what will come, [s/c/t, b, h]."""


class Handle(Protocol):
    """The handle of a message under way. Until `wait` returns, its tensor may still be read."""

    def wait(self) -> Any: ...


Message, Work = TensorMessage, Handle  # as older files of students import them


class Started:
    """The handle of a message under way; `number` says how many like it came before in this step."""

    is_old = False  # sent in an earlier step; observers count the waits of a step, and not this one

    def __init__(self, message: TensorMessage, work: Handle, stage: int, number: int, limit: tuple):
        self.message, self.work, self.stage, self.number = message, work, stage, number
        self.limit = limit

    def wait(self) -> Any:
        """Waits until it is received. Raises ConnectionError, naming both stages, if it is not."""
        (_await if self.is_old else _wait_for)(self)


class Receive(Started):
    """A message that is on its way to this stage. `tensor` is what it will be in."""

    has_come = False

    @property
    def tensor(self) -> torch.Tensor:
        """Before `wait`, what is in it has no meaning."""
        return self.message.tensor

    def wait(self) -> torch.Tensor:
        """The tensor, once it is there. Raises ConnectionError, naming both stages, if it is not."""
        if not self.has_come:
            _wait_for(self)
            self.has_come = True
        return self.message.tensor


def is_single_shape(x: Any) -> bool:
    """True for one shape ([s, b, h]), which begins with a number; False for a list of shapes.

    >>> [is_single_shape(x) for x in ([4, 2, 8], [[4, 2, 8]], [torch.Size([4, 2, 8])], (), 5)]
    [True, False, False, False, False]
    """
    begins_with_number = isinstance(x, (list, tuple)) and len(x) > 0 and isinstance(x[0], int)
    return begins_with_number or isinstance(x, torch.Size)


def sends_shapes(config: ModelParallelConfig) -> bool:
    """Whether the shape goes ahead of every message: lengths vary, or are longer after a stage of
    its own for further tokens."""
    return config.variable_seq_lengths or config.mtp_standalone


def get_tensor_shapes(
    *,
    seq_length: int,
    micro_batch_size: int,
    decoder_seq_length: int | None,
    config: ModelParallelConfig,
    tp_group: dist.ProcessGroup,
    cp_group: dist.ProcessGroup,
) -> list[tuple[int, ...]]:
    """Shapes of what travels between two stages: one, [s/c/t, b, h]; /t with sequence parallelism.

    With `variable_seq_lengths` the sizes are sent ahead of each message instead: one empty shape. The
    same where a stage has nothing but the layers for K further tokens: its messages are (1 + K) s long.
    A two-stack model's stages exchange decoder states, of `decoder_seq_length`.
    """
    if sends_shapes(config):
        return [torch.Size()]  # one shape, where () would be a list of none
    length = (decoder_seq_length or seq_length) // cp_group.size()
    if config.sequence_parallel:
        length //= tp_group.size()
    return [(length, micro_batch_size, config.hidden_size)]


def communicator_of(
    pg_collection: ProcessGroupCollection, config: ModelParallelConfig
) -> "P2PCommunicator":
    """The communicator of these groups' pipeline, made once and kept with them."""
    made = getattr(pg_collection, "p2p", None)
    if made is None or made.config is not config or made.pp_group is not pg_collection.pp:
        made = pg_collection.p2p = P2PCommunicator(pg_collection.pp, config)
    return made


class P2PCommunicator(MessageBatches):
    """Point-to-point communication of one stage with others of `pp_group`.

    Args:
        pp_group: the ranks of one pipeline, stage 0 first.
        config: dtype (`pipeline_dtype`), batching, overlap, variable lengths.

    Raises ValueError for interleaving over two stages with batched messages: each rank is then both
    the next and the previous neighbour of the other, and in a batch nothing tells an activation from
    a gradient. NCCL would pair them by position, and positions differ between the two ranks.
    """

    def __init__(self, pp_group: dist.ProcessGroup, config: ModelParallelConfig):
        check_stages(config, pp_group.size())
        self.pp_group, self.config = pp_group, config
        self.world_size, self.curr_rank_in_pg = pp_group.size(), pp_group.rank()
        self.next_rank = (self.curr_rank_in_pg + 1) % self.world_size
        self.prev_rank = (self.curr_rank_in_pg - 1) % self.world_size
        self.virtual_pipeline_model_parallel_size = config.virtual_pipeline_model_parallel_size
        if config.pipeline_schedule in (None, INTERLEAVED):
            self.refuse_a_ring_of_two()
        self.device, self.is_tagged = get_device(), is_tagged(pp_group)
        # Who keeps a sent tensor until its receiver has it:
        #   NCCL, gloo      this communicator, which waits in `finish` for what has not left
        #   shared memory   the group, which has copied it: it may wait there beyond the step
        self._group_keeps_sent = self.is_tagged and getattr(pp_group, "keeps_messages", False)
        # Unless told the group's limit, gloo waits as long as the default group may.
        is_gloo = pp_group.name() == "gloo"
        self._limit = (timedelta(seconds=get_timeout(pp_group)),) if is_gloo else ()
        self.begin_step()

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        """Whoever copies groups makes a communicator of their own."""

    def refuse_a_ring_of_two(self) -> None:
        """Raises ValueError where the nine methods could swap activations and gradients.

        The messages of an order have one order, and are not swapped.
        """
        p2p_checks.check_ring(self.config, self.world_size)

    # -- The edges of a step; the groups' are in `collectives` --

    def begin_step(self, send_limit: int = SEND_LIMIT) -> None:
        """Before the first message of a step; `send_limit` says how many may lie unreceived."""
        self.send_limit = send_limit
        of_group = self._group_keeps_sent
        self._unfinished_sends = _untaken_of(self.pp_group) if of_group else defaultdict(deque)
        # How many messages there were, by direction, payload and peer.
        self._num_started: dict[tuple[bool, str, int], int] = defaultdict(int)
        self._sends_shapes = sends_shapes(self.config)
        # On gloo, a message that a failed step left behind must meet no receive of the next one.
        self._first_tag = num_begun(self.pp_group) % _MAX_STEPS * _TAGS_PER_STEP

    def finish(self) -> None:
        """Waits until everything sent has left this stage. Raises ConnectionError if it cannot."""
        if not self._group_keeps_sent:
            self._finish_kept()
        for unfinished in self._unfinished_sends.values():
            for send in unfinished:
                send.is_old = True

    def abandon(self) -> None:
        """The step has failed here."""
        self._unfinished_sends.clear()

    # -- What plain 1F1B calls --

    @traced("forward-recv")
    def recv_forward(self, tensor_shapes: Shape | list[Shape], is_first_stage: bool) -> Any:
        """The input of this stage's next forward, from the previous stage; None on the first.

        `tensor_shapes` is one shape, or a list of shapes; then a list comes back, of tensors or None.
        """
        messages = self._in_order(recv_prev=None if is_first_stage else tensor_shapes)
        return _as_asked(self.exchange(messages), tensor_shapes)

    @traced("backward-recv")
    def recv_backward(self, tensor_shapes: Shape | list[Shape], is_last_stage: bool) -> Any:
        """The gradient of this stage's next backward, from the next stage; None on the last."""
        messages = self._in_order(recv_next=None if is_last_stage else tensor_shapes)
        return _as_asked(self.exchange(messages), tensor_shapes)

    @traced("forward-send")
    def send_forward(self, output_tensors: Any, is_last_stage: bool) -> None:
        """Sends an output (or a list of them) to the next stage; nothing on the last."""
        self.exchange(self._in_order(send_next=None if is_last_stage else output_tensors))

    @traced("backward-send")
    def send_backward(self, input_tensor_grads: Any, is_first_stage: bool) -> None:
        """Sends the gradient of an input to the previous stage; nothing on the first."""
        self.exchange(self._in_order(send_prev=None if is_first_stage else input_tensor_grads))

    @traced("forward-send-backward-recv")
    def send_forward_recv_backward(
        self, output_tensors: Any, tensor_shapes: Shape | list[Shape], is_last_stage: bool
    ) -> Any:
        """Sends an output to the next stage and waits for a gradient from it; None on the last."""
        messages = ()
        if not is_last_stage:
            messages = self._in_order(send_next=output_tensors, recv_next=tensor_shapes)
        return _as_asked(self.exchange(messages), tensor_shapes)

    @traced("backward-send-forward-recv")
    def send_backward_recv_forward(
        self, input_tensor_grads: Any, tensor_shapes: Shape | list[Shape], is_first_stage: bool
    ) -> Any:
        """Sends a gradient to the previous stage, waits for an input from it; None on the first."""
        messages = ()
        if not is_first_stage:
            messages = self._in_order(send_prev=input_tensor_grads, recv_prev=tensor_shapes)
        return _as_asked(self.exchange(messages), tensor_shapes)

    # -- What interleaved 1F1B calls; a ninth method, without overlap, is in `message_batches` --

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
        shape = tensor_shape if recv_prev else None
        messages = self._in_order(send_next=output_tensor, recv_prev=shape)
        return _now_or_later(self.exchange(messages), "recv_prev", overlap_p2p_comm)

    @traced("backward-send-backward-recv")
    def send_backward_recv_backward(
        self,
        input_tensor_grad: torch.Tensor | None,
        recv_next: bool,
        tensor_shape: Shape,
        overlap_p2p_comm: bool = False,
    ) -> Any:
        """Sends a gradient back (unless None) and receives one (if `recv_next`). See above."""
        shape = tensor_shape if recv_next else None
        messages = self._in_order(send_prev=input_tensor_grad, recv_next=shape)
        return _now_or_later(self.exchange(messages), "recv_next", overlap_p2p_comm)

    def _in_order(self, **given: Any) -> Iterator[TensorMessage]:
        """The messages of one call, in order; each is made once the one before has been started.

        `send_next` and `send_prev` are a tensor or a list of them, `recv_prev` and `recv_next` a shape
        or a list of them; None is the same as not given.
        """
        if self.config.batch_p2p_comm:
            # To and from the previous stage first, as in Megatron. The order has a meaning where
            # one stage is both neighbours: NCCL pairs messages by their places.
            order = ("send_prev", "recv_prev", "send_next", "recv_next")
        elif self.curr_rank_in_pg % 2:
            # Started one by one, where each may block until its partner is there. Were all stages
            # to send first, a ring of them would wait for ever; so odd stages receive first.
            order = ("recv_prev", "send_next", "recv_next", "send_prev")
        else:
            order = ("send_next", "recv_prev", "send_prev", "recv_next")
        for name in order:
            values = given.get(name)
            if values is None:
                continue
            peer = self.next_rank if name in ("send_next", "recv_next") else self.prev_rank
            payload = ACTIVATION if name in ("send_next", "recv_prev") else GRADIENT
            if name in ("send_next", "send_prev"):
                for tensor in values if isinstance(values, list) else [values]:
                    yield TensorMessage(True, tensor, peer, payload)
            else:
                for shape in [values] if is_single_shape(values) else values:
                    yield TensorMessage(False, None, peer, payload, shape)

    # -- The exchange itself --

    def exchange(self, messages: Iterable[TensorMessage], overlap: bool = False) -> list[Any]:
        """Starts messages, in this order; returns a handle for each.

        Args:
            messages: each with its peer (a rank of the group) and payload; a send with its tensor, a
                receive with the shape that it will have.
            overlap: whether the program goes on although nobody has received what it sends. Where
                messages have tags, and with `overlap_p2p_comm`, it always does.

        The handle of a receive is a `Receive`. Nobody needs to wait for a send: it waits here for room,
        and `finish` waits for what has not left. With `batch_p2p_comm` an untagged group gets all
        messages as one batch. Raises ConnectionError, naming both stages, if a peer has gone.
        """
        if self._sends_shapes:
            messages = self._with_shapes(list(messages), overlap)
        runs_on = overlap or self.is_tagged or self.config.overlap_p2p_comm
        is_batch = self.config.batch_p2p_comm and not self.is_tagged
        ready: list[TensorMessage] = []
        works: list[Handle] = []
        for message in messages:
            if message.is_send:
                unfinished = self._unfinished_sends[message.peer, message.payload]
                if runs_on and len(unfinished) >= self.send_limit:
                    self._make_room(unfinished)
                if not self._group_keeps_sent:
                    message = self._kept(message)
            elif message.tensor is None:
                message = self._with_memory(message)
            ready.append(message)
            # At once: memory for a receive is not made while a message waits to be sent.
            if not is_batch:
                works.append(self.start(message))
        if is_batch:
            works = self.start_batch(ready)
        return [self._handle(m, work, runs_on) for m, work in zip(ready, works, strict=True)]

    @traced("p2p-start", tracing.of_message)
    def start(self, message: TensorMessage) -> Handle:
        """Starts one message. Raises ConnectionError, naming both stages, if the peer has gone."""
        group, tag = self.pp_group, self._first_tag + TAGS[message.payload]
        try:
            if message.is_send:
                return dist.isend(message.tensor, group=group, group_dst=message.peer, tag=tag)
            if hasattr(group, "receive_lent"):  # what is in shared memory need not be copied
                return group.receive_lent(message.tensor, message.peer, tag)
            return dist.irecv(message.tensor, group=group, group_src=message.peer, tag=tag)
        except (RuntimeError, OSError) as error:
            raise p2p_checks.lost_at_start(self.curr_rank_in_pg, message, error) from error

    def _make_room(self, unfinished: deque[Started]) -> None:
        while len(unfinished) >= self.send_limit:
            unfinished.popleft().wait()

    def _with_memory(self, message: TensorMessage) -> TensorMessage:
        # The input must require a gradient, or backward would stop at the stage's first layer.
        tensor = torch.empty(
            tuple(message.shape),
            dtype=self.config.pipeline_dtype,
            device=self.device,
            requires_grad=message.payload == ACTIVATION,
        )
        return TensorMessage(False, tensor, message.peer, message.payload, message.shape)

    def _handle(self, message: TensorMessage, work: Handle, runs_on: bool) -> Started:
        kind = (message.is_send, message.payload, message.peer)
        number = self._num_started[kind]
        self._num_started[kind] += 1
        make = Started if message.is_send else Receive
        if message.is_send and self._group_keeps_sent:
            message = TensorMessage(True, None, message.peer, message.payload, message.tensor.shape)
        handle = make(message, work, self.curr_rank_in_pg, number, self._limit)
        if message.is_send and runs_on:
            unfinished = self._unfinished_sends[message.peer, message.payload]
            while unfinished and self._group_keeps_sent and unfinished[0].work.is_taken():
                unfinished.popleft()
            unfinished.append(handle)
        elif message.is_send:
            handle.wait()
        return handle


def _await(handle: Started) -> None:
    message, work = handle.message, handle.work
    try:
        # Of a send through shared memory, `wait` returns at once.
        wait = getattr(work, "wait_until_taken", None)
        work.wait(*handle.limit) if wait is None else wait()
    except (RuntimeError, OSError) as error:
        raise p2p_checks.lost_under_way(handle.stage, message, error) from error


_wait_for = traced("p2p-wait", tracing.of_message_wait)(_await)

_untaken: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()


def _untaken_of(group: dist.ProcessGroup) -> dict[tuple[int, str], deque[Started]]:
    """By peer and payload, what was sent and perhaps not taken yet: also by another communicator."""
    return _untaken.setdefault(group, defaultdict(deque))


# -- What the nine methods give back --


def _as_asked(handles: list[Started], tensor_shapes: Shape | list[Shape]) -> Any:
    """The tensors received: one for one shape, a list for a list; None where nothing was."""
    is_one = is_single_shape(tensor_shapes)
    tensors = [handle.wait() for handle in handles if isinstance(handle, Receive)]
    if is_one:
        return tensors[0] if tensors else None
    return tensors or [None] * len(tensor_shapes)


def _now_or_later(handles: list[Started], name: str, later: bool) -> Any:
    """The tensor of the one receive, None without one; with `later`, and all handles by name."""
    by_name = _by_name(handles)
    received = by_name.get(name)
    if later:
        return received and received.tensor, by_name
    return received and received.wait()


def _by_name(handles: list[Started]) -> dict[str, Started]:
    """Handles under Megatron's names for them."""
    names = {
        (True, ACTIVATION): "send_next",
        (False, ACTIVATION): "recv_prev",
        (True, GRADIENT): "send_prev",
        (False, GRADIENT): "recv_next",
    }
    return {names[handle.message.is_send, handle.message.payload]: handle for handle in handles}
