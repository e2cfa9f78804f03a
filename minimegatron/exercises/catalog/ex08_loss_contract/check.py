"""Checks every row of the contract, then a GPT's gradients with uneven numbers of tokens."""

import random
from collections.abc import Callable, Sequence
from types import ModuleType, SimpleNamespace
from typing import Any

import torch

from minimegatron.exercises.bench_gpt import StepCase, on_these_ranks
from minimegatron.exercises.bench_gpt_judge import Reference, is_close
from minimegatron.exercises.check import Case, Result, Wrong, data_seed, installed
from minimegatron.exercises.feedback_numbers import check_numbers

CALC_LOSS = "minimegatron.core.pipeline_parallel.steps.forward_step_calc_loss"
DIVIDE = "minimegatron.core.distributed.finalize_model_grads._divide_by_num_tokens"
REPLACES = (CALC_LOSS, DIVIDE)
TABLE, STEP = "the table, row by row", "a training step"
NUM_TOKENS = 3
MASKED = 1
"""Of the global batch's microbatches, the one without a token that counts."""
WORLD = 4


def cases(seed: int) -> list[Case]:
    """The table, then GPT steps: both options, with stages and without, odd M, M = 1."""
    draw, data = random.Random(seed), data_seed(seed)
    M, c = draw.choice([5, 7]), draw.choice([2, 4])
    found = [Case(TABLE, part=TABLE, M=M, c=c, total=10.0 + data % 5)]
    some, few = draw.choice([2, 3, 4]), draw.choice([2, 3])
    for p, M, on in [(2, some, False), (2, some, True), (1, few, True), (1, 1, False)]:
        step = StepCase(pp=p, num_microbatches=M, num_layers=2, per_token=on, seed=data).values
        words = f"GPT, pp={p}, dp={4 // p}, M={M}, calculate_per_token_loss {'on' if on else 'off'}"
        found.append(Case(words, part=STEP, step=step))
    return found


