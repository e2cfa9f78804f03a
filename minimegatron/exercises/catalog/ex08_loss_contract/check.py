"""Checks every row of the contract, then a GPT's gradients with uneven numbers of tokens."""

import random
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import torch

from minimegatron.exercises.bench_gpt import (
    TOLERANCE,
    GptStep,
    StepCase,
    on_these_ranks,
    one_process,
)
from minimegatron.exercises.check import (
    Case,
    Result,
    Wrong,
    check_numbers,
    installed,
    wrong_numbers,
)

CALC_LOSS = "minimegatron.core.pipeline_parallel.steps.forward_step_calc_loss"
DIVIDE = "minimegatron.core.distributed.finalize_model_grads._divide_by_num_tokens"
MASKED = 1
"""Of the global batch's microbatches, the one without a token that counts."""


def cases(seed: int) -> list[Case]:
    """The table, then GPT steps: both options, with stages and without, odd M, M = 1."""
    draw = random.Random(seed)
    table = Case("the table, row by row", M=draw.choice([5, 7]), c=draw.choice([2, 4]), seed=seed)
    M = draw.choice([2, 3, 4])
    steps = [(2, M, False), (2, M, True), (1, draw.choice([2, 3]), True), (1, 1, False)]
    return [table] + [
        Case(
            f"GPT, pp={p}, dp={4 // p}, M={M}, calculate_per_token_loss {'on' if on else 'off'}",
            p=p,
            M=M,
            per_token=on,
            seed=seed,
        )
        for p, M, on in steps
    ]


def run(student: ModuleType, case: Case) -> Result:
    """The rows, or one step."""
    if "table" in case.name:
        check_table(student, case)
        return Result()
    return run_step(student, case)


# -- The table --


def _call(student: ModuleType, returned: Callable, case: Case, **changes: Any) -> tuple:
    """(loss, number of tokens, store) of one call on the last stage, unless `changes` say otherwise."""
    store: list = []
    arguments: dict[str, Any] = {
        "model": None,
        "output_tensor": torch.ones((), dtype=torch.float64),
        "loss_func": returned,
        "vp_stage": None,
        "collect_non_loss_data": False,
        "num_microbatches": case.M,
        "forward_data_store": store,
        "cp_group_size": 1,
        "is_last_stage": True,
    }
    per_token = changes.pop("per_token", False)
    config = SimpleNamespace(
        calculate_per_token_loss=per_token, aux_loss_scale_funcs=(), grad_scale_func=None
    )
    found = student.forward_step_calc_loss(**(arguments | changes), config=config)
    if not isinstance(found, tuple) or len(found) != 2:
        raise Wrong(
            f"forward_step_calc_loss returned {type(found).__name__}; two values are expected: the "
            "loss, and the number of tokens"
        )
    return *found, store


def check_table(student: ModuleType, case: Case) -> None:
    """Each row, each exception."""
    total, n = 10.0 + case.seed % 5, 3

    def three(output: torch.Tensor) -> tuple:
        loss = output * total
        return loss, torch.tensor(n, dtype=torch.int), {"loss": loss.detach()}

    def two(output: torch.Tensor) -> tuple:
        loss = output * total
        return loss, {"loss": loss.detach()}

    rows = [
        ("(sum, n, report), option off: sum / n / M", three, {}, total / n / case.M, n),
        ("(sum, n, report), option on: sum", three, {"per_token": True}, total, n),
        ("(mean, report), c = 1: mean / M", two, {}, total / case.M, 0),
        (
            f"(mean, report), c = {case.c}: mean * c / M",
            two,
            {"cp_group_size": case.c},
            total * case.c / case.M,
            0,
        ),
        (
            "(mean, report), cp_group_size None: mean / M",
            two,
            {"cp_group_size": None},
            total / case.M,
            0,
        ),
    ]
    for words, function, changes, expected, tokens in rows:
        loss, found, store = _call(student, function, case, **changes)
        where = f"M = {case.M}, n = {n}, row {words}"
        if changes.get("per_token") and float(loss) == total / n / case.M:
            raise Wrong(
                f"loss ({where}) is {float(loss):g}, expected {expected:g}: it was divided as with "
                "the option off\nWith calculate_per_token_loss the sums stay sums. They are divided "
                "once, after the last backward, by the tokens of the whole global batch."
            )
        c = changes.get("cp_group_size") or 1
        sizes = {"num_microbatches": case.M, "cp": c, "tokens": n}
        check_numbers(f"loss ({where})", loss, expected, None, sizes)
        check_numbers(f"number of tokens ({where})", found, tokens, None)
        _check_report(where, store, total)
    _check_masked(student, case)
    _check_no_loss(student, case)


def _check_report(where: str, store: list, total: float) -> None:
    if len(store) != 1:
        raise Wrong(f"forward_data_store got {len(store)} reports for one microbatch ({where})")
    found = store[0].get("loss") if isinstance(store[0], dict) else None
    if found is None:
        raise Wrong(f"forward_data_store got {store[0]!r}, not the report ({where})")
    if float(found) != total:
        raise Wrong(
            f"the report changed: it said {total:g}, and says {float(found):g} afterwards ({where})\n"
            "It was made with loss.detach(), which shares the memory of the loss. Dividing in place "
            "(/=, div_) changes both: make a new tensor, loss = loss / ..."
        )


