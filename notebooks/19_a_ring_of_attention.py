# ---
# jupyter:
#   jupytext:
#     formats: ipynb,py:percent
#     text_representation:
#       extension: .py
#       format_name: percent
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 19 A ring of attention
#
# **The question.** A sequence is too long for one rank. How do ranks that share it compute attention,
# the one place where tokens look at one another?
#
# A linear layer, a norm or an MLP looks at one token at a time. So c ranks can each take a part of a
# sequence, and compute these as before. In attention each token looks at all tokens before it, on
# whichever rank they are. Sharing sequences in this way is called context parallelism.
#
# First by hand, then on ranks. Everything is in float64, so that "the same" can be checked.

# %%
# %matplotlib inline
import time
from unittest.mock import patch

import torch
import torch.distributed as dist
from IPython.display import SVG

from minimegatron import launch, trace
from minimegatron.core.transformer import context_parallel
from minimegatron.core.transformer.zigzag import positions_of_rank
from minimegatron.notebook import compare, predict
from minimegatron.notebook.drawing import draw_pairs
from minimegatron.planner.context_costs import context_parallel_bytes
from minimegatron.planner.layer_plan import one_ring
from minimegatron.planner.render_layers import render_layers
from minimegatron.planner.ring_costs import RingCosts
from minimegatron.tracing.activation_meter import ActivationMeter
from minimegatron.tracing.lanes import exposed_of, in_flight
from minimegatron.training.tiny_gpt import TinyGPT, masked_loss

torch.set_default_dtype(torch.float64)
M = 2  # microbatches in a step

# %% [markdown]
# ## Predict
#
# 1. 32 tokens on 4 ranks, rank 0 has the first 8, rank 3 the last 8. A token looks at itself and at
#    all before it; each such pair costs work. How many times as much work does rank 3 have as rank 0?
# 2. In a ring each rank hands keys and values on to the next rank, until everybody has seen all. How
#    many times does a rank send its neighbour something, in the forward of one layer, c = 4?
# 3. In backward, keys and values go round again, and the gradients of keys and values with them. How
#    many times does a rank send *gradients*?
# 4. Another way is an all-to-all that gives each rank all tokens, of some of the heads. On 2 ranks,
#    with 4 heads, it sends as many bytes in forward as the ring. Now only 2 heads have keys and
#    values of their own, and two query heads share each (grouped queries). Which way sends fewer?
# 5. Until backward a rank holds activations. Which share of them does it hold if 4 ranks share each
#    sequence: all, about 1/4, or about 1/16?

# %%
# Write your answers in place of None. Running this cell locks them in.
predict(
    work_of_rank_3_over_rank_0=None,
    sends_in_forward=None,
    sends_of_gradients=None,
    fewer_bytes=None,  # "ring" or "all-to-all"
    share_of_activations=None,  # "all", "1/4" or "1/16"
)

# %% [markdown]
# ## Who has which tokens

# %%
S, C, WIDTH = 32, 4, 8  # tokens, ranks, width of a head
CONTIGUOUS = list(torch.arange(S).chunk(C))


def zigzag(rank):
    """Of 2c pieces, one from the front and one from the back."""
    pieces = torch.arange(S).chunk(2 * C)
    return torch.cat([pieces[rank], pieces[2 * C - 1 - rank]])


ZIGZAG = [zigzag(rank) for rank in range(C)]

# %%
for name, split in (("contiguous", CONTIGUOUS), ("zig-zag", ZIGZAG)):
    pairs = [int((own + 1).sum()) for own in split]  # token i looks at i + 1 tokens
    print(f"{name:10} pairs of each rank: {pairs}")
pairs_of_contiguous = [int((own + 1).sum()) for own in CONTIGUOUS]
compare(work_of_rank_3_over_rank_0=pairs_of_contiguous[-1] / pairs_of_contiguous[0])

# %%
CAUSAL = torch.ones(S, S, dtype=torch.bool).tril()


def rank_of_tokens(split):
    """[s]: which rank has it."""
    ranks = torch.empty(S, dtype=torch.long)
    for rank, own in enumerate(split):
        ranks[own] = rank
    return ranks


# %%
maps = {
    name: torch.where(CAUSAL, rank_of_tokens(split).unsqueeze(1), -1)
    for name, split in (("contiguous", CONTIGUOUS), ("zig-zag", ZIGZAG))
}
draw_pairs(maps, "rank")

# %% [markdown]
# A row is as long as the token has tokens before it. Contiguous, rank 3 has the eight longest rows,
# and the other ranks wait for it. In a zig-zag every rank has as many long rows as short ones, and
# all have 132 pairs. That is what the package does:

