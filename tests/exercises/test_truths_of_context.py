"""What the checks of exercises 22 and 23 take for right is what the package computes.

A check works out its own truth, so that it and the package can be wrong apart; here they meet.
"""

import math
from types import SimpleNamespace

import pytest
import torch

from minimegatron.core.transformer import context_parallel, mtp_loss, multi_token_prediction
from minimegatron.core.transformer.transformer_config import TransformerConfig
from minimegatron.exercises.catalog.ex22_ring_attention import blocks
from minimegatron.exercises.catalog.ex22_ring_attention import check as ring_check
from minimegatron.exercises.catalog.ex22_ring_attention import solution as ring_solution
from minimegatron.exercises.catalog.ex22_ring_attention.company import Company
from minimegatron.exercises.catalog.ex22_ring_attention.data import Tokens, positions
from minimegatron.exercises.catalog.ex22_ring_attention.merging import given_parts
from minimegatron.exercises.catalog.ex22_ring_attention.truth import RightRing
from minimegatron.exercises.catalog.ex23_predict_two_tokens import check as losses_check
from minimegatron.exercises.catalog.ex23_predict_two_tokens import data, truth

CLOSE = {"rtol": 1e-10, "atol": 1e-12}
RINGS = [case for case in ring_check.cases(0) if case.part == ring_check.FORWARD]
MERGES = [case for case in ring_check.cases(0) if case.part == ring_check.MERGE]
LOSSES = [case for case in losses_check.cases(0) if case.part == losses_check.LOSSES]


@pytest.mark.parametrize("case", RINGS, ids=str)
def test_blocks_of_the_package_are_a_whole_attention(case):
    """Forward and backward, block by block, as its ring calls them."""
    given = Tokens(case, 0)
    right, c, n = RightRing(given), case.cp, 2 * case.chunk
    output, lse = (
        torch.zeros_like(given.query),
        torch.full(given.query.shape[:2], -math.inf).double(),
    )
    pairs = [(r, j) for r in range(c) for j in range(c)]
    for r, j in pairs:
        rows, columns, is_causal = _places(given, r, j, n)
        visible = torch.ones(n, n, dtype=torch.bool).tril() if is_causal else None
        tensors = given.query[:, rows], given.key[:, columns], given.value[:, columns]
        part = context_parallel.block_attention(*tensors, scale=given.scale, visible=visible)
        output[:, rows], lse[:, rows] = context_parallel.merge(output[:, rows], lse[:, rows], *part)
    torch.testing.assert_close(output, right.output, **CLOSE)
    torch.testing.assert_close(lse, right.lse, **CLOSE)
    delta = (given.grad * output).sum(dim=2)
    found = [torch.zeros_like(one) for one in (given.query, given.key, given.value)]
    for r, j in pairs:
        rows, columns, is_causal = _places(given, r, j, n)
        visible = torch.ones(n, n, dtype=torch.bool).tril() if is_causal else None
        tensors = given.query[:, rows], given.key[:, columns], given.value[:, columns]
        terms = context_parallel.block_gradients(
            given.grad[:, rows],
            *tensors,
            lse=lse[:, rows],
            delta=delta[:, rows],
            scale=given.scale,
            visible=visible,
        )
        for total, term, where in zip(found, terms, (rows, columns, columns), strict=True):
            total[:, where] += term
    for total, wanted in zip(found, right.gradients(), strict=True):
        torch.testing.assert_close(total, wanted, rtol=1e-9, atol=1e-12)


def _places(given: Tokens, r: int, j: int, n: int) -> tuple[torch.Tensor, torch.Tensor, bool]:
    """Positions in the sequence of a block's queries and keys."""
    block = context_parallel.block_of(r, j, n)
    mine, theirs = (positions(one, given.size, given.length) for one in (r, j))
    return mine[block.rows], theirs[block.columns], block.causal


@pytest.mark.parametrize("case", MERGES, ids=str)
def test_merged_as_in_the_package(case):
    parts = given_parts(case)
    merged = zip(context_parallel.merge(*parts), ring_solution.merge(*parts), strict=True)
    for ours, theirs in merged:
        torch.testing.assert_close(ours, theirs, **CLOSE)


def test_the_blocks_of_the_solution_are_those_of_the_package():
    n = 6
    for c in (2, 3, 4):
        for rank in range(c):
            for step in range(c):
                block = context_parallel.block_of(rank, (rank - step) % c, n)
                *slices, is_causal = ring_solution.block_of_step(step, rank, c, n)
                ours = [list(range(n))[one] for one in (block.rows, block.columns)]
                assert [list(range(n))[one] for one in slices] == ours
                assert is_causal == block.causal


def test_the_figures_of_the_ring_page():
    """Its merge, its pairs, how often a gradient travels."""
    outputs = [torch.full((1, 1, 1), x, dtype=torch.float64) for x in (2.0, 6.0)]
    for more in (0.0, 1000.0):
        lses = [torch.full((1, 1), math.log(x) + more, dtype=torch.float64) for x in (1.0, 3.0)]
        output, lse = ring_solution.merge(outputs[0], lses[0], outputs[1], lses[1])
        assert float(output) == pytest.approx(5.0)
        assert float(lse) == pytest.approx(math.log(4.0) + more)
    assert [positions(rank, 2, 8).tolist() for rank in range(2)] == [[0, 1, 6, 7], [2, 3, 4, 5]]
    for rank in range(2):
        for step, num_pairs in enumerate((10, 8)):
            queries, keys, is_causal = ring_solution.block_of_step(step, rank, 2, 4)
            numbers = [list(range(4))[one] for one in (queries, keys)]
            assert len(blocks.pairs_of(*numbers, is_causal)) == num_pairs


