"""Attention over ranks: outputs and gradients of one process, what is sent and what is kept.

One process plays all ranks; see `tests.played_ranks`. Real ones: tests/test_parity_context.py.
"""

import math
import threading

import pytest
import torch
import torch.nn.functional as F

from minimegatron.core import tracing
from minimegatron.core.process_groups_config import ProcessGroupCollection
from minimegatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from minimegatron.core.tensor_parallel.random import checkpoint
from minimegatron.core.transformer import context_parallel
from minimegatron.core.transformer.activation_config import COMM_TYPES
from minimegatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from minimegatron.core.transformer.context_parallel import (
    Sharing,
    attention_over_ranks,
    block_attention,
    block_of,
    merge,
)
from minimegatron.core.transformer.dot_product_attention import DotProductAttention
from minimegatron.core.transformer.enums import AttnMaskType
from minimegatron.core.transformer.spec_utils import ModuleSpec
from minimegatron.core.transformer.transformer_config import TransformerConfig
from minimegatron.core.transformer.zigzag import positions_of_rank, take_part
from tests.fake_transport import FakeGroup
from tests.figures import figure
from tests.played_ranks import play

WIDTH = 4
TOLERANCE = 1e-12
RINGS = ("p2p", "all_gather")


def tensors(c: int, heads: int, groups: int, b: int = 2, tokens: int = 4, dtype=torch.float64):
    """Query, key, value and the gradient of the output, of the whole sequence [s, b, heads, d]."""
    generator = torch.Generator().manual_seed(c + heads)
    sizes = (heads, groups, groups, heads)
    return [
        torch.randn(tokens * c, b, number, WIDTH, generator=generator, dtype=torch.float64).to(
            dtype
        )
        for number in sizes
    ]