# %%
for rank, own in enumerate(ZIGZAG):
    assert torch.equal(positions_of_rank(S, rank, C), own)
    print(f"rank {rank}: {own.tolist()}")

# %% [markdown]
# ## A softmax in two parts
#
# A rank gets the keys and values in blocks. It must not wait until all are there, or it would hold
# the whole sequence. But a softmax needs its denominator, the sum over *all* keys. The way out: of
# each block keep the output and the logarithm of its denominator, `lse` (log-sum-exp). From these two
# the blocks' outputs can be weighed later.


# %%
def block_attention(q, k, v, visible=None):
    """(output [q, d], lse [q]) of these keys and values alone."""
    scores = q @ k.T / WIDTH**0.5
    if visible is not None:
        scores = scores.masked_fill(~visible, float("-inf"))
    lse = scores.logsumexp(dim=-1)
    return (scores - lse.unsqueeze(1)).exp() @ v, lse


def merge(out, lse, out2, lse2):
    """The same of two blocks together."""
    both = torch.logaddexp(lse, lse2)
    weight, weight2 = (lse - both).exp(), (lse2 - both).exp()
    return out * weight.unsqueeze(1) + out2 * weight2.unsqueeze(1), both


# %%
torch.manual_seed(7)
Q, K, V = (torch.randn(S, WIDTH, requires_grad=True) for _ in range(3))
q, k, v = Q[-1:], K, V  # the last token, which looks at all
whole, lse = block_attention(q, k, v)
near, far = block_attention(q, k[:10], v[:10]), block_attention(q, k[10:], v[10:])
merged, merged_lse = merge(*near, *far)

torch.testing.assert_close((merged, merged_lse), (whole, lse), rtol=1e-13, atol=1e-13)
shares = [(part[1] - lse).exp().item() for part in (near, far)]
print("weights of the two blocks:", [round(share, 3) for share in shares])

# %% [markdown]
# A weight is the block's share of the whole denominator. Only differences of logarithms are
# exponentiated, so nothing overflows. Blocks may come in any order, and any number of them.
#
# ## The ring, played by one process
#
# Four ranks, each with its zig-zag part of Q, K and V. In turn i rank r has the keys and values of
# rank j = (r − i) mod c: what came from its neighbour r − 1. There are three cases:
#
# * j = r, at the beginning: its own tokens, causal.
# * j < r: the *first* half of j's keys stands before both halves of r's queries, the second half
#   after both. So all queries look at the first half of the keys, without a mask.
# * j > r: the second half of r's queries stands after all of j's keys, the first half before all.
#   So the second half of the queries looks at all keys, without a mask.
#
# In each case it is half of the block, or a little more at the beginning.

# %%
HALF = S // C // 2
hops = []


def hop(travelling, what):
    """Everybody hands on what it has: rank r gets what rank r - 1 had."""
    hops.append(what)
    return travelling[-1:] + travelling[:-1]


# %%
def cut(i, rank, other):
    """Which of its queries look at which of the other's keys, and whether a mask is needed."""
    if other == rank:
        return slice(None), slice(None), CAUSAL[: 2 * HALF, : 2 * HALF]
    if other < rank:
        return slice(None), slice(HALF), None
    return slice(HALF, None), slice(None), None


# %%
def ring_forward(parts):
    """`parts` has (q, k, v) of each rank. Returns (output, lse) of each."""
    travelling = [(k, v) for _, k, v in parts]
    found = [None] * C
    for i in range(C):
        for rank, (q, _, _) in enumerate(parts):
            queries, keys, visible = cut(i, rank, (rank - i) % C)
            k, v = travelling[rank]
            new = block_attention(q[queries], k[keys], v[keys], visible)
            if i == 0:
                found[rank] = new
            else:
                out, lse = (old.clone() for old in found[rank])
                out[queries], lse[queries] = merge(out[queries], lse[queries], *new)
                found[rank] = out, lse
        if i < C - 1:
            travelling = hop(travelling, "k, v")
    return found


# %%
def together(parts):
    """Tensors of the ranks' tokens, in the order of the sequence."""
    return torch.cat(parts)[torch.cat(ZIGZAG).argsort()]


# %%
parts = [(Q[own], K[own], V[own]) for own in ZIGZAG]
hops.clear()
found = ring_forward(parts)
output, lse = (together([of_rank[n] for of_rank in found]) for n in range(2))
whole, whole_lse = block_attention(Q, K, V, CAUSAL)
torch.testing.assert_close((output, lse), (whole, whole_lse), rtol=1e-13, atol=1e-13)
print(f"largest difference from attention in one piece: {(output - whole).abs().max():.0e}")
compare(sends_in_forward=len(hops))

