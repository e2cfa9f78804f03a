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
# # 05 From GPipe to 1F1B
#
# **The question.** Two orders of the same work take exactly as long as each other. Why does
# everybody run the second?
#
# You will write both orders as plain functions, let the planner check them before anything runs,
# run them on four real ranks, and measure time and memory.

# %%
# %matplotlib inline
import torch
from IPython.display import SVG

from minimegatron import launch, pace, trace
from minimegatron.training.pipeline_schedule import get_planned_forward_backward_func
from minimegatron.notebook import compare, predict
from minimegatron.notebook.drawing import draw_held_bytes
from minimegatron.planner.plan_check import check
from minimegatron.planner.plan import plan
from minimegatron.planner.registry import register_schedule
from minimegatron.planner.render import render
from minimegatron.planner.simulator import Costs, simulate
from minimegatron.training.tiny_gpt import TinyGPT, where_it_runs
from minimegatron.tracing.activation_meter import ActivationMeter

STAGES, MICROBATCHES = 4, 8

# %% [markdown]
# ## Predict
#
# Four stages, eight microbatches. A forward takes 1, a backward 2, messages nothing. Write down:
#
# 1. GPipe does all forwards, then all backwards. How long is the step?
# 2. 1F1B alternates as soon as it can. How long is the step?
# 3. A stage keeps what a forward made until that microbatch's backward. At its fullest, how many
#    microbatches does stage 0 keep, in each? And stage 3?

# %%
# Write your answers in place of None. Running this cell locks them in.
predict(
    length_of_gpipe=None,
    length_of_1f1b=None,
    kept_by_gpipe=None,  # [on stage 0, on stage 3]
    kept_by_1f1b=None,
)

# %% [markdown]
# ## An order is a function
#
# `stage` knows its number, `stage.pp_rank`, and how many there are, `stage.pp_size`. Everything
# it does is yielded, messages too. At the ends of the pipeline a send or receive goes nowhere; it
# is written anyway, as in Megatron.


# %%
@register_schedule("all_forwards_first")
def all_forwards_first(stage):
    """GPipe."""
    for i in range(stage.num_microbatches):
        yield stage.recv_forward(i)
        yield stage.forward(i)
        yield stage.send_forward(i)
    for i in range(stage.num_microbatches):
        yield stage.recv_backward(i)
        yield stage.backward(i)
        yield stage.send_backward(i)


# %% [markdown]
# `plan` calls the function once per stage. `simulate` gives every action its time. Blue is
# forward, orange is backward, hatched is idle.

# %%
gpipe = simulate(plan("all_forwards_first", STAGES, MICROBATCHES), Costs(forward=1, backward=2))
SVG(render(gpipe, "svg"))

# %%
compare(
    length_of_gpipe=gpipe.makespan,
    kept_by_gpipe=[gpipe.plan.peak_in_flight(stage) for stage in (0, STAGES - 1)],
)

# %% [markdown]
# Look at stage 3. It could run the backward of microbatch 0 right after its forward: the loss is
# there. 1F1B does. Each stage runs just enough forwards ahead to keep the stages behind it busy,
# then one backward for each forward.
#
# The two inner exchanges are one call each: both neighbours want to send and to receive, and one
# of them would otherwise wait for a partner that waits too.


# %%
@register_schedule("one_forward_one_backward")
def one_forward_one_backward(stage):
    """1F1B."""
    M = stage.num_microbatches
    num_warmup = min(stage.pp_size - stage.pp_rank - 1, M)
    for i in range(num_warmup):
        yield stage.recv_forward(i)
        yield stage.forward(i)
        yield stage.send_forward(i)
    if num_warmup < M:
        yield stage.recv_forward(num_warmup)
    for i in range(M - num_warmup):
        yield stage.forward(num_warmup + i)
        yield stage.send_forward_recv_backward(num_warmup + i, receives=i)
        yield stage.backward(i)
        if num_warmup + i < M - 1:
            yield stage.send_backward_recv_forward(i, receives=num_warmup + i + 1)
        else:
            yield stage.send_backward(i)
    for i in range(M - num_warmup, M):
        yield stage.recv_backward(i)
        yield stage.backward(i)
        yield stage.send_backward(i)


# %%
one_f_one_b = simulate(
    plan("one_forward_one_backward", STAGES, MICROBATCHES), Costs(forward=1, backward=2)
)
SVG(render(one_f_one_b, "svg"))

# %%
compare(
    length_of_1f1b=one_f_one_b.makespan,
    kept_by_1f1b=[one_f_one_b.plan.peak_in_flight(stage) for stage in (0, STAGES - 1)],
)

# %% [markdown]
# ## The planner checks it first
#
# A wrong order hangs, or trains on wrong gradients. `check` finds out without a single process.
# Here is a mistake that looks harmless: send the output only after the gradient has come.


# %%
def sends_too_late(stage):
    for i in range(stage.num_microbatches):
        yield stage.recv_forward(i)
        yield stage.forward(i)
        yield stage.recv_backward(i)
        yield stage.send_forward(i)
        yield stage.backward(i)
        yield stage.send_backward(i)


problems = check(plan(sends_too_late, 2, 1))
print(problems[0])
assert [problem.kind for problem in problems] == ["deadlock"]
assert check(gpipe.plan) == [] and check(one_f_one_b.plan) == []

# %% [markdown]
# ## Run it for real
#
# Four processes, a small GPT cut into four stages, real messages, real gradients. Two things are
# added:
#
# * `pace` pads each forward to 20 ms and each backward to 40 ms, so that four ranks on a laptop
#   with two cores show the order and not their fight for the cores;
# * `ActivationMeter` asks autograd for every tensor that it keeps for backward, and adds up their
#   bytes.


