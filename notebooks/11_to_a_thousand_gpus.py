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
# # 11 To a thousand GPUs
#
# **The question.** A model is to be trained on 1,536 GPUs. How should it be cut, and what goes
# wrong with a bad cut?
#
# No GPU is needed for an answer: the planner counts, and a few formulas do the rest. Published
# configurations tell whether they are any good.

# %%
# %matplotlib inline
from collections import namedtuple

from IPython.display import Markdown

from minimegatron.core.transformer.pipeline_parallel_layer_layout import (
    PipelineParallelLayerLayout,
)
from minimegatron.notebook import compare, predict
from minimegatron.notebook.drawing import draw_configurations, draw_shares
from minimegatron.planner.formulas import makespan_formula
from minimegatron.planner.memory import (
    activation_bytes_per_layer,
    message_bytes,
    model_state_bytes,
    num_layer_parameters,
)
from minimegatron.planner.plan import plan
from minimegatron.planner.simulator import Costs, simulate

# %% [markdown]
# ## Predict
#
# A GPT with 145.6 billion parameters (80 layers, h = 12,288), 1,536 GPUs of 80 GB, eight per
# machine. Within a machine GPUs exchange 300 GB/s, between machines 25.
#
# 1. Tensor parallelism t, pipeline stages p, copies d: t · p · d = 1,536. Which t, which p?
# 2. Which cost grows with t, which with p, which with d?
# 3. From one billion parameters to a trillion: does the same thing stay the bottleneck?

# %%
# Write your answers in place of None. Running this cell locks them in.
predict(
    with_t_of_16=None,  # the step then: "about as fast", "much slower" or "does not fit"
    # Of "bubble (p)", "tensor-parallel sums (t)", "messages between stages (p)", "gradient sum (d)":
    largest_price_at_a_billion=None,
    largest_price_at_a_trillion=None,
)

# %% [markdown]
# ## Ten published configurations
#
# From Narayanan et al. (2021, [arXiv:2104.04473](https://arxiv.org/abs/2104.04473)), table 1:
# GPTs with a vocabulary of 51,200 and sequences of 2,048 on A100 GPUs, with full recompute.
# `teraflops` is what each GPU did, in 10¹² operations per second; 312 is its peak.

# %%
Row = namedtuple("Row", "billions heads h layers t p gpus batch teraflops percent petaflops")

# %%
TABLE = [
    Row(1.7, 24, 2304, 24, 1, 1, 32, 512, 137, 44, 4.4),
    Row(3.6, 32, 3072, 30, 2, 1, 64, 512, 138, 44, 8.8),
    Row(7.5, 32, 4096, 36, 4, 1, 128, 512, 142, 46, 18.2),
    Row(18.4, 48, 6144, 40, 8, 1, 256, 1024, 135, 43, 34.6),
    Row(39.1, 64, 8192, 48, 8, 2, 512, 1536, 138, 44, 70.8),
    Row(76.1, 80, 10240, 60, 8, 4, 1024, 1792, 140, 45, 143.8),
    Row(145.6, 96, 12288, 80, 8, 8, 1536, 2304, 148, 47, 227.1),
    Row(310.1, 128, 16384, 96, 8, 16, 1920, 2160, 155, 50, 297.4),
    Row(529.6, 128, 20480, 105, 8, 35, 2520, 2520, 163, 52, 410.2),
    Row(1008.0, 160, 25600, 128, 8, 64, 3072, 3072, 163, 52, 502.0),
]

# %%
S, V, PEAK = 2048, 51200, 312e12
NVLINK, NETWORK = 300e9, 25e9  # bytes per second and GPU, within a machine and between machines


def num_parameters(row):
    return row.layers * num_layer_parameters(row.h) + (V + S) * row.h


def num_operations(row):
    """Of one step: forward, recompute and backward of a batch (their equation 3)."""
    layers = 96 * row.batch * S * row.layers * row.h**2
    return layers * (1 + S / (6 * row.h) + V / (16 * row.layers * row.h))


# %%
for row in TABLE:
    # The columns of the table depend on each other; so we know that it was copied right.
    assert abs(num_parameters(row) / 1e9 - row.billions) < 0.06, row
    assert abs(row.teraflops * row.gpus / 1000 / row.petaflops - 1) < 0.01, row
    assert abs(100 * row.teraflops * 1e12 / PEAK - row.percent) < 0.6, row
print("our count of parameters agrees with all ten, to the last digit that is given")

