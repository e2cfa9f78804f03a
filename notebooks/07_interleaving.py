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
# # 07 Interleaving
#
# **The question.** The bubble is p − 1 stages long. Can a stage be made shorter without more
# ranks? And if so, why not make it very short?

# %%
# %matplotlib inline
from unittest.mock import patch

import torch
from IPython.display import SVG

from minimegatron import launch, pace, trace
from minimegatron.core.pipeline_parallel import schedule_table
from minimegatron.core.utils import unwrap_model
from minimegatron.notebook import compare, predict
from minimegatron.notebook.drawing import draw_lengths
from minimegatron.planner.plan_check import check
from minimegatron.planner.formulas import makespan_formula
from minimegatron.planner.plan import plan
from minimegatron.planner.render import render
from minimegatron.planner.simulator import Costs, simulate
from minimegatron.training.tiny_gpt import TinyGPT, where_it_runs
from minimegatron.tracing.activation_meter import ActivationMeter

P, M, LAYERS = 4, 8, 8

# %% [markdown]
# ## Predict
#
# Eight layers on four stages, eight microbatches. Plain 1F1B puts layers 1 and 2 on stage 0. Now
# give each stage two *chunks* of one layer instead: stage 0 gets layers 1 and 5, stage 1 gets 2
# and 6, and so on. Each microbatch goes around the ring twice. With a forward of 1 and a backward
# of 2 per *stage*:
#
# 1. 1F1B takes 33. How long is the step now?
# 2. How many messages does it send, per message of 1F1B?
# 3. Stage 0 of 1F1B holds at most 4 microbatches. What does it hold now, in whole stages' worth?

# %%
# Write your answers in place of None. Running this cell locks them in.
predict(length=None, messages_per_message_of_1f1b=None, stage_0_holds=None)

# %% [markdown]
# ## The plan
#
# `Costs.of_stages` divides a stage's time among its chunks, so the work stays the same. Light
# bars are the second chunk.


# %%
def step(v=None, M=M, latency=0, overlap=False, G=None):
    """A simulated step; forward 1 and backward 2 per stage."""
    planned = plan(None, P, M, vpp=v, group_size=G, overlap_p2p_comm=overlap)
    return simulate(planned, Costs.of_stages(1, 2, v or 1, latency=latency))


# %%
SVG(render(step(), "svg"))

# %%
SVG(render(step(2), "svg"))

# %%
print("chunks  length  idle    messages  stage 0 holds, in stages' worth")
for v in (None, 2, 4):
    done, n = step(v), v or 1
    held = done.plan.peak_in_flight(0) / n
    messages = sum(done.plan.message_counts().values())
    idle = float(done.bubble_over_total)
    print(f"{n:6}  {float(done.makespan):6}  {idle:5.1%}  {messages:8}  {held:6}")

# %%
num_messages = {v: sum(step(v).plan.message_counts().values()) for v in (None, 2)}
compare(
    length=float(step(2).makespan),
    messages_per_message_of_1f1b=num_messages[2] / num_messages[None],
    stage_0_holds=step(2).plan.peak_in_flight(0) / 2,
)

# %%
for v in (None, 2, 4):
    done, n = step(v), v or 1
    # Counted from the plan, and by the formulas:
    assert done.makespan == makespan_formula(done.plan.config, 1, 2).value == (M + (P - 1) / n) * 3
    assert sum(done.plan.message_counts().values()) == 2 * (P * n - 1) * M

# %% [markdown]
# There are still p − 1 hops to fill the pipeline, but each is v times shorter. So the idle time
# shrinks by v. Messages grow by a little more than v: (pv − 1)/(p − 1). And more is held, because
# stage 0 must feed everybody's first chunk before anybody's second.
#
# ## Why twice (p − r − 1)?
#
# Plain 1F1B warms up p − r − 1 forwards on stage r. Interleaving warms up **2** (p − r − 1) + (v
# − 1) G, with G = p microbatches per group here. The second term fills the earlier chunks. But
# why the 2?

# %%
warmups = [schedule_table.count_rank_microbatches(P, r, M, 2, P).num_warmup for r in range(P)]
print("warm-up forwards per stage:", warmups)
assert warmups == [min(2 * (P - r - 1) + (2 - 1) * P, 2 * M) for r in range(P)]

