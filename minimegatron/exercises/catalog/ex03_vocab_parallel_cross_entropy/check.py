"""Checks the loss and its gradient against torch's cross-entropy, then inside a GPT's training step."""

import random
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

from minimegatron.core.tensor_parallel.cross_entropy import vocab_parallel_cross_entropy
from minimegatron.exercises.bench_counting import Counter, counted
from minimegatron.exercises.bench_gpt import (
    GptStep,
    StepCase,
    check_gradients,
    make_groups,
    one_process,
)
from minimegatron.exercises.check import Case, Result, Wrong, check_numbers, installed

OURS = "minimegatron.core.tensor_parallel.cross_entropy.VocabParallelCrossEntropy"


def cases(seed: int) -> list[Case]:
    """A group of four and two groups of two; slices of different width."""
    draw = random.Random(seed)
    return [
        Case("tp=4", tp=4, n=draw.choice([7, 8, 10]), seed=seed),
        Case("tp=2, dp=2", tp=2, n=draw.choice([6, 8, 9]), seed=seed + 1),
    ]


def run(student: ModuleType, case: Case) -> Result:
    """Losses and gradients of several kinds of logits, then of a GPT."""
    step_case = StepCase(tp=case.tp, num_microbatches=2, seed=case.seed)
    groups = make_groups(step_case)
    found: Counter | None = None
    with installed(student.VocabParallelCrossEntropy, OURS):
        for kind in ("small logits", "logits in the hundreds", "all targets on rank 0's slice"):
            trial = Trial(case, kind, groups.tp, groups.dp.rank())
            found = trial.check()
        if case.tp == 2:
            check_gpt(step_case, groups)
    return Result({"collectives": f"{found.words()}; all logits are {trial.whole_bytes} bytes"})


