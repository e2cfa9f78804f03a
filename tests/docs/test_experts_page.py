"""What the tour's pages on experts show: computed as the package does it, recorded as it ran."""

import importlib
from fractions import Fraction

import pytest
import torch

experts = importlib.import_module("cases.experts")
layers = importlib.import_module("cases.layers")
record_experts = importlib.import_module("records.expert_loads")

CLOSE = 0.05


def numbers(table: str) -> list[list[str]]:
    """The cells of a Markdown table, without its head."""
    return [[c.strip() for c in line.split("|")[1:-1]] for line in table.splitlines()[2:]]


# -- Routing and the way of tokens --


def test_the_best_two_are_chosen_and_the_least_probable_dropped():
    logits = torch.tensor(experts.LOGITS)
    for rank, (probs, chosen) in enumerate(experts._routes()):
        best = logits[rank].topk(experts.TOPK, dim=-1)
        assert chosen.gather(1, best.indices).all() and chosen.sum() == best.indices.numel()
        torch.testing.assert_close(probs.gather(1, best.indices), best.values.softmax(-1))
    for rank, (probs, chosen) in enumerate(experts._routes()):
        kept = experts._routes(True)[rank][1]
        assert kept.sum(dim=0).max() <= experts.capacity()
        for expert in range(experts.NUM_EXPERTS):
            lost, stays = chosen[:, expert] & ~kept[:, expert], kept[:, expert]
            assert not lost.any() or probs[lost, expert].max() < probs[stays, expert].min()
    assert experts.dropped_words() == "expert 0 drops tokens 2 and 5"
    # A gap is to be seen: the two ranks do not send alike, and neither sends all or nothing.
    (a, b), (c, d) = experts.splits()
    assert len({a, b, c, d}) == 4 and min(a, b, c, d) > 0


def test_both_ends_know_the_sizes():
    counts = [[5, 1, 0, 2], [3, 3, 1, 1]]
    assert experts.splits_of(counts, 0) == "sends [6, 2] and gets [6, 6]"
    assert experts.splits_of(counts, 1) == "sends [6, 2] and gets [2, 2]"
    own = [experts.counts(rank) for rank in range(experts.NUM_RANKS)]
    assert experts.splits() == [[sum(x[:2]), sum(x[2:])] for x in own]


def test_the_pictures_say_what_they_show():
    picture = experts.routing_figure()
    assert picture.count("dropped") >= 2 and f"capacity {experts.capacity()}" in picture
    picture = experts.travel_figure()
    assert picture.count("mm-ribbon") == sum(
        count > 0 for rank in range(experts.NUM_RANKS) for count in experts.counts(rank)
    )
    assert "rank 0 sends 3 to expert 3 on rank 1" in picture


# -- Gradients --


def test_an_expert_is_divided_by_the_number_of_losses():
    rows = numbers(experts.gradient_table())
    assert [row[4:6] for row in rows] == [
        ["2", "1"],
        ["4", "2"],
        ["1", "1"],
        ["2", "2"],
        ["2", "1"],
    ]
    assert [row[7] for row in rows] == ["1/2", "1/4", "1", "1/2", "1/2"]
    assert [row[8] != "right by luck" for row in rows] == [True, True, False, False, True]
    assert experts.expert_grad([1, 2, 3, 4], 2) == "3 and 7; 2.5"
    assert experts.times_over_edp(8, ep=4) == 4 and experts.factor_of(8, ep=4) == Fraction(1, 8)


# -- Recorded runs --


def test_the_recorded_runs_balance_in_the_order_of_the_page():
    runs = experts.recording()["runs"]
    assert {name: run["flags"] for name, run in runs.items()} == record_experts.RUNS
    assert (
        experts.recording()["command"] == f"torchrun {record_experts.LAUNCH} {record_experts.MODEL}"
    )
    worst = float(experts.worst_imbalance(8, 2))
    for run in runs.values():
        assert len(run["imbalance"]) == len(run["loss"]) == record_experts.NUM_STEPS
        assert all(1 <= value <= worst for value in run["imbalance"])
        assert run["loss"][-1] < 0.6 * run["loss"][0]
    last = [float(experts.last_imbalance(name)) for name in ("neither", "auxiliary loss", "bias")]
    assert last[0] > 1.3 * last[1] > 1.3 * last[2]
    losses = [float(experts.last_loss(name)) for name in runs]
    assert max(losses) - min(losses) < 0.15, "the page says that the loss does not tell"
    assert max(runs["neither"]["imbalance"]) > 0.97 * worst, "the page says: soon near it"


@pytest.mark.parametrize("num_stages", [1, 2])
def test_recorded_overlap_is_as_simulated(num_stages):
    ordinary, *combined = layers.overlap()["runs"][str(num_stages)]
    for one in combined:
        assert abs(one["exposed"] / one["planned_exposed"] - 1) < CLOSE
        gained = ordinary["length"] / one["length"]
        assert abs(gained * one["planned_length"] / ordinary["planned_length"] - 1) < CLOSE
        assert one["length"] < ordinary["length"]


# -- The price, and when it fits --


@pytest.mark.parametrize(("pp", "vpp", "m"), [(1, 1, 4), (2, 2, 4), (4, 2, 8)])
def test_the_warm_up_costs_one_layer(pp, vpp, m):
    for rank in range(pp):
        plain, combined = (
            int(layers.peak_layers(pp, m, rank, vpp, 3, is_combined))
            for is_combined in (False, True)
        )
        assert combined == plain + 1
        if pp > 1:
            assert (
                layers.warmup_of(pp, m, rank, vpp, True) == layers.warmup_of(pp, m, rank, vpp) + 1
            )


def test_what_is_exposed_grows_where_the_page_says():
    """By 1 a pair beyond dispatch = m, by 2 beyond 2 m; m is 2, and 12 layers have a partner."""
    at = [int(row[2]) for row in numbers(layers.fits_table(range(1, 8)))]
    ends = at[1] - at[0]  # the first forward and the last backward, which have no partner
    assert [b - a - ends for a, b in zip(at, at[1:], strict=False)] == [0, 12, 12, 24, 24, 24]


def test_pairs_stand_in_brackets():
    assert layers.combined_order(1, 4, 0) == "`F0 [F1 B0] [F2 B1] [F3 B2] B3`"
    assert "[F0.1 B0.1]" not in layers.price_table()