def _check_masked(student: ModuleType, case: Case) -> None:
    def masked(output: torch.Tensor) -> tuple:
        return output * 0.0, torch.tensor(0, dtype=torch.int), {"loss": 0.0}

    loss = _call(student, masked, case)[0]
    if not torch.isfinite(torch.as_tensor(loss)).all():
        raise Wrong(
            f"the loss of a microbatch whose tokens are all masked is {float(loss)}: 0 / 0\nOne such "
            "microbatch makes every gradient of the step nan. Divide by at least 1: the sum is 0."
        )
    check_numbers("the loss of a microbatch without tokens", loss, 0.0)


def _check_no_loss(student: ModuleType, case: Case) -> None:
    def forbidden(output: torch.Tensor, non_loss_data: bool = False) -> Any:
        if not non_loss_data:
            raise Wrong(
                "the loss function was called where there is no loss: only the last stage has one, "
                "and with collect_non_loss_data it is called with non_loss_data=True"
            )
        return "anything"

    output = torch.full((2,), 5.0, dtype=torch.float64)
    changes = {"output_tensor": output, "is_last_stage": False}
    found, tokens, store = _call(student, forbidden, case, **changes)
    check_numbers("the output of a stage that is not the last", found, output.clone())
    check_numbers("number of tokens of a stage that is not the last", tokens, 0)
    if store:
        raise Wrong("a stage that is not the last put something into forward_data_store")
    found, _, store = _call(
        student, forbidden, case, output_tensor=output, collect_non_loss_data=True
    )
    check_numbers("the output with collect_non_loss_data", found, output.clone())
    if store != ["anything"]:
        raise Wrong(
            f"with collect_non_loss_data, forward_data_store is {store!r}; what "
            "loss_func(output_tensor, non_loss_data=True) returned is expected there"
        )


# -- A training step --


def run_step(student: ModuleType, case: Case) -> Result:
    """A GPT whose microbatches have unequal numbers of tokens, one of them none."""
    step_case = StepCase(
        pp=case.p, num_microbatches=case.M, num_layers=2, per_token=case.per_token, seed=case.seed
    )
    step = on_these_ranks(step_case)
    dp = step.groups.dp.size()
    serial = one_process(step_case, dp)
    serial.data[MASKED]["mask"].zero_()
    if step.groups.dp.rank() == MASKED % dp:
        step.data[MASKED // dp]["mask"].zero_()
    with (
        installed(student.forward_step_calc_loss, CALC_LOSS),
        installed(student._divide_by_num_tokens, DIVIDE),
    ):
        step.forward_backward()
    serial.forward_backward()
    expected = serial.gradients()
    mine, everyones = count_tokens(step.data), count_tokens(serial.data)
    for name, param in step.parameters():
        wanted = step.mine(expected[name], param)
        if not torch.allclose(param.main_grad, wanted, rtol=TOLERANCE, atol=TOLERANCE):
            raise wrong_gradient(step, name, param.main_grad, wanted, mine, everyones)
    counts = [int(batch["mask"].sum()) for batch in serial.data]
    how = f"the mean over {everyones} tokens" if case.per_token else "a mean of means"
    return Result({"tokens": f"{counts} in the global batch's microbatches; gradients of {how}"})


def count_tokens(data: list[dict[str, torch.Tensor]]) -> int:
    """Unmasked tokens of all the microbatches."""
    return sum(int(batch["mask"].sum()) for batch in data)


def wrong_gradient(
    step: GptStep, name: str, got: torch.Tensor, wanted: torch.Tensor, mine: int, everyones: int
) -> Wrong:
    """Names the factor, if there is one."""
    shown = wrong_numbers(f"gradient of {name}", got, wanted, step.place(), step.sizes())
    large = wanted.abs() > 1e-6 * wanted.abs().max()
    ratios = got[large] / wanted[large]
    M, dp = step.case.num_microbatches, step.groups.dp.size()
    guesses = [
        (
            everyones,
            f"x {everyones}, the tokens of the global batch: on this stage nothing was divided by "
            "them. Only the last stage has counted; the others have 0 and must be told.",
        ),
        (
            everyones / max(mine, 1),
            f"x {everyones} / {mine}: divided by the {mine} tokens of this replica, but gradients "
            f"were summed over {dp} replicas, which have {everyones}. Sum the numbers too.",
        ),
        (
            1 / M,
            f"1 / M (1/{M}): with the option on, sums are divided once, by all tokens, at the end; "
            "do not divide by the number of microbatches as well.",
        ),
        (
            1 / case_stages(step),
            f"1 / pp: the tokens were added up over the {case_stages(step)} stages, but they are "
            "the same tokens: only the last stage's number counts.",
        ),
    ]
    if step.case.per_token and torch.isfinite(ratios).all():
        for factor, words in guesses:
            if factor != 1 and torch.allclose(ratios, torch.full_like(ratios, factor), rtol=1e-5):
                first = str(shown).splitlines()[0]
                return Wrong(f"{first}\nratio got / expected = {words}")
    return shown


def case_stages(step: GptStep) -> int:
    """p."""
    return step.groups.pp.size()
