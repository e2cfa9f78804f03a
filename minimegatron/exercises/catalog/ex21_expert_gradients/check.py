"""Checks gradients of experts: the mark, the sums and the divisor, the norm, on 4 ranks."""

import random
from collections.abc import Iterator, Sequence
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist

from minimegatron.core import parallel_state
from minimegatron.core.process_groups_config import ProcessGroupCollection
from minimegatron.exercises.bench.feedback import num_of
from minimegatron.exercises.bench.known_mistakes import check_known
from minimegatron.exercises.catalog.ex21_expert_gradients.norms import judge_norms
from minimegatron.exercises.catalog.ex21_expert_gradients.places import WORLD, Places
from minimegatron.exercises.check import Case, Result, Wrong, data_seed

REPLACES = (
    "minimegatron.core.parameter.kind_of",
    "minimegatron.core.parameter_marks.mark_expert_parameters",
)
MARK, GRADIENTS, NORM = "the mark", "the gradients", "the norm"
LAYOUTS = {
    "experts over pairs": {"ep": 2},
    "each expert cut, dense layers whole": {"etp": 2},
    "experts over the tensor pair": {"tp": 2, "ep": 2},
    "experts over pairs, each cut like dense layers": {"tp": 2, "ep": 2, "etp": 2},
    "experts over the context pair": {"cp": 2, "ep": 2},
    "two stages, the first without experts": {"pp": 2, "ep": 2},
}
"""Of `parallel_state.initialize_model_parallel`; etp is 1 where it is not given."""
WITH_NORM = (
    "experts over pairs",
    "experts over the tensor pair",
    "each expert cut, dense layers whole",
    "experts over pairs, each cut like dense layers",
    "two stages, the first without experts",
)
"""Each shows another thing that may be counted twice, or not at all."""


def cases(seed: int) -> list[Case]:
    """Marks of several sizes; then each layout, its gradients and its norm."""
    draw, data = random.Random(seed), data_seed(seed)
    sizes = [(1, 1, 1), (1, 2, 1), (2, 2, 1), (1, 1, 2), (2, 1, 1), (2, 1, 2)]
    sizes.append((draw.choice([2, 4]), draw.choice([2, 8]), draw.choice([1, 2])))
    found = [Case("dense parameters and experts of seven sizes", part=MARK, sizes=sizes)]
    for part, names in ((GRADIENTS, LAYOUTS), (NORM, WITH_NORM)):
        for number, name in enumerate(names):
            layout = LAYOUTS[name]
            values = {"tp": 1, "pp": 1, "cp": 1, "ep": 1, "etp": 1} | layout
            words = ", ".join(f"{key}={size}" for key, size in layout.items())
            found.append(Case(f"{name}: {words}", part=part, seed=data + number, **values))
    return found


def run(student: ModuleType, case: Case) -> Any:
    """One of the parts."""
    if case.part == MARK:
        return _run_mark(student, case)
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=case.tp,
        pipeline_model_parallel_size=case.pp,
        context_parallel_size=case.cp,
        expert_model_parallel_size=case.ep,
        expert_tensor_parallel_size=case.etp,
    )
    groups = ProcessGroupCollection.use_mpu_process_groups()
    rank, places = dist.get_rank(), Places(case)
    # For the norm, gradients that are final; any will do that copies agree on.
    final = case.part == NORM
    gradients = places.one_process(rank) if final else places.left_by_backward(rank)
    params = _params(student, case, places, gradients)
    if final:
        norm = student.get_grad_norm(list(params.values()), groups)
        return {"norm": norm, "unchanged": _unchanged(params, gradients)}
    left, replaced = {name: param.main_grad for name, param in params.items()}, []
    for function in (student.sum_over_tensor_ranks, student.reduce_gradients):
        function(list(params.values()), groups)
        others = [name for name, param in params.items() if not _is_in(left[name], param.main_grad)]
        replaced = replaced or [(function.__name__, name) for name in others]
    found = {name: param.main_grad for name, param in params.items()}
    return {"gradients": found, "replaced": replaced[:1]}


def _is_in(buffer: torch.Tensor, gradient: torch.Tensor) -> bool:
    """Whether a gradient is still where backward has left it."""
    return gradient is buffer or gradient.data_ptr() == buffer.data_ptr()


def _params(
    student: ModuleType, case: Case, places: Places, gradients: dict[str, torch.Tensor]
) -> dict[str, torch.nn.Parameter]:
    """What the rank holds, marked by the student."""
    params = {}
    for name, one in places.held(dist.get_rank()).items():
        param = torch.nn.Parameter(torch.zeros_like(gradients[name]))
        param.main_grad = gradients[name].clone()
        param.tensor_model_parallel = one.is_cut
        student.set_allreduce(param, one.is_expert, case.tp, case.ep, case.etp)
        params[name] = param
    return params


