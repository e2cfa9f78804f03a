"""Checks the sum of a tied embedding's gradients, inside the real step of a small GPT."""

import os
import random
from collections.abc import Sequence
from dataclasses import replace
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist

from minimegatron.exercises.bench.gpt_step import GptStep, StepCase, on_these_ranks
from minimegatron.exercises.bench.gpt_step_judge import Reference, is_close
from minimegatron.exercises.bench.sent_bytes import SentTensors, all_sent_counted
from minimegatron.exercises.check import Case, Result, Wrong, data_seed, installed
from minimegatron.exercises.room.room import student_frames

OURS = "minimegatron.core.distributed.finalize_model_grads._allreduce_word_embedding_grads"
REPLACES = (OURS,)
EMBEDDING = "embedding.word_embeddings.weight"
WORLD = 4


def cases(seed: int) -> list[Case]:
    """Two stages, four, virtual ones, tensor parallelism, one stage, and nothing tied."""
    draw = random.Random(seed)
    steps = {
        "2 stages, 2 replicas": StepCase(pp=2, num_microbatches=3),
        "4 stages": StepCase(pp=4, num_microbatches=2),
        "2 stages of 2 chunks": StepCase(pp=2, vp=2, num_microbatches=2),
        "2 stages of 2 chunks, ranks 0 and 2 first": StepCase(
            pp=2, vp=2, num_microbatches=2, order="tp-cp-ep-pp-dp"
        ),
        "2 stages, 2 tensor-parallel ranks": StepCase(tp=2, pp=2),
        "1 stage: one copy": StepCase(tp=2),
        "2 stages, nothing tied": StepCase(pp=2, tied=False),
    }
    if seed:
        for name, step in steps.items():
            more = step.pp * draw.randint(0, 1) if step.vp else draw.randint(0, 2)
            num_microbatches = step.num_microbatches + more
            steps[name] = replace(step, num_microbatches=num_microbatches, seed=data_seed(seed))
    return [Case(name, step=step.values) for name, step in steps.items()]


def run(student: ModuleType, case: Case) -> dict[str, Any]:
    """One step with the student's function; gradients before it and after, and what else changed."""
    step = on_these_ranks(case.step)
    before: dict[str, torch.Tensor] = {}
    also_changed: list[tuple[str, str]] = []
    sent = SentTensors()

    def watched(model: Any, embd_group: Any, pp_group: Any) -> None:
        before.update(step.gradients())
        watch = _Watch(step)
        try:
            with all_sent_counted(sent):
                student._allreduce_word_embedding_grads(model, embd_group, pp_group)
        except AttributeError as error:
            if "NoneType" not in str(error):
                raise
            raise Wrong(_no_weight(error, student.__file__, case)) from error
        also_changed.extend(watch.changes())
        # A sum that a rank does not join must not meet what the schedule sends next.
        step.meet()

    with installed(watched, OURS):
        step.forward_backward()
    step.meet()
    return {
        "gradients": step.gradients(),
        "before": before.get(EMBEDDING),
        "also changed": also_changed,
        "sent": sent.words() if sent.calls else "",
    }


def judge(case: Case, answers: Sequence[dict[str, Any]]) -> Result:
    """Every gradient against one process."""
    reference = Reference(case.step, WORLD).run()
    for rank, answer in enumerate(answers):
        for name, what in answer["also changed"]:
            raise Wrong(_misplaced(reference.who(rank), name, what))
    if reference.case.tied:
        _check_embedding(reference, answers)
    for rank, answer in enumerate(answers):
        if answer["sent"] and not _has_a_copy_to_sum(reference, rank):
            raise Wrong(_needless(reference, rank, answer["sent"]))
    reference.check_gradients([answer["gradients"] for answer in answers])
    return Result(_achieved(reference, answers[0]["gradients"]))


class _Watch:
    """Notices what the function must leave alone: the weights, and where the gradients lie."""

    def __init__(self, step: GptStep):
        self._before = [
            (name, param, param.detach().clone(), param.main_grad)
            for name, param in step.parameters()
        ]

    def changes(self) -> list[tuple[str, str]]:
        """[(name, "weight" or "place"), ...]. Puts the views back, for whoever reads on."""
        found = []
        for name, param, weight, view in self._before:
            if not torch.equal(param.detach(), weight):
                found.append((name, "weight"))
            now = param.main_grad
            if not isinstance(now, torch.Tensor) or now.data_ptr() != view.data_ptr():
                found.append((name, "place"))
                param.main_grad = view
        return found


