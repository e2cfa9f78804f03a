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
# # 06 A real 1F1B step, traced
#
# **The question.** A pipeline of four stages is idle for more than a quarter of its time. When,
# where, and who is waited for?
#
# The last notebook drew the plan. Here `forward_backward_func`, the package's version of Megatron's function, runs a
# step on four real ranks, with every call recorded: `forward_step`, `backward_step`, each message,
# each wait.

# %%
# %matplotlib inline
import time
from fractions import Fraction
from itertools import pairwise

import torch.distributed as dist

from minimegatron import launch, pace, trace
from minimegatron.notebook import compare, predict, show_wide
from minimegatron.notebook.drawing import draw_waiting
from minimegatron.planner.plan import plan
from minimegatron.planner.simulator import Costs, simulate
from minimegatron.training.tiny_gpt import TinyGPT, where_it_runs

STAGES, MICROBATCHES = 4, 8

# %% [markdown]
# ## Predict
#
# Four stages, eight microbatches; a backward takes twice as long as a forward.
#
# 1. Which share of all time is idle? (The formula of the last notebook: (p − 1)/(M + p − 1).)
# 2. Which stage is idle longest?
# 3. Stage 0 is never short of input. Does it wait at all, and if so, for what?
# 4. Suppose that stage 2 is twice as slow in its forwards as the others. Which stage is idle least?
# 5. One forward of stage 2 takes 10 ms longer than planned, and the whole step takes 10 ms longer for
#    it. By how many ms does the idle time of stage 0 grow? And that of stage 2?

# %%
# Write your answers in place of None. Running this cell locks them in.
predict(
    share_idle=None,  # such as "25%" or 1 / 4
    idle_longest=None,  # a stage, or "all alike"
    stage_0_waits_for=None,  # a stage, or "nobody"
    idle_least_if_2_is_slow=None,  # a stage
    stage_0_idle_longer=None,  # in ms
    stage_2_idle_longer=None,  # in ms
)

# %% [markdown]
# ## The run
#
# `trace()` records what runs inside. `pace(20, 40)` pads forwards to 20 ms and backwards to 40 ms,
# so that four ranks on a small machine do not mainly wait for a processor; everything else is real.


# %%
def run(slow_stage=None):
    """In each rank: one step, traced. A slow stage's forwards take twice as long."""
    gpt = TinyGPT(pp=STAGES, num_layers=STAGES)

    def slower_forward_step(data_iterator, model):
        time.sleep(0.040)
        return gpt.forward_step(data_iterator, model)

    is_slow = gpt.groups.pp.rank() == slow_stage
    gpt.step(1)  # what is made on first use is made now
    with trace() as recorded, pace(20, 40):
        gpt.step(MICROBATCHES, forward_step_func=slower_forward_step if is_slow else None)
    return (recorded, where_it_runs()) if dist.get_rank() == 0 else None


# %%
recorded, where = launch(run, STAGES)[0]
print(where)
recorded.plot(plan=True)

# %% [markdown]
# A row per stage: blue is forward, orange is backward, numbers are microbatches. Hatched: nothing was
# computed. The thin strips are the plan. The line above the picture has two figures for the bubble:
# that of the run, and that of the formula. Further down we take the difference apart.
#
# Was it really the plan's order? Every action of every stage, messages too, is compared:

# %%
step = recorded.step(0)
assert recorded.compare_with_plan() == []
for stage in range(STAGES):
    work = [step.events[stage][index].name for index in step.work(stage)]
    assert work.count("forward-compute") == work.count("backward-compute") == MICROBATCHES
print(sum(len(step.actions(stage)) for stage in range(STAGES)), "actions, all as planned")

# %% [markdown]
# ## One microbatch, call by call
#
# Microbatch 0 on stage 0. Indented lines are calls within calls; on the right stands the line of
# source. `send_forward_recv_backward` is where this stage waits longest.

# %%
show_wide(recorded.tree(rank=0, step=0, microbatch=0, depth=3))

# %% [markdown]
# The same step as code: `lines_of_step=0` records which lines the first step runs, too. With `depth=0` one sees
# who calls whom on stage 1 for microbatch 3, and where its activation and its gradient come from and go to.