def _unchanged(params: dict[str, torch.nn.Parameter], gradients: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(param.main_grad, gradients[name]) for name, param in params.items())


def judge(case: Case, answers: Sequence[Any]) -> Result | None:
    """Every rank's numbers; the mark is the first rank's."""
    if case.part == MARK:
        return _judge_mark(case, answers[0])
    places = Places(case)
    if case.part == NORM:
        return judge_norms(places, answers)
    for rank, answer in enumerate(answers):
        wanted = places.one_process(rank)
        for index, (name, one) in enumerate(places.held(rank).items()):
            known = _known(places, rank, index, one.is_expert)
            sizes = {"dp": case_dp(places), "cp": case.cp, "e": case.ep, "etp": case.etp}
            found = answer["gradients"][name]
            check_known(f"the gradient of {name}", found, wanted[name], known, rank, sizes)
        for function, name in answer["replaced"]:
            raise Wrong(
                f"rank {rank}: after {function} the main_grad of {name} is another tensor than before\n"
                "Its numbers are right. But it was a piece of a buffer with all gradients, and the "
                "optimizer looks there. What stands in that piece now?"
            )
    d, c = case_dp(places), case.cp
    copies = f"{places.num_copies} rank{'s' * (places.num_copies > 1)}"
    words = f"over d x c = {d} x {c} losses; the same expert on {copies}"
    return Result({"gradients": words})


def case_dp(places: Places) -> int:
    """d."""
    return places.num_losses // places.case.cp


# -- The mark --


def _run_mark(student: ModuleType, case: Case) -> list[list[Any]]:
    found = []
    for sizes in case.sizes:
        of_sizes = []
        for is_expert in (False, True):
            param = torch.nn.Parameter(torch.zeros(1))
            student.set_allreduce(param, is_expert, *sizes)
            mark = getattr(param, "allreduce", None)
            of_sizes.append(mark if type(mark) is bool else repr(mark))
        found.append(of_sizes)
    return found


def _judge_mark(case: Case, found: list[list[Any]]) -> None:
    for (t, e, etp), marks in zip(case.sizes, found, strict=True):
        where = f"t = {t}, e = {e}, etp = {etp}"
        for kind, mark in zip(("a dense parameter", "an expert's parameter"), marks, strict=True):
            if not isinstance(mark, bool):
                raise Wrong(f"{where}: allreduce of {kind} is {mark}; True or False is expected")
        if not marks[0]:
            raise Wrong(
                f"{where}: allreduce of a dense parameter is False\n"
                "Experts have groups of their own; dense parameters keep theirs."
            )
        if marks[1] and (e > 1 or etp != t):
            raise Wrong(
                f"{where}: allreduce of an expert's parameter is True\n{_why_mark(t, e, etp)}"
            )
        if not marks[1] and e == 1 and etp == t:
            raise Wrong(
                f"{where}: allreduce of an expert's parameter is False\nWrite down both columns of "
                "groups for these sizes. Is there a rank that is in the one and not in the other?"
            )


def _why_mark(t: int, e: int, etp: int) -> str:
    if e > 1:
        return f"It would be summed over ranks that hold other experts: {e} ranks divide them."
    cut = "different pieces of the same expert" if etp > 1 else "the whole expert"
    return (
        f"Dense layers are shared by {t} rank{'s' * (t > 1)} here and an expert by {etp}: neighbours "
        f"hold {cut}. So ranks with the same dense weights are not those with the same of an expert. "
        "Which two sizes must be equal for both columns to be the same?"
    )


# -- The gradients --


def _known(
    places: Places, rank: int, index: int, is_expert: bool
) -> Iterator[tuple[torch.Tensor, str]]:
    """What mistakes make of a rank's `index`-th gradient."""
    left = [list(places.left_by_backward(r).values()) for r in range(WORLD)]
    of_tensor = [_tensor_summed(places, r) for r in range(WORLD)]
    found = _known_of_experts if is_expert else _known_of_dense
    for value, words in found(places, rank, index, left, of_tensor):
        if value is not None:
            yield value, words


def _tensor_summed(places: Places, rank: int) -> list[torch.Tensor]:
    """A rank's gradients after the right sums over tensor-parallel ranks."""
    left = [list(places.left_by_backward(r).values()) for r in range(WORLD)]
    return [
        left[rank][i]
        if one.is_cut or one.is_expert
        else places.summed("tp", rank, i, left.__getitem__)
        for i, one in enumerate(places.held(rank).values())
    ]


