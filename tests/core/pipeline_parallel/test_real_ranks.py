"""The schedules over real gloo ranks: losses and every gradient equal those of one process.

Stages are plain torch layers, so that only the schedule, the communicator and the transport are
under test. GPT, with every other kind of parallelism, follows in tests/test_parity.py.
"""

import functools
from contextlib import nullcontext

import pytest
import torch

from minimegatron.core import parallel_state
from minimegatron.core.model_parallel_config import ModelParallelConfig
from minimegatron.core.pipeline_parallel.local_transport import LocalTransport
from minimegatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from minimegatron.core.pipeline_parallel.schedules import get_forward_backward_func
from minimegatron.core.pipeline_parallel.transport import TorchTransport
from tests.core.pipeline_parallel.test_order import legal_groups
from tests.figures import figure
from tests.ranks import has_shared_memory, run_ranks

HIDDEN, SEQ, BATCH = 6, 5, 2


class Stage(torch.nn.Module):
    """One virtual stage: a nonlinear layer whose weights depend on its place only."""

    def __init__(self, stage: int, config: ModelParallelConfig | None = None):
        super().__init__()
        generator = torch.Generator().manual_seed(stage)
        self.config = config
        self.linear = torch.nn.Linear(HIDDEN, HIDDEN, dtype=torch.float64)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.4)
        self.input_tensor = None

    def set_input_tensor(self, tensors):
        self.input_tensor = tensors[0]

    def forward(self, batch):
        tensor = batch if self.input_tensor is None else self.input_tensor
        return tensor + torch.tanh(self.linear(tensor))


def batches(num_microbatches: int, lengths: tuple[int, ...]) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(99)
    return [
        torch.randn(lengths[i % len(lengths)], BATCH, HIDDEN, generator=generator).double()
        for i in range(num_microbatches)
    ]


def forward_step_func(data_iterator, model):
    output = model(next(data_iterator))
    return output, lambda out: (out.square().mean(), {"loss": out.detach().square().mean()})


@functools.cache
def reference(
    num_stages: int, num_microbatches: int, lengths: tuple[int, ...]
) -> tuple[list, dict]:
    """Losses, and gradients by stage and name, that many modes of communication share."""
    stages = [Stage(stage) for stage in range(num_stages)]
    losses = []
    for batch in batches(num_microbatches, lengths):
        for stage in stages:
            stage.set_input_tensor([batch])
            batch = stage(batch)
        loss = batch.square().mean()
        losses.append(loss.item())
        (loss / num_microbatches).backward()
    gradients = {
        (i, name): parameter.grad
        for i, stage in enumerate(stages)
        for name, parameter in stage.named_parameters()
    }
    return losses, gradients


def run_mode(p: int, M: int, v: int | None, G: int | None, mode: str) -> tuple[int, list[str]]:
    """One configuration on this rank. Returns how many gradients were compared, and what differed."""
    rank = parallel_state.get_pipeline_model_parallel_rank()
    lengths = (SEQ, SEQ - 2) if "variable" in mode else (SEQ,)
    config = ModelParallelConfig(
        pipeline_model_parallel_size=p,
        virtual_pipeline_model_parallel_size=v,
        microbatch_group_size_per_vp_stage=G,
        pipeline_dtype=torch.float64,
        params_dtype=torch.float64,
        batch_p2p_comm="batched" in mode.split(),
        overlap_p2p_comm="overlap" in mode,
        deallocate_pipeline_outputs="free" in mode,
        variable_seq_lengths="variable" in mode,
    )
    config.hidden_size = HIDDEN
    chunks = [Stage(chunk * p + rank, config) for chunk in range(v or 1)]
    data = batches(M, lengths)
    forward_only = "forward-only" in mode
    group = parallel_state.get_pipeline_model_parallel_group()
    transport = TorchTransport(group) if "gloo" in mode else None
    p2p = P2PCommunicator(group, config, transport)
    is_over_gloo = "gloo" in mode or not has_shared_memory()
    assert isinstance(p2p.transport, TorchTransport if is_over_gloo else LocalTransport)
    with torch.no_grad() if forward_only else nullcontext():
        reports = get_forward_backward_func()(
            forward_step_func=forward_step_func,
            data_iterator=[iter(data) for _ in chunks],
            model=chunks,
            num_microbatches=M,
            seq_length=SEQ,
            micro_batch_size=BATCH,
            forward_only=forward_only,
            p2p_communicator=p2p,
        )
    losses, gradients = reference(p * (v or 1), M, lengths)
    case, problems, compared = f"p={p} M={M} v={v} G={G} {mode}", [], 0
    if rank == p - 1:
        found = [report["loss"].item() for report in reports]
        if max(abs(a - b) for a, b in zip(found, losses, strict=True)) > 1e-12:
            problems.append(f"{case}: losses {found} instead of {losses}")
    for chunk_id, chunk in enumerate(chunks):
        for name, parameter in chunk.named_parameters():
            if forward_only:
                continue
            compared += 1
            difference = (parameter.grad - gradients[chunk_id * p + rank, name]).abs().max()
            if not difference <= 1e-12:
                problems.append(f"{case}: stage {chunk_id * p + rank} {name} off by {difference}")
    return compared, problems


def run_grid(p: int) -> tuple[int, int, list[str]]:
    num_cases = compared = 0
    problems: list[str] = []
    plain = ["batched", "unbatched", "batched free", "unbatched variable", "batched forward-only"]
    plain += ["gloo batched free", "gloo unbatched variable", "gloo batched forward-only"]
    ring = ["unbatched", "unbatched free", "overlap", "overlap free", "overlap forward-only"]
    ring += ["overlap variable free", "unbatched variable"]
    ring += ["gloo unbatched free", "gloo overlap free", "gloo overlap variable"]
    if p > 2:
        ring += ["batched", "batched free", "batched forward-only"]
    for v in (None, 1, 2, 3):
        parallel_state.initialize_model_parallel(
            pipeline_model_parallel_size=p, virtual_pipeline_model_parallel_size=v
        )
        for M in (1, 2, 3, 4, 5, 8):
            for G in [None] if v is None else legal_groups(p, M):
                for mode in plain if v is None else ring:
                    number, found = run_mode(p, M, v, G, mode)
                    num_cases, compared, problems = (
                        num_cases + 1,
                        compared + number,
                        problems + found,
                    )
        parallel_state.destroy_model_parallel()
    return num_cases, compared, problems


@pytest.mark.parametrize("p", [2, 3, 4])
def test_losses_and_gradients_equal_one_process(p):
    results = run_ranks(run_grid, p, p, timeout=200)
    for _, compared, problems in results:
        assert compared > 100
        assert problems == []
    figure(f"p={p}: {results[0][0]} configurations")