def run(student: ModuleType, case: Case) -> Any:
    """What each row gives, or one step."""
    if case.part == TABLE:
        rows = [
            _call(student, _three_or_two(row, case), case, **row.changes) for row in _rows(case)
        ]
        return {"rows": rows, **_run_exceptions(student, case)}
    step = on_these_ranks(case.step)
    if step.groups.dp.rank() == MASKED % step.groups.dp.size():
        step.data[MASKED // step.groups.dp.size()]["mask"].zero_()
    with (
        installed(student.forward_step_calc_loss, CALC_LOSS),
        installed(_watched(student._divide_by_num_tokens), DIVIDE),
    ):
        step.forward_backward()
    return step.gradients()


def _watched(divide: Callable) -> Callable:
    """`divide`, which must leave the number of tokens as it is."""

    def watched(model: Any, num_tokens: torch.Tensor, *groups: Any) -> None:
        before = num_tokens.clone()
        divide(model, num_tokens, *groups)
        if not torch.equal(before, num_tokens):
            raise Wrong(
                f"rank {torch.distributed.get_rank()}: _divide_by_num_tokens changed num_tokens "
                f"from {before.tolist()} to {num_tokens.tolist()}\nIt is the caller's: the tokens of "
                "this replica, which are logged afterwards. broadcast and all_reduce work in place: "
                "use a .clone()."
            )

    return watched


def judge(case: Case, answers: Sequence[Any]) -> Result | None:
    """Each row, or every gradient."""
    if case.part == STEP:
        return _judge_step(case, answers)
    for row, (loss, tokens, store) in zip(_rows(case), answers[0]["rows"], strict=True):
        _judge_row(case, row, loss, tokens, store)
    _judge_exceptions(answers[0])
    return None


# -- The table --


class Row:
    """One row: what the loss function returns, under which options, and what comes of it."""

    def __init__(
        self, words: str, returns_tokens: bool, expected: float, tokens: int, **changes: Any
    ):
        self.words, self.returns_tokens = words, returns_tokens
        self.expected, self.tokens, self.changes = expected, tokens, changes


def _rows(case: Case) -> list[Row]:
    total, n, M, c = case.total, NUM_TOKENS, case.M, case.c
    return [
        Row("(sum, n, report), option off: sum / n / M", True, total / n / M, n),
        Row("(sum, n, report), option on: sum", True, total, n, per_token=True),
        Row("(mean, report), c = 1: mean / M", False, total / M, 0),
        Row(f"(mean, report), c = {c}: mean * c / M", False, total * c / M, 0, cp_group_size=c),
        Row(
            "(mean, report), cp_group_size None: mean / M", False, total / M, 0, cp_group_size=None
        ),
    ]


def _three_or_two(row: Row, case: Case) -> Callable:
    def three(output: torch.Tensor) -> tuple:
        loss = output * case.total
        return loss, torch.tensor(NUM_TOKENS, dtype=torch.int), {"loss": loss.detach()}

    def two(output: torch.Tensor) -> tuple:
        loss = output * case.total
        return loss, {"loss": loss.detach()}

    return three if row.returns_tokens else two


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


def _run_exceptions(student: ModuleType, case: Case) -> dict[str, Any]:
    """A microbatch without tokens, a stage without a loss, data that is no loss."""

    def masked(output: torch.Tensor) -> tuple:
        return output * 0.0, torch.tensor(0, dtype=torch.int), {"loss": 0.0}

    def forbidden(output: torch.Tensor, non_loss_data: bool = False) -> Any:
        if not non_loss_data:
            raise Wrong(
                "the loss function was called where there is no loss: only the last stage has one, "
                "and with collect_non_loss_data it is called with non_loss_data=True"
            )
        return "anything"

    output = torch.full((2,), 5.0, dtype=torch.float64)
    elsewhere = {"output_tensor": output, "is_last_stage": False}
    other = {"output_tensor": output, "collect_non_loss_data": True}
    return {
        "masked": _call(student, masked, case)[0],
        "no loss": _call(student, forbidden, case, **elsewhere),
        "other data": _call(student, forbidden, case, **other),
    }


# -- The table, judged --


def _judge_row(case: Case, row: Row, loss: Any, tokens: Any, store: list) -> None:
    where = f"M = {case.M}, n = {NUM_TOKENS}, row {row.words}"
    per_token = row.changes.get("per_token", False)
    if per_token and _number(loss) == case.total / NUM_TOKENS / case.M:
        raise Wrong(
            f"loss ({where}) is {_number(loss):g}, expected {row.expected:g}: it was divided as with "
            "the option off\nWith calculate_per_token_loss the sums stay sums. They are divided "
            "once, after the last backward, by the tokens of the whole global batch."
        )
    sizes = {"num_microbatches": case.M, "cp": row.changes.get("cp_group_size") or 1}
    check_numbers(f"loss ({where})", loss, row.expected, None, sizes | {"tokens": NUM_TOKENS})
    check_numbers(f"number of tokens ({where})", tokens, row.tokens, None)
    if len(store) != 1:
        raise Wrong(f"forward_data_store got {len(store)} reports for one microbatch ({where})")
    found = store[0].get("loss") if isinstance(store[0], dict) else None
    if found is None:
        raise Wrong(f"forward_data_store got {store[0]!r}, not the report ({where})")
    if _number(found) != case.total:
        raise Wrong(
            f"the report changed: it said {case.total:g}, and says {_number(found):g} afterwards "
            f"({where})\n"
            "It was made with loss.detach(), which shares the memory of the loss. Dividing in place "
            "(/=, div_) changes both: make a new tensor, loss = loss / ..."
        )


def _number(value: Any) -> float:
    return float(value) if isinstance(value, int | float | torch.Tensor) else float("nan")


def _judge_exceptions(found: dict[str, Any]) -> None:
    loss = found["masked"]
    if not torch.isfinite(torch.as_tensor(loss)).all():
        raise Wrong(
            f"the loss of a microbatch whose tokens are all masked is {float(loss)}: 0 / 0\nOne such "
            "microbatch makes every gradient of the step nan. Divide by at least 1: the sum is 0."
        )
    check_numbers("the loss of a microbatch without tokens", loss, 0.0)
    output = torch.full((2,), 5.0, dtype=torch.float64)
    got, tokens, store = found["no loss"]
    check_numbers("the output of a stage that is not the last", got, output)
    check_numbers("number of tokens of a stage that is not the last", tokens, 0)
    if store:
        raise Wrong("a stage that is not the last put something into forward_data_store")
    got, _, store = found["other data"]
    check_numbers("the output with collect_non_loss_data", got, output)
    if store != ["anything"]:
        raise Wrong(
            f"with collect_non_loss_data, forward_data_store is {store!r}; what "
            "loss_func(output_tensor, non_loss_data=True) returned is expected there"
        )


# -- A training step, judged --


def _judge_step(case: Case, answers: Sequence[Any]) -> Result:
    """A GPT whose microbatches have unequal numbers of tokens, one of them none."""
    reference = Reference(case.step, WORLD)
    reference.step.data[MASKED]["mask"].zero_()
    reference.run()
    full, counts = reference.gradients, [int(b["mask"].sum()) for b in reference.step.data]
    for rank, found in enumerate(answers):
        mine = sum(counts[reference.places[rank]["dp"] :: reference.dp])
        for name, wanted in reference.pieces(rank, full).items():
            if not is_close(found.get(name), wanted):
                got = found.get(name)
                raise _wrong_gradient(reference, rank, name, got, wanted, (mine, sum(counts)))
    how = f"the mean over {sum(counts)} tokens" if case.step["per_token"] else "a mean of means"
    return Result({"tokens": f"{counts} in the global batch's microbatches; gradients of {how}"})


def _wrong_gradient(
    reference: Reference,
    rank: int,
    name: str,
    got: Any,
    wanted: torch.Tensor,
    tokens: tuple[int, int],
) -> Wrong:
    """Names the factor, if there is one."""
    shown = reference.wrong_gradient(rank, name, got, wanted)
    if not reference.case.per_token or getattr(got, "shape", None) != wanted.shape:
        return shown
    large = wanted.abs() > 1e-6 * wanted.abs().max()
    ratios = got[large] / wanted[large]
    (mine, everyones), M, p = tokens, reference.case.num_microbatches, reference.case.pp
    guesses = [
        (
            everyones,
            f"x {everyones}, the tokens of the global batch: on this stage nothing was divided by "
            "them. Only the last stage has counted; the others have 0 and must be told.",
        ),
        (
            everyones / max(mine, 1),
            f"x {everyones} / {mine}: divided by the {mine} tokens of this replica, but gradients "
            f"were summed over {reference.dp} replicas, which have {everyones}. Sum the numbers too.",
        ),
        (
            1 / M,
            f"1 / M (1/{M}): with the option on, sums are divided once, by all tokens, at the end; "
            "do not divide by the number of microbatches as well.",
        ),
        (
            1 / p,
            f"1 / pp: the tokens were added up over the {p} stages, but they are "
            "the same tokens: only the last stage's number counts.",
        ),
    ]
    for factor, words in guesses:
        if factor != 1 and torch.allclose(ratios, torch.full_like(ratios, factor), rtol=1e-5):
            first = str(shown).splitlines()[0]
            return Wrong(f"{first}\nratio got / expected = {words}")
    return shown