# %% [markdown]
# ## The first bound: memory
#
# What the first stage's GPUs hold: 18 bytes per parameter (notebook 10), and activations. 1F1B
# makes it hold p microbatches. With full recompute each keeps its layers' inputs, and the layer
# being recomputed is held in full. A micro-batch of one sample is assumed, here and below.

# %%
GIB = 2**30


def copies(row):
    return row.gpus // (row.t * row.p)


def num_microbatches(row):
    return row.batch // copies(row)


def state_bytes(row):
    return float(model_state_bytes(num_parameters(row)).total) / (row.t * row.p)


# %%
def activation_bytes(row, recompute, sequence_parallel=False):
    def of_layer(recompute):
        options = {"sequence_parallel": sequence_parallel, "recompute": recompute}
        return float(activation_bytes_per_layer(S, 1, row.h, row.heads, row.t, **options))

    held = min(num_microbatches(row), row.p)
    total = held * row.layers / row.p * of_layer(recompute)
    return total + (of_layer("none") if recompute == "full" else 0)


# %%
# What the planner counts from the list of all actions, for the deepest pipeline of all:
deepest = plan("1f1b", TABLE[-1].p, num_microbatches(TABLE[-1]))
print(f"{sum(len(actions) for actions in deepest.ranks):,} actions on {TABLE[-1].p} stages")
assert deepest.peak_in_flight(0) == TABLE[-1].p == 64

# %%
WAYS = {
    "everything kept": ("none", False),
    "sequence parallel, selective": ("selective", True),
    "full recompute (as published)": ("full", False),
}
names = [f"{row.billions:g}" for row in TABLE]
states = [state_bytes(row) / GIB for row in TABLE]
activations = {
    way: [activation_bytes(row, *options) / GIB for row in TABLE] for way, options in WAYS.items()
}
draw_configurations(names, states, activations, limit=80e9 / GIB)

# %%
for row in TABLE:
    state = state_bytes(row)
    assert 0.3 < state / 80e9 < 0.6  # the cut keeps it at about half of the memory, for all ten
    assert state + activation_bytes(row, "full") < 80e9
too_large = [
    row.billions for row in TABLE if state_bytes(row) + activation_bytes(row, "none") > 80e9
]
print("without any recompute these do not fit:", too_large)
assert too_large == [145.6, 310.1, 529.6, 1008.0]
assert all(state_bytes(r) + activation_bytes(r, "selective", True) < 80e9 for r in TABLE)

# %% [markdown]
# Memory decides t · p: the product grows with the model, so that every GPU holds about the same.
# But activations do not shrink with p: more stages have fewer layers each, but stage 0 holds more
# microbatches, and the product stays the same. So deep pipelines need recompute, or (Korthikanti
# et al. 2022) sequence parallelism with the attention scores alone recomputed.
#
# ## The second bound: time
#
# Each kind of parallelism has its price, per step:
#
# * **tensor**: per layer and microbatch two sums over t ranks in forward, two in recompute, two
#   in backward, of s b h numbers each; a ring moves 2 (t − 1)/t of them through each GPU;
# * **pipeline**: the bubble, (p − 1)/M of the computing time; and messages;
# * **data**: one sum of all gradients over d copies.
#
# None of it is hidden here, links run at full speed, and the bubble is that of plain 1F1B.
# Kernels that do not reach the peak get what is left.


# %%
def costs(row, computing):
    """Seconds per step beside computing. `computing`: what computing takes in reality."""
    d, M, share = copies(row), num_microbatches(row), row.layers / row.p
    link = NVLINK if row.t <= 8 else NETWORK
    one_sum = 2 * (row.t - 1) / row.t * message_bytes(S, 1, row.h) / link
    one_message = float(message_bytes(S, 1, row.h, row.t, sequence_parallel=True)) / NETWORK
    gradients = 4 * num_parameters(row) / (row.t * row.p)
    return {
        "bubble (p)": (row.p - 1) / M * computing,
        "tensor-parallel sums (t)": 6 * share * M * one_sum,
        "messages between stages (p)": 2 * M * one_message if row.p > 1 else 0.0,
        "gradient sum (d)": 2 * (d - 1) / d * gradients / NETWORK,
    }


# %%
shares = []
for row in TABLE:
    published = num_operations(row) / (row.gpus * row.teraflops * 1e12)
    M = num_microbatches(row)
    without_bubble = published / (1 + (row.p - 1) / M)
    parts = {"computing at peak speed": num_operations(row) / (row.gpus * PEAK)}
    parts |= costs(row, without_bubble)
    shares.append({name: seconds / published for name, seconds in parts.items()})

