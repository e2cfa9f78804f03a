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
# # 15 Two tokens, and a ring of attention
#
# **The question.** Two questions about a sequence. A model predicts the next token at each
# position: can the same step also train it on the token after the next, and what does that change
# in the gradients? And if a sequence is too long for one rank: how do ranks that share it compute
# attention, the one place where tokens look at one another?
#
# Both parts are by hand first, and then on ranks. Everything is in float64, so that "the same" can
# be checked. The two parts do not need each other.

# %%
# %matplotlib inline
import torch
import torch.distributed as dist
import torch.nn.functional as F

from minimegatron import launch, trace
from minimegatron.core.transformer.zigzag import positions_of_rank
from minimegatron.notebook import compare, predict, show_wide
from minimegatron.notebook.drawing import draw_pairs
from minimegatron.training.tiny_gpt import TinyGPT

torch.set_default_dtype(torch.float64)

# %% [markdown]
# ## Part 1: two tokens
#
# Beside the loss of the next token there is a second loss, of the token after the next, with a
# small factor f = 0.1. The second loss comes from one layer more, behind the model's own. This is
# called multi-token prediction (MTP).
#
# ### Predict
#
# 1. A row has 8 labels, and its mask is 0 1 1 1 0 1 1 1: at 6 positions the label counts. For the
#    second loss, every position takes the label and the mask of the position behind it. At how many
#    positions does that label count?
# 2. The step reports the loss of the next token. With MTP, for the same weights and data, is the
#    reported number another one?
# 3. A step has M = 2 microbatches. The schedule divides a microbatch's main loss by 2. It does not
#    see the second loss. If nobody else divides that one, how many times too large is its gradient?
# 4. Three stages: the first has the embedding and one layer, the second one layer and the MTP
#    layer, the third the loss. Input embedding and output layer share one weight. Which stages hold
#    a copy of this weight?

# %%
# Write your answers in place of None. Running this cell locks them in.
predict(
    count_for_second_loss=None,
    reported_loss_changes=None,  # True or False
    times_too_large=None,
    stages_with_embedding=None,  # such as [0, 2]
)

# %% [markdown]
# ### Labels and mask, rolled
#
# Position i has seen tokens 0 to i. Its label is token i + 1. For the second loss it must predict
# token i + 2, which is the label of position i + 1. So all labels move one place to the left, and a
# 0 comes in at the end. The mask moves with them: it says whether a *label* counts.


# %%
def roll(row):
    """One place to the left; the last becomes 0."""
    return torch.cat([row[1:], torch.zeros_like(row[:1])])


# %%
text = torch.tensor([3, 1, 4, 1, 5, 9, 2, 6, 5])
tokens, labels = text[:-1], text[1:]
mask = torch.tensor([0.0, 1, 1, 1, 0, 1, 1, 1])
rows = {"position": torch.arange(8), "token": tokens, "label": labels, "mask": mask}
rows |= {"label of the second loss": roll(labels), "its mask": roll(mask)}
for name, row in rows.items():
    print(f"{name:25}", *row.int().tolist())

# %%
n0, n1 = int(mask.sum()), int(roll(mask).sum())
print("labels that count:", n0, "and", n1)
compare(count_for_second_loss=n1)

# %% [markdown]
# The 0 at the front went out, and a 0 came in at the end. Often n₁ is one less than n₀, but here it
# is not: so both are counted. The last position has no label now. The 0 that came in would be a
# valid label, and only the mask keeps it out.
#
# ### A model by hand
#
# A stand-in for a transformer: each position mixes itself with what is before it. The second loss
# comes from `h1`, and `h1` comes from two things: what position i knows (`h0`), and the embedding of
# token i + 1. That is no cheating: token i + 2 is what must be predicted.

# %%
V, H = 10, 6
torch.manual_seed(5)
EMBED, DECODER, JOIN, LAYER = (
    (0.5 * torch.randn(shape)).requires_grad_() for shape in [(V, H), (H, H), (2 * H, H), (H, H)]
)
WEIGHTS = {"embedding": EMBED, "decoder": DECODER, "joining": JOIN, "MTP layer": LAYER}


# %%
def norm(x):
    return F.layer_norm(x, x.shape[-1:])


def layer(x, weight):
    """Stands for a transformer layer: position i sees the positions 0 to i."""
    seen = x.cumsum(dim=0) / torch.arange(1, len(x) + 1).unsqueeze(1)
    return x + torch.tanh(seen @ weight)


# %%
def hidden_states(tokens):
    """What the next token, and the token behind it, are predicted from; [s, h] each."""
    h0 = norm(layer(EMBED[tokens], DECODER))
    ahead = EMBED[roll(tokens)]
    joined = torch.cat([norm(ahead), norm(h0)], dim=-1) @ JOIN
    return h0, norm(layer(joined, LAYER))


