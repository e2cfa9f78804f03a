"""Checks rolling, the scaler, the losses of all depths, then steps of a small model."""

import random
from collections.abc import Sequence
from types import ModuleType
from typing import Any

import torch

from minimegatron.exercises.bench.feedback import num_of
from minimegatron.exercises.bench.feedback_numbers import check_numbers
from minimegatron.exercises.bench.known_mistakes import check_known
from minimegatron.exercises.catalog.ex23_predict_two_tokens.data import (
    SmallModel,
    draw,
    given_batch,
    given_states,
    given_weights,
    token_loss_of,
)
from minimegatron.exercises.catalog.ex23_predict_two_tokens.steps import OLD_SCALE, judge_step
from minimegatron.exercises.catalog.ex23_predict_two_tokens.truth import (
    depth_losses,
    means,
    rolled,
    wrong_ways,
)
from minimegatron.exercises.check import Case, Result, Wrong, data_seed

_CORE = "minimegatron.core.transformer."
REPLACES = (
    _CORE + "multi_token_prediction.roll_tensor",
    _CORE + "multi_token_prediction.process_mtp_loss",
    _CORE + "mtp_loss.MTPLossAutoScaler",
    _CORE + "moe.moe_utils.MoEAuxLossAutoScaler",
)
SCALE = 0.75
"""That is set while losses are attached to given states."""
EARLIER = 50.0
"""The scale while the scaler's forward runs; that of the case is set between forward and backward."""
ROLL, SCALER, LOSSES, STEP = "rolling", "the scaler", "the losses", "a step"


def cases(seed: int) -> list[Case]:
    """Tensors to roll, the scaler, losses with holes in the mask or one label, then steps."""
    random_numbers, data = random.Random(seed), data_seed(seed)
    return [
        Case("numbers and labels", part=ROLL, seed=data),
        Case(SCALER, part=SCALER),
        *_losses(random_numbers, data + 10),
        *_steps(random_numbers, data + 20),
    ]


def _losses(draw: random.Random, data: int) -> list[Case]:
    every = [[1] * 5, [1] * 5]
    holes = [_holes(6, 2), _holes(6, draw.choice([1, 3]))]
    one = [[0, 1, 0, 0]]
    f = draw.choice([0.3, 0.2])
    kinds = [
        ("K=1, every label counts", 1, every, False),
        ("K=2, some labels do not count", 2, holes, False),
        ("K=2, per token", 2, holes, True),
        ("K=3, one label counts", 3, one, False),
        ("K=3, one label counts, per token", 3, one, True),
    ]
    return [
        Case(name, part=LOSSES, K=K, masks=[mask], per_token=per_token, f=f, seed=data + number)
        for number, (name, K, mask, per_token) in enumerate(kinds)
    ]


def _holes(length: int, place: int) -> list[int]:
    """A mask with a 0 that is neither the first nor the last, so that rolling is seen."""
    mask = [1] * length
    mask[place] = 0
    return mask


def _steps(draw: random.Random, data: int) -> list[Case]:
    found = []
    for number, (M, K, per_token, scale) in enumerate(
        ((3, 2, False, 1.0), (2, 1, False, 4.0), (3, 3, True, 4.0))
    ):
        words = "per token" if per_token else "means"
        # Another number of labels in each microbatch.
        masks = [
            [_holes(6, draw.choice([1, 2, 3])), [1] * (5 - i) + [0] * (1 + i)] for i in range(M)
        ]
        name = f"{words}, M={M}, K={K}, loss scale {scale:g}"
        values = {"K": K, "f": 0.5, "masks": masks, "loss_scale": scale, "seed": data + number}
        found.append(Case(name, part=STEP, per_token=per_token, **values))
    return found


def run(student: ModuleType, case: Case) -> Any:
    """One of the parts."""
    if case.part == ROLL:
        return _run_roll(student, case)
    if case.part == SCALER:
        return _run_scaler(student)
    return (_run_losses if case.part == LOSSES else _run_step)(student, case)


def judge(case: Case, answers: Sequence[Any]) -> Result | None:
    """There is one rank."""
    (answer,) = answers
    if case.part == ROLL:
        return _judge_roll(case, answer)
    if case.part == SCALER:
        return _judge_scaler(answer)
    return (_judge_losses if case.part == LOSSES else judge_step)(case, answer)


