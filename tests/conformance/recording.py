"""One rank's step of either package's schedule, without processes, as a list of what it did.

Read by: `test_call_order`. The communicator is replaced by one that notes each call and makes up
what it receives, so a rank runs alone. Every made-up tensor carries a number, so that the record
also says which message fed which forward and backward.

Below the communicator, `recording_distributed` notes which messages a call of the real communicators
starts: each at once or in a batch, in raw order.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch

from tests.fake_transport import FakeGroup


@dataclass(frozen=True)
class StepCase:
    """p stages, this rank r, v chunks (None for plain 1F1B), M microbatches, G per group."""

    p: int
    r: int
    M: int
    v: int | None = None
    G: int | None = None
    forward_only: bool = False
    overlap: bool = False


class _Handle:
    def wait(self) -> bool:
        return True


def _numbers(tensors: Any) -> Any:
    if isinstance(tensors, list):
        return [_numbers(tensor) for tensor in tensors]
    return None if tensors is None else tensors.item()


@dataclass
class RecordingCommunicator:
    """Megatron's nine methods, with the same return values, and no peer."""

    pp_group: FakeGroup
    config: Any
    log: list[tuple]
    num_received: int = field(default=0)

    @property
    def virtual_pipeline_model_parallel_size(self) -> int | None:
        return self.config.virtual_pipeline_model_parallel_size

    def _receive(self, wanted: bool) -> torch.Tensor | None:
        if not wanted:
            return None
        self.num_received += 1
        return torch.full((1, 1, 1), float(self.num_received), requires_grad=True)

    def _receive_each(self, shapes: Any, wanted: bool) -> Any:
        if shapes and isinstance(shapes[0], int):
            return self._receive(wanted)
        return [self._receive(wanted) for _ in shapes]

    def recv_forward(self, tensor_shapes, is_first_stage):
        self.log.append(("recv_forward", is_first_stage))
        return self._receive_each(tensor_shapes, not is_first_stage)

    def recv_backward(self, tensor_shapes, is_last_stage):
        self.log.append(("recv_backward", is_last_stage))
        return self._receive_each(tensor_shapes, not is_last_stage)

    def send_forward(self, output_tensors, is_last_stage):
        self.log.append(("send_forward", _numbers(output_tensors), is_last_stage))

    def send_backward(self, input_tensor_grads, is_first_stage):
        self.log.append(("send_backward", _numbers(input_tensor_grads), is_first_stage))

    def send_forward_recv_backward(self, output_tensors, tensor_shapes, is_last_stage):
        self.log.append(("send_forward_recv_backward", _numbers(output_tensors), is_last_stage))
        return self._receive_each(tensor_shapes, not is_last_stage)

    def send_backward_recv_forward(self, input_tensor_grads, tensor_shapes, is_first_stage):
        grads = _numbers(input_tensor_grads)
        self.log.append(("send_backward_recv_forward", grads, is_first_stage))
        return self._receive_each(tensor_shapes, not is_first_stage)

    def send_forward_recv_forward(
        self, output_tensor, recv_prev, tensor_shape, overlap_p2p_comm=False
    ):
        sent = _numbers(output_tensor)
        self.log.append(("send_forward_recv_forward", sent, recv_prev, overlap_p2p_comm))
        return self._exchange("next", sent, "prev", recv_prev, overlap_p2p_comm)

    def send_backward_recv_backward(
        self, input_tensor_grad, recv_next, tensor_shape, overlap_p2p_comm=False
    ):
        sent = _numbers(input_tensor_grad)
        self.log.append(("send_backward_recv_backward", sent, recv_next, overlap_p2p_comm))
        return self._exchange("prev", sent, "next", recv_next, overlap_p2p_comm)

    def _exchange(self, to, sent, source, wanted, overlap):
        received = self._receive(wanted)
        if not overlap:
            return received
        handles = {} if sent is None else {f"send_{to}": _Handle()}
        return received, handles | ({f"recv_{source}": _Handle()} if wanted else {})

    def send_forward_backward_recv_forward_backward(
        self, output_tensor, input_tensor_grad, recv_prev, recv_next, tensor_shape
    ):
        sent = (_numbers(output_tensor), _numbers(input_tensor_grad))
        self.log.append(
            ("send_forward_backward_recv_forward_backward", *sent, recv_prev, recv_next)
        )
        return self._receive(recv_prev), self._receive(recv_next)

    # Ours tells its communicator more than Megatron's: none of it is a message.

    def expect_forward(self, number, tensor_shapes):
        pass

    def expect_backward(self, number, tensor_shapes):
        pass

    def finish(self):
        pass


# -- What a communicator's call starts --