draw_shares(names, shares, rest="kernels below peak, and the rest")

# %%
print("billions    t   p   d     M   largest price         of the step")
bounds = []
for row, share in zip(TABLE, shares, strict=True):
    prices = {name: value for name, value in share.items() if not name.startswith("computing")}
    largest = max(prices, key=prices.get)
    bounds.append(largest)
    cut = f"{row.billions:8} {row.t:4} {row.p:3} {copies(row):3} {num_microbatches(row):5}"
    print(f"{cut}   {largest:26} {prices[largest]:6.1%}")

# %%
compare(largest_price_at_a_billion=bounds[0], largest_price_at_a_trillion=bounds[-1])

# %%
assert all(sum(share.values()) < 1 for share in shares)  # nothing is counted twice
assert bounds[:3] == ["gradient sum (d)"] * 3
assert bounds[3:7] == ["tensor-parallel sums (t)"] * 4
assert bounds[7:] == ["bubble (p)"] * 3
assert all(share["messages between stages (p)"] < 0.01 for share in shares)

# %% [markdown]
# Three regimes. Small models on many GPUs wait for gradients (which overlap hides: notebook 08).
# Then the tensor-parallel sums weigh most. From about 300 billion parameters on, the bubble
# does, and that is what interleaving was made for (notebook 07). Messages between stages never
# matter: that is why the *pipeline* goes over the slow network, and tensor parallelism stays
# within a machine.
#
# The formula against the planner, for the trillion: every action of every stage, simulated.

# %%
done = simulate(deepest, Costs(forward=1, backward=3))  # the recompute is part of the backward
assert done.makespan == makespan_formula(deepest.config, 1, 3).value
idle = float(done.bubble_over_ideal)
print(f"p = 64, M = 512: idle / computing = {idle:.1%}, by counting and by (p - 1)/M")
assert done.bubble_over_ideal == (64 - 1) / 512

# %% [markdown]
# ## All cuts of one model
#
# The question from the beginning: 145.6 billion parameters, 1,536 GPUs, a batch of 2,304. Here are
# the powers of two up to 16 that divide evenly, with the same two bounds.

# %%
row = TABLE[6]
computing = num_operations(row) / (row.gpus * row.teraflops * 1e12) / (1 + (row.p - 1) / 96)
cuts = {}
for t in (1, 2, 4, 8, 16):
    for p in (1, 2, 4, 8, 16):
        cut = row._replace(t=t, p=p)
        if row.batch % copies(cut) or row.layers % p:
            continue
        memory = (state_bytes(cut) + activation_bytes(cut, "full")) / 1e9
        cuts[t, p] = memory, sum(costs(cut, computing).values())

# %%
lines = ["| t | p | d | GB per GPU | seconds beside computing | |", "|---|---|---|---|---|---|"]
for (t, p), (memory, seconds) in sorted(cuts.items(), key=lambda item: item[1][1]):
    verdict = "" if memory < 80 else "does not fit"
    verdict = "**published**" if (t, p) == (row.t, row.p) else verdict
    d = row.gpus // (t * p)
    lines.append(f"| {t} | {p} | {d} | {memory:,.0f} | {seconds:.1f} | {verdict} |")
Markdown("\n".join(lines))

# %%
fitting = {cut: seconds for cut, (memory, seconds) in cuts.items() if memory < 80}
best = min(fitting.values())
of_16 = min((seconds for (t, _), seconds in fitting.items() if t == 16), default=None)
words = {True: "much slower", False: "about as fast"}
compare(with_t_of_16="does not fit" if of_16 is None else words[of_16 > 2 * best])

# %%
assert (8, 8) in fitting and fitting[8, 8] < 1.1 * best
assert min(p for t, p in fitting if t == 8) == 8  # the shallowest pipeline that fits, at t = 8
assert all(seconds > 5 * best for (t, _), seconds in fitting.items() if t == 16)
print(f"cuts (t, p) that fit: {sorted(fitting)}")
print(f"the published one takes {fitting[8, 8] / best - 1:.0%} more than the best of them")

# %% [markdown]
# So the recipe that people quote is a consequence: tensor parallelism up to the size of a
# machine, then as many stages as memory demands, and copies for the rest.
#
# ## Layers that are not alike
#
# DeepSeek-V3 has 61 layers, one more that predicts the token after next (MTP), and a vocabulary
# of 129,280. Megatron-Core's documentation cuts it for 16 stages of two chunks like this:

