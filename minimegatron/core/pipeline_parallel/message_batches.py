"""What a communicator does where messages have no tags, sizes that vary, or do not overlap.

Counterpart: `megatron.core.pipeline_parallel.p2p_communication`.
"""

from typing import Any

import torch
import torch.distributed as dist

from minimegatron.core import tracing
from minimegatron.core.orders.work import ACTIVATION, GRADIENT
from minimegatron.core.pipeline_parallel import p2p_checks
from minimegatron.core.tracing import traced


class MessageBatches:
    """The part of `P2PCommunicator` that shared memory and equal sizes do not need."""

    _unfinished_sends: dict

    def _kept(self, message: Any) -> Any:
        # A view of its own: freeing the output's `.data` must not touch what is sent.
        return message._replace(tensor=message.tensor.detach().contiguous())

    def _finish_kept(self) -> None:
        for unfinished in self._unfinished_sends.values():
            while unfinished:
                unfinished.popleft().wait()

    def start_batch(self, messages: list) -> list:
        """Starts all messages together: none waits for another of its batch."""
        if not messages:  # NCCL refuses an empty batch
            return []
        try:
            works = dist.batch_isend_irecv([self._operation(message) for message in messages])
        except (RuntimeError, OSError) as error:
            raise p2p_checks.lost_at_start(self.curr_rank_in_pg, messages[0], error) from error
        return works * len(messages) if len(works) == 1 else works

    @traced("p2p-start", tracing.of_message)
    def _operation(self, message: Any) -> dist.P2POp:
        start = dist.isend if message.is_send else dist.irecv
        return dist.P2POp(start, message.tensor, group=self.pp_group, group_peer=message.peer)

    # -- Interleaving where messages do not overlap --

    @traced("forward-backward-send-forward-backward-recv")
    def send_forward_backward_recv_forward_backward(
        self,
        output_tensor: torch.Tensor | None,
        input_tensor_grad: torch.Tensor | None,
        recv_prev: bool,
        recv_next: bool,
        tensor_shape: Any,
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """All four at once. Returns (input, output gradient), each None if not asked for."""
        messages = self._in_order(
            send_next=output_tensor,
            send_prev=input_tensor_grad,
            recv_prev=tensor_shape if recv_prev else None,
            recv_next=tensor_shape if recv_next else None,
        )
        handles = [handle for handle in self.exchange(messages) if not handle.message.is_send]
        received = {handle.message.payload: handle for handle in handles}
        from_prev, from_next = received.get(ACTIVATION), received.get(GRADIENT)
        return from_prev and from_prev.wait(), from_next and from_next.wait()

    # -- Shapes ahead --

    def _with_shapes(self, messages: list, overlap: bool) -> list:
        # Three int64 per message, so tensors between stages must have three dimensions.
        if all(message.payload not in (ACTIVATION, GRADIENT) for message in messages):
            return messages  # none, or these are the shapes
        handles = self.exchange([self._size_message(message) for message in messages], overlap)
        return [
            message if message.is_send else message._replace(shape=handle.wait().tolist())
            for message, handle in zip(messages, handles, strict=True)
        ]

    def _size_message(self, message: Any) -> Any:
        if not message.is_send:
            sizes = torch.empty(3, dtype=torch.int64, device=self.device)
        elif message.tensor.dim() == 3:
            sizes = torch.tensor(message.tensor.shape, dtype=torch.int64, device=self.device)
        else:
            p2p_checks.refuse_dimensions(message.tensor)
        return message._replace(tensor=sizes, payload=f"{message.payload} shape")