# %%
def run(order):
    """In each rank: one step in this order."""
    gpt = TinyGPT(pp=STAGES, num_layers=STAGES)
    forward_backward = get_planned_forward_backward_func(order)
    gpt.step(1)  # what is made on first use is made now
    with trace() as recorded, pace(20, 40), ActivationMeter(gpt.chunks) as meter:
        reports = gpt.step(MICROBATCHES, forward_backward)
    gradients = gpt.gradients()
    with ActivationMeter(gpt.chunks) as alone:
        gpt.step(1)
    return {
        "trace": recorded if torch.distributed.get_rank() == 0 else None,
        "where": where_it_runs(),
        "losses": [float(report["loss"]) for report in reports],
        "gradients": gradients,
        "bytes": meter.after_each,
        "bytes of one microbatch": alone.peak,
    }


# %%
def run_both():
    return [run(order) for order in (all_forwards_first, one_forward_one_backward)]


by_rank = launch(run_both, STAGES)
runs = {
    name: [results[number] for results in by_rank] for number, name in enumerate(["GPipe", "1F1B"])
}
print(runs["GPipe"][0]["where"])

# %%
figure = runs["GPipe"][0]["trace"].plot(plan=True)
figure

# %%
figure = runs["1F1B"][0]["trace"].plot(plan=True)
figure

# %% [markdown]
# Same length, or nearly: the hatched parts have moved. (A busy machine shows ragged edges; the
# thin strips are the plan.) Now the memory, measured at the end of each forward and backward:

# %%
steps = {name: ranks[0]["trace"].step(0) for name, ranks in runs.items()}
held = {name: [rank["bytes"] for rank in ranks] for name, ranks in runs.items()}
draw_held_bytes({name: (steps[name], held[name]) for name in runs})

# %% [markdown]
# ## Check the claim
#
# The first assertion is the strongest: the run did what the plan says, call for call, on every
# rank. What the planner counts is then what the ranks did.

# %%
simulations = {"GPipe": gpipe, "1F1B": one_f_one_b}
for name, ranks in runs.items():
    assert ranks[0]["trace"].compare_with_plan() == []
    done = simulations[name]
    measured = [max(rank["bytes"]) / rank["bytes of one microbatch"] for rank in ranks]
    planned = [done.plan.peak_in_flight(stage) for stage in range(STAGES)]
    assert measured == planned, (measured, planned)
    paced = ranks[0]["trace"].step(0).makespan / 1e3
    print(f"{name:5}  by the plan {done.makespan}, paced {paced:.0f} ms; held at most: {planned}")

# %% [markdown]
# Not only the peak: after every single forward and backward, each stage holds what the plan says.

# %%
for name, ranks in runs.items():
    for stage, rank in enumerate(ranks):
        one, held = rank["bytes of one microbatch"], simulations[name].plan.in_flight(stage)
        assert rank["bytes"] == [one * number for number in held]

# %%
# At 4 stages and 8 microbatches: 33 in both; 8, 8, 8, 8 microbatches held, and 4, 3, 2, 1.
assert gpipe.makespan == one_f_one_b.makespan == (MICROBATCHES + STAGES - 1) * (1 + 2)
for stage in range(STAGES):
    assert gpipe.plan.peak_in_flight(stage) == MICROBATCHES
    assert one_f_one_b.plan.peak_in_flight(stage) == min(MICROBATCHES, STAGES - stage)

# %%
# Nothing else changed: the same losses and gradients; on a CPU, whose sums have one order, every bit.
for before, after in zip(runs["GPipe"], runs["1F1B"], strict=True):
    tolerance = 0 if "the CPU" in before["where"] else 1e-6
    torch.testing.assert_close(after["losses"], before["losses"], rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(
        after["gradients"], before["gradients"], rtol=tolerance, atol=tolerance
    )

# %% [markdown]
# So 1F1B buys memory, not time. And that memory does not grow with the number of microbatches:
# stage 0 holds at most `p` microbatches, however large `M` is. Time is bought with it after all,
# indirectly: more microbatches need no more room, so the bubble, (p − 1)/(M + p − 1) of the step, can
# be made as small as you like.

# %%
for M in (8, 32, 128):
    steps = {name: simulate(plan(name, STAGES, M)) for name in ("gpipe", "1f1b")}
    held = {name: step.plan.peak_in_flight(0) for name, step in steps.items()}
    assert held == {"gpipe": M, "1f1b": STAGES}
    print(
        f"M = {M:3}: idle {float(steps['1f1b'].bubble_over_total):5.1%} in both; stage 0 holds {held}"
    )

# %% [markdown]
# ## Change it
#
# * In `one_forward_one_backward`, take one warm-up forward away (`- 2` for `- 1`, and `max(0,
#   ...)`). Predict first: does it hang? What does it cost, what does it save? `check` and
#   `simulate` tell.
# * Set `MICROBATCHES = 2`. Which line keeps the first stages from waiting for a microbatch that
#   never comes?
# * Let GPipe run its backwards newest first (`reversed(range(...))`). Predict the length, and the
#   memory. Are the gradients still bit for bit the same? Which assertion tells, and why does it
#   matter little?
#
# ## Where next
#
# * The real function, line by line: [1F1B](../docs/tour/one-f-one-b.md) in the tour.
# * Write it without looking: exercises [ex05](../minimegatron/exercises/catalog/ex05_predict_1f1b/page.md) and
#   [ex06](../minimegatron/exercises/catalog/ex06_one_f_one_b/page.md) (`minimegatron exercises start ex06`).
# * The next notebook traces the package's own 1F1B and asks, of every gap, who was waited for.
