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
# # 14 Combined 1F1B, traced
#
# **The question.** In a layer of experts every token travels to its experts and back, and until it
# is there, the rank has nothing to compute. Is there really nothing? And if something is found to
# fill the time, what does it cost, and when is it not enough?
#
# This notebook needs [the one before it](13_experts.ipynb).

# %%
# %matplotlib inline
import inspect
from dataclasses import replace
from functools import partial
from itertools import accumulate
from unittest.mock import patch

import torch
import torch.distributed as dist
from IPython.display import SVG

from minimegatron import launch, pace, trace
from minimegatron.core.models.common.model_chunk_schedule_plan import TransformerLayerSchedulePlan
from minimegatron.core.pipeline_parallel import schedule_table
from minimegatron.notebook import compare, predict, show_wide
from minimegatron.notebook.drawing import draw_hiding, draw_lanes
from minimegatron.planner.actions import BACKWARD, FORWARD, parts_of
from minimegatron.planner.layer_costs import LayeredCosts
from minimegatron.planner.layer_plan import Half, LayerCosts, one_stage, run_lanes, step_nodes
from minimegatron.planner.plan import plan
from minimegatron.planner.plan_check import check
from minimegatron.planner.render_layers import render_layers
from minimegatron.planner.simulator import simulate
from minimegatron.tracing.activation_meter import ActivationMeter
from minimegatron.tracing.lanes import exposed_of, exposure, in_flight
from minimegatron.tracing.node_order import wrong_nodes
from minimegatron.tracing.trace_words import function_name
from minimegatron.training.tiny_gpt import TinyGPT, where_it_runs

RANKS, LAYERS, M = 2, 2, 4

# %% [markdown]
# ## Predict
#
# A layer computes attention, then its experts (called *mlp*). Between them tokens go to their
# experts (*dispatch*), after them the results come back (*combine*). Dispatch and combine are
# all-to-alls. In a forward, attention and mlp take 2 units of time each, in a backward 4. An
# all-to-all takes 1, in both. A step has two layers and four microbatches: 96 units of computation,
# and 32 units of all-to-alls. One after the other they take 128.
#
# Now let the forward of microbatch 1 run beside the backward of microbatch 0, and so on. While one
# waits for its tokens, the other computes.
#
# 1. How many units does the step take now?
# 2. Let all-to-alls take longer. The time saved grows, but not for ever. From which length of an
#    all-to-all does it no longer grow?
# 3. Without this, a rank holds the activations of at most two layers, those of one microbatch. How
#    many now?
# 4. Are the gradients equal to the last bit, or a little different?
# 5. How long is a dispatch, compared with the computation of the experts? One of these decides: T,
#    how many tokens; k, how many experts each has; h, the size of a token; f, the width of an
#    expert.

# %%
# Write your answers in place of None. Running this cell locks them in.
predict(
    takes_now=None,
    saves_no_more_from=None,
    layers_held=None,
    equal_to_the_last_bit=None,  # True or False
    what_decides=None,  # "T", "k", "h" or "f"
)

# %% [markdown]
# ## Why an all-to-all costs time
#
# The bytes of a dispatch and the work of the experts both grow with the tokens, so look at the ratio
# of their times. A token is h numbers of 2 bytes. Of e ranks one is its own, so (e − 1)/e of the
# rows go through the network. In large models an expert mostly has three matrices of h × f; for a
# row it multiplies and adds once for each number in them. The two speeds are round numbers for a
# large GPU and its network card.

# %%
FLOPS, BYTES_PER_SECOND = 400e12, 50e9


def dispatch_over_experts(T, k, h, f, e=8):
    rows = T * k
    dispatch = rows * h * 2 * (e - 1) / e / BYTES_PER_SECOND
    experts = rows * 3 * h * f * 2 / FLOPS
    return dispatch / experts


# %%
usual = {"T": 4096, "k": 2, "h": 4096, "f": 2048}
doubled = {name: dispatch_over_experts(**usual | {name: 2 * usual[name]}) for name in usual}
print(f"dispatch / experts: {dispatch_over_experts(**usual):.2f}")
print("if one is doubled:", {name: round(ratio, 2) for name, ratio in doubled.items()})
for f in (16384, 4096, 1024):
    print(f"f = {f:5}: {dispatch_over_experts(**usual | {'f': f}):.2f}")
compare(what_decides=min(doubled, key=doubled.get))