class Trial:
    """One set of logits, the same on all ranks of a group, of which each rank shows its slice."""

    def __init__(self, case: Case, kind: str, group: Any, replica: int):
        self.kind, self.group, self.n, self.tp = kind, group, case.n, case.tp
        generator = torch.Generator().manual_seed(1000 * case.seed + 10 * replica + len(kind))
        vocab = case.n * case.tp
        self.logits = torch.randn((3, 4, vocab), generator=generator, dtype=torch.float64)
        if "hundreds" in kind:
            self.logits *= 400
            self.logits[0, 0, -1] = 1500.0  # exp overflows above 709
        top = case.n if "rank 0" in kind else vocab
        self.target = torch.randint(top, (3, 4), generator=generator)
        self.weights = torch.rand((3, 4), generator=generator, dtype=torch.float64)
        self.weights[1, 1] = 0.0  # a token that is masked out
        self.first = group.rank() * case.n
        self.whole_bytes = self.logits.numel() * self.logits.element_size()

    def mine(self, tensor: torch.Tensor) -> torch.Tensor:
        """This rank's slice of the last dimension."""
        return tensor[..., self.first : self.first + self.n].clone()

    def check(self) -> Counter:
        """Raises Wrong unless losses and gradients are right; returns what was sent."""
        whole = self.logits.clone().requires_grad_()
        loss = F.cross_entropy(whole.flatten(0, 1), self.target.flatten(), reduction="none")
        expected = loss.view(3, 4)
        expected.backward(self.weights)

        given = self.mine(self.logits).requires_grad_()
        with counted() as counter:
            found = vocab_parallel_cross_entropy(given, self.target, tp_group=self.group)
        where = f"rank {dist.get_rank()} ({self.kind})"
        if not torch.equal(given.detach(), self.mine(self.logits)):
            raise Wrong(f"{where}: forward changed the logits it was given; they are the model's")
        result = found.detach().clone() if isinstance(found, torch.Tensor) else found
        self._check_loss(where, result, expected.detach())
        found.backward(self.weights)
        self._check_gradient(where, given.grad, self.mine(whole.grad))
        if counter.num_bytes >= self.whole_bytes / self.tp:
            raise Wrong(
                f"{where}: right, but your collectives were given {counter.num_bytes} bytes "
                f"({counter.words()}); the logits themselves are {self.whole_bytes}\n"
                "Three numbers per token are enough: the maximum, the target's logit, the sum of "
                "exponentials."
            )
        return counter

    # -- Losses --

    def _check_loss(self, where: str, found: Any, expected: torch.Tensor) -> None:
        if isinstance(found, torch.Tensor) and found.shape == expected.shape:
            if not torch.isfinite(found).all():
                place = [int(i) for i in (~torch.isfinite(found)).nonzero()[0]]
                raise Wrong(
                    f"{where}: the loss of token {place} is {found[tuple(place)].item()}, expected "
                    f"{expected[tuple(place)].item():.6g}\nexp(x) overflows above 709. Subtract the "
                    "largest logit of all ranks first: log(sum exp(x - m)) - (x_y - m) is the same "
                    "for every m."
                )
            if not torch.allclose(found, expected):
                for guess, words in self._guesses():
                    if torch.allclose(found, guess):
                        raise Wrong(f"{where}: the loss is wrong: {words}")
        sizes = {"tp": self.tp}
        check_numbers(f"{self.kind}: the loss of a token", found, expected, dist.get_rank(), sizes)

    def _guesses(self) -> list[tuple[torch.Tensor, str]]:
        """Losses that known mistakes give, and what to say about each."""
        slices = self.logits.unflatten(-1, (self.tp, self.n))
        rank = self.group.rank()
        here = slices[..., rank, :]
        entry = (self.target - self.first).clamp(0, self.n - 1)
        is_here = (self.target >= self.first) & (self.target < self.first + self.n)
        right = self.logits.gather(-1, self.target.unsqueeze(-1)).squeeze(-1)
        log_sum, own_sum = self.logits.logsumexp(-1), here.logsumexp(-1)
        maximum = self.logits.amax(-1)
        others = self._foreign_entries(slices) - (self.tp - 1) * maximum
        owner = self.target // self.n
        peaks = slices.amax(-1)
        own_peak = peaks.gather(-1, owner.unsqueeze(-1)).squeeze(-1)
        mixed = (slices - peaks.unsqueeze(-1)).exp().sum((-1, -2)).log()
        only_here = torch.where(is_here, right - maximum, 0.0)
        unmasked = here.gather(-1, entry.unsqueeze(-1)).squeeze(-1)
        return [
            (
                own_sum - right,
                "each rank normalised over its own slice of the vocabulary\nThe sum of exponentials "
                "is over all words: it needs an all-reduce too.",
            ),
            (
                log_sum - right - others,
                "words of other ranks were not masked\nA target outside this rank's slice looks up "
                "some entry of it, to have a valid index. That entry must count as zero in the sum "
                "over the ranks.",
            ),
            (
                log_sum - maximum - only_here,
                "this rank used the target's logit only where the target is in its own slice\nThe "
                "other ranks need it too: sum it over the ranks, zero where it is not.",
            ),
            (
                log_sum - unmasked,
                "this rank took an entry of its own slice for the target's logit, also where the "
                "target is in another slice\nMask those, and sum over the ranks.",
            ),
            (
                mixed - (right - own_peak),
                "each rank subtracted the maximum of its own slice\nexp(x - m) adds up over ranks "
                "only if all of them use the same m: the maximum needs an all-reduce (MAX).",
            ),
        ]

    def _foreign_entries(self, slices: torch.Tensor) -> torch.Tensor:
        """The sum of what the ranks that do not hold the target look up at entry 0."""
        first = slices[..., 0]
        owner = (self.target // self.n).unsqueeze(-1)
        return first.sum(-1) - first.gather(-1, owner).squeeze(-1)

    # -- Gradients --

    def _check_gradient(self, where: str, found: Any, expected: torch.Tensor) -> None:
        if found is None:
            raise Wrong(f"{where}: backward gave the logits no gradient (None)")
        softmax = self.mine(self.logits.softmax(-1))
        weights = self.weights.unsqueeze(-1)
        entry = (self.target - self.first).unsqueeze(-1)
        is_here = (entry >= 0) & (entry < self.n)
        entry = entry.masked_fill(~is_here, 0)
        everywhere = softmax.scatter_add(-1, entry, -torch.ones_like(weights)) * weights
        guesses = [
            (softmax * weights, "the 1 at the target is not subtracted"),
            (
                everywhere,
                "the 1 is subtracted on ranks that do not hold the target too, at their entry 0: "
                "mask them, as in forward",
            ),
            (
                expected.where(weights != 0, softmax * 0) / weights.clamp(min=1e-30),
                "grad_output is not used: tokens count differently (a masked one not at all), so "
                "each token's gradient must be multiplied by its own grad_output",
            ),
        ]
        if found.shape == expected.shape and not torch.allclose(found, expected):
            for guess, words in guesses:
                near = torch.isclose(found, guess) | (weights == 0)
                if near.all() and not torch.allclose(guess, expected):
                    raise Wrong(f"{where}: the gradient of the logits is wrong: {words}")
        what = f"{self.kind}: the gradient of the logits"
        check_numbers(what, found, expected, dist.get_rank(), {"tp": self.tp})


def check_gpt(case: StepCase, groups: Any) -> None:
    """Two replicas of a GPT over two ranks each, against one process."""
    step = GptStep(case, groups)
    reports = step.forward_backward()
    serial = one_process(case, groups.dp.size())
    expected = serial.forward_backward()[groups.dp.rank() :: groups.dp.size()]
    for number, (report, wanted) in enumerate(zip(reports, expected, strict=True)):
        what = f"the GPT's loss of microbatch {number}"
        check_numbers(what, report["loss"], wanted["loss"], dist.get_rank(), step.sizes())
    check_gradients(step, serial.gradients())
