"""Checks log-probabilities and mask, advantages, the loss of each token, and what is returned."""

import random
from collections.abc import Sequence
from types import ModuleType
from typing import Any

import torch

from minimegatron.exercises.bench.known_mistakes import check_known
from minimegatron.exercises.catalog.ex25_grpo_loss.truth import WAYS, gradient, token_loss
from minimegatron.exercises.check import Case, Result, Wrong, data_seed

_RL = "minimegatron.rl.rl_utils."
REPLACES = (
    _RL + "selective_log_softmax",
    _RL + "calculate_grpo_advantages",
    _RL + "calculate_grpo_loss",
    "minimegatron.train_rl.loss_func",
)
LOGPROBS, ADVANTAGES, LOSS, RETURNS = "log-probabilities", "advantages", "token loss", "returned"
MASKS = {
    "an uneven mask": [[0, 1, 1, 0, 0], [0, 1, 1, 1, 1], [1, 1, 0, 0, 0]],
    "an empty row": [[0, 1, 1, 1, 0], [0, 0, 0, 0, 0]],
    "a microbatch without tokens": [[0, 0, 0], [0, 0, 0]],
}


def cases(seed: int) -> list[Case]:
    """Each function alone; the loss with one term more each time."""
    draw, data = random.Random(seed), data_seed(seed)
    bounds = {"eps_lower": 0.2, "eps_upper": draw.choice([0.3, 0.4]), "seed": data}
    off = {"kl_beta": 0.0, "entropy_weight": 0.0, "weighted": False, "cap": 1.0}
    beta, eta, cap = draw.choice([0.2, 0.3]), draw.choice([0.1, 0.15]), draw.choice([1.5, 1.25])
    kinds = {
        "the clipped ratio": {},
        "with KL": {"kl_beta": beta},
        "with entropy": {"entropy_weight": eta},
        "with weights": {"weighted": True, "cap": cap},
        "all terms": {"kl_beta": beta, "entropy_weight": eta, "weighted": True, "cap": cap},
    }
    return [
        Case(LOGPROBS, part=LOGPROBS, seed=data),
        Case("advantages of three groups", part=ADVANTAGES, group=draw.choice([3, 4]), seed=data),
        *(
            Case(f"{LOSS}, {words}", part=LOSS, **(off | more | bounds))
            for words, more in kinds.items()
        ),
        *(Case(words, part=RETURNS, mask=[mask], seed=data) for words, mask in MASKS.items()),
    ]


def run(student: ModuleType, case: Case) -> Any:
    """One function, with values and gradients."""
    given = _given(case)
    if case.part == LOGPROBS:
        returned = student.answer_logprobs(
            *(given[x].clone() for x in ("logits", "tokens", "mask"))
        )
        return _several(returned, 2, "answer_logprobs", "(log-probabilities, mask)")
    if case.part == ADVANTAGES:
        return student.group_advantages(given["rewards"].clone(), case.group)
    if case.part == LOSS:
        return _run_loss(student, case, given)
    loss = given["loss"].clone().requires_grad_()
    returned = student.loss_func(given["mask"].clone(), loss * 1.0)
    total, count, report = _several(returned, 3, "loss_func", "(sum, number, report)")
    return _returned(total, count, report, loss)


def judge(case: Case, answers: Sequence[Any]) -> Result | None:
    """There is one rank."""
    judges = {LOGPROBS: _logprobs, ADVANTAGES: _advantages, LOSS: _loss, RETURNS: _sums}
    return judges[case.part](case, _given(case), answers[0])


def _several(value: Any, number: int, function: str, words: str) -> tuple:
    if not isinstance(value, tuple) or len(value) != number:
        what = f"a tuple of {len(value)}" if isinstance(value, tuple) else f"a {_type(value)}"
        raise Wrong(f"{function} returned {what}; {words} is expected")
    return value


def _type(value: Any) -> str:
    return "None (was `return` forgotten?)" if value is None else type(value).__name__


