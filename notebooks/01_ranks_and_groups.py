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
# # 01 Ranks and groups
#
# **The question.** Sixteen GPUs train one model. Each runs the same program and knows one number,
# its rank. How does it find out which layers are its own, which ranks share them, and to which ranks
# it sends what?
#
# A *rank* is one process with one GPU. A *group* is a list of ranks that communicate together.
# First sixteen ranks on paper, then four real ones.

# %%
# %matplotlib inline
from minimegatron.core.rank_generator import RankGenerator
from minimegatron.notebook import compare, live_ranks, predict
from minimegatron.notebook.drawing import draw_groups

# %% [markdown]
# ## Predict
#
# The model is cut three ways:
#
# * **tp = 2**, tensor parallelism: two ranks share every layer, each has half of every matrix;
# * **pp = 4**, pipeline parallelism: four stages, each has a quarter of the layers;
# * **dp = 2**, data parallelism: the whole is there twice, for different data.
#
# 2 · 4 · 2 = 16. Ranks are numbered like the cells of an array. tp changes fastest, then dp, then
# pp: the order `"tp-dp-pp"`. Write down:
#
# 1. Which of the four stages is rank 6 on?
# 2. Which rank has the other half of its layers?
# 3. Which ranks have the same weights as rank 6, so that their gradients must be averaged?
# 4. Where does rank 6 send its activations?

# %%
# Write your answers in place of None. Running this cell locks them in.
predict(
    stage_of_rank_6=None,
    has_the_other_half=None,  # a rank
    have_the_same_weights=None,  # a list of the other ranks
    receives_from_rank_6=None,  # a rank
)

# %% [markdown]
# ## The arithmetic


# %%
def layout(order):
    return RankGenerator(tp=2, ep=1, dp=2, pp=4, cp=1, order=order)


grid = layout("tp-dp-pp")


