"""The implementations that run the same stages: ours, megatron-core's, torch's, a minimal one.

Read by: `step_time`, `paced`, and the conformance tests (for `cuda_calls_on_cpu`). Each builder
returns a function without arguments that runs one training step, forward and backward of every
microbatch, and returns this rank's list of losses (empty before the last stage).

`megatron-core` asks for the current GPU in a handful of places. `cuda_calls_on_cpu` answers them
with the CPU from out here; nothing in minimegatron knows of it.
"""

import contextlib
import functools
import importlib
from collections import deque
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn

from tests.benchmarks.stages import Case, loss_of

Step = Callable[[], list[torch.Tensor]]


class PeerMissing(Exception):
    """An implementation that cannot run here or cannot run this case; the message says why."""


# -- megatron-core without a GPU --


def _on_cpu(factory: Callable) -> Callable:
    @functools.wraps(factory)
    def on_cpu(*args, **kwargs):
        if "device" in kwargs and torch.device(kwargs["device"] or "cpu").type == "cuda":
            kwargs["device"] = "cpu"
        return factory(*args, **kwargs)

    return on_cpu


@contextlib.contextmanager
def cuda_calls_on_cpu() -> Iterator[None]:
    """Answers torch.cuda.current_device, synchronize and device="cuda" with the CPU."""
    with contextlib.ExitStack() as stack:
        patch = functools.partial(mock.patch.object, torch.cuda)
        stack.enter_context(patch("current_device", lambda: "cpu"))
        stack.enter_context(patch("synchronize", lambda *args, **kwargs: None))
        stack.enter_context(mock.patch.object(torch.Tensor, "cuda", lambda self, *_, **__: self))
        for name in ("empty", "zeros", "ones", "full", "tensor"):
            replacement = _on_cpu(getattr(torch, name))
            stack.enter_context(mock.patch.object(torch, name, replacement))
        yield


@contextlib.contextmanager
def experts_on_cpu() -> Iterator[None]:
    """What megatron-core's layer of experts needs without a GPU and without Transformer Engine.

    Its all-to-all dispatcher copies counts from the GPU: here they are there already. Its router asks
    for a name that only Transformer Engine brings.
    """
    owner = import_megatron("transformer.moe.token_dispatcher").MoEAlltoAllTokenDispatcher
    router = import_megatron("transformer.moe.moe_utils")
    with (
        mock.patch.object(router, "te_general_gemm", None, create=True),
        mock.patch.object(owner, "cuda_dtoh_stream", "made already"),
        mock.patch.object(owner, "_maybe_dtoh_and_synchronize", _counts_as_numbers),
    ):
        yield


def _counts_as_numbers(dispatcher, point: str, tokens_per_expert=None):
    for name in ("input_splits", "output_splits", "output_splits_tp"):
        if torch.is_tensor(getattr(dispatcher, name)):
            setattr(dispatcher, name, getattr(dispatcher, name).numpy())
    return tokens_per_expert


def import_megatron(module: str):
    """`megatron.core.<module>`, or PeerMissing with the reason."""
    try:
        return importlib.import_module(f"megatron.core.{module}")
    except ImportError as error:
        raise PeerMissing(
            f"megatron-core cannot be imported ({error}); pip install 'megatron-core>=0.16,<0.17'"
        ) from error


# -- What Megatron's and our schedules expect of a model and its groups --


class GroupOfOne:
    """Stands for a process group of this rank alone, without the threads of a real one."""

    def size(self) -> int:
        return 1

    def rank(self) -> int:
        return 0


class SchedulableChunk(nn.Module):
    """A chunk with the config, type and `set_input_tensor` that Megatron's schedules ask for."""

    def __init__(self, chunk: nn.Module, config, model_type, is_first: bool, vp_stage: int | None):
        super().__init__()
        self.chunk = chunk
        self.config = config
        self.model_type = model_type
        self.is_first = is_first
        self.vp_stage = vp_stage
        self.input_tensor = None

    def set_input_tensor(self, input_tensor) -> None:
        self.input_tensor = input_tensor[0] if isinstance(input_tensor, list) else input_tensor

    def forward(self, x: torch.Tensor | None) -> torch.Tensor:
        return self.chunk(x if self.is_first else self.input_tensor)