# %%
ranks = rank_of_tokens(ZIGZAG)
turn = (ranks.unsqueeze(1) - ranks) % C  # in which turn a pair's key is with the pair's query
turn_map = torch.where(CAUSAL, turn, -1)
for rank in range(C):
    print(
        f"rank {rank}: pairs in turn", [int((turn_map[ranks == rank] == i).sum()) for i in range(C)]
    )
draw_pairs({"rank of the pair": maps["zig-zag"], "turn": turn_map}, "rank / turn")

# %% [markdown]
# In turn 0 each rank is with its own keys: the triangles at the diagonal, and the square where its
# second piece looks at its first. These are a few pairs more than in later turns, and equally many on
# every rank. There are c − 1 hops: after turn c − 1 nobody needs the keys any more.
#
# ## The way back
#
# Backward computes the softmax again, block by block. It needs no denominators of blocks for that:
# the probabilities are exp(S − lse) with the *merged* lse, which the rank has kept. And each row needs
# one number, D = Σ dO · O, once. Then for each block, with P the probabilities and S the scores:
#
#     dV = Pᵀ dO      dS = P ∘ (dO Vᵀ − D)      dQ = dS K / √d      dK = dSᵀ Q / √d
#
# dQ stays with its rank. dK and dV belong to the rank that owns the keys, and every rank adds its
# share. So they travel with their keys, and collect.


# %%
def block_backward(q, k, v, visible, lse, grad, delta):
    """(dq, dk, dv), what this block adds to them."""
    scores = q @ k.T / WIDTH**0.5
    if visible is not None:
        scores = scores.masked_fill(~visible, float("-inf"))
    p = (scores - lse.unsqueeze(1)).exp()
    ds = p * (grad @ v.T - delta.unsqueeze(1)) / WIDTH**0.5
    return ds @ k, ds.T @ q, p.T @ grad


# %%
def ring_backward(parts, found, grads):
    """From the gradient of each rank's output, those of its q, k and v."""
    deltas = [(grad * out).sum(dim=-1) for grad, (out, _) in zip(grads, found, strict=True)]
    dqs = [torch.zeros_like(q) for q, _, _ in parts]
    pairs = [(k, v) for _, k, v in parts]
    sums = [(torch.zeros_like(k), torch.zeros_like(v)) for k, v in pairs]
    for i in range(C):
        for rank, (q, _, _) in enumerate(parts):
            queries, keys, visible = cut(i, rank, (rank - i) % C)
            (k, v), (dk, dv) = pairs[rank], sums[rank]
            of_rows = (t[queries] for t in (found[rank][1], grads[rank], deltas[rank]))
            added = block_backward(q[queries], k[keys], v[keys], visible, *of_rows)
            dqs[rank][queries] += added[0]
            dk[keys] += added[1]
            dv[keys] += added[2]
        if i < C - 1:
            pairs = hop(pairs, "k, v")
        sums = hop(sums, "dk, dv")  # after the last turn too: they go home
    return [(dq, *home) for dq, home in zip(dqs, sums, strict=True)]


# %%
upstream = torch.randn(S, WIDTH)
wanted = torch.autograd.grad(whole, (Q, K, V), upstream)
with torch.no_grad():
    gradients = ring_backward(parts, found, [upstream[own] for own in ZIGZAG])
for n, (name, right) in enumerate(zip(("dQ", "dK", "dV"), wanted, strict=True)):
    by_ring = together([of_rank[n] for of_rank in gradients])
    torch.testing.assert_close(by_ring, right, rtol=1e-12, atol=1e-12)
    print(f"{name}: largest difference {(by_ring - right).abs().max():.0e}")

# %%
backward_hops = hops[C - 1 :]
print("hops of backward:", *backward_hops, sep="\n  ")
compare(sends_of_gradients=backward_hops.count("dk, dv"))

# %% [markdown]
# Keys and values make c − 1 hops, as in forward. Their gradients make one more: after turn c − 1 they
# are with the neighbour, and the last hop brings them home. With c = 2 a rank's next is also its
# previous, so a hop in the wrong direction is not noticed there: test a ring with four.
#
# ## On ranks
#
# A GPT on one rank, and on two and four that share its sequences. Each rank gets the whole batch and
# takes its part of it, labels and mask too. The mask leaves out the last tokens of some rows: all of
# these are on rank 0. So the ranks' counts differ, and `calculate_per_token_loss` is the simplest way
# to get it right: each rank returns its sum and its count, and both are summed over all ranks.

