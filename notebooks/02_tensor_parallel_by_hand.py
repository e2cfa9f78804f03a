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
# # 02 Tensor parallelism by hand
#
# **The question.** An MLP is too wide for one GPU. Two ranks shall compute together exactly what
# one would, forward and backward. How are the matrices cut, and where must the ranks talk?
#
# The MLP is `Y = gelu(X A) B`. Everything is in float64, so that "exactly" can be checked.

# %%
# %matplotlib inline
import torch
import torch.nn.functional as F

from minimegatron.notebook import compare, live_ranks, predict
from minimegatron.notebook.drawing import draw_matrices

RANKS, WIDTH = 2, 8
ranks = live_ranks(RANKS)

# %% [markdown]
# ## Predict
#
# 1. Cut A into a left and a right half (by columns), or into an upper and a lower half (by rows)?
#    With which cut can each rank apply gelu to what it has, without asking the other?
# 2. How must B be cut, so that it takes what A's cut leaves on each rank?
# 3. How often must the two ranks exchange something in the forward? And in the backward: where?

# %%
# Write your answers in place of None. Running this cell locks them in.
predict(
    cut_of_A=None,  # "columns" or "rows"
    cut_of_B=None,
    exchanges_forward=None,  # how many
    exchanges_backward=None,
)

# %% [markdown]
# ## One rank, to compare with

# %%
torch.manual_seed(0)
X = torch.randn(3, 4, dtype=torch.float64)  # 3 tokens, 4 features
A = torch.randn(4, WIDTH, dtype=torch.float64)
B = torch.randn(WIDTH, 4, dtype=torch.float64)
dY = torch.randn(3, 4, dtype=torch.float64)  # what comes back from the layers behind


# %%
def on_one_rank():
    leaves = [matrix.clone().requires_grad_() for matrix in (X, A, B)]
    x, a, b = leaves
    y = F.gelu(x @ a) @ b
    y.backward(dY)
    return y.detach(), *[leaf.grad for leaf in leaves]


Y, dX, dA, dB = on_one_rank()
ranks.push(X=X, A=A, B=B, dY=dY)

# %% [markdown]
# ## Which cut of A?
#
# By rows, each rank would have a *term* of X A: `X A = X[:, :2] A[:2] + X[:, 2:] A[2:]`. Is the
# gelu of a sum the sum of the gelus?

# %%
predict(gelu_of_sum_is_sum_of_gelus=None)  # True or False

# %%
terms = [X[:, :2] @ A[:2], X[:, 2:] @ A[2:]]
assert torch.allclose(sum(terms), X @ A)
whole, of_terms = F.gelu(X @ A), sum(map(F.gelu, terms))
print("off by up to", float((whole - of_terms).abs().max()))
compare(gelu_of_sum_is_sum_of_gelus=torch.allclose(whole, of_terms))

# %% [markdown]
# By rows, the ranks would have to add up before the gelu, and again after B. By columns, each rank has
# whole *columns* of X A, and gelu works on each number by itself. So A is cut by columns. Then a
# rank has half of the columns of gelu(X A), and these meet half of B's rows: B is cut by rows.

# %%
# %%px
import torch.nn.functional as F

share = len(B) // world_size
mine = slice(rank * share, (rank + 1) * share)
a = A[:, mine].clone().requires_grad_()
b = B[mine].clone().requires_grad_()
x = X.clone().requires_grad_()

hidden = F.gelu(x @ a)
term = hidden @ b
print("A", tuple(a.shape), "hidden", tuple(hidden.shape), "B", tuple(b.shape))
print("first row of the result:", [round(v, 3) for v in term[0].tolist()])

# %%
print("first row of Y:         ", [round(v, 3) for v in Y[0].tolist()])
assert torch.allclose(sum(ranks["term"]), Y)

# %%
shape_of_a, shape_of_b = ranks["tuple(a.shape), tuple(b.shape)"][0]
compare(
    cut_of_A="columns" if shape_of_a[0] == len(A) else "rows",
    cut_of_B="rows" if shape_of_b[1] == B.shape[1] else "columns",
)

# %% [markdown]
# Each rank has a term of Y, of full size. One sum at the very end is all the forward needs.
#
# ## The sum, and its backward
#
# Autograd does not know that `dist.all_reduce` adds. We tell it. Forward: add up. Backward: every
# term of a sum gets the sum's gradient, so there is nothing to do.


# %%
# %%px
class Reduce(torch.autograd.Function):
    """Forward: all-reduce. Backward: nothing."""

    @staticmethod
    def forward(ctx, term):
        total = term.clone()
        dist.all_reduce(total)
        return total

    @staticmethod
    def backward(ctx, gradient):
        return gradient


y = Reduce.apply(F.gelu(x @ a) @ b)
y.backward(dY)
gradients = {"X": x.grad, "A": a.grad, "B": b.grad}

# %% [markdown]
# Three gradients. One of them is wrong. Which, and why? Predict, then look.

# %%
predict(wrong_gradient=None)  # "X", "A" or "B"

# %%
pieces = zip(dA.chunk(RANKS, dim=1), dB.chunk(RANKS, dim=0), strict=True)
right = [{"X": dX, "A": dA_piece, "B": dB_piece} for dA_piece, dB_piece in pieces]


