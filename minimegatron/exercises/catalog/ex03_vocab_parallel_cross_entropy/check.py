"""Checks the loss and its gradient against torch's cross-entropy, then inside a GPT's training step."""

import random
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

from minimegatron.core.tensor_parallel.cross_entropy import vocab_parallel_cross_entropy
from minimegatron.exercises.bench.feedback_numbers import check_numbers
from minimegatron.exercises.bench.gpt_step import StepCase, make_groups, on_these_ranks
from minimegatron.exercises.bench.gpt_step_judge import Reference
from minimegatron.exercises.bench.sent_bytes import all_sent_counted
from minimegatron.exercises.check import Case, Result, Wrong, data_seed, installed

OURS = "minimegatron.core.tensor_parallel.cross_entropy.VocabParallelCrossEntropy"
REPLACES = (OURS, "minimegatron.core.tensor_parallel.cross_entropy._find_target")
KINDS = ("small logits", "logits in the hundreds", "all targets on rank 0's slice")
WORLD = 4
NO_OFFSET = (
    "targets were looked up as if this rank's slice began at word 0\nA target is an id of the whole "
    "vocabulary. At which word does the slice begin, and at which entry of it lies the target?"
)

OWN_SLICE = (
    "it is the loss over this rank's slice of the vocabulary\nNo other rank was asked. Which "
    "numbers of a "
    "token does this rank not have?"
)
ONE_M = (
    "m is subtracted from the logits in one of its two terms, and not in the other\nIn "
    "log(sum exp(x - m)) - (x_y - m) the two m cancel. Which of yours is without it?"
)


def cases(seed: int) -> list[Case]:
    """A group of four and two groups of two; slices of different width; then a GPT."""
    draw, data = random.Random(seed), data_seed(seed)
    sizes = [(4, draw.choice([7, 8, 10]), data), (2, draw.choice([6, 8, 9]), data + 1)]
    found = [
        Case(f"tp={tp}, dp={WORLD // tp}, {kind}", part="the loss", tp=tp, n=n, kind=kind, seed=s)
        for tp, n, s in sizes
        for kind in KINDS
    ]
    gpt = StepCase(tp=2, num_microbatches=2, seed=data + 1).values
    return [*found, Case("a GPT, tp=2, dp=2", part="in a GPT", step=gpt)]


def run(student: ModuleType, case: Case) -> dict[str, Any]:
    """Losses and gradients of one kind of logits, or of a GPT."""
    with installed(student.VocabParallelCrossEntropy, OURS):
        if case.part == "in a GPT":
            step = on_these_ranks(case.step)
            return {"reports": step.forward_backward(), "gradients": step.gradients()}
        groups = make_groups(StepCase(tp=case.tp))
        return Trial(case, dist.get_rank()).run(groups.tp)


def judge(case: Case, answers: list[Any]) -> Result | None:
    """Every rank's losses, gradients, and bytes."""
    if case.part == "in a GPT":
        reference = Reference(case.step, WORLD).run()
        reference.check_losses([answer["reports"] for answer in answers], "GPT's loss")
        reference.check_gradients([answer["gradients"] for answer in answers])
        return None
    for rank, answer in enumerate(answers):
        trial = Trial(case, rank)
        trial.judge(answer)
    words = f"{answers[0]['collectives']}; all logits are {trial.whole_bytes} bytes"
    return Result({"collectives": words})


OTHER_COPY = (
    "numbers of ranks {} are in it, which hold another copy of the model and other tokens\nWhich ranks "
    "hold the other slices of this rank's logits, and which ranks did you ask?"
)