# %% [markdown]
# Take the 2 away and ask the planner. The patch below changes one number in the arithmetic that
# the planner and the real schedule share.

# %%
count = schedule_table.count_rank_microbatches


def with_single_warmup(p, r, M, v, G, **more):
    counts = count(p, r, M, v, G, **more)
    num_warmup = min((p - r - 1) + (v - 1) * G, counts.total)
    return counts._replace(
        num_warmup=num_warmup,
        num_remaining=counts.total - num_warmup,
        are_all_in_warmup=num_warmup >= counts.total,
    )


# %%
with patch.object(schedule_table, "count_rank_microbatches", with_single_warmup):
    exchanged = check(plan("interleaved", P, 8, vpp=2))
    overlapped = plan("interleaved", P, 8, vpp=2, overlap_p2p_comm=True)

print(exchanged[0])

# %%
assert [problem.kind for problem in exchanged] == ["deadlock"]
assert check(overlapped) == []
assert simulate(overlapped, Costs.of_stages(1, 2, 2)).makespan == step(2, M=8).makespan

# %% [markdown]
# In the steady state one call may send an activation and a gradient and receive one of each:
# messages that begin and end together. A gradient therefore moves back one stage per *pair* of
# forward and backward, as the activation moves one stage on; there and back takes twice as
# many forwards. With one forward of warm-up for each stage instead of two, a stage comes to that
# exchange before its neighbour has the gradient, and both wait.
#
# With separate, overlapped messages (`overlap_p2p_comm`) the short warm-up runs. While messages take
# no time the step is as long, and most stages hold less. But the two forwards of warm-up for each stage
# are also the time in which messages travel: as soon as they take time, the short warm-up makes the longer step. So
# one exchange *needs* the 2, and with overlap the 2 hides messages' time. Megatron warms up so in both
# modes.
#
# ## Group size
#
# A stage runs G microbatches through one chunk before it turns to the next chunk. Does a larger G
# help?

# %%
predict(larger_G_shortens_the_step=None)  # True or False

# %%
for G in (4, 8, 16):
    done = step(2, M=16, G=G)
    held = done.plan.peak_in_flight(0)
    print(f"G = {G:2}: length {float(done.makespan)}, stage 0 holds {held} half stages' worth")
compare(larger_G_shortens_the_step=step(2, M=16, G=16).makespan < step(2, M=16, G=4).makespan)

# %%
assert {step(2, M=16, G=G).makespan for G in (4, 8, 16)} == {52.5}
assert [step(2, M=16, G=G).plan.peak_in_flight(0) for G in (4, 8, 16)] == [11, 15, 23]

# %% [markdown]
# Not while messages are free: the length is the same, and every further microbatch in the group
# is one more to hold. Nor when they take time, with overlap or without: warm-up and cool-down, where
# messages are waited for, get longer.
#
# ## When messages eat it
#
# Let a message take a while: x, in units of a stage's forward. (A message's latency does not
# shrink with the chunk. Its size does not either: it is one layer's output, however many layers a
# chunk has.)

# %%
latencies = [i / 50 for i in range(31)]
curves = {
    (v, overlap): [float(step(v, 16, x, overlap).makespan) for x in latencies]
    for v, overlap in [(None, False), (2, False), (4, False), (2, True), (4, True)]
}
draw_lengths(latencies, curves, 16 * 3, f"{P} stages, 16 microbatches (simulated)")


# %%
def first_loss(v, other):
    """The least message time from which v chunks are slower than `other`."""
    pairs = zip(latencies, curves[v, False], curves[other, False], strict=True)
    return next(x for x, mine, theirs in pairs if mine > theirs)


print("v = 4 is slower than v = 2 from a message time of", first_loss(4, 2))
print("v = 4 is slower than plain 1F1B from", first_loss(4, None))
assert curves[4, False][0] < curves[2, False][0] < curves[None, False][0]
assert first_loss(4, 2) < first_loss(4, None) < 0.2
# Messages that travel during computation push that limit far out:
assert all(hidden <= open_ for hidden, open_ in zip(curves[2, True], curves[2, False], strict=True))
assert curves[2, True][-1] < curves[None, False][-1]