def attend(query, key, value, mask=None, causal=True, scale=None, keep=None):
    """In one process, written out. `keep`: factors on the probabilities."""
    query, key, value = (tensor.permute(1, 2, 0, 3) for tensor in (query, key, value))
    key, value = (x.repeat_interleave(query.size(1) // x.size(1), dim=1) for x in (key, value))
    scores = query @ key.mT * (scale or 1 / math.sqrt(WIDTH))
    hidden = torch.zeros_like(scores, dtype=torch.bool) if mask is None else mask
    if causal:
        s = scores.size(-1)
        hidden = hidden | torch.ones(s, s, dtype=torch.bool).triu(1)
    nowhere = hidden.all(-1, keepdim=True)
    scores = scores.masked_fill(hidden & ~nowhere, float("-inf"))
    probabilities = scores.softmax(-1).masked_fill(nowhere, 0.0)
    if keep is not None:
        probabilities = probabilities * keep
    return (probabilities @ value).permute(2, 0, 1, 3).flatten(2)


def expected(query, key, value, grad, **options):
    inputs = [x.clone().requires_grad_() for x in (query, key, value)]
    output = attend(*inputs, **options)
    output.backward(grad.flatten(2))
    return [output.detach(), *(x.grad for x in inputs)]


def local(query, key, value, mask):
    return attend(query, key, value, mask)


def one_rank(group, kind, whole, mask, options, attend_here=local):
    """Output and gradients of this rank's tokens."""
    *inputs, grad = (take_part(x, 0, group) for x in whole)
    for tensor in inputs:
        tensor.requires_grad_()
    if mask is not None:
        mask = take_part(mask, mask.dim() - 2, group)
    sharing = Sharing(group, 1, **{"scale": 1 / math.sqrt(WIDTH), **options})
    output = attention_over_ranks(kind, *inputs, mask, sharing, attend_here)
    output.backward(grad.flatten(2))
    return [output.detach(), *(x.grad for x in inputs)]


def together(parts: list[torch.Tensor]) -> torch.Tensor:
    """The whole sequence of all ranks' parts."""
    length = sum(map(len, parts))
    order = [positions_of_rank(length, rank, len(parts)) for rank in range(len(parts))]
    return torch.cat(parts)[torch.cat(order).argsort()]


def compare(c, kind, whole, wanted, mask=None, options=(), attend_here=local) -> float:
    ranks = play(c, one_rank, kind, whole, mask, dict(options), attend_here)
    found = [together([rank[number] for rank in ranks]) for number in range(4)]
    names = ("output", "dq", "dk", "dv")
    off = {n: (x - y).abs().max().item() for n, x, y in zip(names, found, wanted, strict=True)}
    assert max(off.values()) <= TOLERANCE, off
    return max(off.values())


@pytest.mark.parametrize("kind", COMM_TYPES)
@pytest.mark.parametrize(
    "c, heads, groups", [(2, 4, 4), (2, 4, 2), (4, 4, 4), (4, 8, 4), (8, 8, 8)]
)
def test_equals_one_process(kind, c, heads, groups):
    whole = tensors(c, heads, groups)
    worst = compare(c, kind, whole, expected(*whole))
    figure(f"{kind}, {c} ranks, {heads} heads in {groups} groups: off by {worst:.1e}")


@pytest.mark.parametrize("kind", RINGS)
def test_one_key_head_for_all_ranks(kind):
    whole = tensors(4, 4, 1)
    compare(4, kind, whole, expected(*whole))


def some_mask(s: int, b: int, heads: int = 1) -> torch.Tensor:
    """Uneven; row 3 and the last may look nowhere."""
    mask = torch.rand(b, heads, s, s, generator=torch.Generator().manual_seed(s)) < 0.4
    mask[:, :, 3] = True
    mask[:, :, -1] = True
    return mask


@pytest.mark.parametrize("kind", COMM_TYPES)
@pytest.mark.parametrize("causal", [True, False], ids=("causal", "padding"))
@pytest.mark.parametrize("heads", [1, 4], ids=("alike", "by head"))
def test_with_a_mask_and_rows_that_see_nothing(kind, causal, heads):
    c = 4
    whole = tensors(c, 4, 4)
    mask = some_mask(len(whole[0]), 2, heads)

    def here(query, key, value, mask):
        return attend(query, key, value, mask, causal)

    wanted = expected(*whole, mask=mask, causal=causal)
    compare(c, kind, whole, wanted, mask, {"causal": causal}, attend_here=here)
    assert all(tensor.isfinite().all() for tensor in wanted)
    assert wanted[0][3].abs().max() == 0 == wanted[1][-1].abs().max()


@pytest.mark.parametrize("kind", COMM_TYPES)
def test_a_tail_that_nobody_may_see(kind):
    """A padded sequence: whole blocks are hidden, whole ranks see nothing of others' chunks."""
    whole = tensors(2, 4, 4)
    s = len(whole[0])
    mask = torch.zeros(2, 1, s, s, dtype=torch.bool)
    mask[..., s // 4 :] = True
    mask[:, :, s // 4 :] = True
    compare(2, kind, whole, expected(*whole, mask=mask), mask)


@pytest.mark.parametrize("kind", COMM_TYPES)
def test_no_mask_and_another_scale(kind):
    whole = tensors(2, 4, 2)

    def here(query, key, value, mask):
        return attend(query, key, value, mask, causal=False, scale=0.3)

    options = {"causal": False, "scale": 0.3}
    wanted = expected(*whole, causal=False, scale=0.3)
    compare(2, kind, whole, wanted, None, options, attend_here=here)


@pytest.mark.parametrize("kind", RINGS)
def test_the_same_rows_for_all_tokens_broadcast(kind):
    """One mask for all sequences and heads."""
    whole = tensors(2, 2, 2)
    mask = some_mask(len(whole[0]), 1)
    compare(2, kind, whole, expected(*whole, mask=mask), mask)


@pytest.mark.parametrize("kind", COMM_TYPES)
def test_a_mask_of_integers(kind):
    """As `get_batch_on_this_tp_rank` has it, which sends all fields as one message of int64."""
    whole = tensors(2, 4, 4)
    mask = some_mask(len(whole[0]), 2)
    compare(2, kind, whole, expected(*whole, mask=mask), mask.long())


# -- Results that merge --


def test_merged_halves_are_the_whole():
    query, key, value, _ = (x.permute(1, 2, 0, 3) for x in tensors(2, 2, 2))
    visible = torch.rand(8, 8, generator=torch.Generator().manual_seed(0)) < 0.6
    visible[2] = False
    visible[3, :4], visible[4, 4:] = False, False
    whole = block_attention(query, key, value, scale=0.5, visible=visible)
    parts = [
        block_attention(query, key[..., some, :], value[..., some, :], scale=0.5, visible=seen)
        for some, seen in [(slice(4), visible[:, :4]), (slice(4, None), visible[:, 4:])]
    ]
    for first, second in (parts, parts[::-1]):
        output, lse = merge(*first, *second)
        torch.testing.assert_close(output, whole[0], rtol=0, atol=1e-14)
        torch.testing.assert_close(lse, whole[1], rtol=0, atol=1e-14)
        assert output[:, :, 2].abs().max() == 0 and lse[:, :, 2].max() == float("-inf")


def test_large_scores_do_not_overflow():
    query = torch.full((1, 4), 100.0)
    key = torch.tensor([[100.0] * 4, [99.0] * 4])
    parts = [block_attention(query, key[i : i + 1], key[i : i + 1], scale=1.0) for i in (0, 1)]
    output, lse = merge(*parts[0], *parts[1])
    assert lse.item() == pytest.approx(40000.0) and torch.equal(output, key[:1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", RINGS)
def test_sums_in_float32_at_least(kind, dtype):
    """Off by the rounding of inputs' and results' dtype, not by that of sums."""
    whole = tensors(4, 4, 2, dtype=dtype)
    ranks = play(4, one_rank, kind, whole, None, {})
    found = [together([rank[number] for rank in ranks]) for number in range(4)]
    wanted = expected(*(x.double() for x in whole))
    epsilon = torch.finfo(dtype).eps
    for x, y in zip(found, wanted, strict=True):
        assert x.dtype == dtype
        assert (x - y).abs().max() <= 8 * epsilon * y.abs().max()
    x = torch.ones(2, 4, dtype=dtype)
    assert {part.dtype for part in block_attention(x, x, x, scale=1.0)} == {torch.float32}


def differentiated_twice(group, kind, whole):
    query, key, value = (take_part(x, 0, group).requires_grad_() for x in whole[:3])
    output = attention_over_ranks(kind, query, key, value, None, Sharing(group, 1, 0.5), local)
    (first,) = torch.autograd.grad((output**2).sum(), query, create_graph=True)
    first.sum().backward()


@pytest.mark.parametrize("kind", RINGS)
def test_a_gradient_of_gradients_is_refused(kind):
    """Was: wrong numbers, because what a rank keeps of its forward counted as constant."""
    with pytest.raises(RuntimeError, match="create_graph=True, but"):
        play(2, differentiated_twice, kind, tensors(2, 4, 4))


# -- Dropout --


def factors_of(monkeypatch) -> list:
    """[(rank, factors)] of every block from now on."""
    drawn, draw = [], Sharing.draw

    def noted(sharing, query, key):
        drawn.append((sharing.group.rank(), draw(sharing, query, key)))
        return drawn[-1][1]

    monkeypatch.setattr(Sharing, "draw", noted)
    return drawn


def keep_of(drawn: list, kind: str, c: int, b: int, heads: int, s: int) -> torch.Tensor:
    """[b, heads, s, s] of all ranks' blocks."""
    keep = torch.zeros(b, heads, s, s, dtype=torch.float64)
    for rank in range(c):
        own = positions_of_rank(s, rank, c)
        blocks = [factors.flatten(1, 2) for r, factors in drawn if r == rank]
        if kind == "all_gather":
            keep[:, :, own] = blocks[0]
            continue
        for step, factors in enumerate(blocks):
            source = (rank - step) % c
            block = block_of(rank, source, len(own))
            keys = positions_of_rank(s, source, c)[block.columns]
            keep[:, :, own[block.rows, None], keys] = factors
    return keep


@pytest.mark.parametrize("kind", RINGS)
@pytest.mark.parametrize("c", [2, 4])
def test_dropout_drops_the_same_in_backward(kind, c, monkeypatch):
    whole = tensors(c, 4, 2)
    drawn = factors_of(monkeypatch)
    options = {"scale": 0.5, "dropout": 0.3}
    ranks = play(c, one_rank, kind, whole, None, options)
    num_blocks = c if kind == "p2p" else 1
    forward, backward = [], []
    for rank in range(c):
        blocks = [entry for entry in drawn if entry[0] == rank]
        assert len(blocks) == 2 * num_blocks
        forward += blocks[:num_blocks]
        backward += blocks[num_blocks:]
    for (_, first), (_, second) in zip(forward, backward, strict=True):
        assert torch.equal(first, second)
    keep = keep_of(forward, kind, c, 2, 4, len(whole[0]))
    wanted = expected(*whole, scale=0.5, keep=keep)
    for number, tensor in enumerate(wanted):
        found = together([rank[number] for rank in ranks])
        assert (found - tensor).abs().max() <= TOLERANCE
    # The ranks of a context group have one stream: the same local pattern, as in Megatron.
    assert torch.equal(forward[0][1], forward[num_blocks][1])


def with_stream(group, kind, whole, recomputed):
    """Output and gradients; the next random number after forward, and after backward."""
    *inputs, grad = (take_part(x, 0, group) for x in whole)
    for tensor in inputs:
        tensor.requires_grad_()
    sharing = Sharing(group, 1, 0.5, dropout=0.3)

    def here(query, key, value, mask):
        query, key, value = (x.permute(1, 2, 0, 3) for x in (query, key, value))
        found = F.scaled_dot_product_attention(
            query, key, value, dropout_p=0.3, is_causal=True, scale=0.5
        )
        return found.permute(2, 0, 1, 3).flatten(2)

    def run(*inputs):
        return attention_over_ranks(kind, *inputs, None, sharing, here)

    output = checkpoint(run, False, *inputs) if recomputed else run(*inputs)
    numbers = [torch.rand(2)]
    output.backward(grad.flatten(2))
    numbers.append(torch.rand(2))
    return [output.detach(), *(x.grad for x in inputs), *numbers]


@pytest.mark.parametrize("kind", COMM_TYPES)
def test_recompute_repeats_the_ring_and_leaves_the_stream(kind):
    whole = tensors(4, 4, 4)
    plain, again = (play(4, with_stream, kind, whole, recomputed) for recomputed in (False, True))
    for first, second in zip(plain, again, strict=True):
        for x, y in zip(first, second, strict=True):
            assert torch.equal(x, y)
    other = play(4, with_stream, kind, whole, False, seed=2)
    assert not torch.equal(plain[0][0], other[0][0])


# -- What is sent, when, and what is kept --


class Watcher:
    """Notes traced calls, by rank."""

    def __init__(self):
        self.calls = []

    def start(self, call):
        group = call.arguments.get("group")
        rank = None if group is None else group.rank()
        self.calls.append((rank, call.name, dict(call.attributes)))

    def stop(self, call):
        pass


def watched(c, kind, whole):
    watcher = Watcher()
    with tracing.observed_by(watcher):
        play(c, one_rank, kind, whole, None, {})
    return watcher.calls


@pytest.mark.parametrize("c, heads, groups", [(2, 4, 4), (4, 8, 4)])
def test_volumes_of_each_way(c, heads, groups):
    b, tokens = 3, 6
    whole = tensors(c, heads, groups, b, tokens)
    u = 2 * tokens * b * groups * WIDTH
    wanted = {
        "p2p": (c - 1) * u + (c - 1) * u + c * u,
        "all_gather": (c - 1) * u + 2 * (c - 1) * u,
        # There, queries and outputs; keys and values; each way.
        "a2a": 2 * (2 * tokens * b * heads * WIDTH + u) * (c - 1) // c,
    }
    for kind, elements in wanted.items():
        sent = [0] * c
        for rank, name, told in watched(c, kind, whole):
            if name == "all-gather":
                sent[rank] += (c - 1) * told["bytes"]
            elif name == "reduce-scatter":
                sent[rank] += (c - 1) * told["bytes"] // c
            elif rank is not None:
                sent[rank] += told["bytes_sent"]
        assert sent == [8 * elements] * c, kind
        figure(f"{kind}, {c} ranks: {elements} elements of each rank, {elements / u:g} u")
        if heads == groups and kind == "a2a":
            assert elements == 2 * 4 * tokens * b * heads * WIDTH * (c - 1) // c


def test_hops_are_told():
    c, tokens, b, groups = 4, 4, 2, 2
    calls = watched(c, "p2p", tensors(c, 4, groups))
    for rank in range(c):
        hops = [told for r, name, told in calls if name == "ring-hop" and r == rank]
        assert [(told["direction"], told["payload"], told["hop"]) for told in hops] == [
            *[("forward", "kv", hop) for hop in range(3)],
            *[("backward", what, hop) for hop in range(3) for what in ("kv", "dkv")],
            ("backward", "dkv", 3),
        ]
        for told in hops:
            assert told["shape"] == (2, b, groups, 1, tokens, WIDTH)
            assert told["bytes_sent"] == told["bytes"] == 8 * math.prod(told["shape"])
            assert (told["layer"], told["group_size"], told["dtype"]) == (1, c, "float64")
    waits = [told for _, name, told in calls if name == "collective-wait"]
    assert waits == [{"collective": "ring-hop"}] * c * 10


def test_the_next_keys_travel_while_these_are_looked_at():
    """Of rank 0: a hop starts, its block is computed, then it is waited for."""
    order, first = [], []

    def note(name):
        thread = threading.get_ident()
        first.append(thread)
        if thread == first[0]:
            order.append(name)

    class OrderWatcher(Watcher):
        def start(self, call):
            is_block = call.name == "attention-block"
            note("block" if is_block else call.attributes.get("payload", "wait"))

    with tracing.observed_by(OrderWatcher()):
        play(3, one_rank, "p2p", tensors(3, 2, 2), None, {})
    forward = ["kv", "block", "wait"] * 2 + ["block"]
    assert order[:7] == forward
    start, middle = ["kv", "block", "dkv", "wait"], ["kv", "block", "wait", "dkv", "wait"]
    assert order[7:] == [*start, *middle, "block", "wait", "dkv", "wait"]


@pytest.mark.parametrize("kind", RINGS)
def test_no_matrix_of_tokens_is_kept(kind):
    b, heads, tokens, c = 2, 4, 16, 2
    whole = tensors(c, heads, 2, b, tokens)
    kept = []

    def pack(tensor):
        kept.append(tensor.numel())
        return tensor

    def hooked(group):
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            one_rank(group, kind, whole, None, {})

    play(c, hooked)
    assert kept and max(kept) <= b * heads * tokens * WIDTH < b * heads * tokens * tokens


@pytest.mark.parametrize("kind", RINGS)
def test_autocast_changes_nothing(kind, monkeypatch):
    """In a forward with it, products of float32 would be taken in bfloat16."""
    whole = tensors(2, 2, 2, dtype=torch.float32)
    wanted = play(2, one_rank, kind, whole, None, {})

    def within(*arguments):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return context_parallel.attention_over_ranks(*arguments)

    monkeypatch.setitem(globals(), "attention_over_ranks", within)
    for found, rank in zip(play(2, one_rank, kind, whole, None, {}), wanted, strict=True):
        assert all(torch.equal(x, y) for x, y in zip(found, rank, strict=True))


# -- In a module --


def make_config(c: int, **options) -> TransformerConfig:
    sizes = {"num_layers": 2, "hidden_size": 16, "num_attention_heads": 4}
    return TransformerConfig(**sizes, context_parallel_size=c, **options)


def in_a_module(group, whole, kind, mask_type, mask):
    core = DotProductAttention(
        make_config(2, cp_comm_type=["p2p", kind], attention_dropout=0.0),
        2,
        mask_type,
        pg_collection=ProcessGroupCollection(cp=group),
    )
    assert core.cp_comm_type == kind
    query, key, value, _ = (take_part(x, 0, group) for x in whole)
    return core(query, key, value, None if mask is None else take_part(mask, 2, group))


@pytest.mark.parametrize("kind", COMM_TYPES)
@pytest.mark.parametrize("mask_type", list(AttnMaskType), ids=lambda kind: kind.name)
def test_every_kind_of_mask(kind, mask_type):
    whole = tensors(2, 4, 4)
    mask = some_mask(len(whole[0]), 2)
    for given in (None, mask):
        parts = play(2, in_a_module, whole, kind, mask_type, given)
        alone = DotProductAttention(make_config(1, attention_dropout=0.0), 2, mask_type)
        wanted = alone(*whole[:3], given)
        assert (together(parts) - wanted).abs().max() <= TOLERANCE


@pytest.mark.parametrize(
    "shape",
    [(2, 8), (8, 8), (2, 8, 8), (2, 1, 8, 4), (2, 4, 8, 8)],
    ids=lambda shape: "x".join(map(str, shape)),
)
def test_a6_a_mask_needs_a_rank_s_rows_and_all_columns(shape):
    """2 sequences of 8 tokens, of which a rank has 4; the last mask has all rows."""

    def on_a_rank(group, mask):
        core = DotProductAttention(
            make_config(2), 1, AttnMaskType.causal, pg_collection=ProcessGroupCollection(cp=group)
        )
        query, key, value, _ = (take_part(x, 0, group) for x in tensors(2, 4, 4))
        return core(query, key, value, mask)

    words = (
        r"give \[2 or 1, 4 or 1, 4 or 1, 8\]: sequences, heads and queries of this rank, and all"
    )
    with pytest.raises(ValueError, match=words):
        play(2, on_a_rank, torch.zeros(shape, dtype=torch.bool))


def groups_of(size: int) -> ProcessGroupCollection:
    return ProcessGroupCollection(tp=FakeGroup(), pp=FakeGroup(), cp=FakeGroup(0, size))


def test_a_config_of_other_sizes_than_the_group_is_refused():
    for c, size in ((1, 2), (2, 1), (2, 4)):
        with pytest.raises(ValueError, match=f"parallel_size is {c}, .* cp group has {size} ranks"):
            DotProductAttention(
                make_config(c), 1, AttnMaskType.causal, pg_collection=groups_of(size)
            )


class AttentionOfOneRank(torch.nn.Module):
    """A core attention that a user wrote, without groups."""

    def __init__(self, config, layer_number, attn_mask_type):
        super().__init__()


def test_a_core_attention_without_groups_is_refused():
    parts = SelfAttentionSubmodules(
        linear_qkv=ColumnParallelLinear,
        core_attention=ModuleSpec(AttentionOfOneRank),
        linear_proj=RowParallelLinear,
    )
    with pytest.raises(
        ValueError, match="AttentionOfOneRank takes no pg_collection, .* other 1 con"
    ):
        SelfAttention(make_config(2), parts, 1, pg_collection=groups_of(2))
    SelfAttention(make_config(1), parts, 1, pg_collection=groups_of(1))


def test_a_layer_chooses_its_way():
    config = make_config(2, cp_comm_type=["a2a", "p2p"])
    options = {"attn_mask_type": AttnMaskType.causal, "pg_collection": groups_of(2)}
    ways = [DotProductAttention(config, layer, **options).cp_comm_type for layer in (1, 2, 3)]
    assert ways == ["a2a", "p2p", "p2p"]
    assert DotProductAttention(config, 1, cp_comm_type="all_gather", **options).cp_comm_type == (
        "all_gather"
    )
    for way, words in (("a2a+p2p", "not implemented"), ("ring", "unknown"), ("a2a", "whole heads")):
        config = make_config(2, num_query_groups=1)
        with pytest.raises(ValueError, match=words):
            DotProductAttention(config, 1, cp_comm_type=way, **options)
