"""Checks the sum of a tied embedding's gradients, inside the real step of a small GPT.

Called by: the exercises' engine, on 4 ranks. Calls: `bench_gpt`.
"""

import random
from dataclasses import replace
from types import ModuleType
from typing import Any

import torch

from minimegatron.core.collectives import all_gather
from minimegatron.exercises.bench_gpt import (
    GptStep,
    StepCase,
    check_gradients,
    on_these_ranks,
    reference_gradients,
    wrong_gradient,
)
from minimegatron.exercises.check import Case, Result, Wrong, installed

SYMBOL = "minimegatron.core.distributed.finalize_model_grads._allreduce_word_embedding_grads"
COPIES = {"copies of the embedding": 2}
EMBEDDING = "embedding.word_embeddings.weight"


def cases(seed: int) -> list[Case]:
    """Two stages, four, virtual ones, tensor parallelism, one stage, and nothing tied."""
    draw = random.Random(seed)
    steps = {
        "2 stages, 2 replicas": StepCase(pp=2, num_microbatches=3),
        "4 stages": StepCase(pp=4, num_microbatches=2),
        "2 stages of 2 chunks": StepCase(pp=2, vp=2, num_microbatches=2),
        "2 stages, 2 tensor-parallel ranks": StepCase(tp=2, pp=2),
        "1 stage: one copy": StepCase(tp=2),
        "2 stages, nothing tied": StepCase(pp=2, tied=False),
    }
    if seed:
        for name, step in steps.items():
            more = step.pp * draw.randint(0, 1) if step.vp else draw.randint(0, 2)
            steps[name] = replace(step, num_microbatches=step.num_microbatches + more, seed=seed)
    return [Case(name, step=step) for name, step in steps.items()]


def run(student: ModuleType, case: Case) -> Result:
    """One step with the student's function; every gradient against one process."""
    step = on_these_ranks(case.step)
    expected = reference_gradients(case.step, step.groups.dp.size())
    before: dict[str, torch.Tensor] = {}

    def watched(model: Any, embd_group: Any, pp_group: Any) -> None:
        before.update(step.gradients())
        try:
            student._allreduce_word_embedding_grads(model, embd_group, pp_group)
        except AttributeError as error:
            if case.step.vp is None or "NoneType" not in str(error):
                raise
            raise Wrong(_wrong_chunk(step, error)) from error

    with installed(watched, SYMBOL):
        step.forward_backward()
    step.meet()
    if case.step.tied and EMBEDDING in before:
        _check_embedding(step, before[EMBEDDING], expected[EMBEDDING])
    check_gradients(step, expected)
    return Result(_achieved(step))


def _check_embedding(step: GptStep, before: torch.Tensor, full: torch.Tensor) -> None:
    """The tied weight alone first: the parts are known, so what was done with them can be told."""
    grads = {name: param.main_grad for name, param in step.parameters()}
    got = grads[EMBEDDING]
    wanted = step.mine(full, dict(step.parameters())[EMBEDDING])
    embd_group = step.groups.embd
    parts = got.new_empty((embd_group.size() * got.size(0), *got.shape[1:]))
    all_gather(parts, before, embd_group)
    if torch.allclose(got, wanted, rtol=1e-9, atol=1e-9):
        return
    error = str(wrong_gradient(step, EMBEDDING, got, wanted, COPIES))
    if embd_group.size() == 1:
        why = (
            "There is one stage, so both uses of the weight added into one gradient already; "
            "summing again counts something twice."
        )
        raise Wrong(f"{error}\n{why}")
    raise Wrong(f"{error}\n{_what_was_done(step, got, before, parts.chunk(2))}")


def _wrong_chunk(step: GptStep, error: AttributeError) -> str:
    return (
        f"rank {step.place()}: {error}\n"
        "This stage has two chunks. The embedding is in the first chunk of the first stage, the "
        "output layer in the last chunk of the last; for any other chunk "
        "shared_embedding_or_output_weight() is None."
    )


def _what_was_done(
    step: GptStep, got: torch.Tensor, before: torch.Tensor, parts: tuple[torch.Tensor, ...]
) -> str:
    table, output = parts
    is_first = step.groups.pp.rank() == 0
    own, other = ("lookup table", "output weights")[:: 1 if is_first else -1]
    if torch.equal(got, before):
        return (
            f"Your function changed nothing on this rank: it still holds only the gradient of the "
            f"weight as {own}. The part as {other} is on stage "
            f"{step.case.pp - 1 if is_first else 0}. Training goes on without an error, and the two "
            "copies of one weight drift apart."
        )
    if torch.allclose(got, (table + output) / 2):
        return (
            "That is the average of the two parts. Each part is a term of one gradient, not an "
            "estimate of it: the loss depends on the weight in two places, so the terms are added."
        )
    if torch.allclose(got, 2 * before):
        return "That is this rank's own part twice: the sum was made with a rank of the same stage."
    return (
        f"Expected is the part as {own} (made here) plus the part as {other} (made on stage "
        f"{step.case.pp - 1 if is_first else 0}): one sum over embd_group, in place in main_grad."
    )


def _achieved(step: GptStep) -> dict[str, Any]:
    """Counted on rank 0, which holds a copy."""
    if step.groups.embd is None:
        return {}
    copies = step.groups.embd.size() if step.case.tied else 1
    if copies == 1:
        return {"copies": 1, "summed": "nothing"}
    return {"copies": copies, "summed": f"{step.parameters()[0][1].numel() * 8} bytes"}
