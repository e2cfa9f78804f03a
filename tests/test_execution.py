"""Planned schedules on real ranks: the same losses and gradients as one process, in their order."""

import pytest
import torch

from minimegatron.core import parallel_state
from minimegatron.core.distributed.distributed_data_parallel_config import (
    DistributedDataParallelConfig,
)
from minimegatron.core.distributed.torch_ddp import TorchDistributedDataParallel
from minimegatron.core.model_parallel_config import ModelParallelConfig
from minimegatron.core.process_groups_config import ProcessGroupCollection
from minimegatron.planner.plan_check import ScheduleError
from minimegatron.training.pipeline_schedule import get_planned_forward_backward_func
from tests.core.pipeline_parallel.test_real_ranks import (
    BATCH,
    HIDDEN,
    SEQ,
    Stage,
    batches,
    forward_step_func,
    reference,
)
from tests.ranks import run_ranks


def last_first(stage):
    """GPipe with its backwards in the reverse order: legal, and not first in, first out."""
    for i in range(stage.num_microbatches):
        yield stage.recv_forward(i)
        yield stage.forward(i)
        yield stage.send_forward(i)
    for i in reversed(range(stage.num_microbatches)):
        yield stage.recv_backward(i)
        yield stage.backward(i)
        yield stage.send_backward(i)


def forgets_a_backward(stage):
    for action in last_first(stage):
        if not (action.kind == "backward" and action.microbatch == 1 and stage.pp_rank == 0):
            yield action


SCHEDULES = [
    ("gpipe", None, False),
    ("1f1b", None, False),
    (last_first, None, False),
    ("interleaved", 2, False),
    ("interleaved", 2, True),
]


def run_planned(p: int, M: int) -> tuple[int, list[str]]:
    compared, problems = 0, []
    for name, v, overlap in SCHEDULES:
        parallel_state.initialize_model_parallel(
            pipeline_model_parallel_size=p, virtual_pipeline_model_parallel_size=v
        )
        rank = parallel_state.get_pipeline_model_parallel_rank()
        config = ModelParallelConfig(
            pipeline_model_parallel_size=p,
            virtual_pipeline_model_parallel_size=v,
            pipeline_dtype=torch.float64,
            batch_p2p_comm=v is None,
            overlap_p2p_comm=overlap,
            deallocate_pipeline_outputs=True,
        )
        config.hidden_size = HIDDEN
        chunks = [Stage(chunk * p + rank, config) for chunk in range(v or 1)]
        data = batches(M, (SEQ,))
        reports = get_planned_forward_backward_func(name)(
            forward_step_func=forward_step_func,
            data_iterator=[iter(data) for _ in chunks],
            model=chunks,
            num_microbatches=M,
            seq_length=SEQ,
            micro_batch_size=BATCH,
        )
        losses, gradients = reference(p * (v or 1), M, (SEQ,))
        if rank == p - 1:
            found = sorted(report["loss"].item() for report in reports)
            if max(abs(a - b) for a, b in zip(found, sorted(losses), strict=True)) > 1e-12:
                problems.append(f"{name}: losses {found}")
        for chunk_id, chunk in enumerate(chunks):
            for parameter_name, parameter in chunk.named_parameters():
                wanted = gradients[chunk_id * p + rank, parameter_name]
                compared += 1
                if not (parameter.grad - wanted).abs().max() <= 1e-12:
                    problems.append(f"{name}: stage {chunk_id * p + rank} {parameter_name}")
        parallel_state.destroy_model_parallel()
    return compared, problems


@pytest.mark.parametrize("p", [2, 4])
def test_planned_schedules_equal_one_process(p):
    for compared, problems in run_ranks(run_planned, p, p, 8):
        assert compared == 2 * 7
        assert problems == []


def run_with_torch_ddp(num_microbatches: int) -> str:
    parallel_state.initialize_model_parallel()
    config = ModelParallelConfig(pipeline_dtype=torch.float64)
    config.hidden_size = HIDDEN
    groups = ProcessGroupCollection.use_mpu_process_groups()
    ddp_config = DistributedDataParallelConfig()
    model = TorchDistributedDataParallel(config, ddp_config, Stage(0, config), pg_collection=groups)
    config.no_sync_func = model.no_sync
    try:
        get_planned_forward_backward_func(last_first)(
            forward_step_func=forward_step_func,
            data_iterator=iter(batches(num_microbatches, (SEQ,))),
            model=model,
            num_microbatches=num_microbatches,
            seq_length=SEQ,
            micro_batch_size=BATCH,
        )
    except ValueError as error:
        return str(error)
    return ""


def test_torch_ddp_with_several_microbatches_in_flight_is_refused():
    """Was: their gradients were never summed over the ranks."""
    for message in run_ranks(run_with_torch_ddp, 2, 3):
        assert "has 3 microbatches in flight, but torch's DistributedDataParallel" in message
    assert run_ranks(run_with_torch_ddp, 2, 1) == ["", ""]


def run_faulty() -> str:
    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=2)
    config = ModelParallelConfig(pipeline_model_parallel_size=2, pipeline_dtype=torch.float64)
    config.hidden_size = HIDDEN
    rank = parallel_state.get_pipeline_model_parallel_rank()
    with pytest.raises(ScheduleError) as error:
        get_planned_forward_backward_func(forgets_a_backward)(
            forward_step_func=forward_step_func,
            data_iterator=iter(batches(4, (SEQ,))),
            model=Stage(rank, config),
            num_microbatches=4,
            seq_length=SEQ,
            micro_batch_size=BATCH,
        )
    return str(error.value)


def test_a_faulty_schedule_is_refused_before_anything_is_sent():
    for message in run_ranks(run_faulty, 2):
        assert "rank 0" in message
        assert "microbatch 1" in message