def _known_of_experts(
    places: Places, rank: int, index: int, left: list, _: list
) -> Iterator[tuple[torch.Tensor | None, str]]:
    copies, losses = places.num_copies, places.num_losses
    right = places.summed("expt_dp", rank, index, left.__getitem__)
    seen = len(places.group("tp_ep", rank))
    yield (
        right / copies,
        f"It was divided by {copies}, the number of ranks that hold this expert. But before that, "
        f"backward had already added up what the tokens of {num_of(seen, 'rank')} contribute, and "
        f"the mean is "
        f"taken of {losses} losses.",
    )
    yield right, f"It was summed, and not divided. The mean of {losses} losses is wanted."
    yield (
        left[rank][index] / losses,
        f"It was divided, but not summed over the {num_of(copies, 'rank')} that hold this expert.",
    )
    yield left[rank][index], "It is what backward has left: neither summed nor divided."
    mixed = places.summed("dp_cp", rank, index, left.__getitem__)
    others = [r for r in places.group("dp_cp", rank) if r != rank]
    holds = (
        f"ranks {', '.join(map(str, others))} hold other experts, or other pieces, at this place"
    )
    words = f"It was summed over groups.dp_cp, as if it were dense: {holds}."
    for value in (mixed, None if mixed is None else mixed / losses):
        yield value, words
    of_tp = places.summed("tp", rank, index, left.__getitem__)
    if of_tp is not None:
        summed = [
            [places.summed("tp", r, i, left.__getitem__) for i in range(len(left[r]))]
            for r in range(WORLD)
        ]
        total = places.summed("expt_dp", rank, index, summed.__getitem__)
        yield (
            total / losses,
            f"It was summed over groups.tp too: rank {_partner(places, rank)} holds another expert at "
            "this place, and the gradients of both are added up. No expert's gradient is a term of a "
            "sum over tensor-parallel ranks.",
        )
    yield from _other_divisors(right, losses)
    everywhere = sum(left[r][index] for r in range(WORLD)) if places.case.pp == 1 else None
    if everywhere is not None:
        yield everywhere / losses, "It was summed over all ranks, and they hold several experts."


def _other_divisors(right: torch.Tensor, losses: int) -> Iterator[tuple[torch.Tensor, str]]:
    """Sums that were divided by another number."""
    for number in (2, 3, 4, 8, 16):
        yield (
            right / number,
            f"It was summed rightly, and divided by {number}. The mean is taken of {losses} losses "
            "here. How many there are depends on the layout: who knows it?",
        )


def _partner(places: Places, rank: int) -> int:
    return next((other for other in places.group("tp", rank) if other != rank), rank)


def _known_of_dense(
    places: Places, rank: int, index: int, left: list, of_tensor: list
) -> Iterator[tuple[torch.Tensor | None, str]]:
    losses, t = places.num_losses, places.case.tp
    right = places.summed("dp_cp", rank, index, of_tensor.__getitem__)
    term = places.summed("dp_cp", rank, index, left.__getitem__)
    yield (
        term / losses,
        f"It is one term of a sum over the {t} tensor-parallel ranks: each has seen its part of the "
        "sequence.",
    )
    yield right, f"It was summed, and not divided. The mean of {losses} losses is wanted."
    if t > 1:
        yield (
            right / losses / t,
            f"It was divided by {losses * t} in all. If there is only one division, how many losses "
            f"are there? If there are two, the sum over the {t} tensor-parallel ranks was made a mean.",
        )
    yield (
        right / case_dp(places),
        f"It was divided by d = {case_dp(places)}. Context-parallel ranks have losses too: there are "
        f"{losses}.",
    )
    yield of_tensor[rank][index] / losses, "It was divided, but not summed over groups.dp_cp."
    yield of_tensor[rank][index], "It is this rank's own: neither summed over replicas nor divided."
    yield from _other_divisors(right, losses)
    few = places.summed("expt_dp", rank, index, of_tensor.__getitem__)
    yield few / losses, "It was summed over groups.expt_dp, as if it were an expert's."
    summed = [
        [places.summed("tp", r, i, left.__getitem__) for i in range(len(left[r]))]
        for r in range(WORLD)
    ]
    if all(one is not None for one in (summed[r][index] for r in range(WORLD))):
        total = places.summed("dp_cp", rank, index, summed.__getitem__)
        yield (
            total / losses,
            f"It was summed over the {t} tensor-parallel ranks, which hold pieces of it: pieces are "
            "not terms of a sum.",
        )
