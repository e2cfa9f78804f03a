"""What a communicator does where messages have no tags, or sizes that vary: batches, sizes ahead.

Counterpart: `megatron.core.pipeline_parallel.p2p_communication`.
"""

from typing import Any

import torch
import torch.distributed as dist

from minimegatron.core import call_attributes
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
        works = dist.batch_isend_irecv([self._operation(message) for message in messages])
        return works * len(messages) if len(works) == 1 else works

    @traced("p2p-start", call_attributes.of_message)
    def _operation(self, message: Any) -> dist.P2POp:
        start = dist.isend if message.is_send else dist.irecv
        return dist.P2POp(start, message.tensor, group=self.pp_group, group_peer=message.peer)

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
