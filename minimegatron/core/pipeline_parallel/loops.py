"""The schedules as loops: which microbatch goes forward, which backward, and which messages between.

Torch-free. Counterpart: the loops inside `forward_backward_no_pipelining`,
`forward_backward_pipelining_without_interleaving` and
`forward_backward_pipelining_with_interleaving` of `megatron.core.pipeline_parallel.schedules`.

A loop is written for two actors: a chunk, which computes, and a communicator, which sends and
receives. A training step runs it with `steps.ModelChunk` and `P2PCommunicator`. The planner runs it
with two actors that write down what they are told (`core.orders.loop_recorder`). So a plan is what the
loop does.
"""

from collections import deque
from collections.abc import Sequence
from typing import Any, Protocol

from minimegatron.core.pipeline_parallel.schedule_table import Arrival, InterleavedOrder


class Chunk(Protocol):
    """A part of the model on this stage. Inputs, outputs and gradients are tensors, or lists of them.

    | method                               | what it does                                          |
    |--------------------------------------|-------------------------------------------------------|
    | `forward_step(microbatch_id, input)` | the forward; returns the output, and keeps both       |
    | `free_output(output)`                | after it is sent: its memory is not needed any more   |
    | `backward_step(output_grad)`         | of the oldest in flight; returns the input's gradient |
    | `num_in_flight()`                    | forwards done whose backward is not                   |
    """

    num_microbatches: int
    forward_only: bool


class Communicator(Protocol):
    """Messages to and from the stages before and after: the nine methods of `P2PCommunicator`."""

    pp_group: Any
    """The stages: `rank()` is this one's number, `size()` says how many there are."""


def no_pipelining(chunk: Chunk) -> None:
    """Gradient accumulation on one stage: forward and backward of each microbatch in turn."""
    for i in range(chunk.num_microbatches):
        chunk.forward_step(i, None)
        if not chunk.forward_only:
            chunk.backward_step(None)


def one_f_one_b(chunk: Chunk, p2p: Communicator, recv_shapes: Any, send_shapes: Any) -> None:
    """Plain 1F1B: warm-up forwards, then one forward and one backward in turn, then the rest.

    Stage r of p warms up with p - r - 1 forwards, one for each stage that must see a microbatch
    before its gradient can come back. From then on a forward is followed by the backward of the
    oldest microbatch, so at most p - r microbatches are held at a time, however many there are.
    Source: Narayanan et al. 2021 (arXiv:2104.04473), section 2.2.1.

    `recv_shapes` and `send_shapes` are those of this stage's inputs and outputs.
    """
    stage, num_stages = p2p.pp_group.rank(), p2p.pp_group.size()
    is_first_stage, is_last_stage = stage == 0, stage == num_stages - 1
    num_microbatches = chunk.num_microbatches
    num_warmup_microbatches = min(num_stages - stage - 1, num_microbatches)
    if chunk.forward_only:  # nothing to wait for: every forward is a warm-up forward
        num_warmup_microbatches = num_microbatches

    # -- Warm-up: forwards only, until the last stage has its first microbatch --
    for i in range(num_warmup_microbatches):
        input_tensor = p2p.recv_forward(recv_shapes, is_first_stage)
        output_tensor = chunk.forward_step(i, input_tensor)
        p2p.send_forward(output_tensor, is_last_stage)
        chunk.free_output(output_tensor)

    # -- Steady state: one forward, then the backward of the oldest microbatch in flight --
    if num_warmup_microbatches < num_microbatches:
        input_tensor = p2p.recv_forward(recv_shapes, is_first_stage)
    for i in range(num_warmup_microbatches, num_microbatches):
        output_tensor = chunk.forward_step(i, input_tensor)
        grad = p2p.send_forward_recv_backward(output_tensor, send_shapes, is_last_stage)
        chunk.free_output(output_tensor)
        input_grad = chunk.backward_step(grad)
        # What is used up must not be held while the next tensors come; the output's graph counts.
        input_tensor = output_tensor = grad = None
        if i == num_microbatches - 1:
            p2p.send_backward(input_grad, is_first_stage)
        else:
            input_tensor = p2p.send_backward_recv_forward(input_grad, recv_shapes, is_first_stage)

    # -- Cool-down: the backwards of what warm-up put in flight --
    while chunk.num_in_flight() > 0:
        grad = p2p.recv_backward(send_shapes, is_last_stage)
        input_grad = chunk.backward_step(grad)
        p2p.send_backward(input_grad, is_first_stage)


