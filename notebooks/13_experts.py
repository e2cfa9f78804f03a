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
# # 13 Experts by hand, then parallel
#
# **The question.** A layer has many MLPs, the experts, and a token goes through two of them. Which
# two, who decides, and how does a token come to an expert on another rank? And what becomes of the
# others, if everybody likes the same two?
#
# By hand everything is in float64, so that "the same" can be checked.

# %%
# %matplotlib inline
import torch
import torch.distributed as dist
import torch.nn.functional as F

from minimegatron import launch, trace
from minimegatron.core import collectives
from minimegatron.core.tracing import observed_by
from minimegatron.core.transformer.moe import moe_utils
from minimegatron.notebook import compare, predict
from minimegatron.notebook.drawing import draw_balance, draw_routing, draw_splits, draw_ways
from minimegatron.training.tiny_gpt import TinyGPT

RANKS, TOKENS, EXPERTS, TOPK, HIDDEN = 2, 12, 4, 2, 6

# %% [markdown]
# ## Predict
#
# Two ranks, each with two of the four experts and with six of the twelve tokens. Each token chooses
# two experts, wherever they are.
#
# 1. Does a rank get as many tokens as it sends?
# 2. How many exchanges between the ranks does the layer need in forward: tokens must go there,
#    results must come back. Anything else? And how many in backward?
# 3. A model with eight experts is trained for 40 steps, and nothing keeps the load even. How many
#    times an even share does the fullest expert get then? (1: even. 4: all tokens go to the same
#    two of eight.)

# %%
# Write your answers in place of None. Running this cell locks them in.
predict(
    gets_as_many_as_it_sends=None,  # True or False
    exchanges_forward=None,  # all-to-alls: of rows of tokens, or of what goes with them
    exchanges_backward=None,
    fullest_expert=None,  # a number from 1 to 4
)

# %% [markdown]
# ## The router
#
# One matrix, a row for each expert. The two largest of a token's four numbers say where it goes,
# and a softmax of these two says how much each counts.

# %%
torch.manual_seed(3)
X = torch.randn(TOKENS, HIDDEN, dtype=torch.float64)
W = torch.randn(EXPERTS, HIDDEN, dtype=torch.float64)  # the router
UP = torch.randn(EXPERTS, HIDDEN, 2 * HIDDEN, dtype=torch.float64)  # the experts: UP and DOWN
DOWN = torch.randn(EXPERTS, 2 * HIDDEN, HIDDEN, dtype=torch.float64)


# %%
def route(x):
    """[T, h] -> probabilities [T, E], 0 where not chosen."""
    best, chosen = (x @ W.T).topk(TOPK, dim=1)
    return x.new_zeros(len(x), EXPERTS).scatter(1, chosen, best.softmax(dim=1))


def expert(number, x):
    return F.gelu(x @ UP[number]) @ DOWN[number]


# %%
probs = route(X)
draw_routing(probs)
assert torch.allclose(probs.sum(dim=1), torch.ones(TOKENS, dtype=torch.float64))

# %% [markdown]
# The plainest layer asks every expert about every token, and multiplies most answers by 0:

# %%
Y = sum(probs[:, [e]] * expert(e, X) for e in range(EXPERTS))
rows_computed = EXPERTS * len(X)

# %% [markdown]
# ## The permutation
#
# To ask only those that were chosen, the tokens are put into the order of the experts. Each choice
# makes a row, so a token stands there twice. A mask, turned round and read row by row, has this
# order.

# %%
numbers, tokens = (probs > 0).T.nonzero(as_tuple=True)
counts = (probs > 0).sum(dim=0).tolist()
print("experts:", numbers.tolist())
print("tokens: ", tokens.tolist())
draw_ways([probs > 0])

# %%
blocks = X[tokens].split(counts)
answers = torch.cat([expert(e, block) for e, block in enumerate(blocks)])
weighed = answers * probs[tokens, numbers].unsqueeze(1)
permuted = torch.zeros_like(X).index_add(0, tokens, weighed)  # each row back to its token