# %%
SHARED = {
    "num_layers": 2,
    "seq_length": S,
    "position_embedding_type": "rope",
    "calculate_per_token_loss": True,
    "params_dtype": torch.float64,
}


# %%
def sum_and_count(mask, losses):
    total, count, _ = masked_loss(mask, losses)
    return total, count, {"sum": total.detach().clone(), "count": count}


# %%
def step_of_shared(c, **config):
    config = SHARED | {"context_parallel_size": c} | config
    gpt = TinyGPT(loss_func=sum_and_count, **config)
    with ActivationMeter(gpt.chunks) as meter:
        reports = gpt.step(M)
    gradients = gpt.gradients()
    with trace() as recorded:
        gpt.step(1)
    return {
        "reports": [(report["sum"].item(), int(report["count"])) for report in reports],
        "gradients": gradients,
        "bytes": meter.peak,
        "trace": recorded if dist.get_rank() == 0 else None,
    }


# %%
sharing = {c: launch(step_of_shared, c, c) for c in (1, 2, 4)}


def losses_of(ranks):
    """Of each microbatch: sums and counts of all ranks, and their quotient."""
    found = []
    for reports in zip(*(of_rank["reports"] for of_rank in ranks), strict=True):
        total, count = (sum(column) for column in zip(*reports, strict=True))
        found.append(total / count)
    return found


# %%
(whole,) = sharing[1]
for c, ranks in sharing.items():
    counts = [[count for _, count in found["reports"]] for found in ranks]
    print(f"c = {c}: losses {[round(x, 6) for x in losses_of(ranks)]}, counts of ranks {counts}")
    torch.testing.assert_close(losses_of(ranks), losses_of(sharing[1]), rtol=1e-12, atol=1e-12)
    for found in ranks:
        torch.testing.assert_close(found["gradients"], whole["gradients"], rtol=1e-10, atol=1e-10)

# %% [markdown]
# Losses and gradients are those of one rank. Every rank has all weights, and after its backward the
# part of their gradients that comes from its tokens. So gradients are summed over the ranks that
# share sequences as they are over data-parallel copies.
#
# ## What is sent
#
# One layer, one microbatch. The ring is called `p2p` here, as in Megatron. `all_gather` gives every
# rank all keys and values at once; that is shorter to write, and a rank holds all of them for a
# moment. `a2a` gives each rank all tokens of some of the heads. Which bytes leave a rank, and do the
# planner's formulas know them?

# %%
EVENTS = ("ring-hop", "all-gather", "reduce-scatter", "all-to-all")


def bytes_that_leave(event):
    told = event.attributes
    others = told["group_size"] - 1
    if event.name == "all-gather":  # what it has, to each of the others
        return told["bytes"] * others
    if event.name == "reduce-scatter":  # to each of the others the part that is theirs
        return told["bytes"] // told["group_size"] * others
    return told["bytes_sent"]


# %%
def bytes_sent(recorded):
    """(forward, backward) of rank 0."""
    events, sent = recorded.rank(0).events, [0, 0]
    for event in events:
        if event.name in EVENTS:
            frames = [event]
            while frames[-1].parent is not None:
                frames.append(events[frames[-1].parent])
            in_backward = any(frame.name == "backward-compute" for frame in frames)
            sent[in_backward] += bytes_that_leave(event)
    return tuple(sent)


# %%
WAYS = ("p2p", "all_gather", "a2a")


def measure(c, groups_of_heads):
    """Bytes by (groups, way)."""
    found = {}
    for groups in groups_of_heads:
        for way in WAYS:
            config = {"num_layers": 1, "num_query_groups": groups, "cp_comm_type": way}
            found[groups, way] = step_of_shared(c, **config)["trace"]
    return {case: recorded and bytes_sent(recorded) for case, recorded in found.items()}


# %%
(sent, _) = launch(measure, 2, 2, (4, 2))
print("ranks  heads  groups  way          forward  backward")
for (groups, way), found in sent.items():
    print(f"{2:5}{4:7}{groups:8}  {way:10}{found[0]:10}{found[1]:10}")
    assert found == tuple(context_parallel_bytes(way, S, 2, 4, groups, 8, 2, bytes_per_element=8))
for way in WAYS:
    forward, backward = map(int, context_parallel_bytes(way, S, 2, 4, 4, 8, 4, bytes_per_element=8))
    print(f"{4:5}{4:7}{4:8}  {way:10}{forward:10}{backward:10}  by the formula")