class Trial:
    """One set of logits, the same on all ranks of a group, of which each rank shows its slice."""

    def __init__(self, case: Case, rank: int):
        self.case, self.kind, self.n, self.tp, self.rank = case, case.kind, case.n, case.tp, rank
        replica, self.tp_rank = divmod(rank, case.tp)
        generator = torch.Generator().manual_seed(1000 * case.seed + 10 * replica + len(case.kind))
        vocab = case.n * case.tp
        self.logits = torch.randn((3, 4, vocab), generator=generator, dtype=torch.float64)
        if "hundreds" in case.kind:
            self.logits *= 400
            self.logits[0, 0, -1] = 1500.0  # exp overflows above 709
        top = case.n if "rank 0" in case.kind else vocab
        self.target = torch.randint(top, (3, 4), generator=generator)
        self.weights = torch.rand((3, 4), generator=generator, dtype=torch.float64)
        self.weights[1, 1] = 0.0  # a token that is masked out
        self.first = self.tp_rank * case.n
        self.whole_bytes = self.logits.numel() * self.logits.element_size()
        self.where = f"rank {rank}"

    def mine(self, tensor: torch.Tensor) -> torch.Tensor:
        """This rank's slice of the last dimension."""
        return tensor[..., self.first : self.first + self.n].clone()

    def run(self, group: Any) -> dict[str, Any]:
        """In the room: one forward and backward."""
        given = self.mine(self.logits).requires_grad_()
        target, weights = self.target.clone(), self.weights.clone()
        with all_sent_counted() as counter:
            found = vocab_parallel_cross_entropy(given, target, tp_group=group)
        self._check_kept("forward", "target", target, self.target)
        if not torch.equal(given.detach(), self.mine(self.logits)):
            raise Wrong(
                f"{self.where}: forward changed the logits it was given; they are the model's"
            )
        result = found.detach().clone() if isinstance(found, torch.Tensor) else found
        if isinstance(found, torch.Tensor):
            self._check_shape(found)
            # Another microbatch comes before this one's backward, as in a pipeline.
            apart = self.mine(self.other_logits()).requires_grad_()
            vocab_parallel_cross_entropy(apart, target.clone(), tp_group=group)
            with all_sent_counted(counter):
                found.backward(weights)
            self._check_kept("backward", "grad_output", weights, self.weights)
        return {
            "loss": result,
            "gradient": given.grad,
            "num_bytes": counter.num_bytes,
            "collectives": counter.words(),
        }

    def other_logits(self) -> torch.Tensor:
        """Those of another microbatch: the same in another order."""
        return self.logits.roll(1, 0)

    def _check_kept(self, what: str, name: str, now: torch.Tensor, before: torch.Tensor) -> None:
        if not torch.equal(now, before):
            raise Wrong(
                f"{self.where}: {what} changed {name}\nIt is the caller's, who may use it again. Which "
                "of your operations work in place?"
            )

    def _check_shape(self, found: torch.Tensor) -> None:
        """Raises Wrong for losses that backward could not begin from."""
        if found.shape != self.target.shape:
            raise Wrong(
                f"{self.where}: forward returned losses of shape {list(found.shape)}, but "
                f"{list(self.target.shape)} is expected: one loss per token\nTokens do not all count "
                "the same (some are masked), so whoever calls it sums them up."
            )

    def judge(self, answer: dict[str, Any]) -> None:
        """Raises Wrong unless loss and gradient are right, and little was sent."""
        whole = self.logits.clone().requires_grad_()
        loss = F.cross_entropy(whole.flatten(0, 1), self.target.flatten(), reduction="none")
        expected = loss.view(3, 4)
        expected.backward(self.weights)
        self._check_loss(self.where, answer["loss"], expected.detach())
        self._check_gradient(self.where, answer["gradient"], self.mine(whole.grad))
        if answer["num_bytes"] >= self.whole_bytes / self.tp:
            raise Wrong(
                f"{self.where}: right, but your collectives were given {answer['num_bytes']} bytes "
                f"({answer['collectives']}); the logits themselves are {self.whole_bytes}\n"
                "Which numbers about a token does a rank lack? How many are they, however large the "
                "vocabulary is?"
            )

    # -- Losses --

    def _check_loss(self, where: str, found: Any, expected: torch.Tensor) -> None:
        if isinstance(found, torch.Tensor) and found.shape == expected.shape:
            if not torch.isfinite(found).all():
                place = tuple(int(i) for i in (~torch.isfinite(found)).nonzero()[0])
                raise Wrong(
                    f"{where}: the loss of token {list(place)} is {found[place].item()}, expected "
                    f"{expected[place].item():.6g}\n{_infinite_words(found[place].item())}"
                )
            if not torch.allclose(found, expected):
                for guess, words in self._guesses():
                    if torch.allclose(found, guess):
                        raise Wrong(f"{where}: the loss is wrong: {words}")
        sizes = {"tp": self.tp}
        check_numbers("the loss of a token", found, expected, self.rank, sizes)

    def _guesses(self) -> list[tuple[torch.Tensor, str]]:
        """Losses that known mistakes give, and what to say about each."""
        slices = self.logits.unflatten(-1, (self.tp, self.n))
        here = slices[..., self.tp_rank, :]
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
        only_here, peak = torch.where(is_here, right - maximum, 0.0), here.amax(-1)
        # Without the offset, ids below n look up an entry on every rank, the others on none.
        not_shifted = slices.gather(-1, self._entries_of_all_ranks()).squeeze(-1).sum(-1)
        is_low = self.target < self.n
        unmasked = here.gather(-1, entry.unsqueeze(-1)).squeeze(-1)
        return [
            *self._guesses_of_all_ranks(),
            (
                log_sum - torch.where(is_low, not_shifted - (self.tp - 1) * maximum, maximum),
                NO_OFFSET,
            ),
            (log_sum - torch.where(is_low, not_shifted, 0.0), NO_OFFSET),
            (log_sum - maximum, self._nothing_found()),
            (log_sum, self._nothing_found()),
            (log_sum - maximum - right, ONE_M),
            (log_sum + maximum - right, ONE_M),
            (own_sum - unmasked, OWN_SLICE),
            (own_sum - peak - torch.where(is_here, unmasked - peak, 0.0), OWN_SLICE),
            (
                own_sum - right,
                "each rank normalised over its own slice of the vocabulary\nThe sum of exponentials "
                "is over all words. Who has the others?",
            ),
            (
                log_sum - right - others,
                "words of other ranks count too\nA target outside this rank's slice looks up some "
                "entry of it, to have a valid index. What has that entry to do with the target?",
            ),
            (
                log_sum - maximum - only_here,
                "this rank used the target's logit only where the target is in its own slice\nThe "
                "other ranks need it too. How do they get it, if nobody knows who has it?",
            ),
            (
                log_sum - unmasked,
                "this rank took an entry of its own slice for the target's logit, also where the "
                "target is in another slice\nWho has that logit, and what can this rank add to it?",
            ),
            (
                mixed - (right - own_peak),
                "each rank subtracted the maximum of its own slice\nexp(x - m) adds up over ranks "
                "only if all of them use the same m. How can they agree on one?",
            ),
        ]

    def _guesses_of_all_ranks(self) -> Iterator[tuple[torch.Tensor, str]]:
        """Sums over all ranks, where each model's copy has some of them only."""
        if self.tp == WORLD:
            return
        copies = [Trial(self.case, rank) for rank in range(0, WORLD, self.tp)]
        others = [r for r in range(WORLD) if r // self.tp != self.rank // self.tp]
        words = OTHER_COPY.format(others)
        logits = torch.stack([one.logits for one in copies])
        target = torch.stack([one.target for one in copies]).unsqueeze(-1)
        own = logits.amax(-1)
        for maximum in (own, own.amax(0).expand_as(own)):
            shifted = logits - maximum.unsqueeze(-1)
            sums = shifted.exp().sum(-1)
            right = shifted.gather(-1, target).squeeze(-1)
            mine = self.rank // self.tp
            yield sums.sum(0).log() - right.sum(0), words
            yield sums.sum(0).log() - right[mine], words
            yield sums[mine].log() - right.sum(0), words

    def _foreign_entries(self, slices: torch.Tensor) -> torch.Tensor:
        """The sum of what the ranks that do not hold the target look up at entry 0."""
        first = slices[..., 0]
        owner = (self.target // self.n).unsqueeze(-1)
        return first.sum(-1) - first.gather(-1, owner).squeeze(-1)

    def _nothing_found(self) -> str:
        text = "the target's logit, x_y - m, counts as 0 here\n"
        if self.rank != self.tp_rank:
            return (
                f"{text}No tensor-parallel rank found the target in its slice. This is rank "
                f"{self.rank} of all ranks, but {self.tp_rank} of its tensor-parallel ranks. Which of "
                "the two says where its slice begins?"
            )
        return f"{text}One of the ranks holds the target. How does its logit come to the others?"

    def _entries_of_all_ranks(self) -> torch.Tensor:
        """Each target below n as a place in every slice; 0 for the others."""
        entry = self.target.masked_fill(self.target >= self.n, 0)
        return entry[..., None, None].expand(*entry.shape, self.tp, 1)

    # -- Gradients --

    def _summed_gradient(self) -> torch.Tensor:
        """All slices of the logits' gradient, added up."""
        whole = self.logits.softmax(-1)
        whole.scatter_add_(-1, self.target.unsqueeze(-1), -torch.ones_like(whole[..., :1]))
        return (whole * self.weights.unsqueeze(-1)).unflatten(-1, (self.tp, self.n)).sum(-2)

    def _check_gradient(self, where: str, found: Any, expected: torch.Tensor) -> None:
        if found is None:
            raise Wrong(f"{where}: backward gave the logits no gradient (None)")
        softmax = self.mine(self.logits.softmax(-1))
        other_softmax = self.mine(self.other_logits().softmax(-1))
        weights = self.weights.unsqueeze(-1)
        entry = (self.target - self.first).unsqueeze(-1)
        is_here = (entry >= 0) & (entry < self.n)
        entry = entry.masked_fill(~is_here, 0)
        everywhere = softmax.scatter_add(-1, entry, -torch.ones_like(weights)) * weights
        guesses = [
            (
                self._summed_gradient(),
                "it was summed over the ranks\nThe slices are logits of other words on each rank. "
                "Which of them does a rank's gradient belong to?",
            ),
            (
                softmax * weights,
                "at the target it is as everywhere else\nThe loss has two terms. In which of them is "
                "x_y alone, and what is the slope of that one?",
            ),
            (
                everywhere,
                "ranks that do not hold the target subtract something too, at their entry 0\nWhose "
                "logit is x_y?",
            ),
            (
                expected + (other_softmax - softmax) * weights,
                "it belongs to another microbatch, whose forward came between this one's forward and "
                "its backward\nWhere does each forward keep what its own backward needs?",
            ),
            (
                expected.where(weights != 0, softmax * 0) / weights.clamp(min=1e-30),
                "grad_output is not used\nTokens count differently, a masked one not at all. Where "
                "does backward hear how much each of them counts?",
            ),
        ]
        if found.shape == expected.shape and not torch.allclose(found, expected):
            for guess, words in guesses:
                near = torch.isclose(found, guess) | (weights == 0)
                if near.all() and not torch.allclose(guess, expected):
                    raise Wrong(f"{where}: the gradient of the logits is wrong: {words}")
        what = "the gradient of the logits"
        check_numbers(what, found, expected, self.rank, {"tp": self.tp})


def _infinite_words(loss: float) -> str:
    """Why the loss is infinite or NaN: what is wrong with the subtracted maximum, m."""
    if loss == float("-inf"):
        return (
            "This is log(0): every exp(x - m) is 0, so m is far above this token's largest "
            "logit. Print m beside the token's logits of all ranks. Of which tokens is it made, and "
            "what does all_reduce do with the ranks' numbers?"
        )
    return (
        "exp(x) overflows above 709, and log(sum exp(x - m)) - (x_y - m) is the same for every m. With "
        "which m is no exp(x - m) too large, on any rank?"
    )