assert torch.allclose(permuted, Y)
print(f"the same, from {len(answers)} rows in place of {rows_computed}")

# %% [markdown]
# The package does the same in `permute` and `unpermute`. It weighs inside the expert, so that the
# way back only adds.

# %%
rows, weights, sorted_tokens = moe_utils.permute(X, probs > 0, probs)
assert torch.equal(rows, X[tokens]) and torch.equal(sorted_tokens, tokens)
assert torch.allclose(moe_utils.unpermute(weighed, tokens, X.shape), Y)
theirs, chosen = moe_utils.topk_routing_with_score_function(X @ W.T, TOPK)
assert torch.allclose(theirs, probs) and torch.equal(chosen, probs > 0)

# %% [markdown]
# ## What keeps the load even
#
# Nothing above cares how many tokens an expert gets. The auxiliary loss does. For each expert it
# multiplies f, how many tokens chose it, by P, the sum of its scores. f is counted and has no
# gradient; the gradient goes through P. Which expert's scores does it push down most?

# %%
predict(pushed_down_most=None)  # the number of an expert, from the picture above


# %%
scores = (X @ W.T).softmax(dim=1).requires_grad_()
f = torch.tensor(counts)
loss = EXPERTS / (TOPK * TOKENS**2) * (f * scores.sum(dim=0)).sum()
loss.backward()
push = scores.grad[0]
print(f"loss {loss:.3f}; it is 1 if the load is even")
print("tokens:", counts, " gradient of a score:", [round(g, 4) for g in push.tolist()])
compare(pushed_down_most=int(push.argmax()))

# %%
assert torch.allclose(push / push.sum(), f / f.sum().double())  # in proportion to the tokens
assert all(torch.equal(row, push) for row in scores.grad)  # for every token, wherever it went
theirs = moe_utils.switch_load_balancing_loss_func(scores, f, TOKENS, TOPK, EXPERTS, 1.0)
assert torch.allclose(theirs, loss)

# %% [markdown]
# ## On two ranks
#
# Rank 0 has the first half of the tokens and the experts 0 and 1. Before anything can be sent, each
# rank must know how many rows will come: so the counts are gathered first. Then rows and weights
# travel, both by the same splits.


# %%
def send(rows, to_each, from_each):
    """An all-to-all of rows, without a gradient."""
    output = rows.new_empty((sum(from_each), *rows.shape[1:]))
    collectives.all_to_all(output, rows.contiguous(), dist.group.WORLD, from_each, to_each)
    return output


# %%
def layer_on_ranks(x):
    rank, world = dist.get_rank(), dist.get_world_size()
    x = x.chunk(world)[rank]
    probs = route(x)
    numbers, tokens = (probs > 0).T.nonzero(as_tuple=True)
    own = (probs > 0).sum(dim=0)
    counts = own.new_empty(world * EXPERTS)
    collectives.all_gather(counts, own, dist.group.WORLD)
    counts = counts.view(world, world, -1)  # [from, to, expert there]
    to_each, from_each = counts[rank].sum(1).tolist(), counts[:, rank].sum(1).tolist()
    rows = send(x[tokens], to_each, from_each)
    weights = send(probs[tokens, numbers], to_each, from_each)
    # In the order of the ranks that they come from. Experts want theirs together.
    local = torch.arange(counts.shape[2]).repeat(world).repeat_interleave(counts[:, rank].flatten())
    order = local.argsort(stable=True)
    blocks = rows[order].split(counts[:, rank].sum(0).tolist())
    first = rank * len(blocks)  # number of this rank's first expert
    answers = torch.cat([expert(first + e, block) for e, block in enumerate(blocks)])
    weighed = (answers * weights[order].unsqueeze(1))[order.argsort()]
    back = send(weighed, from_each, to_each)
    y = torch.zeros_like(x).index_add(0, tokens, back)
    return {"y": y, "rows": counts.sum(2), "map": probs > 0, "came": (first + local[order]).tolist()}