def _kind(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"a tensor of shape {list(value.shape)}"
    return "None (was `return` forgotten?)" if value is None else f"a {type(value).__name__}"


def _pair(value: Any, function: str, words: str) -> tuple[Any, Any]:
    if not isinstance(value, tuple) or len(value) != 2:
        raise Wrong(f"{function} returned {_kind(value)}; {words} is expected")
    return value


# -- Rolling --


def to_roll(case: Case) -> list[torch.Tensor]:
    """By hand, then labels, a mask with a hole, and three dimensions."""
    mask = torch.tensor([[1.0, 1.0, 0.0, 1.0]], dtype=torch.float64)
    labels = (draw(case, 0, 2, 5).abs() * 10 + 1).long()
    by_hand = torch.tensor([1.0, 2.0, 3.0, 4.0], dtype=torch.float64)
    return [by_hand, labels, mask, draw(case, 1, 2, 2, 3)]


def _run_roll(student: ModuleType, case: Case) -> list[tuple[torch.Tensor, float]]:
    found = []
    for given in to_roll(case):
        kept = given.clone()
        tensor, total = _pair(student.roll_tensor(kept), "roll_tensor", "(the tensor, its sum)")
        if not isinstance(tensor, torch.Tensor) or tensor.shape != given.shape:
            raise Wrong(
                f"roll_tensor made {_kind(tensor)} of a tensor {list(given.shape)}; the shape stays"
            )
        if tensor.dtype != given.dtype:
            raise Wrong(
                f"roll_tensor made {tensor.dtype} of {given.dtype}; the dtype stays\nLabels are "
                "rolled, too, and a loss needs them as int64."
            )
        if not torch.equal(kept, given):
            raise Wrong(
                f"roll_tensor changed what it was given: {given.tolist()} is {kept.tolist()} now\n"
                "The main loss needs the same labels and the same mask."
            )
        found.append((tensor, float(total)))
    return found


def _judge_roll(case: Case, answer: list[tuple[torch.Tensor, float]]) -> None:
    for given, (found, total) in zip(to_roll(case), answer, strict=True):
        wanted = rolled(given, 1)
        known = [
            (
                given,
                "Nothing was moved. What stands at t + 1 of what was given, and where should it be "
                "now?",
            ),
            (
                given.roll(-1, dims=-1),
                "The first has come round to the end. There it would be the label of a token that "
                "stands a whole sequence further on: put 0 there.",
            ),
            (
                torch.cat([torch.zeros_like(given[..., :1]), given[..., :-1]], dim=-1),
                "It was moved to the back. Position t gets what stood at t + 1.",
            ),
            (
                torch.cat([given[..., 1:], given[..., -1:]], dim=-1),
                "The last stands there twice: put 0 at the end.",
            ),
        ]
        if given.dim() > 2:
            moved = torch.cat([given[:, 1:], torch.zeros_like(given[:, :1])], dim=1)
            known.append((moved, "It was moved in the second dimension, and not in the last."))
        if given.dim() > 1 and len(given) > 1:
            flat = given.reshape(-1)
            of_next = torch.cat([flat[1:], flat.new_zeros(1)]).view_as(given)
            words = "The last of a row got the first of the next. Is that one the token after it?"
            known.append((of_next, words))
            known.append((given.roll(-1, dims=0), "That is another sequence: roll within each."))
        check_known(f"roll_tensor of {given.tolist()}", found, wanted, known)
        what = f"the sum that roll_tensor gives of {given.tolist()}"
        before = [
            (given.double().sum(), "That is the sum before rolling; the first has gone since.")
        ]
        value = torch.tensor(total, dtype=torch.float64)
        check_known(what, value, wanted.double().sum(), before)


# -- The scaler --


def _given_to_scaler() -> list[torch.Tensor]:
    """The output, the loss of each token, and what arrives at the output."""
    rows = [[[1.0, -2.0], [4.0, 8.0]], [[3.0, 5.0, 7.0]], [[1.0, 2.0], [3.0, 5.0]]]
    return [torch.tensor(row, dtype=torch.float64) for row in rows]


def _run_scaler(student: ModuleType) -> list[dict[str, Any]]:
    found = []
    for scale in (1.0, 0.25, 3.0):
        if found:  # before that, nobody has set one
            student.MTPLossAutoScaler.set_loss_scale(torch.tensor(EARLIER, dtype=torch.float64))
        given, loss, arrives = _given_to_scaler()
        given.requires_grad_()
        loss.requires_grad_()
        output = student.MTPLossAutoScaler.apply(given, loss)
        if found:
            student.MTPLossAutoScaler.set_loss_scale(torch.tensor(scale, dtype=torch.float64))
        if not isinstance(output, torch.Tensor) or output.shape != given.shape:
            raise Wrong(
                f"MTPLossAutoScaler.apply gives {_kind(output)}; the output as it is, "
                f"{list(given.shape)}, is expected"
            )
        seen = {"scale": scale, "output": output.detach().clone()}
        _backward(output, arrives)
        found.append(seen | {"of_output": given.grad, "of_loss": loss.grad})
    return found


def _backward(output: torch.Tensor, arrives: torch.Tensor) -> None:
    """Backward; what autograd itself refuses of a scaler is told."""
    try:
        output.backward(arrives)
    except TypeError as error:
        if "NoneType" not in str(error):
            raise
        raise Wrong(
            f"the scaler's backward fails before any set_loss_scale: {error}\nThe class attribute is "
            "None then. What does None count as?"
        ) from error
    except RuntimeError as error:
        if "MTPLossAutoScaler" not in str(error):
            raise
        raise Wrong(
            f"autograd refuses what the scaler's backward returned: {error}\nIts forward has two "
            "arguments, so it returns two gradients, each with the shape of its argument."
        ) from error


def _judge_scaler(answer: list[dict[str, Any]]) -> None:
    given, loss, arrives = _given_to_scaler()
    for seen in answer:
        scale = seen["scale"]
        added = [
            (given + loss.sum(), "The loss was added to the output. Forward changes nothing."),
            (given + loss.mean(), "The loss was added to the output. Forward changes nothing."),
        ]
        check_known("the scaler's output", seen["output"], given, added)
        scaled = [
            (
                arrives * scale,
                "The scale was multiplied into the main loss's gradient. That one is scaled already; "
                "the scale is for the loss that is attached.",
            ),
            (arrives + scale, "The attached loss's gradient was added to it. Each has its own."),
        ]
        check_known("the scaler's gradient of the output", seen["of_output"], arrives, scaled)
        if seen["of_loss"] is None:
            raise Wrong(
                "the scaler's backward returned no gradient for the loss\nforward has two arguments, "
                "so backward returns two gradients. Without the second one no depth learns."
            )
        wanted = torch.full_like(loss, scale)
        known = [
            (
                torch.ones_like(wanted),
                f"It is 1, but set_loss_scale({scale:g}) was called before. Losses that are attached "
                "must be scaled as the main loss is: set_loss_scale says how.",
            ),
            (
                torch.full_like(wanted, EARLIER),
                f"It is {EARLIER:g}, the scale that was set when forward ran. "
                f"set_loss_scale({scale:g}) came after that, and before backward. "
                "When is the scale read?",
            ),
            (
                torch.full_like(wanted, 0.25),
                "That is the scale that was set first. A later set_loss_scale replaces it.",
            ),
            (
                scale * loss,
                "The loss itself is in it. The gradient of a sum is 1 for each of its terms, whatever "
                "they are.",
            ),
            (
                torch.full_like(wanted, scale / loss.numel()),
                "It was divided by the number of tokens. Each number that is attached counts in full.",
            ),
        ]
        check_known("the scaler's gradient of the loss", seen["of_loss"], wanted, known)


# -- The losses --


def _arrives(case: Case) -> torch.Tensor:
    """What the main loss sends back to the model's own hidden states."""
    return draw(case, 5, *given_states(case)[0].shape)


def _run_losses(student: ModuleType, case: Case) -> dict[str, Any]:
    states = [state.requires_grad_() for state in given_states(case)]
    batch, token_loss = given_batch(case, 0), token_loss_of(given_weights(case)["table"])
    student.MTPLossAutoScaler.set_loss_scale(torch.tensor(SCALE, dtype=torch.float64))
    given = (batch["labels"].clone(), batch["loss_mask"].clone())
    returned = student.attach_mtp_losses(list(states), *given, token_loss, case.f, case.per_token)
    words = "(hidden states, list of means)"
    hidden, logged = _pair(returned, "attach_mtp_losses", words)
    if not isinstance(hidden, torch.Tensor) or hidden.shape != states[0].shape:
        raise Wrong(f"attach_mtp_losses returned {_kind(hidden)} as hidden states")
    if not isinstance(logged, list | tuple):
        raise Wrong(f"attach_mtp_losses returned {_kind(logged)} as means; a list of K is expected")
    if len(logged) != case.K:
        means = num_of(len(logged), "mean")
        raise Wrong(f"attach_mtp_losses returned {means} for {num_of(case.K, 'depth')}")
    if hidden is states[0]:
        raise Wrong(
            "attach_mtp_losses returned hidden_states[0] itself, with nothing attached\nWhat apply "
            "gives is a new tensor, and only who uses that one sends a gradient to the losses. The log "
            "would show them all the same, and the depths would never learn."
        )
    if not torch.equal(given[0], batch["labels"]) or not torch.equal(given[1], batch["loss_mask"]):
        raise Wrong("attach_mtp_losses changed the labels or the mask; the main loss needs both")
    for k, one in enumerate(logged):
        if isinstance(one, torch.Tensor) and one.requires_grad:
            raise Wrong(
                f"the mean of depth {k + 1} that attach_mtp_losses returned has a graph (requires_grad "
                "is True)\nWho writes the log may keep it for many steps. What is kept with it?"
            )
        if isinstance(one, torch.Tensor) and one.numel() != 1:
            raise Wrong(
                f"attach_mtp_losses returned {_kind(one)} as the mean of depth {k + 1}; one number is "
                "expected: the sum of its losses over the number of its labels"
            )
    found = {"hidden": hidden.detach().clone(), "means": [float(one) for one in logged]}
    _backward(hidden, _arrives(case))
    return found | {"gradients": [state.grad for state in states]}


def _judge_losses(case: Case, answer: dict[str, Any]) -> Result:
    states, batch = given_states(case), given_batch(case, 0)
    others = [
        (
            state,
            f"Those are the hidden states of depth {k}: losses are attached to the model's own.",
        )
        for k, state in enumerate(states)
    ]
    name = "the tensor of hidden states that attach_mtp_losses returned"
    check_known(name, answer["hidden"], states[0], others)
    table = given_weights(case)["table"]
    given = (batch["labels"], batch["loss_mask"], token_loss_of(table))
    _judge_depths(case, states, given, answer["gradients"])
    what = "the gradient of the model's own hidden states"
    check_numbers(what, answer["gradients"][0], _arrives(case))
    logged = torch.tensor(answer["means"], dtype=torch.float64)
    right = torch.tensor(means(case, states, *given), dtype=torch.float64)
    known = [
        (right * case.f / case.K, "f and K are in them. The log shows what the model is worth."),
        (right * case.f, "f is in them. The log shows what the model is worth."),
        (right * float(batch["loss_mask"].sum()), "They are sums; the log shows means."),
    ]
    check_known("the means for the log", logged, right, known)
    return Result({"means": ", ".join(f"{one:.3f}" for one in answer["means"])})


def _judge_depths(
    case: Case, states: list[torch.Tensor], given: tuple, gradients: list[torch.Tensor | None]
) -> None:
    """What each depth's hidden states got."""
    right = _gradients(case, states, given)
    for k in range(1, case.K + 1):
        name = f"the gradient of depth {k}'s hidden states"
        found = gradients[k]
        if found is None:
            raise Wrong(
                f"depth {k}'s hidden states have no gradient\nEither its loss is not made of them, or "
                "it was detached. Or what apply returned for it was lost: attach each loss to what the "
                "attachment before has given."
            )
        if not torch.isfinite(found).all():
            raise Wrong(
                f"{name} has values that are nan or inf\nAt this depth no label counts any more: n_{k} "
                "is 0, and 0 / 0 is nan. A nan times a mask of 0 stays nan. Clamp the number first."
            )
        known = [
            (
                right[k],
                f"It is as if the scale were 1, but set_loss_scale({SCALE:g}) was called before. What "
                "attaches this loss? MTPLossAutoScaler gives it its scale.",
            )
        ]
        known += [
            (SCALE * _gradients(case, states, given, way)[k], words)
            for way, words in wrong_ways(case)
        ]
        check_known(name, found, SCALE * right[k], known, layout={"K": case.K})


def _gradients(
    case: Case, states: list[torch.Tensor], given: tuple, *way: Any
) -> list[torch.Tensor]:
    """Of every hidden state, from the sum of all depths' losses."""
    leaves = [state.clone().requires_grad_() for state in states]
    total = sum(depth_losses(case, leaves, *given, *way))
    found = torch.autograd.grad(total, leaves, allow_unused=True)
    return [torch.zeros_like(x) if g is None else g for g, x in zip(found, leaves, strict=True)]


# -- A step --


def _run_step(student: ModuleType, case: Case) -> dict[str, Any]:
    model = SmallModel(given_weights(case))
    microbatches = [given_batch(case, which) for which in range(len(case.masks))]
    scaler, attach = student.MTPLossAutoScaler, student.attach_mtp_losses
    # A loss of the model's own, deep inside: whoever makes the step does not see it.
    own = torch.zeros(1, dtype=torch.float64, requires_grad=True)
    model.attach = lambda hidden: scaler.apply(hidden, own)

    def counting(*given: Any, **named: Any) -> Any:
        counted.append(None)
        return attach(*given, **named)

    counted: list[None] = []
    student.attach_mtp_losses = counting
    scaler.set_loss_scale(torch.tensor(OLD_SCALE, dtype=torch.float64))
    try:
        student.forward_backward(model, microbatches, case.f, case.per_token, case.loss_scale)
    finally:
        student.attach_mtp_losses = attach
    gradients = {name: weight.grad for name, weight in model.weights.items()}
    if gradients["table"] is None:
        raise Wrong("after forward_backward the table has no gradient: backward never ran")
    calls = {"num_forwards": model.num_forwards, "num_attached": len(counted)}
    return calls | {"gradients": gradients, "of_own": own.grad}
