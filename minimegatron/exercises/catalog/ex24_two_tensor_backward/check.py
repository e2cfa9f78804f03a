"""Checks the hand-over, what is freed, the backward of each kind of stage, then whole pipelines."""

import gc
import random
import weakref
from collections.abc import Sequence
from types import ModuleType
from typing import Any

import torch

from minimegatron.exercises.bench.feedback import num_of
from minimegatron.exercises.bench.feedback_numbers import check_numbers
from minimegatron.exercises.bench.known_mistakes import check_known
from minimegatron.exercises.bench.step_case import StepCase
from minimegatron.exercises.catalog.ex24_two_tensor_backward.calls import Student
from minimegatron.exercises.catalog.ex24_two_tensor_backward.data import (
    BLIND,
    DECODER,
    ENCODED,
    ENCODER,
    EVEN,
    FIRST,
    FIRST_DECODER,
    GRADIENT_OF,
    KINDS,
    LAST,
    ONLY_DECODER,
    Kind,
    Layers,
    given_grads,
    given_inputs,
    given_own,
    given_weights,
)
from minimegatron.exercises.catalog.ex24_two_tensor_backward.truth import RightStage
from minimegatron.exercises.catalog.ex24_two_tensor_backward.whole import (
    judge_t5,
    judge_whole,
    run_t5,
    run_whole,
)
from minimegatron.exercises.check import Case, Result, Wrong, data_seed

_STEPS = "minimegatron.core.pipeline_parallel.steps."
REPLACES = (
    *(_STEPS + name for name in ("all_outputs", "ModelChunk.free_output", "backward_step")),
    "minimegatron.core.pipeline_parallel.user_results.add_gradient",
)
ONE_NUMBER = 8
"""Bytes that a freed tensor may have."""
HAND_OVER, FREEING, BACKWARD = "the hand-over", "freeing", "backward"
WHOLE, T5 = "a pipeline", "a T5"
RUN_ON_RANKS, JUDGED_ON_RANKS = {WHOLE: run_whole, T5: run_t5}, {WHOLE: judge_whole, T5: judge_t5}
SOME = (FIRST, ENCODER, DECODER, FIRST_DECODER, LAST)
OTHERS = (FIRST, ENCODER, FIRST_DECODER, LAST, ONLY_DECODER)


def cases(seed: int) -> list[Case]:
    """Every kind of stage alone, part by part; then the whole pipeline on three ranks."""
    numbers, data = random.Random(seed), data_seed(seed)
    M, longer = numbers.choice([3, 4]), numbers.choice([4, 5])
    found = [
        _stages("what each kind of stage sends", HAND_OVER, SOME, 1, data),
        _stages("what each kind of stage frees", FREEING, SOME, 1, data),
        _stages(f"{DECODER.name}, M={M}", BACKWARD, (DECODER,), M, data + 1),
        _stages("other kinds of stages, M=2", BACKWARD, OTHERS, 2, data + 1),
        _stages(f"{EVEN.name}, M=2", BACKWARD, (EVEN,), 2, data + 1),
        _stages(f"{BLIND.name}, M=1", BACKWARD, (BLIND,), 1, data + 1),
    ]
    for split, num in ((1, longer), (2, 2)):
        name = f"{split} encoder stage{'s' * (split > 1)} of 3, M={num}"
        found.append(Case(name, part=WHOLE, split=split, M=num, seed=data + 2))
    step = StepCase(family="t5", pp=3, split=1, num_layers=2, num_microbatches=4, seed=data)
    return [*found, Case("a T5, 1 encoder stage of 3, M=4", part=T5, step=step.values)]


def _stages(name: str, part: str, kinds: tuple[Kind, ...], M: int, seed: int) -> Case:
    return Case(name, part=part, kinds=[kind.name for kind in kinds], M=M, seed=seed)


def run(student: ModuleType, case: Case) -> Any:
    """One of the parts."""
    if case.part in RUN_ON_RANKS:
        return RUN_ON_RANKS[case.part](student, case)
    runs = {HAND_OVER: _run_hand_over, FREEING: _run_freeing, BACKWARD: _run_backward}
    return [runs[case.part](Student(student, KINDS[name]), case) for name in case.kinds]


def judge(case: Case, answers: Sequence[Any]) -> Result | None:
    """One stage alone gives the same on every rank, unless chance is in it."""
    if case.part in JUDGED_ON_RANKS:
        return JUDGED_ON_RANKS[case.part](case, answers)
    judges = {HAND_OVER: _judge_hand_over, FREEING: _judge_freeing, BACKWARD: _judge_backward}
    for answer in answers:
        for name, one in zip(case.kinds, answer, strict=True):
            judges[case.part](case, KINDS[name], one)
    return Result(_achieved(case, answers[0]))