compare(fewer_bytes="ring" if sent[2, "p2p"][0] < sent[2, "a2a"][0] else "all-to-all")

# %% [markdown]
# The ring and the gather send keys and values, and nothing else in forward. With fewer groups of
# heads that is less. The all-to-all sends queries and output too, so it gains less from groups. But
# each rank sends only what the others need: with four ranks and no groups it sends half as much as
# the ring in forward.
#
# ## What a hop hides behind
#
# The ring's other strength is time: while a rank computes with the keys that are here, the next ones
# are on their way. On paper, with blocks that take 2 units and hops that take 1; below, the same if
# each hop were waited for at once:

# %%
costs = RingCosts(num_ranks=C, block=2, hop=1)
rows = [("hops beside blocks", one_ring(costs, "forward"))]
rows += [("each hop waited for", one_ring(costs, "forward", overlap=False))]
SVG(render_layers(rows, "Forward of one attention, one rank of four"))

# %%
backward = one_ring(costs, "backward")
SVG(render_layers([("backward", backward)], "Its backward; the last hop brings gradients home"))

# %% [markdown]
# On real ranks: a CPU computes and moves bytes with the same cores, and these blocks are tiny. So each
# block sleeps for 20 ms. A hop is *in flight* from its start to the end of the wait for it; during the
# wait nothing is computed.


# %%
def slow_blocks():
    """One forward on this rank, each block of attention 20 ms long."""
    block = context_parallel.block_attention

    def slow(*args, **more):
        time.sleep(0.02)
        return block(*args, **more)

    gpt = TinyGPT(context_parallel_size=C, **SHARED | {"num_layers": 1})
    with patch.object(context_parallel, "block_attention", slow), trace() as recorded:
        gpt.step(1, forward_only=True)
    return recorded if dist.get_rank() == 0 else None


# %%
slow = launch(slow_blocks, C)[0]
for rank in range(C):
    bars = in_flight(dict(enumerate(slow.rank(rank).events)), "ring-hop")
    print(f"rank {rank}:", end="")
    for bar in bars:
        begin, end = exposed_of(bar)
        in_all, waited = (bar.end - bar.start) / 1e3, (end - begin) / 1e3
        print(f"  in flight {in_all:5.1f} ms, waited {waited:4.1f}", end=";")
        assert in_all > 19  # a block was computed meanwhile
    print()

# %% [markdown]
# Every hop was in flight for the whole of a block. What is waited for is mostly another rank that is
# a little late.
#
# ## What a rank holds

# %%
held = {c: max(found["bytes"] for found in ranks) for c, ranks in sharing.items()}
for c, number in held.items():
    print(f"c = {c}: at most {number / 1024:6.1f} KiB, {number / held[1]:.3f} of c = 1")
shares = {"all": 1, "1/4": 1 / 4, "1/16": 1 / 16}
compare(share_of_activations=min(shares, key=lambda name: abs(shares[name] - held[4] / held[1])))
# On a GPU, PyTorch's own attention keeps the scores of float64 too: c = 1 holds more there.
assert all(number * c / held[1] < 1.1 for c, number in held.items())
assert abs(held[2] / held[4] / 2 - 1) < 0.1

# %% [markdown]
# 1/c. Each activation has a row per token, and a rank has 1/c of the tokens. The keys and values of
# others are used and let go: for backward a rank keeps its own, its output, and one lse per row and
# head. So sequences may be c times as long. (Weights, gradients and the optimizer do not get
# smaller.)
#
# ## Change it
#
# * In `hop`, let everything go the other way: `travelling[1:] + travelling[:1]`. Which assertion
#   fails? Does it fail with `C = 2`?
# * In `ring_backward`, use each block's own lse instead of the merged one. Which of dQ, dK, dV are
#   wrong?
# * Leave `calculate_per_token_loss` out of `SHARED`. The losses stay the same, the gradients do not.
#   Why? Which token weighs too much?
# * `S = 30`. Who complains, and what does it propose?
#
# ## Where next
#
# * [A ring of attention](../docs/tour/a-ring-of-attention.md) in the tour: the code.
# * [ex22](../minimegatron/exercises/catalog/ex22_ring_attention/page.md): write the merge, the ring and
#   its backward.
# * Labs: `minimegatron exercises lab start ring-gradients-stop-early`,
#   `... ring-backward-with-partial-lse`, `... rope-restarts-on-each-rank`.
# * [Notebook 15](15_two_tokens.ipynb) has another question about a sequence: can a model learn from
#   the token after the next, too?