def _loss_func(output: torch.Tensor):
    loss = loss_of(output)
    return loss, loss.detach().clone()


def _forward_step(data_iterator, model: nn.Module):
    return model(next(data_iterator) if model.is_first else None), _loss_func


P2P_MODES = {
    "batched": {"batch_p2p_comm": True, "overlap_p2p_comm": False},
    "unbatched": {"batch_p2p_comm": False, "overlap_p2p_comm": False},
    "overlap": {"batch_p2p_comm": False, "overlap_p2p_comm": True},
    "flush": {
        "batch_p2p_comm": False,
        "overlap_p2p_comm": True,
        "overlap_p2p_comm_warmup_flush": True,
    },
}


def _megatron_like(core: SimpleNamespace, case: Case, chunks, inputs, mode: str) -> Step:
    """One step of Megatron's schedules or of ours: the same call under another import."""
    group = core.group or dist.group.WORLD
    rank, is_interleaved = group.rank(), case.num_chunks > 1
    config = core.TransformerConfig(
        num_layers=max(case.num_blocks, case.num_virtual_stages),
        hidden_size=case.hidden_size,
        num_attention_heads=1,
        pipeline_model_parallel_size=case.num_stages,
        virtual_pipeline_model_parallel_size=case.num_chunks if is_interleaved else None,
        pipeline_dtype=torch.float32,
        **P2P_MODES[mode],
    )
    model = [
        SchedulableChunk(
            chunk,
            config,
            core.model_type,
            is_first=rank == 0 and index == 0,
            vp_stage=index if is_interleaved else None,
        )
        for index, chunk in enumerate(chunks)
    ]
    schedules = core.schedules
    if is_interleaved:
        schedule = schedules.forward_backward_pipelining_with_interleaving
    else:
        schedule = schedules.forward_backward_pipelining_without_interleaving
    alone = GroupOfOne()
    pg_collection = core.ProcessGroupCollection()
    pg_collection.tp, pg_collection.cp, pg_collection.dp_cp = alone, alone, alone
    pg_collection.pp, pg_collection.embd, pg_collection.pos_embd = group, None, None
    communicator = core.P2PCommunicator(group, config)
    microbatches = inputs.split(case.seq_length)

    def step() -> list[torch.Tensor]:
        iterators = [iter(microbatches) for _ in model]
        with core.surroundings():
            return schedule(
                forward_step_func=_forward_step,
                data_iterator=iterators,
                model=model,
                num_microbatches=case.num_microbatches,
                seq_length=case.seq_length,
                micro_batch_size=1,
                p2p_communicator=communicator,
                pg_collection=pg_collection,
            )

    return step


def build_megatron(case: Case, chunks, inputs, mode: str) -> Step:
    """`megatron-core`'s schedule from PyPI."""
    core = SimpleNamespace(
        schedules=import_megatron("pipeline_parallel.schedules"),
        P2PCommunicator=import_megatron("pipeline_parallel.p2p_communication").P2PCommunicator,
        TransformerConfig=import_megatron("transformer.transformer_config").TransformerConfig,
        ProcessGroupCollection=import_megatron("process_groups_config").ProcessGroupCollection,
        model_type=import_megatron("enums").ModelType.encoder_or_decoder,
        surroundings=cuda_calls_on_cpu,
        group=None,
    )
    return _megatron_like(core, case, chunks, inputs, mode)


