"""After a step that failed on one rank, each rank is as it was before the step: all but its gradients.

All is asked for by what the modules have, not by name: a new buffer or attribute is seen too.
"""

import random
from functools import partial
from typing import Any

import numpy
import torch

from minimegatron.core import parallel_state
from minimegatron.core.model_parallel_config import ModelParallelConfig
from minimegatron.core.pipeline_parallel.failed_step import StateOfStep
from minimegatron.core.process_groups_config import ProcessGroupCollection
from minimegatron.core.tensor_parallel.random import (
    get_cuda_rng_tracker,
    keep_rng_states,
    model_parallel_cuda_manual_seed,
)
from minimegatron.core.transformer.mtp_loss import MTPLossLoggingHelper
from minimegatron.core.utils import get_model_config
from tests.parity import Case, batches, build, forward_step_func, run_step
from tests.ranks import run_ranks
from tests.test_failed_step import FailingStep, Planted, tells

# What each forward sets before it is read, and what each step clears.
OF_A_FORWARD = {
    "input_tensor",
    "current_microbatch",
    "embedding_activation_buffer",
    "grad_output_buffer",
}


def state_of(chunks: list) -> dict[str, Any]:
    """Everything that a rank goes on from, by names; tensors are copies."""
    found: dict[str, Any] = {
        "tracker of further tokens": MTPLossLoggingHelper.tracker,
        "random": random.getstate(),
        "random of numpy": numpy.random.get_state(),
        "random of torch": torch.get_rng_state(),
        "random states": get_cuda_rng_tracker().get_states(),
        "the random state in use": get_cuda_rng_tracker().current,
    }
    for number, chunk in enumerate(chunks):
        for name, module in chunk.module.named_modules():
            at = f"chunk {number}, {name}"
            found |= {
                f"{at}: {what}": value
                for what, value in vars(module).items()
                if what not in OF_A_FORWARD and isinstance(value, bool | int | float | dict | list)
                if not what.startswith("_")
            }
            for kind in (module.named_parameters, module.named_buffers):
                found |= {f"{at}.{what}": value for what, value in kind(recurse=False)}
    return {name: copied(value) for name, value in found.items()}


def copied(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    if isinstance(value, dict):
        return {name: copied(entry) for name, entry in value.items()}
    return tuple(map(copied, value)) if isinstance(value, list | tuple) else value


def is_same(value: Any, other: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return isinstance(other, torch.Tensor) and torch.equal(value, other)
    if isinstance(value, dict):
        keys = value.keys() == other.keys()
        return keys and all(is_same(value[name], other[name]) for name in value)
    if isinstance(value, tuple):
        return len(value) == len(other) and all(map(is_same, value, other))
    return bool(numpy.all(value == other))


def with_dropout_and_counts(chunks: list) -> None:
    """The model as the tests' parity has none: with dropout, and a buffer that somebody added."""
    for chunk in chunks:
        chunk.module.register_buffer("microbatches_seen", torch.zeros(1))
        chunk.module.register_buffer("replaced", torch.zeros(1), persistent=False)
        chunk.module.register_forward_hook(_count)
        for module in chunk.modules():
            if hasattr(module, "hidden_dropout"):
                module.hidden_dropout = 0.1


def _count(module: torch.nn.Module, *unused: Any) -> None:
    module.microbatches_seen += 1
    module.replaced = module.replaced + torch.rand(1)


def one_step(case: Case, groups: Any, chunks: list, step: Any) -> None:
    for chunk in chunks:
        chunk.zero_grad_buffer()
    run_step(case, groups, chunks, [iter(batches(case.M)) for _ in chunks], False, step)


def fail_and_compare(case: Case, places: list[tuple[int, str]]) -> list[str]:
    """A good step, then failed ones: what each has changed; then the good step that is as without."""
    parallel_state.initialize_model_parallel(
        case.tp, case.pp, case.vp, expert_model_parallel_size=case.ep
    )
    model_parallel_cuda_manual_seed(1)
    groups = ProcessGroupCollection.use_mpu_process_groups()
    chunks, _ = build(case, groups)
    with_dropout_and_counts(chunks)
    get_model_config(chunks[0]).before_step_funcs += (keep_rng_states,)
    rank, problems = torch.distributed.get_rank(), []
    one_step(case, groups, chunks, forward_step_func)
    before = state_of(chunks)
    for failing, place in places:
        step = FailingStep(place, get_model_config(chunks[0])) if rank == failing else None
        where = f"{place} on rank {failing}"
        try:
            one_step(case, groups, chunks, step or forward_step_func)
            problems.append(f"{where}: rank {rank} raised nothing")
        except (Planted, ConnectionError):
            pass
        if step is not None:
            step.restore()
        now = state_of(chunks)
        problems += [
            f"after {where}, rank {rank}: {name} has changed"
            for name in before
            if name not in now or not is_same(before[name], now[name])
        ]
        problems += [f"{where}: {name} is new" for name in now.keys() - before.keys()]
    one_step(case, groups, chunks, forward_step_func)
    after = state_of(chunks)
    if all(is_same(before[name], after[name]) for name in before if "random" in name):
        problems.append("a good step drew no random number: this test sees nothing")
    return problems


BIASES = {"experts": 4, "balance": "bias", "llama": True}
CASES = {
    # Untied: nothing but the end of the step connects the last stage with the first.
    "a9: biases of experts, two stages": (
        Case(pp=2, M=3, num_layers=2, **BIASES),
        [(0, "finalize"), (0, "backward"), (1, "loss"), (1, "finalize"), (0, "forward")],
    ),
    "a9: two tensor ranks": (
        Case(tp=2, M=2, num_layers=1),
        [(1, "finalize"), (0, "backward"), (1, "forward")],
    ),
    "a9: further tokens, two chunks each": (
        Case(pp=2, vp=2, G=2, M=2, batched=False, overlap=True, mtp=1, llama=True),
        [(0, "finalize"), (0, "backward"), (1, "loss")],
    ),
}


def all_cases() -> list[str]:
    problems = []
    for name, (case, places) in CASES.items():
        problems += [f"{name}: {problem}" for problem in fail_and_compare(case, places)]
        parallel_state.destroy_model_parallel()
    return problems


@tells
def test_a9_after_a_failed_step_each_rank_is_as_before():
    found = run_ranks(all_cases, 2, timeout=120)
    assert [problem for problems in found for problem in problems] == []


def test_a9_buffers_and_random_numbers_are_put_back():
    model, undone = torch.nn.Module(), []
    model.register_buffer("mean", torch.zeros(3))
    model.register_buffer("wide", torch.zeros(1).expand(3))
    model.register_buffer("nothing", None)
    hooks = (lambda models: partial(undone.append, models[0]), lambda models: None)
    hooks = (*hooks, keep_rng_states)
    model_parallel_cuda_manual_seed(5, tp_rank=0)
    state = StateOfStep(ModelParallelConfig(before_step_funcs=hooks), [model])
    with get_cuda_rng_tracker().fork():
        drawn = torch.rand(4)
    model.mean += 1
    model.mean = torch.ones(3)
    state.put_back()
    assert model.mean.tolist() == [0, 0, 0] and undone == [model]
    with get_cuda_rng_tracker().fork():
        assert torch.equal(torch.rand(4), drawn)
