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
from itertools import pairwise

import matplotlib.pyplot as plt
from matplotlib.patches import FancyArrowPatch

from minimegatron.core.rank_generator import RankGenerator
from minimegatron.notebook import live_ranks

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
#
# ## The arithmetic

# %%
grid = RankGenerator(tp=2, ep=1, dp=2, pp=4, cp=1, order="tp-dp-pp")


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

# %% [markdown]
# So rank 6 is on stage 1 (counted from 0), shares its layers with rank 7, averages gradients with
# rank 4, and its pipeline runs 2, 6, 10, 14: it receives from 2 and sends to 10.
#
# ## The picture
#
# Sixteen ranks in two machines of eight. Ranks of one group are joined by a line.

# %%
COLOURS = ["#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#7f7f7f", "#b8a900"]
WORDS = {
    "tp": "tensor: every layer, many times",
    "dp": "data: gradients, once a step",
    "pp": "pipeline: one message per microbatch",
}


def place(rank):
    """Where a rank is drawn: a row per machine's half."""
    return rank % 4 + (0.0 if rank < 8 else 5.0), -(rank % 8 // 4)


def draw(order):
    ordered = RankGenerator(tp=2, ep=1, dp=2, pp=4, cp=1, order=order)
    figure, panels = plt.subplots(3, 1, figsize=(7.5, 5.6), layout="constrained")
    for panel, (axis, words) in zip(panels, WORDS.items(), strict=True):
        for left in (-0.45, 4.55):
            panel.add_patch(plt.Rectangle((left, -1.45), 3.9, 1.9, fc="#f1f4f7", ec="#aab4be"))
        for number, group in enumerate(ordered.get_ranks(axis)):
            colour = COLOURS[number % len(COLOURS)]
            xs, ys = zip(*map(place, group), strict=True)
            for one, next_one in pairwise(group):
                (x, y), (next_x, next_y) = place(one), place(next_one)
                # Past a rank that is not in the group, the line goes round it.
                bend = (-0.4, 0.4)[one % 2] if y == next_y and next_x - x > 1 else 0
                line = FancyArrowPatch(
                    (x, y), (next_x, next_y), connectionstyle=f"arc3,rad={bend}", arrowstyle="-"
                )
                line.set(color=colour, lw=3, alpha=0.6)
                panel.add_patch(line)
            panel.scatter(xs, ys, s=330, color=colour, zorder=3)
            for rank in group:
                panel.annotate(
                    rank, place(rank), color="white", ha="center", va="center", weight="bold"
                )
        panel.set(title=f"{axis}, {words}", xlim=(-0.7, 8.7), ylim=(-1.6, 0.6), aspect="equal")
        panel.axis("off")
    plt.show()


draw("tp-dp-pp")

# %% [markdown]
# ## Why this order
#
# Inside a machine, GPUs are joined by links much faster than those between machines. So the groups
# that talk most should not cross. Count the groups that do, for two orders of the same sizes.
# Predict first: which kind of group crosses when pp changes fastest?


# %%
def crossing(order):
    """How many groups of each kind have ranks in both machines."""
    ordered = RankGenerator(tp=2, ep=1, dp=2, pp=4, cp=1, order=order)
    return {
        axis: sum(group[0] // 8 != group[-1] // 8 for group in ordered.get_ranks(axis))
        for axis in ("tp", "dp", "pp")
    }


for order in ("tp-dp-pp", "pp-dp-tp"):
    print(f"{order}: groups that cross: {crossing(order)}")

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
# %%px
sums = {}
for kind in ("tp", "pp"):
    x = torch.tensor([float(rank)], device=device)
    dist.all_reduce(x, group=parallel_state.get_group(kind))
    sums[kind] = int(x)
sums

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
# %%px
from collections import Counter

from minimegatron.core import tracing
from minimegatron.tiny_gpt import TinyGPT


class CountCalls:
    def __init__(self, groups):
        self.kinds = {id(groups.tp): "tp", id(groups.dp): "dp"}
        self.calls, self.bytes = Counter(), Counter()

    def start(self, call):
        if call.name == "p2p-start":
            kind, size = f"pp, {call.attributes['doing']}", call.attributes["bytes"]
        elif call.attributes.get("group_size", 1) > 1:
            kind = self.kinds.get(id(call.arguments["group"]), "embedding") + f", {call.name}"
            size = call.attributes["bytes"]
        else:
            return
        self.calls[kind] += 1
        self.bytes[kind] += size

    def stop(self, call):
        pass


def count(**layout):
    gpt = TinyGPT(**layout, num_layers=4)
    counter = CountCalls(gpt.groups)
    tracing.add_observer(counter)
    gpt.step(num_microbatches=4)
    tracing.remove_observer(counter)
    return {kind: (counter.calls[kind], counter.bytes[kind]) for kind in sorted(counter.calls)}


counted = {"tp 2, pp 2": count(tp=2, pp=2), "tp 2, dp 2": count(tp=2)}

# %%
counted = ranks["counted"][0]  # rank 0's
for layout, kinds in counted.items():
    for kind, (calls, num_bytes) in kinds.items():
        print(f"{layout}:  {kind:22} {calls:3} calls, {num_bytes / 1024:6.1f} KiB")

# %% [markdown]
# Tensor parallelism talks inside every layer, forward and backward. The pipeline sends one message
# per microbatch, small ones. Data parallelism calls once, with everything. That is why tp gets the
# fastest links, and why the pipeline is the one to leave the machine.
#
# ("embedding" is a fourth kind of group: the first and the last stage hold the same table.)

# %%
stages, copies = counted["tp 2, pp 2"], counted["tp 2, dp 2"]
M, LAYERS = 4, 4
assert stages["pp, sending"][0] == stages["pp, receiving"][0] == M
assert copies["dp, all-reduce"][0] == 1
# Two all-reduces per layer forward, two backward; stage 0 has half of the layers, and one more per
# microbatch in the embedding.
assert stages["tp, all-reduce"][0] == M * (4 * LAYERS // 2 + 1)
assert copies["tp, all-reduce"][0] > 2 * stages["tp, all-reduce"][0]
assert stages["pp, sending"][1] < copies["dp, all-reduce"][1] < copies["tp, all-reduce"][1]
ranks.stop()

# %% [markdown]
# ## Change it
#
# * `draw("pp-dp-tp")`. Which lines now leave the machine, and what would that cost per step?
# * Make the first layout tp = 4: `RankGenerator(tp=4, ep=1, dp=2, pp=2, cp=1, ...)`. Write down
#   rank 6's groups before you look. Which sizes of tp keep its groups inside a machine?
# * `%px count(tp=2, pp=2, sequence_parallel=True)`, before the ranks are stopped. What has taken the
#   place of the all-reduces inside layers, and how large are the messages between stages now?
# * In the sums, let rank 3 leave its pipeline group's all-reduce out (`if (rank, kind) != (3, "pp")`).
#   Who waits, and who says so?
#
# ## Where next
#
# * All kinds of groups, in Megatron's words: [process groups](../docs/tour/process-groups.md).
# * Write the arithmetic yourself:
#   [exercise 1](../minimegatron/exercises/catalog/ex01_rank_arithmetic/page.md)
#   (`minimegatron exercises start ex01`).
# * [The next notebook](02_tensor_parallel_by_hand.ipynb) cuts a layer in two.
# * For your own sizes: `minimegatron groups --world-size 16 --tp 2 --pp 4`.