def coordinates(rank):
    """By hand: rank = tp + 2 * (dp + 2 * pp)."""
    return {"tp": rank % 2, "dp": rank // 2 % 2, "pp": rank // 4}


for rank in range(16):
    assert coordinates(rank).items() <= grid.coordinates(rank).items()
print("rank 6:", coordinates(6))

# %% [markdown]
# A group of an axis is the set of ranks that agree in all other coordinates. (Some of Megatron's groups
# vary in two coordinates, as the model-parallel group "tp-pp", or take only the first and the last
# stage, as the embedding's.)


# %%
def groups(axis):
    """The ranks that differ in `axis` alone, together."""
    found = {}
    for rank in range(16):
        others = tuple(at for name, at in coordinates(rank).items() if name != axis)
        found.setdefault(others, []).append(rank)
    return sorted(found.values())


for axis in ("tp", "dp", "pp"):
    assert groups(axis) == grid.get_ranks(axis)
    (mine,) = [group for group in groups(axis) if 6 in group]
    print(f"{axis}: {len(groups(axis))} groups of {len(mine)}; rank 6 is in {mine}")

# %%
tp, dp, pp = (next(group for group in groups(axis) if 6 in group) for axis in ("tp", "dp", "pp"))
compare(
    stage_of_rank_6=pp.index(6),
    has_the_other_half=tp[1 - tp.index(6)],
    have_the_same_weights=[rank for rank in dp if rank != 6],
    receives_from_rank_6=pp[pp.index(6) + 1],
)

# %% [markdown]
# So rank 6 is on stage 1 (counted from 0), shares its layers with rank 7, averages gradients with
# rank 4, and its pipeline runs 2, 6, 10, 14: it receives from 2 and sends to 10.
#
# ## The picture
#
# Sixteen ranks in two machines of eight. Ranks of one group are joined by a line.

# %%
draw_groups(layout("tp-dp-pp"))

# %% [markdown]
# ## Why this order
#
# Inside a machine, GPUs are joined by links much faster than those between machines. So the groups
# that talk most should not cross. Count the groups that do, for two orders of the same sizes.
# Predict first: which kind of group crosses when pp changes fastest?

# %%
predict(crosses_when_pp_is_fastest=None)  # "tp", "dp" or "pp"


# %%
def crossing(order):
    """How many groups of each kind have ranks in both machines."""
    return {
        axis: sum(group[0] // 8 != group[-1] // 8 for group in layout(order).get_ranks(axis))
        for axis in ("tp", "dp", "pp")
    }


for order in ("tp-dp-pp", "pp-dp-tp"):
    print(f"{order}: groups that cross: {crossing(order)}")
(crossed,) = (axis for axis, number in crossing("pp-dp-tp").items() if number)
compare(crosses_when_pp_is_fastest=crossed)

# %%
assert crossing("tp-dp-pp") == {"tp": 0, "dp": 0, "pp": 4}
assert crossing("pp-dp-tp") == {"tp": 8, "dp": 0, "pp": 0}

# %% [markdown]
# In the usual order only the pipelines cross. They can afford it, as you will see at the end.
#
# ## Four real ranks
#
# Four processes that stay alive. A cell that begins with `%%px` runs in each of them, not here.
# Each has `rank`, `torch` and `dist` (`torch.distributed`) already.

# %%
ranks = live_ranks(4)

# %%
# %%px
f"I am process {rank} of {world_size}, and my messages go by {dist.get_backend()}"

# %% [markdown]
# `shm` is memory that ranks of one machine share; with a GPU for each rank it would be `nccl`.
#
# Nothing so far tells them who they are in the model. This does, with tp = 2 and pp = 2. Every
# rank makes *all* groups, also those it is not in: making a group is itself something that all
# ranks do together.

# %%
# %%px
from minimegatron.core import parallel_state

parallel_state.initialize_model_parallel(
    tensor_model_parallel_size=2, pipeline_model_parallel_size=2
)
members = {kind: parallel_state.get_global_ranks(kind) for kind in ("tp", "dp", "pp")}
members

# %% [markdown]
# The same arithmetic, now with processes behind it. Does a group reach its members and nobody else?
# Let every rank add up the numbers of those it can reach: an *all-reduce*, after which every member
# of the group holds the sum.
#
# Predict rank 2's two sums.

# %%
predict(sum_over_tp=None, sum_over_pp=None)

# %%
# %%px
sums = {}
for kind in ("tp", "pp"):
    x = torch.tensor([float(rank)], device=device)
    dist.all_reduce(x, group=parallel_state.get_group(kind))
    sums[kind] = int(x)
sums

# %%
compare(sum_over_tp=ranks["sums"][2]["tp"], sum_over_pp=ranks["sums"][2]["pp"])

# %%
assert ranks["members"][2] == {"tp": [2, 3], "dp": [2], "pp": [0, 2]}
assert ranks["sums"] == [
    {kind: sum(mine[kind]) for kind in ("tp", "pp")} for mine in ranks["members"]
]

# %% [markdown]
# ## A trap: two numbers for the same rank
#
# Within a group, ranks are counted from 0 again. `torch.distributed` sometimes wants one number
# and sometimes the other.

# %%
# %%px 3
group = parallel_state.get_pipeline_model_parallel_group()
print("the world calls me", dist.get_rank(), "- my pipeline calls me stage", group.rank())
before = parallel_state.get_pipeline_model_parallel_prev_rank()
print("dist.recv(src=...) from the stage before me wants", before, "- not", group.rank() - 1)
assert (dist.get_rank(), group.rank(), before) == (3, 1, 1)

# %% [markdown]
# ## Who talks how often, and how much?
#
# One training step of a tiny GPT with four layers and M = 4 microbatches, twice: with tp = 2 and
# pp = 2, then with tp = 2 and dp = 2. Each rank counts its own calls. (`tracing.add_observer` shows
# it every call that matters; the group is one of the arguments.)
#
# Predict, for rank 0: how many messages does it send to the next stage? How many all-reduces of
# gradients are there in a step? Are there more or fewer all-reduces for tensor parallelism?

# %%
predict(
    messages_sent=None,
    all_reduces_of_gradients=None,
    all_reduces_for_tp=None,  # "more" or "fewer" than of gradients
)

# %%
# %%px
from minimegatron.core import tracing
from minimegatron.notebook.counting import CallCounter
from minimegatron.training.tiny_gpt import TinyGPT


def count(**layout):
    gpt = TinyGPT(**layout, num_layers=4)
    counter = CallCounter(gpt.groups)
    with tracing.observed_by(counter):
        gpt.step(num_microbatches=4)
    return {kind: (calls, counter.bytes[kind]) for kind, calls in sorted(counter.calls.items())}


counted = {"tp 2, pp 2": count(tp=2, pp=2), "tp 2, dp 2": count(tp=2)}

# %%
counted = ranks["counted"][0]  # rank 0's
for name, kinds in counted.items():
    for kind, (calls, num_bytes) in kinds.items():
        print(f"{name}:  {kind:22} {calls:3} calls, {num_bytes / 1024:6.1f} KiB")

# %%
stages, copies = counted["tp 2, pp 2"], counted["tp 2, dp 2"]
for_tp, of_gradients = copies["tp, all-reduce"][0], copies["dp, all-reduce"][0]
compare(
    messages_sent=stages["pp, sending"][0],
    all_reduces_of_gradients=of_gradients,
    all_reduces_for_tp="more" if for_tp > of_gradients else "fewer",
)

# %% [markdown]
# Tensor parallelism talks inside every layer, forward and backward. The pipeline sends one message
# per microbatch, small ones. Data parallelism calls once, with everything. That is why tp gets the
# fastest links, and why the pipeline is the one to leave the machine.
#
# ("embedding" is a fourth kind of group: the first and the last stage hold the same table.)

# %%
M, LAYERS = 4, 4
assert stages["pp, sending"][0] == stages["pp, receiving"][0] == M
assert copies["dp, all-reduce"][0] == 1
# Two all-reduces per layer forward, two backward; stage 0 has half of the layers, and one more per
# microbatch in the embedding.
assert stages["tp, all-reduce"][0] == M * (4 * LAYERS // 2 + 1)
assert copies["tp, all-reduce"][0] > 2 * stages["tp, all-reduce"][0]
assert stages["pp, sending"][1] < copies["dp, all-reduce"][1] < copies["tp, all-reduce"][1]

# %% [markdown]
# ## Change it
#
# The four ranks are still there.
#
# * `draw_groups(layout("pp-dp-tp"))`. Which lines now leave the machine, and what would that cost per step?
# * Make `layout` one of tp = 4: `RankGenerator(tp=4, ep=1, dp=2, pp=2, cp=1, ...)`. Write down
#   rank 6's groups before you look. Which sizes of tp keep its groups inside a machine?
# * `%px count(tp=2, pp=2, sequence_parallel=True)`. What has taken the place of the all-reduces
#   inside layers, and how large are the messages between stages now?
# * In the sums, let rank 3 leave its pipeline group's all-reduce out (`if (rank, kind) != (3, "pp")`).
#   Who waits, and who says so?

# %%
ranks.stop()

# %% [markdown]
# ## Where next
#
# * All kinds of groups, in Megatron's words: [process groups](../docs/tour/process-groups.md).
# * Write the arithmetic yourself:
#   [exercise 1](../minimegatron/exercises/catalog/ex01_rank_arithmetic/page.md)
#   (`minimegatron exercises start ex01`).
# * [The next notebook](02_tensor_parallel_by_hand.ipynb) cuts a layer in two.
# * For your own sizes: `minimegatron groups --world-size 16 --tp 2 --pp 4`.