def _achieved(case: Case, answer: list[dict[str, Any]]) -> dict[str, str]:
    if case.part == HAND_OVER:
        numbers = ", ".join(str(len(one["sent"])) for one in answer[:-1])
        return {"tensors sent": numbers}
    if case.part == FREEING:
        freed = [one["before"] - one["after"] for one in answer]
        return {"bytes freed": ", ".join(str(one) for one in freed)}
    numbers = ", ".join(str(sum(x is not None for x in one["inputs"][0])) for one in answer)
    return {"gradients sent back": numbers}


class _Forward:
    """One microbatch's forward: what came in, and what goes out."""

    def __init__(self, caller: Student, case: Case, layers: Layers, microbatch: int):
        kind = caller.kind
        given = given_inputs(case.seed, kind, microbatch)
        self.inputs = [tensor.requires_grad_() for tensor in given] or [None]
        self.output = layers(self.inputs, *given_own(case.seed, kind, microbatch))
        self.outputs = caller.hand_over(self.inputs, self.output)


# -- The hand-over --


def _run_hand_over(caller: Student, case: Case) -> dict[str, Any]:
    one = _Forward(caller, case, Layers(caller.kind, given_weights(case.seed)), 0)
    return {
        "output": one.output.detach().clone(),
        "sent": [tensor.detach().clone() for tensor in one.outputs],
        "is_in_graph": [tensor.requires_grad for tensor in one.outputs],
    }


def _judge_hand_over(case: Case, kind: Kind, answer: dict[str, Any]) -> None:
    sent, inputs = answer["sent"], given_inputs(case.seed, kind, 0)
    right = [answer["output"], *(inputs[-1:] if ENCODED in kind.output_words else [])]
    if len(sent) != len(right):
        raise Wrong(_number_words(kind, len(sent)))
    if len(right) == 2 and _is(sent[0], right[1]) and _is(sent[1], right[0]):
        raise Wrong(
            f"{kind.name}: hand_over sends the encoder's output first\nThe next stage takes [hidden, "
            "e]: what the layers have made comes first."
        )
    known = [(answer["output"], "That is this stage's output once more.")]
    known += [
        (tensor, f"That is what came in as {word}; the encoder's output is the last of inputs.")
        for tensor, word in zip(inputs, kind.input_words, strict=True)
    ]
    for number, (found, wanted) in enumerate(zip(sent, right, strict=True)):
        _judge_sent(f"{kind.name}: tensor {number} of hand_over", found, wanted, known)
    if not answer["is_in_graph"][0]:
        raise Wrong(
            f"{kind.name}: the output that hand_over returns was detached\nA message needs numbers "
            "only, but backward begins at this very tensor."
        )


def _judge_sent(what: str, found: torch.Tensor, wanted: torch.Tensor, known: list) -> None:
    for tensor, words in known:
        if _is(found, tensor) and not _is(tensor, wanted):
            raise Wrong(f"{what} is not the one that is expected\n{words}")
    check_numbers(what, found, wanted)


def _number_words(kind: Kind, num: int) -> str:
    wanted = len(kind.output_words)
    words = f"{kind.name}: hand_over returned {num} tensor{'s' * (num != 1)}, not {wanted}"
    if kind.is_last:
        return f"{words}\nNobody stands after the last stage: the loss is all there is."
    if not kind.is_decoder:
        return (
            f"{words}\nThe encoder is still at work: what one of its stages makes is all that the next "
            "one needs."
        )
    return (
        f"{words}\nThe next decoder stage looks at the encoder's output, too, and gets messages from "
        "this stage only. So this stage must send it on."
    )