def _given(case: Case) -> dict[str, torch.Tensor]:
    """What the student's function is given, in float64."""
    source = torch.Generator().manual_seed(case.seed)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=source, dtype=torch.float64)

    if case.part == LOGPROBS:
        # No token is followed by itself, so that a shift is seen in each entry.
        tokens = (torch.arange(6) + torch.tensor([[0], [2]])) % 5
        mask = torch.tensor([[0, 0, 1, 1, 0, 0], [0, 0, 0, 1, 1, 1]], dtype=torch.float64)
        return {"logits": draw(2, 6, 5), "tokens": tokens, "mask": mask}
    if case.part == ADVANTAGES:
        # The last group's answers are equally good.
        rewards = torch.cat([draw(2 * case.group), torch.full((case.group,), 0.5).double()])
        return {"rewards": rewards}
    if case.part == RETURNS:
        mask = torch.tensor(case.mask[0], dtype=torch.float64)
        return {"mask": mask, "loss": draw(*mask.shape)}
    old = -draw(4, 5).abs() - 0.5
    # Beyond both bounds, and between them, with both signs of A.
    apart = torch.tensor([0.6, -0.6, 0.1, 0.3, -0.25]).double() * (1 + 0.01 * draw(4, 5))
    given = {
        "current": old + apart,
        "old": old,
        "ref": old + 0.4 * draw(4, 5),
        "advantages": torch.tensor([1.2, -0.8, 0.5, -1.1], dtype=torch.float64),
        "arrives": 1 + draw(4, 5).abs(),
    }
    if case.weighted:
        given["inference"] = old - torch.tensor([0.9, 0.1, -0.7, 0.2, 0.6], dtype=torch.float64)
    return given


# -- Log-probabilities and advantages --


def _logprobs(case: Case, given: dict[str, torch.Tensor], answer: tuple) -> None:
    logits, tokens, mask = given["logits"], given["tokens"], given["mask"]
    every = logits.log_softmax(-1)

    def at(scores: torch.Tensor, of: torch.Tensor) -> torch.Tensor:
        return scores.gather(-1, of.unsqueeze(-1)).squeeze(-1)

    same = "Those logits were computed from this token already. Which ones predicted it?"
    known = [
        (at(every, tokens)[:, 1:], same),
        (at(every, tokens)[:, :-1], same),
        (at(logits[:, :-1], tokens[:, 1:]), "Those are logits. When do probabilities sum to 1?"),
        (at(every[:, :-1], tokens[:, 1:]).exp(), "Those are probabilities."),
    ]
    right = at(every[:, :-1], tokens[:, 1:])
    check_known("log-probabilities", answer[0], right, known)
    late = (
        mask[:, 1:] * mask[:, :-1],
        "The first token of each answer is lost. Which entry is its?",
    )
    early = (mask[:, :-1], "The mask is of other tokens than the log-probabilities: of which?")
    without_end = mask[:, 1:].clone()
    without_end[:, :-1] *= mask[:, 2:]
    end = (
        without_end,
        "The last token of an answer, its end, is lost. Was it not the model's choice?",
    )
    check_known("mask", answer[1], mask[:, 1:], [late, early, end])


def _advantages(case: Case, given: dict[str, torch.Tensor], answer: Any) -> None:
    def of(rows: torch.Tensor, correction: int = 0, eps: float = 1e-4) -> torch.Tensor:
        deviation = rows.std(1, correction=correction, keepdim=True)
        return ((rows - rows.mean(1, keepdim=True)) / (eps + deviation)).view(-1)

    rewards = given["rewards"]
    rows = rewards.view(-1, case.group)
    known = [
        (
            of(rewards.view(1, -1)),
            "Mean and deviation are those of all rows. With whom is an answer compared?",
        ),
        (of(rows, 1), "That is the unbiased deviation. Which one does the stub name?"),
        (
            (rows - rows.mean(1, keepdim=True)).view(-1),
            "Only the mean was subtracted. What makes easy and hard prompts count alike?",
        ),
    ]
    fits = rewards.view(case.group, -1)
    mixed = ((fits - fits.mean(0)) / (1e-4 + fits.std(0, correction=0))).view(-1)
    known.append((mixed, "Rows of other prompts are in the group. Which rows follow each other?"))
    if isinstance(answer, torch.Tensor) and not torch.isfinite(answer).all():
        raise Wrong(
            "advantages have values that are nan or inf\nAll answers of one group got the same reward: "
            "by what do you divide there?"
        )
    check_known("advantages", answer, of(rows), known)


# -- The loss of each token --


def _sizes(case: Case) -> dict[str, float]:
    names = ("eps_lower", "eps_upper", "kl_beta", "entropy_weight", "cap")
    return {name: getattr(case, name) for name in names}


