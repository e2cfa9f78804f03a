"""The schedules over real gloo ranks: losses and every gradient equal those of one process.

Stages are plain torch layers, so that only the schedule, the communicator and the group are under
test. GPT, with every other kind of parallelism, follows in tests/test_parity.py. Here every two
options meet; test_order.py has all combinations, over a strict fake transport.
"""

import functools
import itertools
from contextlib import nullcontext

import pytest
import torch

from minimegatron.core import parallel_state
from minimegatron.core.model_parallel_config import ModelParallelConfig
from minimegatron.core.pipeline_parallel.schedules import get_forward_backward_func
from minimegatron.core.process_groups_config import ProcessGroupCollection
from tests.core.pipeline_parallel.test_order import legal_groups
from tests.core.wire_kinds import GLOO, group_over
from tests.covering import Rule, Space, covering_array
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


def groups_of_runs() -> dict[bool, ProcessGroupCollection]:
    """By whether the pipeline's group is one over gloo itself."""
    usual, over_gloo = (ProcessGroupCollection.use_mpu_process_groups() for _ in range(2))
    assert usual.pp.name() == "shm" and (usual.pp.mesh is not None) == has_shared_memory()
    over_gloo.pp = group_over(GLOO)
    return {False: usual, True: over_gloo}


def run_mode(
    groups: ProcessGroupCollection, p: int, M: int, v: int | None, G: int | None, mode: str
) -> tuple[int, list[str]]:
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
    with torch.no_grad() if forward_only else nullcontext():
        reports = get_forward_backward_func()(
            forward_step_func=forward_step_func,
            data_iterator=[iter(data) for _ in chunks],
            model=chunks,
            num_microbatches=M,
            seq_length=SEQ,
            micro_batch_size=BATCH,
            forward_only=forward_only,
            pg_collection=groups,
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


Config = tuple[int | None, int, int | None, str]
"""v, M, G and mode, as `run_mode` takes them."""


def grid(p: int) -> list[Config]:
    """Every configuration of p ranks."""
    plain = ["batched", "unbatched", "batched free", "unbatched variable", "batched forward-only"]
    plain += ["gloo batched free", "gloo unbatched variable", "gloo batched forward-only"]
    ring = ["unbatched", "unbatched free", "overlap", "overlap free", "overlap forward-only"]
    ring += ["overlap variable free", "unbatched variable"]
    ring += ["gloo unbatched free", "gloo overlap free", "gloo overlap variable"]
    if p > 2:
        ring += ["batched", "batched free", "batched forward-only"]
    return [
        (v, M, G, mode)
        for v in (None, 1, 2, 3)
        for M in (1, 2, 3, 4, 5, 8)
        for G in ([None] if v is None else legal_groups(p, M))
        for mode in (plain if v is None else ring)
    ]


def options(p: int) -> Space:
    """What may be combined over p ranks."""
    return Space(
        {
            "v": (None, 1, 2, 3),
            "M": (1, 2, 3, 4, 5, 8),
            "G": (None, *range(p, 9)),
            "p2p": ("batched", "unbatched", "overlap"),
            "kind": ("", "free", "forward-only"),
            "lengths": ("", "variable"),
            "wire": ("", "gloo"),
        },
        [
            Rule(("v", "G"), lambda v, G: (v is None) == (G is None)),
            Rule(("M", "G"), lambda M, G: G is None or G in legal_groups(p, M)),
            Rule(("v", "p2p"), lambda v, p2p: p2p != "overlap" or v is not None),
            Rule(("v", "p2p"), lambda v, p2p: p2p != "batched" or v is None or p > 2),
            Rule(("p2p", "lengths"), lambda p2p, lengths: not lengths or p2p != "batched"),
        ],
    )


@functools.cache
def pairwise(p: int) -> list[Config]:
    """Few of them, in which every two options meet that may. Sorted by v."""
    found = []
    for row in covering_array(options(p)):
        words = (row["wire"], row["p2p"], row["lengths"], row["kind"])
        found.append((row["v"], row["M"], row["G"], " ".join(filter(None, words))))
    return sorted(found, key=lambda config: config[0] or 0)


def run_configs(p: int, configs: list[Config]) -> tuple[int, list[str]]:
    compared, problems = 0, []
    for v, of_v in itertools.groupby(configs, key=lambda config: config[0]):
        parallel_state.initialize_model_parallel(
            pipeline_model_parallel_size=p, virtual_pipeline_model_parallel_size=v
        )
        groups = groups_of_runs()
        for _, M, G, mode in of_v:
            number, found = run_mode(groups["gloo" in mode], p, M, v, G, mode)
            compared, problems = compared + number, problems + found
        parallel_state.destroy_model_parallel()
    return compared, problems


@pytest.mark.parametrize("p", [2, 3, 4])
def test_losses_and_gradients_equal_one_process(p):
    check(p, pairwise(p))


@pytest.mark.full
@pytest.mark.parametrize("p", [2, 3, 4])
def test_every_configuration_equals_one_process(p):
    check(p, grid(p))


def check(p: int, configs: list[Config]) -> None:
    for compared, problems in run_ranks(run_configs, p, p, configs, timeout=200):
        assert problems == []
        assert compared > 40
    figure(f"p={p}: {len(configs)} configurations")
