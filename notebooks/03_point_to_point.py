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
# # 03 Point to point
#
# **The question.** Two neighbouring stages want to hand each other a tensor: one an activation, the
# other a gradient. Both send, then both receive. What can go wrong in so short a program?
#
# You will make it hang on purpose, let the hang doctor say why, and cure it in two ways.

# %%
# %matplotlib inline
import matplotlib.pyplot as plt
import torch
import torch.distributed as dist

from minimegatron import launch
from minimegatron.launcher import HangError

# %% [markdown]
# ## Predict
#
# Three calls send a tensor, and each waits elsewhere. `dist.send` over gloo keeps the *program* waiting
# until the partner has received it. `dist.isend` returns at once; only `wait()` on its handle waits.
# Over NCCL both calls return at once, and the GPU's *stream* waits for the partner. This notebook uses
# `dist.send` over gloo. Which of these programs for two ranks come to an end?
#
# 1. both send first, then receive;
# 2. both receive first, then send;
# 3. rank 0 sends first, rank 1 receives first.
#
# A program is written as data here, one list of calls per rank, so that it can be run *and* drawn.

# %%
SEND, RECEIVE = "send to", "receive from"
both_send_first = [[(SEND, 1), (RECEIVE, 1)], [(SEND, 0), (RECEIVE, 0)]]
both_receive_first = [[(RECEIVE, 1), (SEND, 1)], [(RECEIVE, 0), (SEND, 0)]]
one_of_each = [[(SEND, 1), (RECEIVE, 1)], [(RECEIVE, 0), (SEND, 0)]]


def play(programs):
    """In each rank: its calls, one after the other. Returns what it received."""
    rank, received = dist.get_rank(), []
    for what, peer in programs[rank]:
        tensor = torch.full((1000,), float(rank))
        if what == SEND:
            dist.send(tensor, dst=peer)
        else:
            dist.recv(tensor, src=peer)
            received.append(int(tensor[0]))
    return received


# %% [markdown]
# ## The run
#
# `launch` calls a function in n real ranks. With `hang_timeout=1` it notices when no rank has moved
# for a second, and asks the hang doctor. (On the CPU with gloo on any machine. Over NCCL the program
# would stop further down, where it first needs a result.)

# %%
try:
    launch(play, 2, both_send_first, hang_timeout=1, backend="gloo", device="cpu")
except HangError as hang:
    doctor = hang.diagnosis
print(doctor.text)

# %%
assert doctor.kind == "cycle"
assert doctor.cycle == (0, 1)  # 0 waits for 1, which waits for 0

# %% [markdown]
# Neither rank does anything wrong by itself. Each waits for something that the other would do next.
# Nothing is lost, nothing raises; without a doctor the job would be silent until some time-out, on a
# thousand GPUs as on two.
#
# ## A picture of who waits
#
# A call is over when both its ends are there: a send and a receive *meet*. That is the whole rule, so
# a few lines can predict any program: let calls meet while any two do. What is left waits for ever.


# %%
def meet(programs):
    """([(sender, its call, receiver, its call), ...] in order, {rank: the call it is stuck in})."""
    at, met = [0] * len(programs), []
    while True:
        for rank, program in enumerate(programs):
            if at[rank] == len(program) or program[at[rank]][0] != SEND:
                continue
            peer = program[at[rank]][1]
            if at[peer] < len(programs[peer]) and programs[peer][at[peer]] == (RECEIVE, rank):
                met.append((rank, at[rank], peer, at[peer]))
                at[rank], at[peer] = at[rank] + 1, at[peer] + 1
                break
        else:
            stuck = {rank: at[rank] for rank in range(len(at)) if at[rank] < len(programs[rank])}
            return met, stuck


def draw(panel, title, programs):
    """A column per rank, time downwards; an arrow per message, red where a rank waits for ever."""
    met, stuck = meet(programs)
    when = {}
    for sender, sends, receiver, receives in met:  # a call comes after the one before it
        before = [(sender, sends - 1), (receiver, receives - 1)]
        when[sender, sends] = when[receiver, receives] = 1 + max(when.get(b, 0) for b in before)
    for rank, program in enumerate(programs):
        panel.plot([rank, rank], [0.4, 3.4], color="#aab4be", zorder=0)
        panel.annotate(f"rank {rank}", (rank, 0.1), ha="center", weight="bold")
        if rank in stuck:
            what, peer = program[stuck[rank]]
            time = 1 + max((when[rank, n] for n in range(stuck[rank])), default=0)
            panel.plot([rank, rank], [time, 3.4], color="#d55e00", lw=4)
            text = f"{what} {peer}\nfor ever"
            panel.annotate(text, (rank, time + 0.9), ha="center", color="#d55e00", fontsize=9,
                           bbox={"fc": "white", "ec": "none"})  # fmt: skip
    for sender, sends, receiver, _ in met:
        time = when[sender, sends]
        panel.annotate(
            "", (receiver, time + 0.12), (sender, time - 0.12),
            arrowprops={"arrowstyle": "-|>", "color": "#0072b2", "lw": 2},
        )  # fmt: skip
    panel.set(xlim=(-0.6, len(programs) - 0.4), ylim=(3.6, -0.2))
    panel.set_title(title, fontsize=11)
    panel.axis("off")


