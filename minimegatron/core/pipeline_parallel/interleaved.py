"""Interleaved 1F1B: each stage holds several chunks of the model and takes turns between them.

Counterpart:
`megatron.core.pipeline_parallel.schedules.forward_backward_pipelining_with_interleaving`: the same
order and the same calls, with its nested helpers as methods.

Why: with v chunks per stage a pipeline fills in p - 1 steps that are v times shorter, so the bubble
shrinks from (p - 1)/M of the ideal time to (p - 1)/(v M). The price is (p v - 1)/(p - 1) times as many
messages. Source: Narayanan et al. 2021 (arXiv:2104.04473), section 2.2.2.
"""

from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import torch

from minimegatron.core.left_out import accepts_left_out
from minimegatron.core.pipeline_parallel.combined_1f1b import CombinedSteps
from minimegatron.core.pipeline_parallel.orders import require_usual_placement
from minimegatron.core.pipeline_parallel.p2p_communication import P2PCommunicator, communicator_of
from minimegatron.core.pipeline_parallel.schedule_table import Arrival, InterleavedOrder
from minimegatron.core.pipeline_parallel.send_limits import get_interleaved_send_limit
from minimegatron.core.pipeline_parallel.step_frame import (
    StepFrame,
    framed_schedule,
    get_tensor_shapes,
    groups_of_step,
    refuse_shared_iterators,
)
from minimegatron.core.pipeline_parallel.steps import ModelChunk
from minimegatron.core.process_groups_config import ProcessGroupCollection
from minimegatron.core.utils import get_model_config


@accepts_left_out
@framed_schedule
def forward_backward_pipelining_with_interleaving(
    *,
    forward_step_func: Callable,
    data_iterator: Iterator | list[Iterator],
    model: torch.nn.Module | list[torch.nn.Module],
    num_microbatches: int,
    seq_length: int,
    micro_batch_size: int,
    decoder_seq_length: int | None = None,
    forward_only: bool = False,
    collect_non_loss_data: bool = False,
    first_val_step: bool | None = None,
    adjust_tensor_shapes_fn: Callable | None = None,
    p2p_communicator: P2PCommunicator | None = None,
    pg_collection: ProcessGroupCollection | None = None,
) -> list:
    """Interleaved 1F1B over `model`, a list of this stage's chunks, with one iterator for each.

    Warm-up runs 2(p - r - 1) + (v - 1)G forwards; then each forward is followed by a backward; then
    come the backwards that are left. All three visit chunks in the order of `get_schedule_table`.
    With `forward_only`, everything is warm-up. One shape is sent, of `seq_length`;
    `decoder_seq_length` is not read, as in Megatron.

    Raises ValueError for what interleaving cannot do: other shapes than one, and numbers of
    microbatches that `check_interleaving` refuses.
    """
    config = get_model_config(model[0])
    _check_arguments(model, data_iterator, config, adjust_tensor_shapes_fn)
    pg_collection = groups_of_step(model[0], pg_collection)
    p2p = p2p_communicator or communicator_of(pg_collection, config)
    if isinstance(p2p, P2PCommunicator):  # somebody else's has Megatron's nine methods, and no more
        p2p.refuse_a_ring_of_two()
    order = InterleavedOrder(
        p2p.pp_group.size(),
        p2p.pp_group.rank(),
        num_microbatches,
        len(model),
        config.microbatch_group_size_per_vp_stage or p2p.pp_group.size(),
        forward_only,
        config.overlap_moe_expert_parallel_comm,
    )
    frame = StepFrame(
        config,
        pg_collection,
        p2p,
        forward_only,
        order.table,
        get_interleaved_send_limit(order, config.overlap_p2p_comm),
    )
    (tensor_shape,) = get_tensor_shapes(
        seq_length=seq_length,
        micro_batch_size=micro_batch_size,
        decoder_seq_length=None,
        config=config,
        tp_group=pg_collection.tp,
        cp_group=pg_collection.cp,
    )
    for chunk_id in range(len(model)):
        frame.add_chunk(
            forward_step_func,
            data_iterator[chunk_id],
            model[chunk_id],
            num_microbatches,
            collect_non_loss_data=collect_non_loss_data,
            first_val_step=first_val_step,
            num_in_flight=order.counts.num_warmup + 1,
            vp_stage=chunk_id,
            is_last_stage=order.is_last_virtual_stage(chunk_id),
            sends=tensor_shape,
        )
    run_class = _RUNS[order.is_combined]
    run = run_class(frame.chunks, order, p2p, tensor_shape, config.overlap_p2p_comm)
    with frame:
        run.warmup()
        if not forward_only:
            run.steady_state()
            run.cooldown()
    return frame.forward_data_store


def _check_arguments(
    model: Any,
    data_iterator: Any,
    config: Any,
    adjust_tensor_shapes_fn: Callable | None,
) -> None:
    if not isinstance(model, list) or not isinstance(data_iterator, list):
        raise ValueError("interleaving needs a list of model chunks and a list of data iterators")
    if len(model) != len(data_iterator):
        raise ValueError(
            f"{len(model)} model chunks but {len(data_iterator)} data iterators; give one iterator "
            "per chunk, each going through all microbatches by itself"
        )
    refuse_shared_iterators(data_iterator)
    if adjust_tensor_shapes_fn is not None:
        raise ValueError("adjust_tensor_shapes_fn works with plain 1F1B only; drop virtual stages")
    if config.overlap_p2p_comm and config.batch_p2p_comm:
        raise ValueError("overlap_p2p_comm needs batch_p2p_comm=False")
    if config.pipeline_schedule is not None:
        require_usual_placement(config)


