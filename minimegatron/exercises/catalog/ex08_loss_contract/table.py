"""The contract's table, row by row: what the student's function makes of each kind of loss function.

Megatron has no counterpart.
"""

import math
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import torch

from minimegatron.exercises.bench.feedback import num_of
from minimegatron.exercises.bench.feedback_numbers import check_numbers
from minimegatron.exercises.check import Case, Wrong

NUM_TOKENS = 3
MASKED, ELSEWHERE = "a microbatch without tokens", "a stage that is not the last"
OTHER = "with collect_non_loss_data"
OTHER_STAGES = {
    ELSEWHERE: {},
    f"{ELSEWHERE}, is_last_stage None": {"is_last_stage": None},
    f"{ELSEWHERE}, {OTHER}": {"collect_non_loss_data": True},
}
OWN_WORDS = {"guessed": 2}
"""What a report says besides the loss: the loss function's own matter."""


def run_table(student: ModuleType, case: Case) -> dict[str, Any]:
    """What each row gives, and what the cases outside the table give."""
    rows = [
        _call(student, _three_or_two(row, case), case, f"row {row.words}", **row.changes)
        for row in _rows(case)
    ]
    return {"rows": rows, **_run_exceptions(student, case)}


def judge_table(case: Case, found: dict[str, Any]) -> None:
    """Each row, then the rest."""
    for row, one in zip(_rows(case), found["rows"], strict=True):
        _judge_row(case, row, one)
    _judge_exceptions(found)


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
        Row(
            f"(sum, n, report), option off, c = {c}: sum / n / M",
            True,
            total / n / M,
            n,
            cp_group_size=c,
        ),
        Row("(mean, report), c = 1: mean / M", False, total / M, 0),
        Row("(mean, report), option on: mean / M", False, total / M, 0, per_token=True),
        Row(f"(mean, report), c = {c}: mean * c / M", False, total * c / M, 0, cp_group_size=c),
        Row(
            f"(mean, report), option on, c = {c}: mean * c / M",
            False,
            total * c / M,
            0,
            per_token=True,
            cp_group_size=c,
        ),
        Row(
            "(mean, report), cp_group_size None: mean / M", False, total / M, 0, cp_group_size=None
        ),
    ]


def _three_or_two(row: Row, case: Case) -> Callable:
    def three(output: torch.Tensor) -> tuple:
        loss = output * case.total
        return loss, torch.tensor(NUM_TOKENS, dtype=torch.int), _report(loss)

    def two(output: torch.Tensor) -> tuple:
        loss = output * case.total
        return loss, _report(loss)

    return three if row.returns_tokens else two


def _report(loss: torch.Tensor) -> dict[str, Any]:
    return {"loss": loss.detach()} | OWN_WORDS