# %%
def run_lines():
    """In each rank: one step, its lines recorded."""
    gpt = TinyGPT(pp=STAGES, num_layers=STAGES)
    gpt.step(1)
    with trace(lines_of_step=0) as recorded:
        gpt.step(MICROBATCHES)
    return recorded if dist.get_rank() == 0 else None


# %%
lines = launch(run_lines, STAGES)[0]
outline = lines.unrolled(rank=1, microbatch=3, depth=0)
show_wide(outline)
assert "→ gradient of microbatch 3 to rank 0" in outline

# %% [markdown]
# `print(lines.unrolled(rank=1, microbatch=3, depth=2))` shows two levels of calls with their lines, without
# `depth` every line; `lines.to_unrolled_html("lines.html", rank=1)` writes a page with all ranks.
#
# ## Find the bubble
#
# First on paper, where the numbers are exact. Of each stage: how long is it idle before its first
# action, in between, and after its last?


# %%
def idle(gaps, begin):
    """Time that a stage computes nothing: before its first action, in between, after its last."""
    parts = [0, 0, 0]
    for gap in gaps:
        part = 2 if gap.before is None else 0 if gap.start == begin else 1
        parts[part] += gap.end - gap.start
    return parts


# %%
planned = simulate(plan("1f1b", STAGES, MICROBATCHES), Costs(forward=1, backward=2))
on_paper = [idle(planned.gaps(stage), 0) for stage in range(STAGES)]
print("in forwards   planned: before, between, after   measured")
for stage in range(STAGES):
    measured = [length / 20_000 for length in idle(step.gaps(stage), step.start)]
    print(f"stage {stage}       ", *(f"{length:5}" for length in on_paper[stage]), end=" " * 14)
    print(*(f"{length:5.1f}" for length in measured))
share = planned.bubble_over_total
print(f"bubble: {float(share):.1%} planned, {step.bubble_over_total:.1%} measured")

# %%
sums = [sum(parts) for parts in on_paper]
are_alike = min(sums) == max(sums)
compare(share_idle=share, idle_longest="all alike" if are_alike else sums.index(max(sums)))

# %%
assert on_paper == [[0, 9, 0], [1, 6, 2], [2, 3, 4], [3, 0, 6]]
assert share == Fraction(STAGES - 1, MICROBATCHES + STAGES - 1)

# %% [markdown]
# Every stage is idle for the same time, (p − 1) forwards and as many backwards. They only have it at
# different times: stage 3 waits for its first input and then never again; stage 0 starts at once,
# and waits in the middle.
#
# ## Name who was waited for
#
# A long gap before an action ends when a message comes. The trace knows which, and who made it: that
# is the gap's name. The longest of every stage, from the real run:

# %%
WORDS = {"forward-compute": "F", "backward-compute": "B"}


def name(place):
    """Such as `B0 of stage 1`, for (stage, index of an event)."""
    event = step.event(place)
    return f"{WORDS[event.name]}{event.action.microbatch} of stage {place[0]}"


longest = {}
for stage in range(STAGES):
    waits = [gap for gap in step.gaps(stage) if gap.before is not None and gap.waits_for]
    longest[stage] = gap = max(waits, key=lambda gap: gap.length)
    waited = f"{gap.length / 1e3:5.0f} ms before {name((stage, gap.before))}"
    print(f"{waited}: waited for {name(gap.waits_for)}")
compare(stage_0_waits_for=longest[0].waits_for[0])

# %% [markdown]
# Stage 0 waits for stage 1, but is stage 1 to blame? It waited itself. Follow the chain: an action
# starts when the stage's action before it has ended *and* the message that it needs is there. Whichever
# of the two came last is what it really waited for. From there, ask again.

# %%
made_by = {step.user(message): step.maker(message) for message in step.transfers}


def waited_for(place):
    """The (stage, index) whose end let this action start; None at the very beginning."""
    stage, index = place
    work = step.work(stage)
    earlier = [(stage, work[work.index(index) - 1])] if index != work[0] else []
    needed = [made_by[place]] if place in made_by else []
    return max(earlier + needed, key=lambda one: step.event(one).end, default=None)