class _InterleavedRun:
    """One step of one stage. Virtual microbatch k is the k-th forward, and the k-th backward.

    `_inputs` and `_grads` hold, per chunk, what has arrived and is not yet used: (tensor, handle).
    The handle is None once the tensor may be read.
    """

    def __init__(
        self,
        chunks: list[ModelChunk],
        order: InterleavedOrder,
        p2p: P2PCommunicator,
        tensor_shape: tuple[int, ...],
        overlap: bool,
    ):
        self.chunks, self.order, self.p2p, self.shape = chunks, order, p2p, tensor_shape
        self.overlap = overlap
        self._inputs: list[deque] = [deque() for _ in chunks]
        self._grads: list[deque] = [deque() for _ in chunks]

    # -- The three phases --

    def warmup(self) -> None:
        """Forwards only. The last one also asks for the first gradient."""
        counts, last_chunk = self.order.counts, len(self.chunks) - 1
        first_input = self.p2p.recv_forward(self.shape, self.order.pp_rank == 0)
        if first_input is not None:
            self._inputs[0].append((first_input, None))
        for k in range(counts.num_warmup):
            output, _ = self._step(k)
            arrival = self.order.arrival_after(k, forward=True)
            is_last = k == counts.num_warmup - 1
            wants_grad = is_last and not self.order.forward_only and not counts.are_all_in_warmup
            if wants_grad and not self.overlap:
                grad = Arrival(not self._is_last_rank(), last_chunk)
                self._exchange_both(output, None, arrival, grad)
            else:
                self._exchange_forward(output, arrival)
            self._free(k, output)
            if wants_grad and self.overlap:
                self._exchange_backward(None, Arrival(not self._is_last_rank(), last_chunk))

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
            grad = self.p2p.recv_backward(self.shape, self._is_last_rank())
            if grad is not None:
                self._grads[last_chunk].append((grad, None))
        for k in range(counts.num_remaining, counts.total):
            _, input_grad = self._step(None, k)
            self._exchange_backward(input_grad, self.order.arrival_after(k, False), False)

    # -- One forward, one backward --

    def _step(
        self, f_k: int | None = None, b_k: int | None = None
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
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

    def _forward(self, k: int) -> torch.Tensor | None:
        chunk_id = self.order.model_chunk_id(k, forward=True)
        input_tensor = self._input(chunk_id)
        output = self.chunks[chunk_id].forward_step(self.order.microbatch_id(k), input_tensor)
        return self._to_send(k, output)

    def _to_send(self, k: int, output: torch.Tensor) -> torch.Tensor | None:
        chunk_id = self.order.model_chunk_id(k, forward=True)
        return None if self.order.is_last_virtual_stage(chunk_id) else output

    def _input(self, chunk_id: int) -> torch.Tensor | None:
        is_first = self.order.is_first_virtual_stage(chunk_id)
        return None if is_first else _arrived(self._inputs[chunk_id])

    def _free(self, k: int, output: torch.Tensor | None) -> None:
        self.chunks[self.order.model_chunk_id(k, forward=True)].free_output(output)

    def _backward(self, k: int) -> torch.Tensor | None:
        chunk_id = self.order.model_chunk_id(k, forward=False)
        return self.chunks[chunk_id].backward_step(self._grad(chunk_id))

    def _grad(self, chunk_id: int) -> torch.Tensor | None:
        is_last = self.order.is_last_virtual_stage(chunk_id)
        return None if is_last else _arrived(self._grads[chunk_id])

    def _is_last_rank(self) -> bool:
        return self.order.pp_rank == self.order.pp_size - 1

    # -- Messages: what goes out, and into which chunk's queue the arrival belongs --

    def _after_forward(self, k: int, output: torch.Tensor | None) -> None:
        self._exchange_forward(output, self.order.arrival_after(k, forward=True))

    def _after_backward(self, k: int, input_grad: torch.Tensor | None) -> None:
        self._exchange_backward(input_grad, self.order.arrival_after(k, forward=False))

    def _exchange_forward(self, output: torch.Tensor | None, arrival: Arrival) -> None:
        handles: dict[str, Any] = {}
        received = self.p2p.send_forward_recv_forward(
            output, arrival.expected, self.shape, overlap_p2p_comm=self.overlap
        )
        if self.overlap:
            received, handles = received
        if arrival.expected:
            self._inputs[arrival.model_chunk_id].append((received, handles.get("recv_prev")))

    def _exchange_backward(
        self, input_grad: torch.Tensor | None, arrival: Arrival, overlap: bool = True
    ) -> None:
        handles: dict[str, Any] = {}
        received = self.p2p.send_backward_recv_backward(
            input_grad, arrival.expected, self.shape, overlap_p2p_comm=overlap
        )
        if overlap:
            received, handles = received
        if arrival.expected:
            self._grads[arrival.model_chunk_id].append((received, handles.get("recv_next")))

    def _exchange_both(
        self,
        output: torch.Tensor | None,
        input_grad: torch.Tensor | None,
        next_input: Arrival,
        next_grad: Arrival,
    ) -> None:
        received, grad = self.p2p.send_forward_backward_recv_forward_backward(
            output, input_grad, next_input.expected, next_grad.expected, self.shape
        )
        if next_input.expected:
            self._inputs[next_input.model_chunk_id].append((received, None))
        if next_grad.expected:
            self._grads[next_grad.model_chunk_id].append((grad, None))


class _CombinedRun(CombinedSteps, _InterleavedRun):
    """The same with combined steps."""


_RUNS = {False: _InterleavedRun, True: _CombinedRun}
"""By whether each forward hides the all-to-alls of a backward, and the other way."""


def _arrived(queue: deque) -> torch.Tensor:
    """The oldest of the tensors that came for a chunk, waited for if it is still on its way."""
    tensor, handle = queue.popleft()
    if handle is not None:
        handle.wait()
    return tensor