def build_ours(case: Case, chunks, inputs, mode: str) -> Step:
    """minimegatron's schedule."""
    try:
        from minimegatron import backend
        from minimegatron.core.enums import ModelType
        from minimegatron.core.pipeline_parallel import schedules
        from minimegatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
        from minimegatron.core.process_groups_config import ProcessGroupCollection
        from minimegatron.core.transformer.transformer_config import TransformerConfig
    except ImportError as error:
        raise PeerMissing(f"minimegatron's schedules cannot be imported ({error})") from error
    core = SimpleNamespace(
        schedules=schedules,
        P2PCommunicator=P2PCommunicator,
        TransformerConfig=TransformerConfig,
        ProcessGroupCollection=ProcessGroupCollection,
        model_type=ModelType.encoder_or_decoder,
        surroundings=contextlib.nullcontext,
        group=dist.new_group(backend=backend.NAME),  # as `initialize_model_parallel` makes it
    )
    return _megatron_like(core, case, chunks, inputs, mode)


def build_torch(case: Case, chunks, inputs, mode: str) -> Step:
    """`torch.distributed.pipelining`: Schedule1F1B or ScheduleInterleaved1F1B."""
    from torch.distributed import pipelining

    group = dist.group.WORLD
    rank, p = group.rank(), group.size()
    message = torch.empty(case.message_shape, requires_grad=True)
    stages = [
        pipelining.PipelineStage(
            chunk,
            index * p + rank,
            case.num_virtual_stages,
            torch.device("cpu"),
            input_args=(message,),
            output_args=(message,),
            group=group,
        )
        for index, chunk in enumerate(chunks)
    ]
    keywords = {"n_microbatches": case.num_microbatches, "loss_fn": lambda y, _: loss_of(y)}
    if case.num_chunks > 1:
        schedule = pipelining.ScheduleInterleaved1F1B(stages, **keywords)
    else:
        schedule = pipelining.Schedule1F1B(stages[0], **keywords)

    def step() -> list[torch.Tensor]:
        losses: list[torch.Tensor] = []
        arguments = (inputs,) if rank == 0 else ()
        target = inputs if rank == p - 1 else None
        schedule.step(*arguments, target=target, losses=losses, return_outputs=False)
        return losses

    return step


def build_minimal(case: Case, chunks, inputs, mode: str) -> Step:
    """1F1B in thirty lines, blocking receives: what one writes in an afternoon."""
    if case.num_chunks > 1:
        raise PeerMissing("the minimal pipeline knows plain 1F1B only")
    rank, p, m = dist.get_rank(), case.num_stages, case.num_microbatches
    microbatches, chunk = inputs.split(case.seq_length), chunks[0]

    def receive(source: int) -> torch.Tensor:
        message = torch.empty(case.message_shape)
        dist.recv(message, source)
        return message

    def step() -> list[torch.Tensor]:
        losses, in_flight, sends = [], deque(), []

        def forward(microbatch: int) -> None:
            x = microbatches[microbatch] if rank == 0 else receive(rank - 1).requires_grad_()
            y = chunk(x)
            if rank == p - 1:
                y = loss_of(y)
                losses.append(y.detach())
                y = y / m
            else:
                sends.append(dist.isend(y.detach(), rank + 1))
            in_flight.append((x, y))

        def backward() -> None:
            x, y = in_flight.popleft()
            torch.autograd.backward(y, receive(rank + 1) if rank < p - 1 else None)
            if rank > 0:
                sends.append(dist.isend(x.grad, rank - 1))

        warmup = min(p - rank - 1, m)
        for microbatch in range(warmup):
            forward(microbatch)
        for microbatch in range(warmup, m):
            forward(microbatch)
            backward()
        for _ in range(warmup):
            backward()
        for send in sends:
            send.wait()
        return losses

    return step


BUILDERS: dict[str, Callable[..., Step]] = {
    "ours": build_ours,
    "megatron": build_megatron,
    "torch": build_torch,
    "minimal": build_minimal,
}


def build(name: str, case: Case, chunks: list[nn.Module], inputs: torch.Tensor) -> Step:
    """The step of an implementation named "family", or "family-mode" for a way of sending."""
    family, _, mode = name.rstrip("'").partition("-")
    if case.num_chunks == 1 and mode in ("overlap", "flush"):
        raise PeerMissing("plain 1F1B does not overlap in megatron-core")
    return BUILDERS[family](case, chunks, inputs, mode or "batched")
