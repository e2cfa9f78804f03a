"""Checks the router: the choice, the loss, the scaler, then steps of a small layer."""

import math
import random
from collections.abc import Sequence
from types import ModuleType, SimpleNamespace
from typing import Any

import torch

from minimegatron.exercises.bench.feedback_numbers import check_numbers
from minimegatron.exercises.bench.known_mistakes import check_known
from minimegatron.exercises.catalog.ex19_router.choice import judge_choice, run_choice
from minimegatron.exercises.catalog.ex19_router.data import given_layer, main_loss, mix
from minimegatron.exercises.catalog.ex19_router.steps import judge_step
from minimegatron.exercises.check import Case, Result, Wrong, data_seed

_UTILS = "minimegatron.core.transformer.moe.moe_utils."
REPLACES = (
    _UTILS + "topk_routing_with_score_function",
    _UTILS + "compute_routing_scores_for_aux_loss",
    _UTILS + "switch_load_balancing_loss_func",
    _UTILS + "MoEAuxLossAutoScaler",
    "minimegatron.core.transformer.moe.router.TopKRouter.routing",
)
CHOICE, LOSS, SCALER, STEP = "the choice", "the loss", "the scaler", "a step"
EARLIER = 50.0
"""The scale while the scaler's forward runs; that of the case is set between forward and backward."""
BY_HAND = {
    "scores": [[0.9, 0.1], [0.8, 0.2], [0.7, 0.3], [0.4, 0.6]],
    "counts": [3, 1],
    "topk": 1,
    "coeff": 0.5,
}
"""As on the page: the loss is 1.2 times the coefficient."""


def cases(seed: int) -> list[Case]:
    """Each row of the stub's table, the page's loss and a drawn one, steps of one and several."""
    draw, data = random.Random(seed), data_seed(seed)
    return [*_choices(draw, data), *_losses(draw), Case(SCALER, part=SCALER), *_steps(draw, data)]


def _choices(draw: random.Random, data: int) -> list[Case]:
    rows = {
        "softmax of the chosen": {"topk": 2},
        "softmax of all": {"topk": 2, "pre": True},
        "softmax of all, one expert": {"topk": 1, "pre": True},
        "sigmoid": {"topk": 3, "score": "sigmoid"},
        "sigmoid, one expert": {"topk": 1, "score": "sigmoid"},
        "sigmoid with a bias": {"topk": 2, "score": "sigmoid", "has_bias": True},
        "scaled": {"topk": 2, "scaling": draw.choice([2.5, 1.5])},
        "softmax of all, scaled": {"topk": 3, "pre": True, "scaling": 0.5},
        "sigmoid, scaled": {"topk": 2, "score": "sigmoid", "pre": True, "scaling": 2.5},
        "sigmoid, one expert, scaled": {"topk": 1, "score": "sigmoid", "scaling": 2.5},
        "softmax of all, float32": {"topk": 2, "pre": True, "dtype": "float32"},
        "softmax of the chosen, one of them far behind": {"topk": 2, "is_far": True},
    }
    found = []
    for number, (name, row) in enumerate(rows.items()):
        sizes = {"tokens": draw.randint(4, 6), "experts": draw.randint(4, 6), "seed": data + number}
        values = {"score": "softmax", "pre": False, "scaling": None, "has_bias": False} | sizes
        values |= {"dtype": "float64", "is_far": False} | row
        found.append(Case(f"{name}, k={row['topk']}", part=CHOICE, **values))
    return found


def _losses(draw: random.Random) -> list[Case]:
    experts, topk, tokens = draw.choice([4, 6]), 2, draw.randint(5, 9)
    chosen = [draw.sample(range(experts), topk) for _ in range(tokens)]
    parts = [[draw.randint(1, 9) for _ in range(experts)] for _ in range(tokens)]
    drawn = {
        "scores": [[part / sum(row) for part in row] for row in parts],
        "counts": [sum(expert in one for one in chosen) for expert in range(experts)],
        "topk": topk,
        "coeff": draw.choice([0.01, 0.1]),
    }
    even = {"scores": [[0.25] * 4] * 8, "counts": [4] * 4, "topk": 2, "coeff": 0.02}
    named = {"worked out by hand": BY_HAND, "even load": even, "drawn": drawn}
    return [Case(f"{name}: {_sizes(one)}", part=LOSS, **one) for name, one in named.items()]


def _sizes(loss: dict[str, Any]) -> str:
    return f"N={len(loss['scores'])}, E={len(loss['counts'])}, k={loss['topk']}"


