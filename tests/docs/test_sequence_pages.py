"""What the tour's pages on a sequence show: a ring of attention, and further tokens."""

import importlib
from fractions import Fraction

import pytest
import torch

from minimegatron.planner.context_costs import pairs_of_tokens

rings = importlib.import_module("cases.rings")
mtp = importlib.import_module("cases.mtp")
sequence_pictures = importlib.import_module("pictures.sequence_pictures")


def cells(table: str) -> list[list[str]]:
    """Of a Markdown table, without its head."""
    return [[c.strip() for c in line.split("|")[1:-1]] for line in table.splitlines()[2:]]


# -- A ring --


@pytest.mark.parametrize(("length", "c"), [(32, 4), (16, 2)])
def test_pairs_are_those_of_the_triangle(length, c):
    whole = length * (length + 1) // 2
    assert rings.zigzag_pairs(length, c) == [whole // c] * c == pairs_of_tokens(length, c)
    plain = rings.contiguous_pairs(length, c)
    assert plain == pairs_of_tokens(length, c, contiguous=True)
    assert sum(plain) == whole and plain[-1] > 1.4 * whole / c
    assert rings.pairs_figure(length, c).count("<polygon") == 2 * 2 * c


@pytest.mark.parametrize("c", [2, 4])
def test_the_steps_cover_each_visible_pair_once(c):
    """Of chunks: those that the ring's blocks have are all that a causal query sees."""
    seen = []
    for rank in range(c):
        chunks = rings.chunks_of_rank(rank, c)
        owners = [rings.holder(rank, step, c) for step in range(c)]
        assert owners[0] == rank and sorted(owners) == list(range(c))
        for owner in owners:
            keys = rings.chunks_of_rank(owner, c)
            blocks = rings.blocks(rank, owner)
            half = [share == sequence_pictures.HALF for _, _, share in blocks]
            # Two whole blocks' worth in each step, which is half of the square.
            assert len(blocks) - sum(half) / 2 == 2
            assert all(half[i] == (chunks[r] == keys[k]) for i, (r, k, _) in enumerate(blocks))
            seen += [(chunks[row], keys[column]) for row, column, _ in blocks]
    assert sorted(seen) == [(q, k) for q in range(2 * c) for k in range(q + 1)]


def test_two_softmaxes_merge_to_one():
    rows = {row[0]: row[3:] for row in cells(rings.merge_table())}
    assert rows["**merged**"] == rows["all keys at once"]
    scores, values = (torch.tensor(rings.HERE[i] + rings.THERE[i]) for i in (0, 1))
    by_hand = float(scores.softmax(0) @ values)
    assert float(rows["**merged**"][0]) == pytest.approx(by_hand, abs=1e-3)
    wrong = float(rows["mean of both outputs"][0].removesuffix(", wrong"))
    assert abs(wrong - by_hand) > 0.1
    assert rings.merged_words([1, 1], [0, 2], [1], [4]).startswith("o = 2 ")


def test_volumes_and_what_is_exposed():
    table = {row[0]: [float(x) for x in row[1:]] for row in cells(rings.volume_table())}
    p2p, gathered, heads = table["`p2p`"], table["`all_gather`"], table["`a2a`"]
    assert p2p[0] == gathered[0] and p2p[1] > gathered[1] > p2p[0] > heads[0] == heads[1]
    assert p2p[2] < heads[2], "the page says that few groups make the ring cheap"
    groups = rings.groups_for_ring(4, 16)
    sent = [rings.sent_bytes(way, 4, 64, 16, groups, 8).forward for way in ("p2p", "a2a")]
    assert sent[0] < sent[1] and rings.sent_words("p2p", 4, 4096, 16, 16, 64) == "12 MiB"
    # By hand, hop 3: forward 3 x (3 - 2), backward 2 x (6 - 4), and 3 home.
    assert (rings.exposed(2, 1), rings.exposed(2, 3)) == ("1", "10")
    assert rings.lanes_figure().count("<svg") == 1


# -- Further tokens --


def test_a_depth_reads_what_the_one_before_predicts():
    for depth in (1, 2):
        before = mtp.targets(mtp.TEXT, depth - 1)
        assert mtp.reads(mtp.TEXT, depth) == before[:-depth] + [""] * depth
        assert mtp.targets(mtp.TEXT, depth)[: -depth or None] == list(mtp.TEXT[1 + depth :])
        assert mtp.num_targets(8, depth) == 8 - depth
    assert mtp.targets_figure().count("mm-padding") == 2 * (1 + 2)
    # The page's question: a masked prompt costs no target.
    assert mtp.counts([0, 0, 0, 1, 1, 1, 1, 1], 1) == [5, 5]
    assert mtp.counts([1] * 8, 2) == [8, 7, 6]


def test_a_depth_weighs_as_much_whatever_is_left_of_it():
    """f/K of the main loss in both contracts; the weights are gradients of the package's own losses."""
    rows = [[Fraction(x) for x in row[1:]] for row in cells(mtp.weights_table())]
    share = Fraction(1, 10) / mtp.K
    for _, _, off, _, on in rows[1:]:
        assert (off, on) == (share * rows[0][2], share * rows[0][4])
    assert [row[0] for row in rows] == [6, 5, 4]
    assert rows[0][2] == Fraction(1, len(mtp.MASKS)) and rows[0][4] == Fraction(6, 14)
    once, often = (mtp.weight([[1] * 5] * 2, 1, 1, 0.1, m) for m in (1, 4))
    assert once == 4 * often == Fraction(1, 80)


def test_who_holds_reads_and_sends_what():
    last, alone = (cells(mtp.stages_table(x).replace(x, "")) for x in ("Ett|tt|tmL", "Ett|tt|m|L"))
    assert [row[2] for row in last] == ["**original**", "–", "copy"]
    assert [row[2] for row in alone] == ["**original**", "–", "copy", "copy if tied"]
    assert [row[3] for row in alone] == ["tokens", "–", "tokens", "labels, mask"]
    assert {row[4] for row in last[:-1]} == {"[s, b, h]"}
    assert [row[4] for row in alone] == ["[s, b, h]", "[s, b, h]", "[2 s, b, h]", "–"]
    assert mtp.embedding_words("Et|t|m|L") == "stages 0 and 2"
    assert mtp.message_words("Et|t|m|L", 2, 1024, 1, 512) == "[2,048, 1, 512]"