@pytest.mark.parametrize("case", LOSSES, ids=str)
def test_losses_of_further_tokens(case):
    """`process_mtp_loss` hangs on the hidden states what the check expects, and logs the same means."""
    states, batch = data.given_states(case), data.given_batch(case, 0)
    labels, mask = batch["labels"], batch["loss_mask"]
    token_loss = data.token_loss_of(data.given_weights(case)["table"])
    joined = torch.cat(states).requires_grad_()
    mtp_loss.MTPLossAutoScaler.set_loss_scale(torch.tensor(1.0))
    config = TransformerConfig(
        num_layers=1,
        hidden_size=4,
        num_attention_heads=1,
        mtp_num_layers=case.K,
        mtp_loss_scaling_factor=case.f,
        calculate_per_token_loss=case.per_token,
    )
    model = SimpleNamespace(
        config=config,
        pg_collection=None,
        cp_group=None,
        training=True,
        output_layer=lambda states, **_: (states, None),
        compute_language_model_loss=lambda labels, states: token_loss(states, labels),
    )
    mtp_loss.MTPLossLoggingHelper.clean_loss_in_tracker()
    hidden = multi_token_prediction.process_mtp_loss(model, joined, labels, mask, None)
    logged = mtp_loss.MTPLossLoggingHelper.tracker["values"].tolist()
    mtp_loss.MTPLossLoggingHelper.clean_loss_in_tracker()
    hidden.backward(torch.zeros_like(hidden))
    leaves = [state.clone().requires_grad_() for state in states]
    sum(truth.depth_losses(case, leaves, labels, mask, token_loss)).backward()
    torch.testing.assert_close(
        joined.grad.chunk(case.K + 1)[1:], tuple(leaf.grad for leaf in leaves[1:]), **CLOSE
    )
    wanted = truth.means(case, states, labels, mask, token_loss)
    assert logged == pytest.approx(wanted, rel=1e-6)


def test_rolled_and_scaled_as_in_the_package():
    for tensor in losses_check.to_roll(losses_check.cases(0)[0]):
        rolled, total = multi_token_prediction.roll_tensor(tensor)
        assert torch.equal(rolled, truth.rolled(tensor, 1)) and total == rolled.sum()
    scale, scaler = torch.tensor(8.0), mtp_loss.MTPLossAutoScaler
    mtp_loss.scale_mtp_as_mean(scale, 4, 1)
    assert float(scaler.main_loss_backward_scale) == 8.0 / 4
    mtp_loss.scale_mtp_as_sum(scale, 4, 1)
    assert float(scaler.main_loss_backward_scale) == 8.0
    scaler.set_loss_scale(torch.tensor(1.0))


def test_the_figures_of_the_page_on_two_tokens():
    """Labels, masks, numbers; and what both means add to the loss."""
    labels, mask = torch.tensor([[5, 6, 7, 8]]), torch.tensor([[1, 1, 0, 1]])
    rows = [
        (truth.rolled(labels, k)[0].tolist(), truth.rolled(mask, k)[0].tolist()) for k in (1, 2)
    ]
    assert rows == [([6, 7, 8, 0], [1, 0, 1, 0]), ([7, 8, 0, 0], [0, 1, 0, 0])]
    assert [sum(row) for _, row in rows] == [2, 1]
    given = iter(torch.tensor([[[2.0, 0, 4, 0]], [[0.0, 6, 0, 0]]]))
    case = SimpleNamespace(K=2, f=0.3, per_token=False)
    added = truth.depth_losses(case, [None] * 3, labels, mask, lambda *_: next(given))
    assert float(sum(added)) == pytest.approx(1.35)


# -- What is company for a hop --


def whole_block(query, key):
    return torch.exp(query @ key.mT)


COMPANY = {
    "a block": (lambda q, k, v: whole_block(q, k), True),
    "a block, einsum": (lambda q, k, v: torch.einsum("aqd,akd->aqk", q, k), True),
    "a block of scaled queries": (lambda q, k, v: whole_block(q * 0.5, k[:, 1:]), True),
    "a block of both, stacked": (lambda q, k, v: whole_block(q, torch.stack([k, v])[0]), True),
    "a block of a copy": (lambda q, k, v: whole_block(q, torch.empty_like(k).copy_(k)), True),
    "anything": (lambda q, k, v: torch.exp(torch.ones(4, 4) @ torch.ones(4, 4)), False),
    "queries alone": (lambda q, k, v: torch.exp(q @ q.mT), False),
    "keys alone": (lambda q, k, v: torch.exp(k @ k.mT), False),
    "zeros like keys": (lambda q, k, v: whole_block(q, torch.zeros_like(k)), False),
}


@pytest.mark.parametrize(("work", "is_block"), COMPANY.values(), ids=list(COMPANY))
def test_d_only_a_block_of_queries_and_keys_hides_a_hop(work, is_block):
    query, key, value = torch.randn(3, 2, 4, 3, dtype=torch.float64).unbind()
    query, key, value = query.clone(), key.clone(), value.clone()
    hop = SimpleNamespace(is_waited=False, has_company=False)
    company = Company(query, [key, value])
    company.under_way = [hop]
    with company:
        work(query, key, value)
    assert hop.has_company == is_block and company.num_hidden == is_block


def test_d_what_comes_at_the_place_of_keys_are_keys():
    query, key, came = torch.ones(3, 1, 2, 3).unbind()
    query, key, came = query.clone(), key.clone(), came.clone()
    company = Company(query, [key])
    assert company.arrive([key], [came]) and company.marks(came) == {1}
    assert not company.arrive([query], [torch.ones(3)])
    with company:
        torch.exp(query @ came.mT)
    # Nothing was under way.
    assert company.num_hidden == 0