@contextmanager
def recording_distributed(log: list[tuple]) -> Iterator[None]:
    """Within it, `torch.distributed` notes ("lone" or "batch", (is it a send, peer), ...) and moves
    nothing. Megatron names a peer by its rank in the job, ours by that in the group; here both are
    the same."""

    def isend(tensor, dst=None, group=None, tag=0, group_dst=None):
        log.append(("lone", (True, dst if group_dst is None else group_dst)))
        return _Handle()

    def irecv(tensor, src=None, group=None, tag=0, group_src=None):
        log.append(("lone", (False, src if group_src is None else group_src)))
        return _Handle()

    def operation(function, tensor, peer=None, group=None, tag=0, group_peer=None):
        assert function in (isend, irecv)
        return function is isend, peer if group_peer is None else group_peer

    def batch(operations):
        log.append(("batch", *operations))
        return [_Handle() for _ in operations]

    with mock.patch.multiple(
        torch.distributed,
        isend=isend,
        irecv=irecv,
        P2POp=operation,
        batch_isend_irecv=batch,
        get_backend=lambda group: "nccl",
        get_global_rank=lambda group, rank: rank,
    ):
        yield


class _Noted(torch.autograd.Function):
    """Forward and backward of one microbatch: notes what came in, returns a number that tells it."""

    @staticmethod
    def forward(ctx, tensor, weight, chunk, log):
        microbatch = chunk.current_microbatch
        ctx.note = (microbatch, chunk.vp_stage, log)
        log.append(("forward_step", microbatch, chunk.vp_stage, _numbers(tensor)))
        return weight.new_tensor([[[1000.0 + 10 * microbatch + (chunk.vp_stage or 0)]]])

    @staticmethod
    def backward(ctx, grad):
        microbatch, vp_stage, log = ctx.note
        log.append(("backward_step", microbatch, vp_stage, _numbers(grad)))
        grad_input = grad.new_tensor([[[-1000.0 - 10 * microbatch - (vp_stage or 0)]]])
        return grad_input if ctx.needs_input_grad[0] else None, grad.reshape(1), None, None


class RecordingChunk(torch.nn.Module):
    """A model chunk that computes nothing. It learns the microbatch; from Megatron as a layer."""

    def __init__(self, config, model_type, vp_stage, log):
        super().__init__()
        self.config, self.model_type, self.vp_stage, self.log = config, model_type, vp_stage, log
        self.weight = torch.nn.Parameter(torch.zeros(1))
        self.decoder = SimpleNamespace(layers=[self])
        self.input_tensor = None

    def set_input_tensor(self, input_tensor):
        self.input_tensor = input_tensor[0] if isinstance(input_tensor, list) else input_tensor

    def forward(self):
        return _Noted.apply(self.input_tensor, self.weight, self, self.log)


def _forward_step(data_iterator, model):
    drawn = next(data_iterator)
    assert drawn == model.current_microbatch

    def loss_func(output):
        return output.sum(), drawn

    return model(), loss_func


def record_step(
    core: SimpleNamespace, case: StepCase, forward_step: Callable = _forward_step
) -> tuple[list[tuple], list]:
    """What one rank did, in order, and what its schedule returned. `core` is either package."""
    num_chunks = case.v or 1
    config = core.TransformerConfig(
        num_layers=case.p * num_chunks,
        hidden_size=1,
        num_attention_heads=1,
        pipeline_model_parallel_size=case.p,
        virtual_pipeline_model_parallel_size=case.v,
        microbatch_group_size_per_vp_stage=case.G,
        pipeline_dtype=torch.float32,
        batch_p2p_comm=not case.overlap and case.p > 2,
        overlap_p2p_comm=case.overlap,
    )
    log: list[tuple] = []
    group, alone = FakeGroup(case.r, case.p), FakeGroup()
    vp_stages = range(case.v) if case.v is not None else [None]
    groups = core.ProcessGroupCollection()
    groups.tp, groups.cp, groups.dp_cp, groups.pp = alone, alone, alone, group
    groups.embd = groups.pos_embd = None
    arguments = {
        "forward_step_func": forward_step,
        "data_iterator": [iter(range(case.M)) for _ in vp_stages],
        "model": [RecordingChunk(config, core.model_type, stage, log) for stage in vp_stages],
        "num_microbatches": case.M,
        "seq_length": 1,
        "micro_batch_size": 1,
        "forward_only": case.forward_only,
        "pg_collection": groups,
    }
    if case.p > 1:
        arguments["p2p_communicator"] = RecordingCommunicator(group, config, log)
    with torch.set_grad_enabled(not case.forward_only):
        return log, core.schedule_for(case)(**arguments)