# %%
DOCUMENTED = "Et*3|(tt|)*29,m|L"
layout = PipelineParallelLayerLayout.from_str(DOCUMENTED, 16)
print(layout.pretty_repr())

# %% [markdown]
# The loss has a chunk of its own, with no layer in it. Is it worth one? Count the weights that a
# token is multiplied with, from the sizes in DeepSeek-AI (2024,
# [arXiv:2412.19437](https://arxiv.org/abs/2412.19437)).

# %%
h, ffn, expert, vocabulary = 7168, 18432, 2048, 129280
queries = h * 1536 + 1536 * 128 * (128 + 64)
keys_and_values = h * (512 + 64) + 512 * 128 * (128 + 128)
attention = queries + keys_and_values + 128 * 128 * h
dense = attention + 3 * h * ffn
sparse = attention + h * 256 + (8 + 1) * 3 * h * expert  # a token: 8 of 256 experts, a shared one
logits = h * vocabulary

# %%
total = 3 * dense + 58 * (sparse + (256 - 8) * 3 * h * expert) + 2 * logits
active = 3 * dense + 58 * sparse + 2 * logits
print(f"{total / 1e9:.0f} billion parameters, {active / 1e9:.1f} of them used for a token")
assert round(total / 1e9) == 671 and abs(active / 1e9 - 37) < 1
print(f"millions multiplied with: a layer {sparse / 1e6:.0f}, the logits {logits / 1e6:.0f}")

# %% [markdown]
# The logits are as much work as one layer and a half, and they are computed twice: for the next
# token, and for MTP's. With these counts as times (a layer's forward is 1, its backward 2), the
# planner compares layouts.

# %%
TIMES = {
    "embedding": (0, 0),
    "decoder": (1, 2),
    # A layer, and the projection before it.
    "mtp": (1 + 2 * h * h / sparse, 2 + 4 * h * h / sparse),
    "loss": (2 * logits / sparse, 4 * logits / sparse),
}
LAYOUTS = {
    "documented": DOCUMENTED,
    "as even as layers go": "Et|(tt|)*30,mL",
    "MTP beside the loss": "Et*2|(tt|)*29,t|mL",
}

# %%
M = 64
lengths = {}
for name, text in LAYOUTS.items():
    layout = PipelineParallelLayerLayout.from_str(text, 16)
    layout.validate_layer_layout(61, 1)
    layer_times = Costs.from_layout(layout, TIMES)
    done = simulate(plan("interleaved", 16, M, vpp=2), layer_times)
    lengths[name] = done.makespan
    slowest, length = max(layer_times.forward), float(done.makespan)
    idle = float(done.bubble_over_total)
    print(f"{name:22} {text:22} slowest chunk {slowest:.2f}, length {length:6.0f}, idle {idle:.0%}")

# %%
assert min(lengths, key=lengths.get) == "documented"
assert TIMES["loss"][0] > 3  # more than any pair of layers

# %% [markdown]
# A pipeline is as slow as its slowest stage, and here that is the one with the loss, even alone.
# The three layers at the beginning are the dense ones. By multiplications they weigh as much as
# the others; but they exchange nothing with other ranks' experts, which this count leaves out.
#
# ## Change it
#
# * The GPUs of a newer machine, 989 · 10¹²: set `NVLINK = 450e9`, `NETWORK = 50e9` in `costs`
#   and compute `cuts` again, with `computing` divided by 3. Which price has grown most?
# * 72 GPUs within one fast network: change `row.t <= 8` in `costs`. Does a larger t pay now? Mind
#   the heads.
# * Take a layer from the last stage's first chunk and give it to the MTP's:
#   `"Et*3|(tt|)*14t|(tt|)*14,tm|L"`. The fullest stage has less to do now. Predict whether the
#   step gets shorter, then let the planner count. What bounds an interleaved pipeline, besides
#   its slowest stage?
#
# ## Where next
#
# * [A calculator](../docs/tour/what-it-costs.md#calculator) for your own sizes, and
#   [layouts](../docs/tour/layouts.md).
# * Exercises [ex17](../minimegatron/exercises/catalog/ex17_layouts/page.md) and
#   [ex18](../minimegatron/exercises/catalog/ex18_memory_cap/page.md).
# * [Multi-node recipes](../docs/recipes/multi_node.md): how to start such a job.