# %% [markdown]
# T, k and h drop out: twice the tokens are twice the bytes and twice the work. Wide experts hardly
# notice their dispatch. Beside narrow ones it takes as long as they compute, or longer.
#
# ## One pair of layers
#
# A layer is four *nodes*, of which two compute and two are all-to-alls. Here are a forward of
# microbatch 1 and a backward of microbatch 0, in the order in which the package runs their nodes.

# %%
layer = LayerCosts(attention=2, mlp=2, dispatch=1, combine=1)
pair = step_nodes(Half(FORWARD, 1, 0, [layer]), Half(BACKWARD, 0, 0, [layer]))


def name(node):
    return f"{node.name} {node.kind[0].upper()}{node.microbatch}"


print(*map(name, pair), sep=", ")

# %% [markdown]
# There are two *lanes*, one for computation and one for all-to-alls, and each does one thing at a
# time. So a node waits for two things: its lane must be free, and the node before it, of the same
# microbatch, must be done. That is the whole clock:


# %%
def clock(nodes):
    """(node, start, end) of each, in the order of their calls."""
    free, done, times = {}, {}, []
    for node in nodes:
        start = max(free.get(node.lane, 0), done.get(node.microbatch, 0))
        free[node.lane] = done[node.microbatch] = end = start + node.length
        times.append((node, start, end))
    return times


# %%
times, last, beside = clock(pair), {}, {}
for number, (node, start, end) in enumerate(times, 1):
    waits_for = last.get(node.microbatch, "what came before the pair")
    last[node.microbatch] = what = name(node)
    others = [name(n) for n, s, e in times if n.lane != node.lane and s < end and start < e]
    beside[what] = others
    print(f"{number} {what:12}  {start}-{end:<2}  waits for {waits_for:26} beside", *others)

# %%
by_package = run_lanes([pair])
assert [tuple(timed) for timed in by_package.nodes] == times
SVG(render_layers([("one pair", by_package)], "A pair of layers: forward F1, backward B0"))

# %% [markdown]
# Each all-to-all runs beside a node of the *other* microbatch, and both microbatches gain. The order
# of the four all-to-alls depends on no data. So all ranks start them in this order, and none waits
# for ever.
#
# In the code an all-to-all is a start and a wait, and what stands between them hides it. `f` is the
# layer that goes forward, `b` the one that goes backward:

# %%
source = inspect.getsource(TransformerLayerSchedulePlan.run)
body = source.split('"""')[-1]
show_wide(inspect.cleandoc(body))
starts = [
    body.index(text) for text in ("combine_b =", "dispatch_f =", "dispatch_b =", "combine_f =")
]
assert starts == sorted(starts)

# %% [markdown]
# ## The whole step on paper
#
# The layers of a forward are paired with those of a backward, which come from the end. The first
# forward and the last backward have no partner.

# %%
ordinary = one_stage(M, [layer] * LAYERS, overlap=False)
combined = one_stage(M, [layer] * LAYERS, joined=True)
title = f"One stage, {LAYERS} layers, {M} microbatches"
SVG(render_layers([("ordinary", ordinary), ("combined", combined)], title))

# %%
for way, lanes in (("ordinary", ordinary), ("combined", combined)):
    print(f"{way}: {lanes.total} = {lanes.compute} computed + {lanes.exposed} exposed")
compare(takes_now=combined.total)
assert ordinary.exposed == ordinary.communication == M * LAYERS * 4
assert combined.exposed == 2 * LAYERS * 2  # two all-to-alls per layer, in two lone halves

# %% [markdown]
# *Exposed* is an all-to-all, or a part of one, beside which nothing is computed. Here it is those
# of F0 and B3, which have nobody. With more microbatches there are more pairs, and still only these
# are exposed.
#
# ## On two real ranks
#
# The same step on two ranks with two experts each. An ordinary `forward_step` calls the model. In a
# combined step it does not: it is asked for a *schedule plan*, the list of nodes, and the schedule
# runs them.

# %%
MODEL = {
    "num_layers": LAYERS,
    "num_moe_experts": 4,
    "moe_ffn_hidden_size": 32,
    "expert_model_parallel_size": RANKS,
    "moe_token_dispatcher_type": "alltoall",
    "params_dtype": torch.float64,
}
UNIT_MS = 10