# %% [markdown]
# The cure: ranks with even numbers send first, odd ones receive first. Does that also work in a
# ring of three, where ranks 0 and 2 are neighbours and both even? Predict, then look.


# %%
def ring(n):
    """Every rank sends to the next and receives from the one before."""
    programs = []
    for rank in range(n):
        calls = [(SEND, (rank + 1) % n), (RECEIVE, (rank - 1) % n)]
        programs.append(calls if rank % 2 == 0 else calls[::-1])
    return programs


programs = {
    "both send first": both_send_first,
    "both receive first": both_receive_first,
    "one of each": one_of_each,
    "a ring of 3, even and odd": ring(3),
}
figure, panels = plt.subplots(
    1, 4, figsize=(11, 3.2), width_ratios=[2, 2, 2, 3], layout="constrained"
)
for panel, (title, program) in zip(panels, programs.items(), strict=True):
    draw(panel, title, program)
plt.show()

# %% [markdown]
# In the odd ring one message waits for a turn, but one rank that receives first is enough to get
# everybody going. Now the same four programs on real ranks. Do those hang that were predicted to,
# and only those?

# %%
for title, program in programs.items():
    _, stuck = meet(program)
    try:
        received = launch(play, len(program), program, hang_timeout=1, backend="gloo", device="cpu")
        print(f"{title:26} received {received}")
        assert not stuck
        assert received == [[peer for what, peer in calls if what == RECEIVE] for calls in program]
    except HangError as hang:
        print(f"{title:26} hangs; in the circle: ranks {hang.diagnosis.cycle}")
        assert sorted(stuck) == sorted(hang.diagnosis.cycle)

# %% [markdown]
# ## The second cure: both at once
#
# Even and odd must be thought of wherever two ranks meet. The other cure is one call that holds
# all the messages, so that none of them comes first. `batch_isend_irecv` starts them all; then one
# waits for all. Megatron's `P2PCommunicator` can do either (`batch_p2p_comm`).


# %%
def exchange():
    """In each of two ranks: send to and receive from the other, in one batch."""
    device = "cuda" if dist.get_backend() == "nccl" else "cpu"
    rank, peer = dist.get_rank(), 1 - dist.get_rank()
    mine = torch.full((1000,), float(rank), device=device)
    theirs = torch.empty(1000, device=device)
    batch = [dist.P2POp(dist.isend, mine, peer), dist.P2POp(dist.irecv, theirs, peer)]
    for work in dist.batch_isend_irecv(batch):
        work.wait()
    return int(theirs[0]), dist.get_backend()


results = launch(exchange, 2, hang_timeout=20)
print(results)
assert [received for received, _ in results] == [1, 0]

# %% [markdown]
# ## Worse than a hang
#
# Without a tag, messages between two ranks are told apart by their order alone: the first send meets
# the first receive, the second the second. (gloo matches tags, where a program gives them; NCCL has none.)
# Suppose rank 0 sends an activation and then a gradient, of the same shape. Rank 1 wants
# the gradient first, and receives into that buffer first. Predict: hang, error, or neither?


# %%
def cross():
    if dist.get_rank() == 0:
        dist.send(torch.full((4,), 1.0), dst=1)  # the activation
        dist.send(torch.full((4,), -1.0), dst=1)  # the gradient
        return None
    gradient, activation = torch.empty(4), torch.empty(4)
    dist.recv(gradient, src=0)
    dist.recv(activation, src=0)
    return {"activation": float(activation[0]), "gradient": float(gradient[0])}


_, received = launch(cross, 2, hang_timeout=5, backend="gloo", device="cpu")
print(received)
assert received == {"activation": -1.0, "gradient": 1.0}

# %% [markdown]
# Neither. The two are swapped, and training goes on with nonsense. With two stages that are each other's
# next *and* previous, batched messages can be paired so ([Megatron-LM
# #750](https://github.com/NVIDIA/Megatron-LM/issues/750),
# [#5271](https://github.com/NVIDIA/Megatron-LM/issues/5271)). The package refuses that combination, and
# its tests put the microbatch's number inside every tensor.
#
# ## Change it
#
# * Write a program of three ranks in which rank 0 only waits, and the circle is between 1 and 2. Which
#   ranks does the doctor accuse? (`doctor.cycle`, `doctor.ranks`)
# * Take rank 1's send out of `one_of_each`. It is not a circle now. What does the doctor call it?
# * Let all four ranks of a ring send first, but rank 3 receive first. How long does the last message
#   wait for its turn? Draw it.
#
# ## Where next
#
# * The nine methods between stages: [messages](../docs/tour/p2p.md).
# * [Exercise 4](../minimegatron/exercises/catalog/ex04_p2p_without_deadlock/page.md)
#   (`minimegatron exercises start ex04`).
# * [The next notebook](04_one_pipeline_step_by_hand.ipynb) sends real activations.