def _call(
    student: ModuleType, returned: Callable, case: Case, where: str, **changes: Any
) -> dict[str, Any]:
    """What comes of one call on the last stage, unless `changes` say otherwise; `where` names it."""
    store: list = []
    asked: list[int] = []

    def counted(*args: Any, **keywords: Any) -> Any:
        asked.append(1)
        return returned(*args, **keywords)

    arguments: dict[str, Any] = {
        "model": None,
        "output_tensor": torch.ones((), dtype=torch.float64, requires_grad=True),
        "loss_func": counted,
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
    arguments |= changes
    found = student.forward_step_calc_loss(**arguments, config=config)
    if not isinstance(found, tuple) or len(found) != 2:
        what = "the output as it is" if "output_tensor" in changes else "the loss"
        raise Wrong(
            f"forward_step_calc_loss ({where}) returned {_returned(found)}; two values are expected: "
            f"{what}, and the number of tokens"
        )
    loss, tokens = found
    is_tensor = isinstance(loss, torch.Tensor)
    return {
        "loss": loss.detach() if is_tensor else loss,
        "has_grad": is_tensor and _is_in_graph(loss, arguments["output_tensor"]),
        "tokens": tokens,
        "store": store,
        "num_calls": len(asked),
    }


def _is_in_graph(loss: torch.Tensor, output: torch.Tensor) -> bool:
    """Whether a backward that begins from the loss comes to the output."""
    try:
        (gradient,) = torch.autograd.grad(loss.sum(), output, allow_unused=True)
    except RuntimeError:
        return False
    return gradient is not None


def _returned(found: Any) -> str:
    if isinstance(found, tuple):
        return f"a tuple of {len(found)}"
    return "None (was `return` forgotten?)" if found is None else f"one {type(found).__name__}"


def _run_exceptions(student: ModuleType, case: Case) -> dict[str, Any]:
    """A microbatch without tokens, a stage without a loss, data that is no loss."""

    def masked(output: torch.Tensor) -> tuple:
        loss = output * 0.0
        return loss, torch.tensor(0, dtype=torch.int), _report(loss)

    output = torch.full((2,), 5.0, dtype=torch.float64)
    elsewhere = {"output_tensor": output, "is_last_stage": False}
    other = {"output_tensor": output, "collect_non_loss_data": True}
    return {
        "masked": _call(student, masked, case, MASKED),
        **{
            where: _call(student, _forbidden(where), case, where, **(elsewhere | more))
            for where, more in OTHER_STAGES.items()
        },
        "other data": _call(student, _forbidden(OTHER), case, OTHER, **other),
    }


def _forbidden(where: str) -> Callable:
    """A loss function where there is no loss: it may be asked for other data."""

    def forbidden(output: torch.Tensor, non_loss_data: bool = False) -> Any:
        if not non_loss_data:
            raise Wrong(
                f"the loss function was called where there is no loss ({where}): only the last stage "
                "has one, and with collect_non_loss_data it is called with non_loss_data=True"
            )
        return "anything"

    return forbidden


# -- Judged --


def _judge_row(case: Case, row: Row, found: dict[str, Any]) -> None:
    loss, tokens, store = found["loss"], found["tokens"], found["store"]
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
    _judge_graph(where, found)
    _judge_tokens(where, tokens, row.tokens)
    _judge_report(where, store, case.total)
    if found["num_calls"] != 1:
        raise Wrong(
            f"the loss function was called {found['num_calls']} times for one microbatch ({where})\n"
            "It may cost much, and may count what it is asked. Where is what it returned the first "
            "time?"
        )


def _judge_graph(where: str, found: dict[str, Any]) -> None:
    if not found["has_grad"]:
        loss = found["loss"]
        what = "a tensor without grad_fn" if isinstance(loss, torch.Tensor) else _type(loss)
        if isinstance(loss, torch.Tensor):
            what += ", or one that does not come from the output"
        raise Wrong(
            f"loss ({where}) is {what}\nBackward begins from the loss: it must be a tensor that is "
            "still in the graph. Which of your lines has taken it out?"
        )


def _judge_report(where: str, store: list, total: float) -> None:
    """One report, as the loss function made it."""
    if len(store) != 1:
        raise Wrong(
            f"forward_data_store got {num_of(len(store), 'report')} for one microbatch ({where})"
        )
    said = store[0].get("loss") if isinstance(store[0], dict) else None
    if said is None or store[0] != {"loss": said} | OWN_WORDS:
        raise Wrong(
            f"forward_data_store got {store[0]!r}, not the report ({where})\nThe loss function has "
            "made the report, and may say in it whatever it likes. Who has made this one?"
        )
    if _number(said) != total:
        raise Wrong(
            f"the report changed: it said {total:g}, and says {_number(said):g} afterwards "
            f"({where})\n"
            "It was made with loss.detach(), which shares the memory of the loss. Dividing in place "
            "(/=, div_) changes both. Which of your lines writes into this memory?"
        )


def _number(value: Any, other: float = float("nan")) -> float:
    return float(value) if isinstance(value, int | float | torch.Tensor) else other


def _judge_tokens(where: str, got: Any, expected: int) -> None:
    is_int = isinstance(got, torch.Tensor) and not got.dtype.is_floating_point
    if not is_int or got.dtype == torch.bool:
        what = f"a tensor of {got.dtype}" if isinstance(got, torch.Tensor) else _type(got)
        raise Wrong(
            f"number of tokens ({where}) is {what}; an int tensor is expected, also where the "
            "number is 0\nThe schedule adds these numbers up, and later they are sent: stages and "
            "replicas must all have the same kind of tensor."
        )
    check_numbers(f"number of tokens ({where})", got, expected)


def _type(value: Any) -> str:
    return "None (was `return` forgotten?)" if value is None else f"a Python {type(value).__name__}"


def _judge_exceptions(found: dict[str, Any]) -> None:
    masked = found["masked"]
    loss = masked["loss"]
    if not math.isfinite(_number(loss, other=0.0)):
        raise Wrong(
            f"the loss of a microbatch whose tokens are all masked is {float(loss)}: 0 / 0\nOne such "
            "microbatch makes every gradient of the step nan. The sum of its losses is 0. By what "
            "may it be divided, so that it stays 0?"
        )
    check_numbers("the loss of a microbatch without tokens", loss, 0.0)
    _judge_graph(MASKED, masked)
    _judge_tokens(MASKED, masked["tokens"], 0)
    _judge_report(MASKED, masked["store"], 0.0)
    output = torch.full((2,), 5.0, dtype=torch.float64)
    for where in OTHER_STAGES:
        elsewhere = found[where]
        check_numbers(f"the output of {where}", elsewhere["loss"], output)
        _judge_tokens(where, elsewhere["tokens"], 0)
        if elsewhere["store"] or elsewhere["num_calls"]:
            raise Wrong(
                f"{where}: the loss function was called {num_of(elsewhere['num_calls'], 'time')}, and "
                f"forward_data_store has {elsewhere['store']!r}\nWhat does the stub say of other "
                "stages?"
            )
    check_numbers("the output with collect_non_loss_data", found["other data"]["loss"], output)
    _judge_tokens(OTHER, found["other data"]["tokens"], 0)
    store = found["other data"]["store"]
    if store != ["anything"]:
        raise Wrong(
            f"with collect_non_loss_data, forward_data_store is {store!r}; what "
            "loss_func(output_tensor, non_loss_data=True) returned is expected there"
        )