# %%
class Job:
    """A model on this rank, with a `forward_step` that can do both."""

    def __init__(self, way):
        is_combined = way == "combined"
        self.gpt = TinyGPT(overlap_moe_expert_parallel_comm=is_combined, **MODEL)
        self.losses = self.step(M)

    def forward_step(self, data_iterator, model, return_schedule_plan=False):
        batch = next(data_iterator)
        positions = torch.arange(self.gpt.seq_length, device=batch["tokens"].device)
        positions = positions.expand_as(batch["tokens"])
        call = model.build_schedule_plan if return_schedule_plan else model
        output = call(batch["tokens"], positions, None, labels=batch["labels"])
        return output, partial(self.gpt.loss_func, batch["mask"])

    def step(self, num_microbatches):
        found = self.gpt.step(num_microbatches, forward_step_func=self.forward_step)
        return [report["loss"].item() for report in found]


# %% [markdown]
# A CPU computes and moves bytes with the same cores, so on it nothing dependable is gained. To see
# times, the runs are *paced*: each node takes at least its units of 10 ms, most of which it sleeps,
# and no all-to-all is over before its 10 ms. Tensors, ranks and messages are real. The lengths are
# not those of your machine.


# %%
def paced_step(job, num_microbatches, units=1):
    """A recorded step; an all-to-all takes so many units. None but on rank 0."""
    node = 2 * UNIT_MS
    lengths = {"attention_ms": node, "mlp_ms": node, "all_to_all_ms": units * UNIT_MS}
    with pace(2 * LAYERS * node, 4 * LAYERS * node, **lengths), trace() as recorded:
        job.step(num_microbatches)
    return recorded if dist.get_rank() == 0 else None


# %%
def run(way):
    job = Job(way)
    gradients = job.gpt.gradients()
    with ActivationMeter(job.gpt.chunks) as meter:
        job.step(M)
    recorded = paced_step(job, M)
    return {
        "losses": job.losses,
        "gradients": gradients,
        "bytes": meter.peak,
        "trace": recorded,
        "where": where_it_runs(),
    }


# %%
def run_both():
    return {way: run(way) for way in ("ordinary", "combined")}


# %%
ranks = launch(run_both, RANKS)
print(ranks[0]["combined"]["where"])
differences = [
    (gradient - found["combined"]["gradients"][name]).abs().max().item()
    for found in ranks
    for name, gradient in found["ordinary"]["gradients"].items()
]
are_equal = all(found["ordinary"]["losses"] == found["combined"]["losses"] for found in ranks)
print(f"losses equal: {are_equal}; largest difference of a gradient: {max(differences)}")
compare(equal_to_the_last_bit=are_equal and max(differences) == 0)

# %%
for found in ranks:
    torch.testing.assert_close(
        found["ordinary"]["gradients"], found["combined"]["gradients"], rtol=1e-10, atol=1e-10
    )

# %% [markdown]
# The order of the nodes has changed, and no sum: each microbatch's gradients are added to a
# weight's one microbatch after the other, as before. So nothing is rounded differently.
#
# ## What was in flight
#
# Now the recorded steps. An all-to-all is *in flight* from its start to the end of the wait for it.
# (A dispatch also sends the tokens' weights, in an all-to-all of their own; it is not drawn.)

# %%
steps = {way: ranks[0][way]["trace"].step(0) for way in ("ordinary", "combined")}
draw_lanes(steps)

# %%
show_wide(ranks[0]["combined"]["trace"].tree(rank=0, step=0, depth=1))
for way, step in steps.items():
    assert ranks[0][way]["trace"].compare_with_plan() == [] and wrong_nodes(step) == []
    assert step.makespan > 0.99 * float(step.simulation.makespan)  # nothing is faster than its pace

# %% [markdown]
# In the ordinary step a whole forward or backward is paced, and what it sleeps comes at its end: so
# its all-to-alls stand at the beginning. The combined step is paced node by node. It has five
# phases: a lone forward, three pairs, a lone backward. In a pair, which node computes while an
# all-to-all is in flight? From the trace, the first pair of layers in `F1 & B0`:

# %%
events = steps["combined"].events[0]
pair_index = steps["combined"].work(0)[1]
nodes = [
    event
    for event in events.values()
    if event.name == "layer-node"
    and event.parent == pair_index
    # The first layer forward, the last one backward.
    and event.attributes["layer"] == (1 if event.attributes["direction"] == FORWARD else LAYERS)
]


# %%
def node_name(event):
    told = event.attributes
    return f"{told['node']} {told['direction'][0].upper()}{event.action.microbatch}"