# %%
by_rank = launch(layer_on_ranks, RANKS, X)
assert torch.allclose(torch.cat([found["y"] for found in by_rank]), Y)
print("experts of the rows that came, sorted:", *[found["came"] for found in by_rank], sep="\n")
draw_ways([found["map"] for found in by_rank])

# %%
rows = by_rank[0]["rows"]
draw_splits(rows)
sent, got = rows.sum(dim=1), rows.sum(dim=0)
print("sent:", sent.tolist(), " got:", got.tolist(), " each counts what stays at home, too")
compare(gets_as_many_as_it_sends=torch.equal(sent, got))

# %% [markdown]
# The picture of rows is what both ends of every message must agree on. A row of it is a rank's
# input splits, a column its output splits. On the way back, and in backward, they change places.
#
# ## The real layer
#
# Now a GPT with such a layer, on the same two ranks, with forward and backward traced. Its
# all-to-alls have a gradient. How many are there?

# %%
MODEL = {
    "num_layers": 1,
    "num_moe_experts": EXPERTS,
    "moe_ffn_hidden_size": 32,
    "moe_token_dispatcher_type": "alltoall",
    "params_dtype": torch.float64,
}


# %%
def real_step(num_microbatches, ep):
    gpt = TinyGPT(expert_model_parallel_size=ep, **MODEL)
    gpt.step(num_microbatches)  # what is made on first use is made now
    with trace() as recorded:
        losses = gpt.step(num_microbatches)
    return {
        "losses": [report["loss"].item() for report in losses],
        "gradients": gpt.gradients(),
        "trace": recorded if dist.get_rank() == 0 else None,
    }


# %%
ranks = launch(real_step, RANKS, 1, RANKS)
(alone,) = launch(real_step, 1, RANKS, 1)  # one process, with the microbatches of both
events = ranks[0]["trace"].rank(0).events


def inside(event, name):
    """Whether a call of that name was open when the event began."""
    while event.parent is not None and event.name != name:
        event = events[event.parent]
    return event.name == name


# %%
exchanges = [event for event in events if event.name == "all-to-all"]
for event in exchanges:
    when = "backward" if inside(event, "backward-compute") else "forward"
    print(f"{when:9} {event.attributes['shape']}, {event.attributes['bytes']} bytes")

in_backward = sum(inside(event, "backward-compute") for event in exchanges)
compare(exchanges_forward=len(exchanges) - in_backward, exchanges_backward=in_backward)

# %% [markdown]
# Three and three: tokens, their weights, and the results; then the gradients of the three. (The
# counts are gathered, without a gradient, and are not among them.) The weights are one number per
# row. They must travel with a gradient: it is the only way on which the main loss reaches the
# router.
#
# The two ranks are also two data-parallel copies of everything else. Are losses and gradients those
# of one process?

# %%
assert len(exchanges) == 6 and in_backward == 3
of_both = [found["losses"][0] for found in ranks]
torch.testing.assert_close(of_both, alone["losses"], rtol=1e-10, atol=1e-10)
experts_of = [{n for n in found["gradients"] if "local_experts" in n} for found in ranks]
assert not experts_of[0] & experts_of[1]  # no expert is on both ranks
for found in ranks:
    for name, gradient in found["gradients"].items():
        wanted = alone["gradients"][name]
        torch.testing.assert_close(gradient, wanted, rtol=1e-10, atol=1e-10)
print(len(experts_of[0]), "of", len(ranks[0]["gradients"]), "gradients on a rank are experts'")

# %% [markdown]
# Nobody has summed the gradients of experts over the ranks: each is on one rank only, and the
# tokens of both came to it. It was divided by 2 all the same, because the loss is a mean over two
# ranks. To divide by the number of an expert's copies, 1 here, is a frequent mistake with
# experts.
#
# ## Balance over steps
#
# A layer of eight experts, trained three times: with nothing that keeps the load even; with the
# auxiliary loss; and with a bias per expert, which goes up after each step for those that got few
# tokens.