def _is(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.shape == other.shape and torch.equal(one, other)


# -- Freeing --


def _run_freeing(caller: Student, case: Case) -> dict[str, Any]:
    one = _Forward(caller, case, Layers(caller.kind, given_weights(case.seed)), 0)
    storage = one.output.untyped_storage()
    num_bytes = storage.nbytes()
    caller.free_outputs(one.outputs)
    encoded = one.inputs[-1]
    return {
        "before": num_bytes,
        "after": one.outputs[0].untyped_storage().nbytes(),
        # Of the same memory, as autograd sees it.
        "saved": storage.nbytes(),
        "encoded": None if encoded is None else encoded.detach().clone(),
    }


def _judge_freeing(case: Case, kind: Kind, answer: dict[str, Any]) -> None:
    before, after = answer["before"], answer["after"]
    if kind.is_decoder and not _is(answer["encoded"], given_inputs(case.seed, kind, 0)[-1]):
        raise Wrong(
            f"{kind.name}: free_outputs freed the encoder's output\nIt was sent, but it is also an "
            "input of this stage: the backward of its cross attention needs the numbers. Only what the "
            "layers of this stage have made may go."
        )
    if kind.is_last and after != before:
        raise Wrong(
            f"{kind.name}: free_outputs freed the loss\nIt is never sent, and the log still shows it."
        )
    if answer["saved"] < before:
        raise Wrong(
            f"{kind.name}: after free_outputs the storage of the output has {answer['saved']} of "
            f"{before} bytes\nWhat the layers have saved for backward lies in that storage, too: it "
            "would read memory that is gone, and the process would die (SIGSEGV). Leave the storage to "
            "those who hold it; only this tensor must let go of it."
        )
    if not kind.is_last and after > ONE_NUMBER:
        kept = "its memory" if after >= before else "a part of its memory"
        raise Wrong(
            f"{kind.name}: after free_outputs the output still has {kept}, {after} bytes of "
            f"{before}\nIt was sent, and this stage needs the numbers no more: the layers have saved "
            "on their own what backward needs. Which function of the imports lets a tensor's memory "
            "go, and with which option?"
        )


# -- Backward --


def _order(M: int) -> list[tuple[str, int]]:
    """Two forwards, then a backward and a forward in turn, as 1F1B has it."""
    forwards = [("F", i) for i in range(M)]
    order = forwards[:2]
    for i in range(M):
        order += [("B", i), *forwards[i + 2 : i + 3]]
    return order


def _run_backward(caller: Student, case: Case) -> dict[str, Any]:
    kind, layers = caller.kind, Layers(caller.kind, given_weights(case.seed))
    in_flight: dict[int, _Forward] = {}
    sent: list[list[torch.Tensor | None]] = []
    as_sent: list[list[torch.Tensor | None]] = []
    for work, i in _order(case.M):
        if work == "F":
            in_flight[i] = _Forward(caller, case, layers, i)
            caller.free_outputs(in_flight[i].outputs)
            continue
        one = in_flight.pop(i)
        grads = given_grads(case.seed, kind, i)
        tensors = [*one.inputs, *one.outputs, *(grads or [])]
        seen = [weakref.ref(tensor) for tensor in tensors if tensor is not None]
        sent.append(caller.backward_step(one.inputs, one.outputs, grads))
        del one, grads, tensors
        _judge_kept(kind, i, seen, sent[-1])
        _judge_under_way(kind, sent, as_sent)
        as_sent.append([None if x is None else x.detach().clone() for x in sent[-1]])
    weights = {name: x.grad for name, x in layers.weights.items()}
    return {"inputs": as_sent, "weights": weights}


def _judge_kept(kind: Kind, i: int, seen: list[weakref.ref], sent: list) -> None:
    """Nobody may hold a microbatch's tensors after its backward, but those that are sent."""

    def held() -> int:
        alive = [tensor for one in seen if (tensor := one()) is not None]
        return sum(all(tensor is not other for other in sent) for tensor in alive)

    if held() and gc.collect() >= 0 and held():
        raise Wrong(
            f"{kind.name}: after the backward of microbatch {i} somebody still holds "
            f"{num_of(held(), 'tensor')} of its forward and of what came from the next stage\n"
            "A step has many microbatches, and their memory must not add up. What in your file "
            "outlives a call?"
        )


def _judge_under_way(kind: Kind, sent: list[list], as_sent: list[list]) -> None:
    """What earlier backwards have returned may still be on its way to the stage before."""
    for i, (now, then) in enumerate(zip(sent, as_sent, strict=False)):
        for place, (one, other) in enumerate(zip(now, then, strict=True)):
            if one is not None and not _is(one.detach(), other):
                raise Wrong(
                    f"{kind.name}: the gradient of input {place} that was returned for microbatch {i} "
                    "was changed by the next backward\nIt may still be on its way to the stage before. "
                    "Every microbatch needs a tensor of its own."
                )


def _judge_backward(case: Case, kind: Kind, answer: dict[str, Any]) -> None:
    right = RightStage(case, kind)
    for i, found in enumerate(answer["inputs"]):
        wanted = right.input_grads(i)
        for place, word in enumerate(kind.input_words):
            what = f"{kind.name}, microbatch {i}: {GRADIENT_OF[word]} (input {place})"
            check_known(what, found[place], wanted[place], right.known_inputs(i, place))
    for name, found in answer["weights"].items():
        wanted = right.weight_grad(name)
        if found is None and wanted.any():
            raise Wrong(
                f"{kind.name}: after backward its weights have no gradient\nThe stage learns from "
                "them. Backward was asked for gradients of inputs only: let it go to all leaves."
            )
        if found is not None:
            after = num_of(case.M, "microbatch", "microbatches")
            what = f"{kind.name}: the gradient of weight {name}, after {after}"
            check_known(what, found, wanted, right.known_weights(name))