def loss_of(hidden, labels):
    """Of each position, [s]. The output layer is the embedding, for both losses."""
    return F.cross_entropy(hidden @ EMBED.T, labels, reduction="none")


# %% [markdown]
# ### The two losses of a step
#
# Two microbatches, of one row each; more labels count in the first. There are two ways to weigh
# tokens. Without the flag `calculate_per_token_loss` every *microbatch* weighs the same: each loss is
# a mean, and the step has the mean of the means. With the flag every *token* weighs the same: there
# are sums, and all is divided once by N, the tokens of the whole step.

# %%
other = torch.tensor([2, 7, 1, 8, 2, 8, 1, 8, 2])
other_mask = torch.tensor([1.0, 1, 1, 0, 0, 0, 0, 0])
BATCHES = [(tokens, labels, mask), (other[:-1], other[1:], other_mask)]
M, N = len(BATCHES), sum(mask.sum() for _, _, mask in BATCHES)
FACTOR, DEPTHS = 0.1, 1  # mtp_loss_scaling_factor, mtp_num_layers


# %%
def weights_of_tokens(mask, per_token):
    """What one token of this microbatch weighs in the step, for the first and second loss."""
    n0, n1 = mask.sum(), roll(mask).sum().clamp(min=1)
    f = FACTOR / DEPTHS
    return (1 / N, f * n0 / n1 / N) if per_token else (1 / n0 / M, f / n1 / M)


# %%
print("flag    microbatch   n0  n1   weight of a token: first loss, second loss")
for per_token in (False, True):
    for number, (_, _, own_mask) in enumerate(BATCHES):
        first, second = weights_of_tokens(own_mask, per_token)
        counts = f"{int(own_mask.sum()):2} {int(roll(own_mask).sum()):3}"
        print(f"{per_token!s:8}{number:10} {counts:>8} {first:30.4f} {second:11.5f}")

# %% [markdown]
# With the flag, the second loss is multiplied by n₀/n₁. Then the n₁ tokens together weigh f times as
# much as the n₀ tokens of the first loss, in each microbatch. (The `clamp` is for a microbatch with
# nothing left to predict: 0/0 would be NaN.)
#
# The step as one sum, and its gradients:


# %%
def sum_of_step(per_token):
    total = 0
    for tokens, labels, mask in BATCHES:
        h0, h1 = hidden_states(tokens)
        first, second = weights_of_tokens(mask, per_token)
        total = total + first * (mask * loss_of(h0, labels)).sum()
        total = total + second * (roll(mask) * loss_of(h1, roll(labels))).sum()
    return total


# %%
wanted = {flag: torch.autograd.grad(sum_of_step(flag), WEIGHTS.values()) for flag in (False, True)}

# %% [markdown]
# ### The autoscaler
#
# A schedule does not work with such a sum. It gets one loss from the model, the first, scales it and
# calls backward. The second loss must come along without being part of it. The trick: an operation
# that gives back its first input unchanged. In backward it hands the gradient on, and it gives the
# *losses* a gradient too, as if they had been added to the total.


# %%
class Attach(torch.autograd.Function):
    """`hidden`, unchanged. In backward each of `losses` gets the gradient `scale`."""

    scale = 1.0

    @staticmethod
    def forward(ctx, hidden, losses):
        ctx.save_for_backward(losses)
        return hidden.view_as(hidden)

    @staticmethod
    def backward(ctx, grad):
        (losses,) = ctx.saved_tensors
        return grad, Attach.scale * torch.ones_like(losses)


# %%
def step_with_autoscaler(per_token, scale):
    """One backward per microbatch. Returns the reported losses and the gradients."""
    Attach.scale = scale
    for weight in WEIGHTS.values():
        weight.grad = None
    reported = []
    for tokens, labels, mask in BATCHES:
        h0, h1 = hidden_states(tokens)
        n0, n1 = mask.sum(), roll(mask).sum().clamp(min=1)
        second = FACTOR / DEPTHS * roll(mask) * loss_of(h1, roll(labels))
        h0 = Attach.apply(h0, second * (n0 if per_token else 1) / n1)
        total = (mask * loss_of(h0, labels)).sum()  # the first loss alone
        (total if per_token else total / n0 / M).backward()
        reported.append((total / n0).item())
    return reported, [weight.grad / (N if per_token else 1) for weight in WEIGHTS.values()]


# %%
for per_token, scale in ((False, 1 / M), (True, 1.0)):
    reported, found = step_with_autoscaler(per_token, scale)
    for gradient, of_sum in zip(found, wanted[per_token], strict=True):
        torch.testing.assert_close(gradient, of_sum, rtol=1e-12, atol=1e-12)
print("autoscaler and sum: the same gradients, with the flag and without")

# %%
with torch.no_grad():
    alone = [
        ((mask * loss_of(hidden_states(tokens)[0], labels)).sum() / mask.sum()).item()
        for tokens, labels, mask in BATCHES
    ]