# %%
TRAINED = {
    "num_layers": 1,
    "num_moe_experts": 8,
    "moe_ffn_hidden_size": 32,
    "seq_length": 32,
    "micro_batch_size": 8,
}
STEPS = 40

# %%
WAYS = {
    "neither": {},
    "auxiliary loss": {"moe_aux_loss_coeff": 0.1},
    "bias": {
        "moe_router_load_balancing_type": "none",
        "moe_router_score_function": "sigmoid",
        "moe_router_enable_expert_bias": True,
        "moe_router_bias_update_rate": 0.02,
    },
}


# %%
class Counts:
    """An observer: tokens per expert, of every router that has chosen."""

    def __init__(self):
        self.seen = []

    def start(self, call):
        """A traced call begins."""

    def stop(self, call):
        if call.name == "moe-counts":
            self.seen.append(call.attributes["tokens_per_expert"])


# %%
def train(way):
    gpt = TinyGPT(**TRAINED, **way)
    optimizer = gpt.optimizer(lr=3e-3)
    fullest = []
    for number in range(STEPS):
        optimizer.zero_grad()
        with observed_by(counts := Counts()):
            gpt.step(1, data=gpt.microbatches(1, seed=number))
        optimizer.step()
        (tokens,) = counts.seen
        fullest.append(max(tokens) * len(tokens) / sum(tokens))
    return fullest


# %%
def train_all(ways):
    return {name: train(way) for name, way in ways.items()}


# %%
(lines,) = launch(train_all, 1, WAYS)
draw_balance(lines, worst=8 / TOPK)

# %%
at_the_end = {name: sum(line[-5:]) / 5 for name, line in lines.items()}
print({name: round(value, 2) for name, value in at_the_end.items()})
compare(fullest_expert=round(at_the_end["neither"], 1))

# %%
assert all(line[0] < 2 for line in lines.values())  # all begin nearly even
assert at_the_end["neither"] > 3
assert at_the_end["auxiliary loss"] < 2.5 and at_the_end["bias"] < 3

# %% [markdown]
# Left alone, the router ends with a few favourites of eight. What they learn makes them still better
# choices. The others get hardly any tokens, so they learn hardly anything. With experts on ranks
# that also costs time: nearly all tokens go to the ranks of the few, and the other ranks wait.
#
# The loss pulls at the router's scores in every step, against what the main loss wants. The bias
# only moves the choice; the weights of the outputs stay as they were.
#
# ## Change it
#
# * `TOPK = 1` at the top. The softmax of one number is always 1. Which gradient does the router get
#   from the main loss then, and what is the way out? (The package refuses it; see
#   `moe_router_pre_softmax`.)
# * Leave out the sort by local expert in `layer_on_ranks` (`order = torch.arange(len(local))`).
#   Which assertion fails? Would anything crash?
# * In `WAYS`, let `moe_aux_loss_coeff` be 0.001 and 1. Which is too little?
# * `"moe_token_dispatcher_type": "allgather"` in `MODEL`. Which collectives take the all-to-alls'
#   place, and how many bytes do they move?
#
# ## Where next
#
# * [ex19](../minimegatron/exercises/catalog/ex19_router/page.md), the router and its loss;
#   [ex20](../minimegatron/exercises/catalog/ex20_all_to_all/page.md), the exchange with its
#   backward; [ex21](../minimegatron/exercises/catalog/ex21_expert_gradients/page.md), the
#   gradients.
# * [The next notebook](14_combined_1f1b.ipynb) hides the exchanges behind computation.
# * Labs: `minimegatron exercises lab start unsorted-local-experts`, `... probs-gradient-dropped`,
#   `... aux-loss-discarded`.