def are_right(gradients):
    """Per rank: which of its gradients are right."""
    return [
        {name: torch.allclose(mine[name], wanted[name]) for name in wanted}
        for mine, wanted in zip(gradients, right, strict=True)
    ]


without_copy = ranks["gradients"]
print(*are_right(without_copy), sep="\n")
wrong = [name for name, is_right in are_right(without_copy)[0].items() if not is_right]
compare(wrong_gradient=" and ".join(wrong))

# %%
assert all(torch.allclose(y, Y) for y in ranks["y"])
assert are_right(without_copy) == RANKS * [{"X": False, "A": True, "B": True}]

# %% [markdown]
# All ranks used X. Each knows only what X did through *its* piece of A. The whole gradient is the
# sum:

# %%
pictures = {f"rank {rank} has": mine["X"] for rank, mine in enumerate(without_copy)}
pictures["their sum"] = sum(pictures.values())
pictures["one rank's dX"] = dX
draw_matrices(pictures)

assert torch.allclose(pictures["their sum"], dX)

# %% [markdown]
# So there is a second operation, where X enters. Forward: nothing. Backward: add up. It is the
# first one turned round, which is why the two are called *conjugate*.


# %%
# %%px
class Copy(torch.autograd.Function):
    """Forward: nothing. Backward: all-reduce."""

    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        total = gradient.clone()
        dist.all_reduce(total)
        return total


# %%
# %%px
x, a, b = (leaf.detach().requires_grad_() for leaf in (x, a, b))
y = Reduce.apply(F.gelu(Copy.apply(x) @ a) @ b)
y.backward(dY)
gradients = {"X": x.grad, "A": a.grad, "B": b.grad}

# %%
print(*are_right(ranks["gradients"]), sep="\n")
assert are_right(ranks["gradients"]) == RANKS * [{"X": True, "A": True, "B": True}]

# %% [markdown]
# ## The real layers
#
# `ColumnParallelLinear` is a copy and a matrix cut by columns; `RowParallelLinear` is a matrix cut
# by rows and a reduce. A Megatron MLP is one of each. They store weights transposed, as
# `torch.nn.Linear` does, so "column" means the columns of A as written here.
#
# Question 3 again: how many collectives do the two layers call, forward and backward? The observer
# counts.

# %%
# %%px
from minimegatron.core import parallel_state, tracing
from minimegatron.core.model_parallel_config import ModelParallelConfig
from minimegatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear

parallel_state.initialize_model_parallel(tensor_model_parallel_size=world_size)
config = ModelParallelConfig(tensor_model_parallel_size=world_size, params_dtype=torch.float64)
common = {"config": config, "bias": False, "skip_bias_add": False}
column = ColumnParallelLinear(4, len(B), init_method=lambda w: w.copy_(A.T), **common).to(X.device)
common["input_is_parallel"] = True
row = RowParallelLinear(len(B), 4, init_method=lambda w: w.copy_(B.T), **common).to(X.device)

# %%
# %%px
from minimegatron.notebook.counting import CollectiveNames

forward, backward = CollectiveNames(), CollectiveNames()
x = X.clone().requires_grad_()
with tracing.observed_by(forward):
    hidden, _ = column(x)
    y, _ = row(F.gelu(hidden))
with tracing.observed_by(backward):
    y.backward(dY)
called = {"forward": forward.seen, "backward": backward.seen}
layers = {"X": x.grad, "A": column.weight.grad.T, "B": row.weight.grad.T}
called

# %%
called = {when: len(names) for when, names in ranks["called"][0].items()}
compare(exchanges_forward=called["forward"], exchanges_backward=called["backward"])

# %%
assert ranks["called"] == RANKS * [{"forward": ["all-reduce"], "backward": ["all-reduce"]}]
# Weights pass through float32 when they are drawn, for any dtype; hence the tolerance.
assert all(torch.allclose(y, Y, atol=1e-5) for y in ranks["y"])
for by_hand, by_layers in zip(ranks["gradients"], ranks["layers"], strict=True):
    assert all(torch.allclose(by_hand[name], by_layers[name], atol=1e-5) for name in by_hand)
print("one all-reduce forward, one backward, and the same gradients")

# %% [markdown]
# Each rank holds half of the weights and half of the hidden activations; X and Y are whole on
# both. Sequence parallelism, in the tour, cuts those too, for one more all-gather in the backward.
#
# ## Change it
#
# * Let `Reduce.backward` all-reduce as well. By which factor is every gradient wrong? (This is what
#   one gets from a differentiable all-reduce that knows nothing of copies: both ranks hold the same
#   dY, and it is counted twice.)
# * Cut B by columns instead, and gather Y's columns at the end. What must each rank have of the
#   hidden activations, and what does that cost?
# * `RANKS = 4`, and run all cells. What grows with the number of ranks: the number of all-reduces,
#   their size, or neither?

# %%
ranks.stop()

# %% [markdown]
# ## Where next
#
# * The layers, line by line: [tensor-parallel layers](../docs/tour/tensor-parallel-layers.md).
# * [Exercise 2](../minimegatron/exercises/catalog/ex02_conjugate_collectives/page.md): both operations,
#   and their gradients (`minimegatron exercises start ex02`).
# * [Exercise 3](../minimegatron/exercises/catalog/ex03_vocab_parallel_cross_entropy/page.md): the
#   loss, when no rank has all of the vocabulary.