# %%
def chain(place):
    """From the beginning of the step up to `place`, each action the cause of the next."""
    causes = []
    while place is not None:
        causes.append(place)
        place = waited_for(place)
    return causes[::-1]


first_backward = next((0, i) for i in step.work(0) if step.events[0][i].name == "backward-compute")
round_trip = [name(place) for place in chain(first_backward)]
print(*round_trip, sep="\n")

# %%
assert round_trip[0] == "F0 of stage 0" and round_trip[-1] == "B0 of stage 0"
# On a machine that is busy with other work, an action that overran its pace may be in the chain too.
assert step.num_late or round_trip == [
    *(f"F0 of stage {stage}" for stage in range(STAGES)),
    *(f"B0 of stage {stage}" for stage in reversed(range(STAGES))),
]
last = max((0, index) for index in step.work(0))
path = chain(last)
assert name(path[0]) == "F0 of stage 0" and name(last) == f"B{MICROBATCHES - 1} of stage 0"
print(f"the chain that makes the step as long as it is has {len(path)} of its {4 * 2 * 8} actions")

# %% [markdown]
# Nobody is to blame. Microbatch 0 has to go all the way to the loss and back before stage 0 can do
# its first backward, and stage 0 may not hold more than p microbatches. The gap in the middle is that
# round trip.
#
# ## Why the run's bubble is not the formula's
#
# The formula knows the plan alone: forwards of 20 ms, backwards of 40 ms, and no time between two
# actions. The run took longer. Where? The last chain goes from the beginning of the step to its end.
# At each moment either an action of the chain runs, or a pause between two of its actions passes. So
# the step's length is a sum: what each action of the chain took, and each pause.

# %%
PACE = {"forward-compute": 20, "backward-compute": 40}  # ms, as in the run
WITHIN, ACROSS = "pauses between two actions of a stage", "pauses from a stage to another: messages"


# %%
def overruns(path):
    """Of each action of a chain, and of each pause between two: (kind, name, ms more than on paper)."""
    found = []
    for place in path:
        event = step.event(place)
        kind, pace_ms = WORDS[event.name], PACE[event.name]
        more = (event.end - event.start) / 1e3 - pace_ms
        found.append((f"{kind}: more than {pace_ms} ms each", name(place), more))
    for before, place in pairwise(path):
        pause = (step.event(place).start - step.event(before).end) / 1e3
        kind = WITHIN if before[0] == place[0] else ACROSS
        found.append((kind, f"{name(before)} -> {name(place)}", pause))
    return found


# %%
on_paper_ms = 20 * planned.makespan
of_this_chain = sum(PACE[step.event(place).name] for place in path)
parts = {"this chain on paper, less the longest": of_this_chain - on_paper_ms}
for kind, _, more in overruns(path):
    parts[kind] = parts.get(kind, 0) + more
print(f"{on_paper_ms:8.1f} ms  the step on paper")
for kind, more in parts.items():
    print(f"{more:+8.1f} ms  {kind}")
print(f"{step.makespan / 1e3:8.1f} ms  the step as it ran")
assert abs(on_paper_ms + sum(parts.values()) - step.makespan / 1e3) < 0.001

# %% [markdown]
# The lines in between add up to the difference; each has the actions and pauses of the chain alone.
# (The run's chain need not be the longest chain of the plan. If it is shorter on paper, one line is
# below 0.) Which single overruns are the longest?

# %%
for _, what, more in sorted(overruns(path), key=lambda one: -one[2])[:5]:
    print(f"{more:+6.1f} ms  {what}")

# %% [markdown]
# Now from the step's length to the idle time. The idle time of a stage is the length of the step minus
# the stage's work. So two things change it: how much longer the step took, and how much longer the
# stage's own work took.


# %%
def own_overrun(stage, kind):
    """What all forwards, or all backwards, of a stage took beyond their pace, together. In ms."""
    events = [step.events[stage][index] for index in step.work(stage)]
    return sum((e.end - e.start) / 1e3 - PACE[kind] for e in events if e.name == kind)