def computed_in(bar):
    """The nodes that were computed, from beginning to end, while it was in flight."""
    whole = [node for node in nodes if bar.start <= node.start and node.end <= bar.end]
    own = ("attention", "mlp")  # the addition of the residual is a node, too, and takes no time
    return [node_name(node) for node in whole if node.attributes["node"] in own]


# %%
seen = {}
for bar in in_flight(events):
    begun, exposed = bar.events[0], exposed_of(bar)
    if events[begun.parent] not in nodes or len(begun.attributes["shape"]) == 1:
        continue
    what, seen[what] = node_name(events[begun.parent]), computed_in(bar)
    lengths = [(end - start) / 1e3 for start, end in ((bar.start, bar.end), exposed)]
    in_words = f"in flight {lengths[0]:5.1f} ms, exposed {lengths[1]:4.1f}"
    print(f"{what:11} {in_words}, beside", *seen[what])

# %%
of_the_clock = {what: others for what, others in beside.items() if what in seen}
assert len(seen) == 4 and seen == of_the_clock

# %% [markdown]
# It is the list of above. An all-to-all is in flight for as long as the node that hides it,
# although it takes only 10 ms: nobody asks for it before. What costs time is the wait. All
# together, in units of 10 ms, beside the two lanes:

# %%
print("          length on paper, measured    exposed on paper, measured")
for way, lanes in (("ordinary", ordinary), ("combined", combined)):
    length = steps[way].makespan / 1e3 / UNIT_MS
    exposed = exposure(steps[way].events[0]).exposed / 1e3 / UNIT_MS
    print(f"{way}  {lanes.total:15}{length:10.1f}  {lanes.exposed:18}{exposed:10.1f}")

# %% [markdown]
# What is measured above paper is your machine: what the program does between two nodes, and
# processors that others want too. The 24 units that are saved are a fact about the order of nodes
# and about the pace. They say nothing of how fast a CPU or a GPU is.
#
# ## When it is not enough
#
# The pair has only so much to compute. Let an all-to-all take 0 to 6 units: on paper, and four of
# these on the ranks (two microbatches, so one pair).


# %%
def on_two_lanes(units, M=2, **how):
    slower = replace(layer, dispatch=units, combine=units)
    return one_stage(M, [slower] * LAYERS, joined=True, **how)


def sweep(units):
    found = {}
    for way in ("ordinary", "combined"):
        job = Job(way)
        runs = {x: paced_step(job, 2, x) for x in units}
        found[way] = {x: t and t.step(0).makespan / 1e3 / UNIT_MS for x, t in runs.items()}
    return found


# %%
measured = launch(sweep, RANKS, (1, 2, 4, 6))[0]
lengths = [x / 4 for x in range(25)]
curves = {
    "ordinary": [on_two_lanes(x, overlap=False).total for x in lengths],
    "combined": [on_two_lanes(x).total for x in lengths],
}
marked = {2: "forward of mlp", 4: "backward of mlp"}
draw_hiding(lengths, curves, measured, marked)

# %%
saved = [a - b for a, b in zip(*curves.values(), strict=True)]
print("saved:", {x: y for x, y in zip(lengths, saved, strict=True) if x == int(x)})
compare(saves_no_more_from=lengths[saved.index(max(saved))])

# %%
print("an all-to-all takes   exposed, M = 4: ordinary, combined, weight gradients delayed")
for x in (1, 2, 3, 4, 5):
    ways = {"overlap": False}, {}, {"delay_wgrad": True}
    print(f"{x:21}", *(f"{float(on_two_lanes(x, M=4, **how).exposed):10}" for how in ways))
assert saved[4 * 4] == max(saved) == saved[-1] and saved[4 * 4 - 1] < max(saved)
for way, points in measured.items():
    for x, length in points.items():  # nothing is faster than its pace
        assert length > 0.99 * on_two_lanes(x, overlap=way == "combined").total

# %% [markdown]
# Let m be the forward of the experts, here 2, as long as the forward of attention.
#
# * Up to m all of a pair is hidden.
# * From m on, the two all-to-alls that stand beside a forward stick out: the backward's dispatch,
#   beside the forward of the experts, and the backward's combine, beside the forward of attention.
#   Delayed weight gradients help here: those of the experts are computed while the backward's
#   dispatch is on its way.
# * From 2 m on, the two beside a backward stick out as well. All computation of the pair is used
#   up. Each unit more costs what it costs in the ordinary order, and what is saved stays the same.
#
# This is why the width of the experts matters: it is m.
#
# ## The price
#
# While a pair runs, one microbatch's layers fill and the other's empty. A layer of a microbatch is
# held from the beginning of its attention forward to the end of its attention backward. How many
# are there at once?