# %% [markdown]
# So: interleave when the bubble is large (M small against p), when links are fast, and with as
# many chunks as keep a message well below a chunk's forward. Overlap the messages if there is
# more than one chunk.
#
# ## Run it for real
#
# The same eight layers, cut plainly and interleaved, on four ranks. A plain forward is padded to
# 16 ms and a chunk's to 8 ms.


# %%
def layers_of(chunk):
    return [layer.layer_number for layer in unwrap_model(chunk).decoder.layers]


# %%
def run(vp, forward_ms):
    gpt = TinyGPT(pp=P, vp=vp, num_layers=LAYERS)
    gpt.step(P)  # what is made on first use is made now
    chunks = vp or 1
    with trace() as recorded, ActivationMeter(gpt.chunks) as meter:
        with pace(forward_ms / chunks, 2 * forward_ms / chunks):
            gpt.step(M)
    return {
        "trace": recorded if torch.distributed.get_rank() == 0 else None,
        "where": where_it_runs(),
        "layers": [layers_of(chunk) for chunk in gpt.chunks],
        "gradients": gpt.gradients(),
        "bytes": meter.after_each,
    }


# %%
def run_all():
    return [run(None, 16), run(2, 16)]


by_rank = launch(run_all, P)
plain, interleaved = ([results[i] for results in by_rank] for i in range(2))
print(plain[0]["where"])
for stage in range(P):
    layers = [ranks[stage]["layers"] for ranks in (plain, interleaved)]
    print(f"stage {stage}: layers per chunk, plain {layers[0]}, interleaved {layers[1]}")

# %%
plain[0]["trace"].plot(plan=True)

# %%
interleaved[0]["trace"].plot(plan=True)

# %% [markdown]
# Purple is a message on its way. Here is where the time went, by name:

# %%
print("\n".join(interleaved[0]["trace"].report().splitlines()[:10]))

# %% [markdown]
# ## Check the claim

# %%
for ranks, v in ((plain, None), (interleaved, 2)):
    recorded, done = ranks[0]["trace"], step(v)
    assert recorded.compare_with_plan() == []  # call for call
    assert len(recorded.step(0).transfers) == sum(done.plan.message_counts().values())
    n = v or 1
    assert len(recorded.step(0).transfers) == 2 * (P * n - 1) * M
    for stage in (1, 2):  # with neither embedding nor loss, all chunks are alike
        held = ranks[stage]["bytes"]
        assert held == [held[0] * number for number in done.plan.in_flight(stage)]

# %%
for ranks, n in ((plain, 1), (interleaved, 2)):
    # Chunk c of stage r is virtual stage c * p + r, and those hold the layers in order.
    for stage, rank in enumerate(ranks):
        per_chunk = LAYERS // (P * n)
        for chunk, layers in enumerate(rank["layers"]):
            first = (chunk * P + stage) * per_chunk + 1
            assert layers == list(range(first, first + per_chunk))

# %%
# The same model was trained, whatever the cut.
whole = {name: grad for rank in plain for name, grad in rank["gradients"].items()}
for rank in interleaved:
    for name, grad in rank["gradients"].items():
        torch.testing.assert_close(grad, whole[name], rtol=1e-5, atol=1e-7)

peaks = [[max(rank["bytes"]) for rank in ranks] for ranks in (plain, interleaved)]
print("KiB held at most, plain:      ", [round(x / 1024) for x in peaks[0]])
print("KiB held at most, interleaved:", [round(x / 1024) for x in peaks[1]])
assert sum(peaks[1]) > sum(peaks[0])

# %% [markdown]
# A shorter bubble, paid with messages and memory.
#
# ## Change it
#
# * Set `M = P`. Predict how much interleaving saves now, in the plan and in the run.
# * Run with `run(None, 2)` and `run(2, 2)`: computation of 2 ms, messages as slow as before.
#   Which is quicker on your machine? Compare with the crossing in the curves: how long is one of
#   your messages?
# * Run `run(2, 16)` with `TinyGPT(..., overlap_p2p_comm=True, batch_p2p_comm=False)`. Which calls
#   of the trace change their names?
#
# ## Where next
#
# * [Interleaving](../docs/tour/interleaving.md) in the tour: the table, the class, the traps.
# * Exercise [ex12](../minimegatron/exercises/catalog/ex12_interleaved_table/page.md): predict the table, then compute
#   it.
# * How the layers are placed when they do not divide evenly: [layouts](../docs/tour/layouts.md),
#   and notebook 11.
