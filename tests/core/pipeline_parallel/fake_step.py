"""One training step of the real schedules with fake computation over the fake transport."""

from dataclasses import dataclass
from functools import partial

import torch

from minimegatron.core.model_parallel_config import ModelParallelConfig
from minimegatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from minimegatron.core.pipeline_parallel.schedules import (
    forward_backward_no_pipelining,
    forward_backward_pipelining_with_interleaving,
    forward_backward_pipelining_without_interleaving,
)
from minimegatron.core.process_groups_config import ProcessGroupCollection
from tests.fake_transport import FakeGroup, FakeTransport, Identified, Network, run_threads


@dataclass(frozen=True)
class Case:
    """p stages, v chunks (None for plain 1F1B), M microbatches, G per group."""

    p: int
    M: int
    v: int | None = None
    G: int | None = None
    forward_only: bool = False
    batched: bool = True
    overlap: bool = False
    deallocate: bool = False

    def config(self) -> ModelParallelConfig:
        config = ModelParallelConfig(
            pipeline_model_parallel_size=self.p,
            virtual_pipeline_model_parallel_size=self.v,
            microbatch_group_size_per_vp_stage=self.G,
            batch_p2p_comm=self.batched and not self.overlap,
            overlap_p2p_comm=self.overlap,
            deallocate_pipeline_outputs=self.deallocate,
            pipeline_dtype=torch.float64,
        )
        config.hidden_size = 2
        return config


class FakeChunk(torch.nn.Module):
    def __init__(self, config, stage, num_stages, log):
        super().__init__()
        self.config, self.stage, self.num_stages, self.log = config, stage, num_stages, log
        self.weight = torch.nn.Parameter(torch.zeros(1, 1, 2, dtype=torch.float64))
        self.input_tensor = None
        self.num_live = 0

    def set_input_tensor(self, tensors):
        self.input_tensor = tensors[0]

    def forward(self, microbatch):
        tensor = self.weight if self.stage == 0 else self.input_tensor
        self.log.append(("F", microbatch, self.stage))
        output = Identified.apply(tensor, microbatch, self.stage, self.num_stages)
        if output.requires_grad:
            output.register_hook(partial(self._note_backward, microbatch))
        return output

    def _note_backward(self, microbatch, grad):
        self.log.append(("B", microbatch, self.stage))


def forward_step_func(data_iterator, model):
    microbatch = next(data_iterator)

    def loss_func(output, non_loss_data=False):
        return output.sum(), {"microbatch": microbatch, "output": output.detach().clone()}

    return model(microbatch), loss_func


def run_rank(case: Case, network: Network, rank: int):
    config = case.config()
    group = FakeGroup(rank, case.p)
    log = network.log[rank]
    num_chunks = case.v or 1
    chunks = [
        FakeChunk(config, chunk * case.p + rank, num_chunks * case.p, log)
        for chunk in range(num_chunks)
    ]
    groups = ProcessGroupCollection(pp=group, tp=FakeGroup(), cp=FakeGroup())
    arguments = {
        "forward_step_func": forward_step_func,
        "data_iterator": [iter(range(case.M)) for _ in chunks],
        "model": chunks,
        "num_microbatches": case.M,
        "seq_length": 1,
        "micro_batch_size": 1,
        "forward_only": case.forward_only,
        "pg_collection": groups,
    }
    with torch.set_grad_enabled(not case.forward_only):
        if case.p == 1:
            return forward_backward_no_pipelining(**arguments)
        p2p = P2PCommunicator(group, config, FakeTransport(network, rank))
        if case.v is None:
            function = forward_backward_pipelining_without_interleaving
        else:
            function = forward_backward_pipelining_with_interleaving
        return function(p2p_communicator=p2p, **arguments)


def run_case(case: Case) -> tuple[list, Network]:
    """Runs every rank of the case; returns what each reported, and the network with its log."""
    network = Network(case.p, blocking=not case.overlap)
    return run_threads(network, partial(run_rank, case, network)), network


def computations(log: list[tuple]) -> list[tuple]:
    """Only the forwards and backwards of a rank's log: (kind, microbatch, virtual stage)."""
    return [entry for entry in log if entry[0] in "FB"]