def interleaved_1f1b(
    chunks: Sequence[Chunk],
    p2p: Communicator,
    order: InterleavedOrder,
    tensor_shape: tuple[int, ...],
    overlap: bool,
) -> None:
    """1F1B over several chunks per stage, which take turns.

    Warm-up runs 2(p - r - 1) + (v - 1)G forwards; then each forward is followed by a backward; then
    come the backwards that are left. All three visit chunks in the order of `get_schedule_table`.
    A forward-only step is all warm-up.
    Source: Narayanan et al. 2021 (arXiv:2104.04473), section 2.2.2.
    """
    InterleavedRun(chunks, p2p, order, tensor_shape, overlap).run()


class InterleavedRun:
    """One step of one stage. Virtual microbatch k is the k-th forward, and the k-th backward.

    `order` says what number k is, and what arrives after it. `_inputs` and `_grads` hold, per chunk,
    what has arrived and is not yet used: (tensor, handle). The handle is None once the tensor may be
    read.
    """

    def __init__(
        self,
        chunks: Sequence[Chunk],
        p2p: Communicator,
        order: InterleavedOrder,
        tensor_shape: tuple[int, ...],
        overlap: bool,
    ):
        self.chunks, self.order, self.p2p, self.shape = chunks, order, p2p, tensor_shape
        self.overlap, self._is_last_rank = overlap, order.pp_rank == order.pp_size - 1
        # Before the first backward. The last rank gets no gradient: the loss is its own.
        self._first_grad = Arrival(not self._is_last_rank, model_chunk_id=len(chunks) - 1)
        self._inputs: list[deque] = [deque() for _ in chunks]
        self._grads: list[deque] = [deque() for _ in chunks]

    def run(self) -> None:
        """All three phases."""
        self.warmup()
        if not self.order.forward_only:
            self.steady_state()
            self.cooldown()

    # -- The three phases --

    def warmup(self) -> None:
        """Forwards only. The last one also asks for the first gradient."""
        counts = self.order.counts
        first_input = self.p2p.recv_forward(self.shape, self.order.pp_rank == 0)
        if first_input is not None:
            self._inputs[0].append((first_input, None))
        for k in range(counts.num_warmup):
            output, _ = self._step(k)
            arrival = self.order.arrival_after(k, forward=True)
            is_last = k == counts.num_warmup - 1
            wants_grad = is_last and not self.order.forward_only and not counts.are_all_in_warmup
            if wants_grad and not self.overlap:
                self._exchange_both(output, None, arrival, self._first_grad)
            else:
                self._exchange_forward(output, arrival)
            self._free(k, output)
            if wants_grad and self.overlap:
                self._exchange_backward(None, self._first_grad)

    def steady_state(self) -> None:
        """One forward, one backward, and the messages of both."""
        num_warmup, num_remaining = self.order.counts.num_warmup, self.order.counts.num_remaining
        for k in range(num_remaining):
            output, input_grad = self._step(num_warmup + k, k)
            if not self.overlap:
                next_input = self.order.arrival_after(num_warmup + k, forward=True)
                next_grad = self.order.arrival_after(k, forward=False)
                self._exchange_both(output, input_grad, next_input, next_grad)
            self._free(num_warmup + k, output)

    def cooldown(self) -> None:
        """The backwards that are left."""
        counts, last_chunk = self.order.counts, len(self.chunks) - 1
        if counts.are_all_in_warmup:
            grad = self.p2p.recv_backward(self.shape, self._is_last_rank)
            if grad is not None:
                self._grads[last_chunk].append((grad, None))
        for k in range(counts.num_remaining, counts.total):
            _, input_grad = self._step(None, k)
            next_grad = self.order.arrival_after(k, forward=False)
            # Without handles, also where the run overlaps: this call waits for the gradient.
            self._exchange_backward(input_grad, next_grad, overlap=False)

    # -- One forward, one backward --

    def _step(self, f_k: int | None = None, b_k: int | None = None) -> tuple[Any, Any]:
        """Forward `f_k`, then backward `b_k`; with overlap, the messages of a pair too."""
        sends_within = self.overlap and f_k is not None and b_k is not None
        output = input_grad = None
        if f_k is not None:
            output = self._forward(f_k)
        if sends_within:
            self._after_forward(f_k, output)
        if b_k is not None:
            input_grad = self._backward(b_k)
        if sends_within:
            self._after_backward(b_k, input_grad)
        return output, input_grad

    def _forward(self, k: int) -> Any:
        chunk_id = self.order.model_chunk_id(k, forward=True)
        input_tensor = self._input(chunk_id)
        output = self.chunks[chunk_id].forward_step(self.order.microbatch_id(k), input_tensor)
        return self._to_send(k, output)

    def _to_send(self, k: int, output: Any) -> Any:
        chunk_id = self.order.model_chunk_id(k, forward=True)
        return None if self.order.is_last_virtual_stage(chunk_id) else output

    def _input(self, chunk_id: int) -> Any:
        is_first = self.order.is_first_virtual_stage(chunk_id)
        return None if is_first else _arrived(self._inputs[chunk_id])

    def _free(self, k: int, output: Any) -> None:
        self.chunks[self.order.model_chunk_id(k, forward=True)].free_output(output)

    def _backward(self, k: int) -> Any:
        chunk_id = self.order.model_chunk_id(k, forward=False)
        return self.chunks[chunk_id].backward_step(self._grad(chunk_id))

    def _grad(self, chunk_id: int) -> Any:
        is_last = self.order.is_last_virtual_stage(chunk_id)
        return None if is_last else _arrived(self._grads[chunk_id])

    # -- Messages: what goes out, and into which chunk's queue the arrival belongs --

    def _after_forward(self, k: int, output: Any) -> None:
        self._exchange_forward(output, self.order.arrival_after(k, forward=True))

    def _after_backward(self, k: int, input_grad: Any) -> None:
        self._exchange_backward(input_grad, self.order.arrival_after(k, forward=False))

    def _exchange_forward(self, output: Any, arrival: Arrival) -> None:
        handles: dict[str, Any] = {}
        received = self.p2p.send_forward_recv_forward(
            output, arrival.expected, self.shape, overlap_p2p_comm=self.overlap
        )
        if self.overlap:
            received, handles = received
        if arrival.expected:
            self._inputs[arrival.model_chunk_id].append((received, handles.get("recv_prev")))

    def _exchange_backward(self, input_grad: Any, arrival: Arrival, overlap: bool = True) -> None:
        handles: dict[str, Any] = {}
        received = self.p2p.send_backward_recv_backward(
            input_grad, arrival.expected, self.shape, overlap_p2p_comm=overlap
        )
        if overlap:
            received, handles = received
        if arrival.expected:
            self._grads[arrival.model_chunk_id].append((received, handles.get("recv_next")))

    def _exchange_both(
        self, output: Any, input_grad: Any, next_input: Arrival, next_grad: Arrival
    ) -> None:
        received, grad = self.p2p.send_forward_backward_recv_forward_backward(
            output, input_grad, next_input.expected, next_grad.expected, self.shape
        )
        if next_input.expected:
            self._inputs[next_input.model_chunk_id].append((received, None))
        if next_grad.expected:
            self._grads[next_grad.model_chunk_id].append((grad, None))


def _arrived(queue: deque) -> Any:
    """The oldest of the tensors that came for a chunk, waited for if it is still on its way."""
    tensor, handle = queue.popleft()
    if handle is not None:
        handle.wait()
    return tensor