def _no_weight(error: AttributeError, path: str, case: Case) -> str:
    """Of a chunk that holds no copy."""
    frame = student_frames(error, path)[-1]
    place = f"{os.path.basename(path)}:{frame.lineno}, in {frame.name}:  {frame.line}"
    begin = f"rank {dist.get_rank()}: {error}\n  {place}\n"
    if not case.step["tied"]:
        return (
            f"{begin}In this model embedding and output layer have a weight each, so nothing is "
            f"shared, "
            "and on the last stage shared_embedding_or_output_weight() is None. What tells your "
            "function?"
        )
    if case.step["vp"] is None:
        return f"{begin}This chunk holds no copy. Which stages hold one?"
    return (
        f"{begin}This stage has two chunks, and the one that your function took holds no copy: there "
        "shared_embedding_or_output_weight() is None. Which of all chunks of the pipeline does a "
        "microbatch pass first, and which last?"
    )


# -- Judged --


def _misplaced(who: str, name: str, what: str) -> str:
    if what == "weight":
        return (
            f"rank {who}: your function changed the weight {name} itself\nThe sum is over its "
            "gradient, get_main_grad(weight). The optimizer changes weights, later."
        )
    return (
        f"rank {who}: main_grad of {name} is another tensor than before: no longer a view into the "
        "gradient buffer\n"
        "The next step clears the buffer, and sums the buffer over data-parallel ranks. Your tensor "
        "gets neither, so this gradient is wrong from the second step on. Write the sum into the "
        "tensor that is there."
    )


def _has_a_copy_to_sum(reference: Reference, rank: int) -> bool:
    last = reference.case.pp - 1
    return reference.case.tied and last > 0 and reference.places[rank]["pp"] in (0, last)


def _needless(reference: Reference, rank: int, sent: str) -> str:
    why = "This stage holds no copy of the weight, and has nothing to add."
    if not reference.case.tied:
        why = "In this model embedding and output layer have a weight each."
    elif reference.case.pp == 1:
        why = "There is one copy of the weight, and its gradient is whole."
    return (
        f"rank {reference.who(rank)}: your function takes part in {sent}\n{why} The others would wait "
        "for it in every step. Which of the groups that your function is given has only the ranks "
        "with something to add?"
    )


def _check_embedding(reference: Reference, answers: Sequence[dict[str, Any]]) -> None:
    """The tied weight alone first: the parts are known, so what was done with them can be told."""
    full, last = reference.gradients, reference.case.pp - 1
    for rank, answer in enumerate(answers):
        place, pieces = reference.places[rank], reference.pieces(rank, full)
        if EMBEDDING not in pieces:
            continue
        got, wanted = answer["gradients"].get(EMBEDDING), pieces[EMBEDDING]
        if is_close(got, wanted):
            continue
        copies = (
            "copies of the embedding, or dp" if reference.dp == 2 else "copies of the embedding"
        )
        error = str(reference.wrong_gradient(rank, EMBEDDING, got, wanted, {copies: 2}))
        # The parts are known, so a ratio that is none says nothing here.
        error = "\n".join(line for line in error.splitlines() if "no common factor" not in line)
        if last == 0:
            raise Wrong(
                f"{error}\nThere is one stage, so both uses of the weight added into one gradient "
                "already; summing again counts something twice."
            )
        # The other copy is on the other end's rank with the same tensor and data coordinates.
        twin = next(
            other
            for other, there in enumerate(reference.places)
            if there == place | {"pp": last - place["pp"]}
        )
        parts = answer["before"], answers[twin]["before"]
        done = _what_was_done(place["pp"], last, got, *parts)
        if is_close(got, 2 * wanted):
            done = _twice(reference.dp)
        raise Wrong(f"{error}\n{done}")


def _what_was_done(stage: int, last: int, got: Any, own_part: Any, other_part: Any) -> str:
    own, other = ("lookup table", "output weights")[:: 1 if stage == 0 else -1]
    there = last - stage
    if is_close(got, own_part):
        return (
            f"Your function left this gradient as it was: it is still only the part as {own}. The "
            f"part as {other} is on stage {there}. Training goes on without an error, and the two "
            "copies of one weight drift apart."
        )
    if is_close(got, (own_part + other_part) / 2):
        return (
            "That is the average of the two parts. Each part is a term of one gradient, not an "
            "estimate of it: the loss depends on the weight in two places, so the terms are added."
        )
    if is_close(got, 2 * own_part):
        return "That is this rank's own part twice: the sum was made with a rank of the same stage."
    return (
        f"Expected is the part as {own} (made here) plus the part as {other} (made on stage "
        f"{there}): one sum over embd_group, in place in main_grad."
    )


def _twice(dp: int) -> str:
    often = "The sum was made twice."
    if dp > 1:
        often = (
            f"Either the sum also ran over the {dp} data-parallel ranks, which hold the same numbers "
            "already; or it was made twice."
        )
    return f"That is the whole gradient, two times. {often} One sum over embd_group is needed."


def _achieved(reference: Reference, gradients: dict[str, torch.Tensor]) -> dict[str, Any]:
    """Counted on rank 0, which holds a copy."""
    if reference.case.pp == 1 or not reference.case.tied:
        return {"copies": 1, "summed": "nothing"}
    return {"copies": 2, "summed": f"{gradients[EMBEDDING].numel() * 8} bytes"}