def _steps(draw: random.Random, data: int) -> list[Case]:
    softmax = {"score": "softmax", "pre": True, "has_bias": False}
    of_chosen = {"score": "softmax", "pre": False, "has_bias": False}
    sigmoid = {"score": "sigmoid", "pre": False, "has_bias": True}
    kinds = [
        ("softmax, k=2", softmax | {"experts": 4, "topk": 2, "tokens": 6}, None, 3, 1.0),
        ("sigmoid and bias, k=1", sigmoid | {"experts": 5, "topk": 1, "tokens": 4}, 1.5, 2, 4.0),
        (
            "softmax of the chosen, k=3",
            of_chosen | {"experts": 6, "topk": 3, "tokens": 5},
            2.5,
            1,
            2.0,
        ),
        ("sigmoid and bias, k=2", sigmoid | {"experts": 5, "topk": 2, "tokens": 4}, None, 1, 1.0),
    ]
    return [
        Case(
            f"{name}, E={kind['experts']}, M={M}, loss scale {scale:g}",
            part=STEP,
            **kind,
            scaling=scaling,
            M=M,
            loss_scale=scale,
            coeff=draw.choice([0.5, 0.8]),
            seed=data + 100 + M,
        )
        for name, kind, scaling, M, scale in kinds
    ]


def run(student: ModuleType, case: Case) -> Any:
    """One of the parts."""
    if case.part == CHOICE:
        return run_choice(student, case)
    if case.part == LOSS:
        return _run_loss(student, case)
    return _run_scaler(student) if case.part == SCALER else _run_step(student, case)


def judge(case: Case, answers: Sequence[Any]) -> Result | None:
    """There is one rank."""
    (answer,) = answers
    if case.part == CHOICE:
        return judge_choice(case, answer)
    if case.part == LOSS:
        return _judge_loss(case, answer)
    return _judge_scaler(answer) if case.part == SCALER else judge_step(case, answer)


# -- The loss --


def _run_loss(student: ModuleType, case: Case) -> dict[str, Any]:
    scores = torch.tensor(case.scores, dtype=torch.float64, requires_grad=True)
    counts = torch.tensor(case.counts)
    sizes = (scores.shape[0], case.topk, scores.shape[1], case.coeff)
    loss = student.switch_load_balancing_loss_func(scores, counts, *sizes)
    if not isinstance(loss, torch.Tensor) or loss.dim():
        raise Wrong(f"switch_load_balancing_loss_func returned {_kind(loss)}; a scalar is expected")
    if not loss.requires_grad:
        raise Wrong(
            "the loss has no graph (requires_grad is False): was it detached, or made of numbers?\n"
            "It must pull at the scores, so its gradient has to come to them."
        )
    loss.backward()
    return {"loss": loss.detach(), "gradient": scores.grad}