# %%
def most_held(attentions):
    """The most layers at once; of each attention (direction, start, end)."""
    changes = [(start, 1) if way == FORWARD else (end, -1) for way, start, end in attentions]
    return max(accumulate(change for _, change in sorted(changes)))


def attentions_of(lanes):
    return [(n.kind, start, end) for n, start, end in lanes.nodes if n.name == "attention"]


# %%
recorded = [
    (event.attributes["direction"], event.start, event.end)
    for event in events.values()
    if event.name == "layer-node" and event.attributes["node"] == "attention"
]
print("on paper, ordinary:", most_held(attentions_of(ordinary)))
print("on paper, combined:", most_held(attentions_of(combined)), " recorded:", most_held(recorded))
compare(layers_held=most_held(recorded))

# %%
for rank, found in enumerate(ranks):
    one_after_the_other, paired = (found[way]["bytes"] for way in ("ordinary", "combined"))
    kib = f"{one_after_the_other / 1024:.0f} KiB ordinary, {paired / 1024:.0f} combined"
    print(f"rank {rank} keeps for backward at most {kib}")
    assert one_after_the_other < paired < one_after_the_other * (LAYERS + 1) / LAYERS
assert most_held(attentions_of(ordinary)) == LAYERS
assert most_held(attentions_of(combined)) == most_held(recorded) == LAYERS + 1

# %% [markdown]
# One layer more, however many layers the model has, and not one microbatch more. In bytes it is
# less than a whole layer: when the forward's experts have run, the backward's experts are gone.
#
# ## With a pipeline
#
# With stages, combined 1F1B is there for interleaving only. Here are the two ranks of an ordinary
# interleaved step, two chunks each: `F2.1` is the forward of microbatch 2 through chunk 1.


# %%
def work(step, rank):
    """Such as F0.0 [F1.0 B0.1], pairs in brackets."""
    words = []
    for action in step.work(rank):
        parts = [f"{x.kind[0].upper()}{x.microbatch}.{x.chunk}" for x in parts_of(action)]
        words.append(parts[0] if len(parts) == 1 else f"[{' '.join(parts)}]")
    return " ".join(words)


# %%
interleaved = plan("interleaved", 2, 4, vpp=2)
show_wide("\n".join(f"rank {rank}: {work(interleaved, rank)}" for rank in range(2)))

# %% [markdown]
# Predict: after the warm-up, each forward makes a pair with the backward behind it. On which rank
# does that give a pair that cannot run?

# %%
predict(cannot_run_on=None)  # a rank

# %%
count = schedule_table.count_rank_microbatches


def without_the_extra_one(*args, **more):
    found = count(*args, **more)
    fewer = found.num_warmup - 1
    return found._replace(num_warmup=fewer, num_remaining=found.total - fewer)


with patch.object(schedule_table, "count_rank_microbatches", without_the_extra_one):
    short = plan("combined", 2, 4, vpp=2)

# %%
problems = check(short)
show_wide("\n".join(f"rank {rank}: {work(short, rank)}" for rank in range(2)))
print(*problems, sep="\n")
compare(cannot_run_on=problems[0].rank)

# %% [markdown]
# Rank 1 has the last chunk. There the backward of microbatch 0 needs the loss of microbatch 0,
# which is not there before the forward beside it has ended. So combined 1F1B does one forward more
# in the warm-up of every rank:

# %%
step = plan("combined", 2, 4, vpp=2)
show_wide("\n".join(f"rank {rank}: {work(step, rank)}" for rank in range(2)))

# %%
assert check(step) == []
for rank in range(2):
    with_pairs, ordinary_step = step.work(rank), interleaved.work(rank)
    extra = [sum(a.phase == "warmup" for a in work) for work in (ordinary_step, with_pairs)]
    print(f"rank {rank}: forwards in the warm-up {extra[0]} -> {extra[1]}; ", end="")
    print(
        f"chunks held {interleaved.peak_in_flight(rank)} -> {step.peak_in_flight(rank)}, and a layer"
    )
    assert extra[1] == extra[0] + 1
    assert step.peak_in_flight(rank) == interleaved.peak_in_flight(rank)
    for action in with_pairs:  # no pair has the same microbatch in the same chunk twice
        assert len({(x.microbatch, x.chunk) for x in parts_of(action)}) == len(parts_of(action))

