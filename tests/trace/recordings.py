"""Recordings that several tests look at: real ranks, small stages, made once per test session."""

import time
from contextlib import nullcontext
from unittest import mock

import torch

import minimegatron
from minimegatron.core import parallel_state
from minimegatron.core.model_parallel_config import ModelParallelConfig
from minimegatron.core.pipeline_parallel.schedules import get_forward_backward_func
from minimegatron.tracing.trace_view import Trace
from tests.core.pipeline_parallel.test_real_ranks import BATCH, HIDDEN, SEQ, Stage, batches

FORWARD_MS, BACKWARD_MS = 8.0, 16.0


class SlowStage(Stage):
    """A stage whose forward takes `seconds`, so that its receiver has to wait."""

    def __init__(self, stage: int, config: ModelParallelConfig, seconds: float):
        super().__init__(stage, config)
        self.seconds = seconds

    def forward(self, batch):
        time.sleep(self.seconds)
        return super().forward(batch)


def users_loss_func(output):
    return output.square().mean(), {"loss": output.detach().square().mean()}


def users_forward_step(data_iterator, model):
    return model(next(data_iterator)), users_loss_func


def run_step(p, M, v=None, overlap=False, seconds=0.0, forward_only=False, schedule=None):
    """One step of this rank's stage; returns its losses and its gradients."""
    rank = parallel_state.get_pipeline_model_parallel_rank()
    config = ModelParallelConfig(
        pipeline_model_parallel_size=p,
        virtual_pipeline_model_parallel_size=v,
        pipeline_dtype=torch.float64,
        batch_p2p_comm=v is None,
        overlap_p2p_comm=overlap,
    )
    config.hidden_size = HIDDEN
    chunks = [SlowStage(chunk * p + rank, config, seconds) for chunk in range(v or 1)]
    with torch.no_grad() if forward_only else nullcontext():
        reports = (schedule or get_forward_backward_func())(
            forward_step_func=users_forward_step,
            data_iterator=[iter(batches(M, (SEQ,))) for _ in chunks],
            model=chunks,
            num_microbatches=M,
            seq_length=SEQ,
            micro_batch_size=BATCH,
            forward_only=forward_only,
        )
    losses = [report["loss"].item() for report in reports]
    return losses, [parameter.grad for chunk in chunks for parameter in chunk.parameters()]


def record(directory, p, M, v, overlap, num_steps, is_paced) -> Trace:
    """In each rank: some steps, the first of them unrecorded; saves to `directory` too."""
    parallel_state.initialize_model_parallel(
        pipeline_model_parallel_size=p, virtual_pipeline_model_parallel_size=v
    )
    run_step(p, M, v, overlap)
    paced = minimegatron.pace(FORWARD_MS, BACKWARD_MS) if is_paced else nullcontext()
    with paced, minimegatron.trace(directory, gather=True) as run:
        for _ in range(num_steps):
            run_step(p, M, v, overlap)
    parallel_state.destroy_model_parallel()
    return run


def record_lines(directory, p=2, M=4) -> Trace:
    """In each rank: two steps of 1F1B; of the second, the lines too. A hook sees each gradient."""
    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=p)

    def users_hook(grad):
        return grad

    class Hooked(SlowStage):
        def forward(self, batch):
            output = super().forward(batch)
            output.register_hook(users_hook)
            return output

    with mock.patch(f"{__name__}.SlowStage", Hooked):
        run_step(p, M)
        with minimegatron.trace(directory, gather=True, lines_of_step=1) as run:
            for _ in range(2):
                run_step(p, M)
    parallel_state.destroy_model_parallel()
    return run