print("reported with MTP:", reported, " without:", alone)
compare(reported_loss_changes=reported != alone)

# %% [markdown]
# The forward is the identity, so the reported loss is the same to the last bit. The gradient is not:
# the embedding and the decoder now hear from the second loss too.
#
# The scale is 1/M without the flag, because the schedule divides the first loss by M. It is 1 with
# the flag, where both are divided by N at the end. Now nobody sets it:

# %%
_, unscaled = step_with_autoscaler(per_token=False, scale=1.0)
_, without = step_with_autoscaler(per_token=False, scale=0.0)
for name, much, none, right in zip(WEIGHTS, unscaled, without, wanted[False], strict=True):
    part, right_part = much - none, right - none  # what the second loss adds
    ratio = part.norm() / right_part.norm()
    print(f"{name:10} second loss adds {right_part.norm():.4f}, unscaled {part.norm():.4f}")
compare(times_too_large=round(ratio.item(), 6))

# %% [markdown]
# This is easy to overlook: training still works, with another factor f, which changes when the
# number of microbatches changes.

# %% [markdown]
# ## Part 2: a ring of attention
#
# A linear layer, a norm or an MLP looks at one token at a time. So c ranks can each take a part of a
# sequence, and compute these as before. In attention each token looks at all tokens before it, on
# whichever rank they are. Sharing sequences in this way is called context parallelism.
#
# ### Predict
#
# 1. 32 tokens on 4 ranks, rank 0 has the first 8, rank 3 the last 8. A token looks at itself and at
#    all before it; each such pair costs work. How many times the work of rank 0 has rank 3?
# 2. In a ring each rank hands keys and values on to the next rank, until everybody has seen all. How
#    many times does a rank send its neighbour something, in the forward of one layer, c = 4?
# 3. In backward, keys and values go round again, and the gradients of keys and values with them. How
#    many times does a rank send *gradients*?
# 4. With 4 query heads and 1 head for keys and values, c = 2: which sends fewer bytes in a forward,
#    the ring or an all-to-all that gives each rank whole heads?
# 5. What share of the activations of one rank alone does each of 4 ranks hold?

# %%
# Write your answers in place of None. Running this cell locks them in.
predict(
    work_of_rank_3_over_rank_0=None,
    sends_in_forward=None,
    sends_of_gradients=None,
    fewer_bytes=None,  # "ring" or "all-to-all"
    share_of_activations=None,
)

# %% [markdown]
# ### Who has which tokens

# %%
S, C, WIDTH = 32, 4, 8  # tokens, ranks, width of a head
CONTIGUOUS = list(torch.arange(S).chunk(C))


def zigzag(rank):
    """Of 2c chunks, one from the front and one from the back."""
    chunks = torch.arange(S).chunk(2 * C)
    return torch.cat([chunks[rank], chunks[2 * C - 1 - rank]])


ZIGZAG = [zigzag(rank) for rank in range(C)]

# %%
for name, split in (("contiguous", CONTIGUOUS), ("zig-zag", ZIGZAG)):
    pairs = [int((own + 1).sum()) for own in split]  # token i looks at i + 1 tokens
    print(f"{name:10} pairs of each rank: {pairs}")
pairs_of_contiguous = [int((own + 1).sum()) for own in CONTIGUOUS]
compare(work_of_rank_3_over_rank_0=pairs_of_contiguous[3] / pairs_of_contiguous[0])

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
# ### A softmax in two parts
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
# ### The ring, played by one process
#
# Four ranks, each with its zig-zag part of Q, K and V. At step i rank r has the keys and values of
# rank j = (r − i) mod c: what came from its neighbour r − 1. There are three cases:
#
# * j = r, at the beginning: its own tokens, causal.
# * j < r: the *first* half of j's keys stands before both halves of r's queries, the second half
#   behind both. So all queries look at the first half of the keys, without a mask.
# * j > r: the second half of r's queries stands behind all of j's keys, the first half before all.
#   So the second half of the queries looks at all keys, without a mask.
#
# In each case it is half of the block, or a little more at the start. Everybody computes as much as
# everybody else, at every step.

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
step = (ranks.unsqueeze(1) - ranks) % C  # at which step a pair's key is with the pair's query
draw_pairs({"rank of the pair": maps["zig-zag"], "step": torch.where(CAUSAL, step, -1)}, "rank / step")

# %% [markdown]
# At step 0 each rank is with its own keys: the triangles at the diagonal, and the square where its
# second chunk looks at its first. There are c − 1 hops: after step c − 1 nobody needs the keys any
# more.
#
# ### The way back
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
        sums = hop(sums, "dk, dv")  # after the last step too: they go home
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
# Keys and values make c − 1 hops, as in forward. Their gradients make one more: after step c − 1 they
# are with the neighbour, and the last hop brings them home. With c = 2 a rank's next is also its
# previous, so a hop in the wrong direction is not noticed there: test a ring with four.