def _run_loss(student: ModuleType, case: Case, given: dict[str, torch.Tensor]) -> dict[str, Any]:
    leaf = given["current"].clone().requires_grad_()
    arguments = {name: given[name].clone() for name in ("old", "ref", "advantages")}
    if case.weighted:
        arguments["inference"] = given["inference"].clone()
    loss = student.grpo_token_loss(leaf, **arguments, **_sizes(case))
    if not isinstance(loss, torch.Tensor):
        raise Wrong(f"grpo_token_loss returned a {_type(loss)}; a tensor [b, s - 1] is expected")
    if loss.shape == leaf.shape and loss.requires_grad:
        (loss * given["arrives"]).sum().backward()
    return {"loss": loss.detach().clone(), "gradient": leaf.grad, "has_graph": loss.requires_grad}


def _loss(case: Case, given: dict[str, torch.Tensor], answer: dict[str, Any]) -> Result:
    sizes, right = _sizes(case), token_loss(given, _sizes(case))
    known = [(token_loss(given, sizes, way), words) for way, words in WAYS.items()]
    check_known("the loss of the tokens", answer["loss"], right, known)
    if not answer["has_graph"]:
        raise Wrong(
            "the loss of the tokens has no graph\nBackward begins from it. Which of your lines takes "
            "`current` out of the graph?"
        )
    known = [(gradient(given, sizes, way), words) for way, words in WAYS.items()]
    check_known("the gradient of `current`", answer["gradient"], gradient(given, sizes), known)
    return Result({"mean loss": f"{float(right.mean()):.4f}"})


# -- What is returned --


def _returned(total: Any, count: Any, report: Any, leaf: torch.Tensor) -> dict[str, Any]:
    if not isinstance(total, torch.Tensor) or not total.requires_grad:
        raise Wrong(
            "the loss that loss_func returned has no graph\nBackward begins from it, of a microbatch "
            "without tokens too. Where was the graph left?"
        )
    if not isinstance(count, torch.Tensor):
        raise Wrong(f"the number that loss_func returned is a {_type(count)}; a tensor is expected")
    if not isinstance(report, dict) or not isinstance(report.get("lm loss"), torch.Tensor):
        raise Wrong('the report of loss_func has no tensor "lm loss"; [sum, number] is expected')
    if report["lm loss"].requires_grad:
        raise Wrong(
            "the report of loss_func has a graph\nWho logs may keep it. What is kept with it?"
        )
    if total.numel() == 1:
        total.sum().backward()
    found = {"sum": total.detach().clone(), "number": count.detach().double()}
    return found | {"report": report["lm loss"].double(), "gradient": leaf.grad}


def _sums(case: Case, given: dict[str, torch.Tensor], answer: dict[str, Any]) -> Result:
    mask, loss = given["mask"], given["loss"]
    total, count = (loss * mask).sum(), mask.sum()
    if not torch.isfinite(answer["sum"]).all():
        raise Wrong("the loss is nan or inf\nNo token counts here. By what did you divide?")
    means = (loss * mask).sum(1) / mask.sum(1).clamp(min=1)
    known = [
        (loss.sum(), "All tokens are in it: prompts and padding too. Which ones count?"),
        (
            total / count.clamp(min=1),
            "That is this microbatch's mean. Others have other numbers of tokens: who may divide?",
        ),
        (loss.mean(), "That is a mean over all tokens. Which ones count, and who may divide?"),
        (means.mean(), "That is a mean of rows' means. Does each token weigh the same in it?"),
        (means.sum(), "That is a sum of rows' means. Does each token weigh the same in it?"),
    ]
    check_known("the loss that loss_func returned", answer["sum"], total, known)
    check_known("its gradient", answer["gradient"], mask)
    filled = mask.sum(1).clamp(min=1).sum()
    others = [
        (count.clamp(min=1), "No token counts here. What becomes of the whole step's divisor?"),
        (filled, "A row without a token was counted as one token."),
        (torch.tensor(float(mask.numel())).double(), "Which tokens count?"),
        (torch.tensor(float(len(mask))).double(), "Those are rows. What is counted?"),
    ]
    check_known("the number that loss_func returned", answer["number"], count, others)
    check_known('"lm loss" of the report', answer["report"], torch.stack([total, count]))
    return Result({"tokens": f"{int(count)}"})