# %%
layers = [[layer] * LAYERS] * 4  # of each of four chunks
costs = LayeredCosts.of_layers(layers)
took = [simulate(found, costs).makespan for found in (interleaved, step)]
print(f"interleaved {took[0]}, combined {took[1]}, with {LAYERS} layers in a chunk")
assert took[1] < took[0]

# %% [markdown]
# The ordinary step also holds w + 1 chunks after w forwards of warm-up: at the end of each forward,
# before the backward that follows it. So the extra forward costs no chunk; the pairs cost a layer,
# as above.
#
# ## What Megatron's documentation says of it
#
# Its page on `combined_1f1b` has three functions and a few sentences. What it says, and where you
# have seen it:
#
# * `combined_1f1b_schedule_for_no_pipelining`: four microbatches make phases 0 to 4, a forward,
#   three times a backward with the next microbatch's forward, and a backward. *Here:* `F0`,
#   `F1 & B0`, `F2 & B1`, `F3 & B2`, `B3` in the trace.
# * Each layer's forward is scheduled together with a layer's backward of another microbatch.
#   *Here:* the pair, on paper and in the trace.
# * The forward's all-to-alls are hidden by attention and mlp of the backward, and the other way
#   round. *Here:* `dispatch F1` beside `mlp B0`, `dispatch B0` beside `mlp F1`.
# * `forward_step_func` returns a schedule plan. *Here:* `Job.forward_step`, called with
#   `return_schedule_plan=True`.
# * `combined_forward_backward_step` is `forward_step` and `backward_step` merged: it makes the
#   plan, then runs both together. *Here:* each phase is one call of it; the cell below counts.
# * It is called only with `overlap_moe_expert_parallel_comm`. *Here:* the ordinary run is the same
#   job without.
# * `combined_1f1b_schedule_for_interleaved_pipelining`: with interleaving, the merged step stands
#   where `forward_step` and `backward_step` stood, between what precedes and follows them. *Here:*
#   its order, planned. Its steps have not run here; the lab `combined-without-extra-warmup` runs
#   them on four ranks.
# * What the functions take and return. *Not here:*
#   [the tour](../docs/tour/hiding-the-all-to-all.md) leads to their source.
#
# Of the extra warm-up, of memory and of the limit 2 m it says nothing.

# %%
for way, found in steps.items():
    functions = [function_name(found.events[0][index]) for index in found.work(0)]
    print(f"{way}: ", ", ".join(f"{functions.count(f)} x {f}" for f in sorted({*functions})))

# %% [markdown]
# ## Change it
#
# * `M = 16`. Predict the exposed units of the combined step, then run. What else changes?
# * Let the mlp take 6 units: `mlp=6` and `range(57)` on paper; in the run `"mlp_ms": 3 * node`, and
#   twice `pace`'s first two numbers. From which length of an all-to-all does the time saved no
#   longer grow? Which one sticks out first? (The assertion on what is saved will fail; the picture
#   tells why.)
# * In `MODEL`, `"moe_layer_freq": 2`: every second layer is dense. What is left to hide, and what
#   is it hidden behind? (Which assertions fail, and are they wrong?)
# * `"moe_token_dispatcher_type": "allgather"`. What does the package say, and why?
# * In `Job.forward_step`, leave `return_schedule_plan` out of the arguments. Who complains?
# * Suppose that each all-to-all is waited for as soon as it has started. Losses and gradients stay
#   right. Which assertion of this notebook would notice?
#
# ## Where next
#
# * [Hiding the all-to-all](../docs/tour/hiding-the-all-to-all.md) in the tour: the code, and a
#   recorded step of two stages.
# * [ex20](../minimegatron/exercises/catalog/ex20_all_to_all/page.md): the exchange and its
#   backward, with which a node begins;
#   [ex12](../minimegatron/exercises/catalog/ex12_interleaved_table/page.md): where the warm-up is
#   counted.
# * Labs: `minimegatron exercises lab start residual-gradient-lost`,
#   `... exchange-of-another-forward`, `... final-norm-outside-plan`, and on four ranks
#   `... combined-without-extra-warmup`.
