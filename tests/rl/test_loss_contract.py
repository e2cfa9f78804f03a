"""Each framework's way to hand over its loss: the gradient is that which it states, on real ranks too.

Lengths of answers are uneven, and one row has no token: with one row a microbatch, one is empty.
"""

from dataclasses import replace
from functools import partial

import pytest
import torch

from minimegatron.core.transformer.zigzag import take_part
from minimegatron.rl.loss_contract import (
    BREAKS,
    FORMULAS,
    ROWS,
    Microbatch,
    coefficients,
    counts_of,
    formula,
)
from minimegatron.rl.rl_utils import gather_sequence
from minimegatron.training.tiny_gpt import TinyGPT
from tests.ranks import run_ranks
from tests.rl.boxes import boxes, whole

LENGTHS = (1, 5, 2, 7, 4, 3, 6, 0)
NUM_ROWS = LENGTH = 8
PLACE, ENDS = torch.arange(LENGTH), torch.tensor(LENGTHS).unsqueeze(-1)
MASK, REAL = (PLACE < ENDS).double(), (PLACE < (ENDS + 2) // 2 * 2).double()
CUTS = [(1, 1, 1), (2, 1, 1), (4, 1, 1), (8, 1, 1), (1, 2, 1), (4, 2, 1), (1, 1, 2), (4, 2, 2)]
"""(M, d, c)"""
BARS = {"NeMo-RL": 1e-9, "ROLL, seq-mean-token-mean": 1e-9}
"""Those that add 1e-8 to what they divide by."""


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_a_row_counts_tokens_as_its_formula_does(row):
    for M, d, c in CUTS:
        found, wanted = coefficients(row, MASK, REAL, M, d, c), formula(row, MASK, M, d, c)
        assert float((found - wanted).abs().max()) < BARS.get(row.name, 1e-15), (M, d, c)
        assert not found[MASK == 0].any() and (found[MASK > 0] > 0).all()


def test_the_formulas_that_depend_on_nothing_are_those_of_the_whole_batch():
    losses = torch.rand(NUM_ROWS, LENGTH, dtype=torch.float64)
    total, means = (losses * MASK).sum(), (losses * MASK).sum(1) / MASK.sum(1).clamp(min=1)
    wanted = {
        "Σt / N": total / 28,
        "Σr / W": means.sum() / 7,
        "Σr / GBS": means.sum() / 8,
        "Σt / Σ max(tokens of a row, 1)": total / 29,
    }
    for words, value in wanted.items():
        torch.testing.assert_close(FORMULAS[words](losses, MASK, []), value)


@pytest.mark.parametrize("broken", BREAKS, ids=lambda broken: broken.words)
def test_a_row_with_a_part_exchanged_is_off_as_it_says(broken):
    is_off = False
    for M, d, c in CUTS:
        row = broken.row
        ratios = (coefficients(row, MASK, REAL, M, d, c) / formula(row, MASK, M, d, c))[MASK > 0]
        if broken.times is not None:
            times = broken.times(counts_of(MASK, REAL, M, d, c))
            torch.testing.assert_close(ratios, torch.full_like(ratios, times), rtol=1e-9, atol=0)
        is_off |= bool((ratios - 1).abs().max() > 0.01)
    assert is_off


def test_what_depends_on_the_cut_does():
    by_words = {broken.words: broken.row for broken in BREAKS}
    for words, apart in (
        ("train_rl without the flag, which is off by default", (0.5, 3.5)),
        ("N of the microbatch in place of the batch's", (0.5, 3.5)),
        ("N of the copy in place of the batch's", (1.0, 1.0)),
        ("an empty microbatch counts one token", (28 / 29, 28 / 29)),
    ):
        row = by_words[words]
        whole_batch = coefficients(row, MASK, REAL, 1)
        ratios = (coefficients(row, MASK, REAL, 8) / whole_batch)[MASK > 0]
        assert (float(ratios.min()), float(ratios.max())) == pytest.approx(apart)


def test_verl_loses_a_token_where_context_ranks_do_not_divide_them():
    (row,) = (row for row in ROWS if row.name.startswith("verl, flag on"))
    odd = (PLACE < ENDS + 1).double()  # 36 tokens in all; in each half of the batch an odd number
    right, off = (coefficients(row, MASK, odd, M, 1, 2) * 28 for M in (1, 2))
    assert float(right.max()) == pytest.approx(1) and float(off.max()) == pytest.approx(36 / 34)


# -- On real ranks --

LAYOUTS = {
    1: [({}, 1), ({}, 4)],
    2: [
        *(({}, 1), ({}, 4)),
        ({"pp": 2}, 2),
        ({"pp": 2, "vp": 2}, 4),
        ({"tp": 2}, 2),
        ({"context_parallel_size": 2}, 1),
        ({"context_parallel_size": 2}, 2),
    ],
}
"""By ranks: fields of TinyGPT, and microbatches of a copy."""


def loss_of(row, counts, where, local_losses):
    """The loss function of a microbatch: what this rank has of it, handed over as the row says."""
    mask, real, group = where
    tokens_of_rows, real_tokens = mask.sum(dim=1), float(real.sum())
    if row.gather:
        losses = gather_sequence(local_losses, row.gather == "sum")
    else:
        losses, mask = local_losses, take_part(mask, 1, group)
    return row.hand_over(Microbatch(losses, mask, tokens_of_rows, real_tokens), counts)


def forward_step(row, counts, group, data_iterator, model):
    tokens, labels, mask, real = next(data_iterator)
    positions = torch.arange(LENGTH).expand_as(tokens)
    tokens, labels, positions = (take_part(each, 1, group) for each in (tokens, labels, positions))
    losses = model(tokens, positions, None, labels=labels)
    return losses, partial(loss_of, row, counts, (mask, real, group))


BROKEN = [replace(broken.row, name=broken.words) for broken in BREAKS]
SHOWS_BREAKS = [({}, 4), ({"context_parallel_size": 2}, 1)]
"""On two ranks."""


def rows_at(layout, num_microbatches, num_ranks):
    shows_breaks = num_ranks == 2 and (layout, num_microbatches) in SHOWS_BREAKS
    return [*ROWS, *BROKEN] if shows_breaks else ROWS


def all_rows(layouts):
    """In a rank: by layout and row, what one step leaves."""
    found = []
    for layout, num_microbatches in layouts:
        found.append({})
        for is_per_token in (False, True):
            gpt = make(layout, is_per_token)
            for row in rows_at(layout, num_microbatches, torch.distributed.get_world_size()):
                if row.is_per_token == is_per_token:
                    found[-1][row.name] = one_step(gpt, row, num_microbatches)
    return found


def one_step(gpt, row, num_microbatches):
    d, c = gpt.groups.dp.size(), gpt.groups.cp.size()
    mine = [field.chunk(d)[gpt.groups.dp.rank()] for field in data()]
    of_copy = float(mine[2].sum())
    counts = replace(counts_of(MASK, REAL, num_microbatches, d, c), tokens_of_copy=of_copy)
    size = len(mine[0]) // num_microbatches
    gpt.micro_batch_size = size
    gpt.step(
        num_microbatches,
        forward_step_func=partial(forward_step, row, counts, gpt.groups.cp),
        data=list(zip(*(field.split(size) for field in mine), strict=True)),
    )
    return boxes(gpt.chunks)


def make(layout, is_per_token):
    return TinyGPT(
        **layout,
        seq_length=LENGTH,
        num_layers=4,
        hidden_size=16,
        num_attention_heads=2,
        params_dtype=torch.float64,
        pipeline_dtype=torch.float64,
        calculate_per_token_loss=is_per_token,
    )


def data():
    tokens = torch.randint(64, (NUM_ROWS, LENGTH), generator=torch.Generator().manual_seed(4))
    return tokens, tokens.roll(-1, dims=1), MASK, REAL


def truths(cuts):
    """In a rank: by cut (M, d, c) and row, gradients of the formulas by autograd in one process.

    Of a row with a part exchanged, those that `coefficients` foretells.
    """
    model = make({}, False).chunks[0].module
    tokens, labels, _, _ = data()
    losses = model(tokens, torch.arange(LENGTH).expand_as(tokens), None, labels=labels)
    named = dict(model.named_parameters())
    found = {}
    for cut in cuts:
        found[cut] = {}
        for row in [*ROWS, *BROKEN]:
            weights = formula(row, MASK, *cut)
            if row in BROKEN:
                weights = coefficients(row, MASK, REAL, *cut)
            total = (weights * losses).sum()
            gradients = torch.autograd.grad(total, list(named.values()), retain_graph=True)
            found[cut][row.name] = dict(zip(named, gradients, strict=True))
    return found


@pytest.mark.parametrize("num_ranks", LAYOUTS)
def test_every_rows_gradient_is_that_of_its_formula(num_ranks):
    cuts = []
    for layout, num_microbatches in LAYOUTS[num_ranks]:
        c = layout.get("context_parallel_size", 1)
        d = num_ranks // (c * layout.get("pp", 1) * layout.get("tp", 1))
        cuts.append((num_microbatches, d, c))
    (wanted,) = run_ranks(truths, 1, cuts)
    per_rank = run_ranks(all_rows, num_ranks, LAYOUTS[num_ranks], timeout=120)
    for number, cut in enumerate(cuts):
        for row in rows_at(*LAYOUTS[num_ranks][number], num_ranks):
            found = whole([of_rank[number][row.name] for of_rank in per_rank])
            assert found.keys() == wanted[cut][row.name].keys()
            for name, gradient in found.items():
                off = float((gradient - wanted[cut][row.name][name]).abs().max())
                assert off < BARS.get(row.name, 1e-12), f"{row.name} at {cut}: {name} by {off:.1e}"
