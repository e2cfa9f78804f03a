"""GRPO's formulas, against the same thing written out."""

import math
import statistics
from types import SimpleNamespace
from unittest import mock

import pytest
import torch

from minimegatron import train_rl
from minimegatron.core import parallel_state
from minimegatron.rl import rl_utils
from minimegatron.rl.rl_utils import (
    calculate_grpo_advantages,
    calculate_grpo_loss,
    selective_log_softmax,
)
from tests.fake_transport import FakeGroup

ROWS, TOKENS, LOWER, UPPER, BETA, ENTROPY, CAP = 4, 6, 0.2, 0.28, 0.1, 0.03, 1.1


def some_rows():
    """Log-probabilities of the model, of the old one, of the reference, of drawing; advantages."""
    torch.manual_seed(3)
    shape, double = (ROWS, TOKENS), torch.float64
    current = -2.0 * torch.rand(shape, dtype=double)
    old, ref, drawn = (current + 0.8 * torch.randn(shape, dtype=double) for _ in range(3))
    return current.requires_grad_(), old, ref, drawn, torch.tensor([1.5, -0.7, 0.0, -1.1]).double()


def written_out(current, old, ref, drawn, advantage):
    """The loss of one token, number by number, for Python's floats or for tensors [1]."""
    exp = torch.exp
    ratio = exp(current - old)
    gains = [ratio * advantage]
    if ratio > 1 + UPPER:
        gains.append(torch.tensor((1 + UPPER) * advantage, dtype=torch.float64))
    elif ratio < 1 - LOWER:
        gains.append(torch.tensor((1 - LOWER) * advantage, dtype=torch.float64))
    gain = gains[0] if len(gains) == 1 or gains[0] <= gains[1] else gains[1]
    weight = min(math.exp(old - drawn), CAP)
    kl = exp(ref - current) - (ref - current) - 1
    return -weight * gain + BETA * kl + ENTROPY * exp(current) * current


def grpo_loss(current, old, ref, drawn, advantages):
    return calculate_grpo_loss(
        current, old, ref, advantages, LOWER, UPPER, BETA, ENTROPY, drawn, CAP
    )


def test_the_loss_and_its_gradient_are_those_of_the_formula():
    current, old, ref, drawn, advantages = some_rows()
    loss, kl, ratios, entropy, above, below = grpo_loss(current, old, ref, drawn, advantages)
    wanted = torch.stack(
        [
            torch.stack(
                [
                    written_out(
                        current[r, t], old[r, t], ref[r, t], drawn[r, t], advantages[r].item()
                    )
                    for t in range(TOKENS)
                ]
            )
            for r in range(ROWS)
        ]
    )
    torch.testing.assert_close(loss, wanted, rtol=1e-12, atol=1e-12)
    weights = torch.rand(ROWS, TOKENS, dtype=torch.float64)
    found, truth = (
        torch.autograd.grad((values * weights).sum(), current, retain_graph=True)[0]
        for values in (loss, wanted)
    )
    torch.testing.assert_close(found, truth, rtol=1e-12, atol=1e-12)
    # Both bounds are in use, on rows of either sign: a test of none of them would say nothing.
    for bound in (above, below):
        assert bound[0].any() and bound[[1, 3]].any() and not bound.all()
    assert torch.equal(above, ratios > 1 + UPPER) and torch.equal(below, ratios < 1 - LOWER)
    assert (kl >= 0).all() and (entropy > 0).all()


def test_weights_have_a_cap_only_if_one_is_given():
    current, old, ref, drawn, advantages = some_rows()
    arguments = (current, old, ref, advantages, LOWER, UPPER, 0.0, 0.0)
    plain = calculate_grpo_loss(*arguments)[0]
    weighted = calculate_grpo_loss(*arguments, drawn)[0]
    capped = calculate_grpo_loss(*arguments, drawn, CAP)[0]
    weights = (old - drawn).exp()
    torch.testing.assert_close(weighted, plain * weights)
    torch.testing.assert_close(capped, plain * weights.clamp(max=CAP))
    assert (weights > CAP).any() and (weights < 1).any()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_log_probabilities_of_chosen_tokens(dtype):
    logits = torch.randn(2, 3, 7).to(dtype)
    index = torch.randint(7, (2, 3))
    found = selective_log_softmax(logits, index)
    truth = logits.double().log_softmax(-1).gather(-1, index.unsqueeze(-1)).squeeze(-1)
    assert found.dtype == dtype
    tolerance = {torch.float64: 1e-14, torch.float32: 1e-6, torch.bfloat16: 2e-2}[dtype]
    torch.testing.assert_close(found.double(), truth, rtol=tolerance, atol=tolerance)