# %%
idle_on_paper = on_paper_ms - MICROBATCHES * sum(PACE.values())
longer = step.makespan / 1e3 - on_paper_ms
print("ms         idle on paper  + step longer  - own F longer  - own B longer  = idle")
for stage in range(STAGES):
    own = [own_overrun(stage, kind) for kind in PACE]
    measured = (step.makespan - step.busy(stage)) / 1e3
    print(f"stage {stage}", *(f"{ms:15.1f}" for ms in (idle_on_paper, longer, *own)), end=" ")
    print(f"{measured:7.1f}")
    assert abs(idle_on_paper + longer - sum(own) - measured) < 0.001

# %%
idle_ms = STAGES * step.makespan / 1e3 - sum(step.busy(stage) for stage in range(STAGES)) / 1e3
print(f"on paper: {STAGES * idle_on_paper} of {STAGES} x {on_paper_ms} ms = {float(share):.1%}")
print(f"measured: {idle_ms:.1f} of {STAGES} x {step.makespan / 1e3:.1f} ms", end=" = ")
print(f"{step.bubble_over_total:.1%}")
question_5 = {"step": 10, "stage 0": 0, "stage 2": 10}  # what each took longer, in ms
compare(
    stage_0_idle_longer=question_5["step"] - question_5["stage 0"],
    stage_2_idle_longer=question_5["step"] - question_5["stage 2"],
)

# %% [markdown]
# An overrun on the chain makes the step longer, so the other stages are idle for longer. The stage that
# overran was busy in that time: its own idle time does not grow. An overrun that is not on the chain is
# no part of the step's length: it fills time in which its stage would have waited.
#
# On paper all pauses are 0. In the run a message is sent and received, and each program has work of its
# own between two actions. Where a machine has fewer cores than ranks, a pause also contains the wait
# for a core. `pace` pads actions; it pads no pauses.
#
# ## And if somebody *is* to blame?
#
# Stage 2's forwards take twice as long. Question 4 was: which stage is idle least? First on paper,
# then for real.

# %%
slow = simulate(plan("1f1b", STAGES, MICROBATCHES), Costs(forward=[1, 1, 2, 1], backward=2))
total_idle = [sum(idle(slow.gaps(stage), 0)) for stage in range(STAGES)]
print("idle, in forwards:", total_idle, "of", slow.makespan)
least = min(range(STAGES), key=total_idle.__getitem__)
compare(idle_least_if_2_is_slow=least)
assert least == 2

# %%
with_slow_stage = launch(run, STAGES, 2)[0][0]
assert with_slow_stage.compare_with_plan() == []


# %%
def waiting(step):
    """[stage][for which stage]: milliseconds."""
    table = [[0.0] * STAGES for _ in range(STAGES)]
    for stage in range(STAGES):
        for gap in step.gaps(stage):
            if gap.before is not None and gap.waits_for is not None:
                table[stage][gap.waits_for[0]] += (gap.waiting + gap.transfer) / 1e3
    return table


# %%
draw_waiting({"all alike": waiting(step), "stage 2 slow": waiting(with_slow_stage.step(0))})

# %% [markdown]
# Before an action a stage waits for its neighbours alone: nobody else sends to it. But the column of
# the slow stage has grown, and the slow stage itself waits least of all. That is how to find it in a
# real job: look for the rank that waits least.
#
# ## Change it
#
# * Take `pace(20, 40)` away. What is the bubble now, and whose fault are the ragged edges on your
#   machine? (`print(recorded.report())` has a line for every long gap.)
# * `MICROBATCHES = 32`. Predict the bubble and the length of the gap before stage 0's first backward.
#   Which of the two changes?
# * `recorded.to_html("step.html")` writes the whole run into one page: click on a gap, and on the call
#   that ends it. `recorded.to_chrome("step.json")` is for Perfetto.
#
# ## Where next
#
# * The function that ran, line by line: [1F1B](../docs/tour/one-f-one-b.md).
# * [Exercise 6](../minimegatron/exercises/catalog/ex06_one_f_one_b/page.md): write it yourself;
#   [exercise 7](../minimegatron/exercises/catalog/ex07_freed_outputs/page.md): what it may throw away.
# * [The next notebook](07_interleaving.ipynb) makes the round trip shorter.