def _kind(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"a tensor of shape {list(value.shape)}"
    return "None (was `return` forgotten?)" if value is None else f"a {type(value).__name__}"


def _judge_loss(case: Case, answer: dict[str, Any]) -> Result:
    scores = torch.tensor(case.scores, dtype=torch.float64)
    counts = torch.tensor(case.counts, dtype=torch.float64)
    (N, E), k = scores.shape, case.topk
    factor = case.coeff * E / (k * N * N)
    loss = factor * sum(
        f * P for f, P in zip(counts.tolist(), scores.sum(dim=0).tolist(), strict=True)
    )
    sizes = {"E": E, "N": N, "k": k, "coeff": 1 / case.coeff}
    squares = factor * scores.sum(dim=0).square().sum() * k
    known = [
        (
            squares,
            "That is the sum of P_i^2: the scores were taken twice. f_i is a number of tokens, "
            "tokens_per_expert[i].",
        )
    ]
    wanted = torch.tensor(loss, dtype=torch.float64)
    check_known(f"the loss for f = {case.counts}", answer["loss"], wanted, known, layout=sizes)
    gradient = (factor * counts).expand(N, E)
    check_numbers("the loss's gradient of the scores", answer["gradient"], gradient, layout=sizes)
    return Result({"loss": f"{loss:.6g} = {loss / case.coeff:.6g} x coeff"})


# -- The scaler --


def _run_scaler(student: ModuleType) -> list[dict[str, Any]]:
    found = []
    for scale in (1.0, 0.25, 3.0):
        if found:  # before that, nobody has set one
            student.MoEAuxLossAutoScaler.set_loss_scale(torch.tensor(EARLIER, dtype=torch.float64))
        given = torch.tensor([[1.0, -2.0], [4.0, 8.0]], dtype=torch.float64, requires_grad=True)
        loss = torch.tensor(7.0, dtype=torch.float64, requires_grad=True)
        output = student.MoEAuxLossAutoScaler.apply(given, loss)
        if found:
            student.MoEAuxLossAutoScaler.set_loss_scale(torch.tensor(scale, dtype=torch.float64))
        if not isinstance(output, torch.Tensor):
            raise Wrong(f"MoEAuxLossAutoScaler.apply gives {_kind(output)}; a tensor is expected")
        seen = {"scale": scale, "output": output.detach().clone()}
        try:
            output.backward(torch.tensor([[1.0, 2.0], [3.0, 5.0]], dtype=torch.float64))
        except TypeError as error:
            if found:
                raise
            raise Wrong(
                f"the scaler's backward fails before any set_loss_scale: {error}\nThe class attribute "
                "is None then. What does None count as?"
            ) from error
        found.append(seen | {"of_output": given.grad, "of_loss": loss.grad})
    return found


def _judge_scaler(answer: list[dict[str, Any]]) -> None:
    given = torch.tensor([[1.0, -2.0], [4.0, 8.0]], dtype=torch.float64)
    arrived = torch.tensor([[1.0, 2.0], [3.0, 5.0]], dtype=torch.float64)
    for seen in answer:
        scale = seen["scale"]
        added = [
            (given + 7.0, "The auxiliary loss was added to the output. Forward changes nothing.")
        ]
        check_known("the scaler's output", seen["output"], given, added)
        sizes = {"the scale": scale}
        of_output = seen["of_output"]
        check_numbers("the scaler's gradient of the output", of_output, arrived, layout=sizes)
        if seen["of_loss"] is None:
            raise Wrong(
                "the scaler's backward returned no gradient for the auxiliary loss\n"
                "forward has two arguments, so backward returns two gradients. Without the second "
                "one nothing pulls at the scores."
            )
        wanted = torch.tensor(scale, dtype=torch.float64)
        why = [
            (
                torch.ones_like(wanted),
                f"It is 1, but set_loss_scale({scale:g}) was called before. The auxiliary loss "
                "must be scaled as the main loss is: set_loss_scale says how.",
            ),
            (
                torch.tensor(EARLIER, dtype=torch.float64),
                f"It is {EARLIER:g}, the scale that was set when forward ran. "
                f"set_loss_scale({scale:g}) came after that, and before backward. "
                "When is the scale read?",
            ),
            (
                torch.tensor(0.25, dtype=torch.float64),
                "That is the scale that was set first. A later set_loss_scale replaces it.",
            ),
            (
                scale * arrived.sum(),
                "What arrives at the output was multiplied in. The auxiliary loss is a loss of its "
                "own: nothing of the main loss's gradient belongs to it.",
            ),
            (arrived.sum(), "That is the sum of what arrives at the output."),
        ]
        check_known("the scaler's gradient of the auxiliary loss", seen["of_loss"], wanted, why)


# -- A step --


class _Layer:
    """A layer whose router's choices are the student's."""

    def __init__(self, student: ModuleType, case: Case):
        self.given = given_layer(case)
        self.weight = self.given.weight.clone().requires_grad_()
        self.student = student
        self.routed: list[tuple[torch.Tensor, torch.Tensor]] = []
        """What each forward's routing has returned."""
        self.router = SimpleNamespace(
            topk=case.topk,
            use_pre_softmax=case.pre,
            scaling_factor=case.scaling,
            score_function=case.score,
            expert_bias=self.given.bias,
            aux_loss_coeff=case.coeff,
            training=True,
            local_tokens_per_expert=torch.zeros(case.experts, dtype=torch.float64),
        )

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        returned = self.student.routing(self.router, x @ self.weight.t())
        if not isinstance(returned, tuple) or len(returned) != 2:
            raise Wrong(f"routing returned {_kind(returned)}; (probs, routing_map) is expected")
        probs, routing_map = returned
        sizes = (len(x), len(self.weight))
        for name, one in (("probs", probs), ("routing_map", routing_map)):
            if not isinstance(one, torch.Tensor) or one.shape != sizes:
                raise Wrong(
                    f"{name} that routing returned is {_kind(one)}; [T, E] is {list(sizes)}"
                )
        self.routed.append((probs.detach().clone(), routing_map.clone()))
        return mix(probs, x, self.given.experts)

    def loss(self, output: torch.Tensor) -> torch.Tensor:
        """The main loss."""
        return main_loss(output, self.given.target)

    def counts(self) -> torch.Tensor:
        """Tokens counted since this was asked last."""
        counts = self.router.local_tokens_per_expert
        found = counts.clone()
        counts.zero_()
        return found


def _run_step(student: ModuleType, case: Case) -> dict[str, Any]:
    """A step; an evaluation; a forward as recomputation runs it, without gradients first."""
    layer = _Layer(student, case)
    batches = layer.given.microbatches
    buffer = layer.router.local_tokens_per_expert
    # A scale that an earlier step has left.
    student.MoEAuxLossAutoScaler.set_loss_scale(torch.tensor(100.0))
    student.forward_backward(layer, layer.loss, list(batches), case.loss_scale)
    if layer.weight.grad is None:
        raise Wrong(
            "after forward_backward the router's weight has no gradient: backward never ran"
        )
    found = {"routed": list(layer.routed), "gradient": layer.weight.grad.clone()}
    is_same = layer.router.local_tokens_per_expert is buffer
    found |= {"in_place": is_same, "training": layer.counts()}
    layer.weight.grad = None
    layer.router.training = False
    student.MoEAuxLossAutoScaler.set_loss_scale(torch.tensor(math.pi))
    layer.loss(layer(batches[0])).backward()
    found |= {"evaluation": layer.counts(), "evaluation_gradient": layer.weight.grad}
    layer.router.training = True
    with torch.no_grad():
        layer(batches[0])
    return found | {"no_grad": layer.counts()}