def test_advantages_are_within_a_group_in_order():
    rewards, turns = [[0.0, 1.0, 3.0], [5.0, 5.0, 5.0]], [[1, 2, 1], [1, 1, 3]]
    found = calculate_grpo_advantages(rewards, turns)
    deviation = statistics.pstdev(rewards[0])
    a, b, c = ((reward - 4 / 3) / (1e-4 + deviation) for reward in rewards[0])
    assert found == pytest.approx([a, b, b, c, 0, 0, 0, 0, 0], abs=1e-12)


class Copier(torch.nn.Module):
    """A model whose logits are the row of a table of the token it reads; two of them are padding."""

    post_process = True

    def __init__(self):
        super().__init__()
        self.table = torch.nn.Parameter(torch.randn(5, 7).double())

    def forward(self, tokens, position_ids, attention_mask, runtime_gather_output=None):
        assert runtime_gather_output and attention_mask is None
        return self.table[tokens]


@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_log_probabilities_are_of_the_token_that_follows(temperature):
    model, tokens = Copier(), torch.randint(5, (3, 6), generator=torch.Generator().manual_seed(2))
    args = SimpleNamespace(unpadded_vocab_size=5, rl_default_temperature=temperature)
    with (
        mock.patch.object(rl_utils, "get_args", lambda: args),
        mock.patch.object(parallel_state, "get_context_parallel_group", FakeGroup),
    ):
        found = rl_utils.get_logprobs(model, tokens, torch.arange(6).expand(3, 6))
        scores = rl_utils.get_logprobs(model, tokens, torch.arange(6).expand(3, 6), no_grad=True)
    wanted = torch.empty(3, 5).double()
    for row in range(3):
        for place in range(5):
            logits = model.table[tokens[row, place], :5] / temperature
            wanted[row, place] = logits.log_softmax(-1)[tokens[row, place + 1]]
    torch.testing.assert_close(found.detach(), wanted.detach(), rtol=1e-12, atol=1e-12)
    assert found.requires_grad and not scores.requires_grad and torch.equal(scores, found.detach())


def test_a_microbatch_without_a_token_counts_none():
    losses = torch.tensor([[1.0, 2.0, 4.0]], requires_grad=True)
    for mask, total, count in (([1.0, 0.0, 1.0], 5.0, 2.0), ([0.0, 0.0, 0.0], 0.0, 0.0)):
        mask = torch.tensor([mask])
        with mock.patch.object(train_rl, "check_loss"):
            loss, num_tokens, report = train_rl.loss_func(mask, {"rl/kl_term": losses * 2}, losses)
        assert (float(loss), float(num_tokens)) == (total, count)
        assert report["lm loss"].tolist() == [total, count]
        assert report["rl/kl_term"].tolist() == [2 * total, count]
        assert loss.requires_grad and not num_tokens.requires_grad
        assert not any(pair.requires_grad for pair in report.values())


def test_what_cannot_be_is_one_sentence():
    current, old, ref, drawn, advantages = some_rows()
    with pytest.raises(ValueError, match="a group has 1 answer"):
        calculate_grpo_advantages([[1.0]], [[1]])
    with pytest.raises(
        ValueError, match=r"old_logprobs are \[4, 5\], but current_logprobs \[4, 6\]"
    ):
        grpo_loss(current, old[:, 1:], ref, drawn, advantages)
    with pytest.raises(ValueError, match=r"advantages are \[4, 6\].* one for each of the 4 rows"):
        grpo_loss(current, old, ref, drawn, advantages[:, None].expand(4, 6))
