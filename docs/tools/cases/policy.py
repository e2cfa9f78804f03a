"""What the page on reinforcement learning shows: answers and advantages, calls, ratios and the loss.

Called by: `problem_cases`; pages find it as `policy`. Calls: the package's own task, advantages and
loss; the planner for the calls; `policy_pictures`.
"""

from collections.abc import Sequence
from fractions import Fraction

import torch

from cases.case_words import table
from minimegatron.planner.actions import BACKWARD, FORWARD
from minimegatron.planner.plan import plan
from minimegatron.planner.simulator import Costs, simulate
from minimegatron.rl.rl_utils import calculate_grpo_advantages, calculate_grpo_loss
from minimegatron.rl.tasks import sort_digits
from pictures import policy_pictures
from pictures.policy_pictures import Block, Call

TASK = sort_digits()
EQUALS, END = 6, 7
CLIP = 0.2
"""Of the page's ratios; Megatron's default is 0.01."""

# -- Answers and advantages --

PROMPT = (3, 1, 2, EQUALS)
ANSWERS = ((1, 2, 3, END), (1, 3, 3, END), (2, 1, 3, 0), (END,))


def tokens_words(tokens: Sequence[int]) -> str:
    """
    >>> tokens_words((3, 1, 2, 6)), tokens_words((1, 7))
    ('3 1 2 =', '1 .')
    """
    return " ".join({EQUALS: "=", END: "."}.get(token, str(token)) for token in tokens)


def rewards_of(answers: Sequence[Sequence[int]] = ANSWERS) -> list[float]:
    """What the task gives for each answer to the page's prompt."""
    return [TASK.rewarded(PROMPT, tuple(answer)) for answer in answers]


def advantages_of(rewards: Sequence[float]) -> list[float]:
    """Of one group."""
    return calculate_grpo_advantages([list(rewards)], [[1] * len(rewards)])


def group_table() -> str:
    """The answers of one group, with reward and advantage."""
    rewards = rewards_of()
    rows = [
        [f"`{tokens_words(answer)}`", f"{reward:.3f}", _signed(advantage)]
        for answer, reward, advantage in zip(ANSWERS, rewards, advantages_of(rewards), strict=True)
    ]
    return table([f"answer to `{tokens_words(PROMPT)}`", "reward", "advantage"], rows)


def reward_words(*answer: int) -> str:
    """
    >>> reward_words(1, 2, 3, 7)
    '1'
    """
    return f"{rewards_of([answer])[0]:g}"


def advantages_words(*rewards: float) -> str:
    """
    >>> advantages_words(0, 1)
    '−1.00, +1.00'
    """
    return ", ".join(map(_signed, advantages_of(rewards)))


def _signed(number: float) -> str:
    return f"{number:+.2f}".replace("-", "−") if abs(number) > 5e-3 else "0"


# -- The loss of a token --


def token_loss(
    ratio: float, advantage: float, clip: float = CLIP, beta: float = 0.0, ref: float = 1.0
) -> tuple[float, float, float]:
    """Of a token whose probability is `ratio` times the old one: the loss, its gradient by the token's
    log-probability, and the KL term. `ref`: the first model's probability over the current one."""
    current = torch.tensor([[ratio]], dtype=torch.float64).log().requires_grad_()
    loss, kl_term, *_ = calculate_grpo_loss(
        current_logprobs=current,
        old_logprobs=torch.zeros_like(current),
        ref_logprobs=current.detach() + torch.tensor(ref, dtype=torch.float64).log(),
        advantages=torch.tensor([advantage], dtype=torch.float64),
        clamp_eps_lower=clip,
        clamp_eps_upper=clip,
        kl_beta=beta,
        entropy_weight=0.0,
    )
    loss.sum().backward()
    return loss.item(), current.grad.item(), kl_term.item()


def loss_words(ratio: float, advantage: float) -> str:
    """
    >>> loss_words(1.5, 1)
    '−1.2, its gradient 0'
    """
    loss, gradient, _ = token_loss(ratio, advantage)
    return f"{_number(loss)}, its gradient {_number(gradient)}"


def k3_words(ref: float) -> str:
    """
    >>> k3_words(1)
    '0'
    """
    return _number(token_loss(1.0, 1.0, ref=ref)[2])


def _number(value: float) -> str:
    # Adding 0.0 leaves no minus before a zero.
    return f"{round(value, 3) + 0.0:g}".replace("-", "−")


def loss_table() -> str:
    """Tokens of a good and of a bad answer: loss and gradient at some ratios."""
    rows = []
    for advantage in (1.0, -1.0):
        for ratio in (1.0, 1.5, 0.5):
            loss, gradient, _ = token_loss(ratio, advantage)
            rows.append([_signed(advantage), *map(_number, (ratio, loss, gradient))])
    return table(["A", "ratio", "loss", "gradient by the log-probability"], rows)


def loss_figure() -> str:
    """The loss over the ratio, for a good answer and a bad one."""
    ratios = [number / 20 for number in range(8, 33)]
    panels = []
    for name, advantage in (("A = 1: make it likelier", 1.0), ("A = −1: make it rarer", -1.0)):
        plain = [token_loss(ratio, advantage, clip=0.99)[0] for ratio in ratios]
        clipped = [token_loss(ratio, advantage)[0] for ratio in ratios]
        panels.append((name, plain, clipped))
    return policy_pictures.losses(ratios, panels, (1 - CLIP, 1 + CLIP))


# -- Calls of the schedule --


def calls_of_rollout(answer_length: int, batches: int = 1, iterations: int = 2) -> list[str]:
    """What the schedule is called for from one rollout to the next, in order.

    >>> calls_of_rollout(1)
    ['token 1', 'scores', 'reference', 'update', 'update']
    """
    drawing = [f"token {number}" for number in range(1, answer_length + 1)]
    return [*drawing, "scores", "reference", *["update"] * batches * iterations]


def num_calls(answer_length: int, batches: int = 1, iterations: int = 2) -> int:
    return len(calls_of_rollout(answer_length, batches, iterations))


def _call(name: str, p: int, m: int) -> Call:
    """Its blocks, as the planner has them; a backward takes 2 and a forward 1."""
    planned = plan("1f1b", p, m, forward_only=name != "update")
    done = simulate(planned, Costs.of_stages(Fraction(1), Fraction(2), 1, None, Fraction(0), None))
    blocks = [
        Block(rank, float(start), float(end), action.kind == BACKWARD)
        for rank, actions in enumerate(done.plan.ranks)
        for action, start, end in zip(actions, done.starts[rank], done.ends[rank], strict=True)
        if action.kind in (FORWARD, BACKWARD)
    ]
    return Call(name, blocks, float(done.makespan))


def calls_figure(p: int = 2, m: int = 2) -> str:
    """A rollout of the task's answers, its scores, and two updates."""
    names = calls_of_rollout(TASK.answer_length)
    return policy_pictures.calls([_call(name, p, m) for name in names], p)


def forward_share(answer_length: int, p: int, m: int, batches: int = 1, iterations: int = 2) -> str:
    """The share of the time that calls without gradients take, in percent, without messages.

    >>> forward_share(4, 2, 2)
    '50%'
    """
    calls = [_call(name, p, m) for name in calls_of_rollout(answer_length, batches, iterations)]
    forward = sum(call.length for call in calls if call.name != "update")
    return f"{100 * forward / sum(call.length for call in calls):.0f}%"
