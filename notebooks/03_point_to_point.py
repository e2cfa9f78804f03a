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
import torch
import torch.distributed as dist

from minimegatron import launch
from minimegatron.launching.launcher import HangError, RankError
from minimegatron.notebook import compare, predict
from minimegatron.notebook.drawing import draw_programs

# %% [markdown]
# ## Predict
#
# Two calls send a tensor, and each waits elsewhere. `dist.send` over gloo keeps the *program* waiting
# until the partner has received it. `dist.isend` returns at once; only `wait()` on its handle waits.
# Over NCCL both calls return at once, and the GPU's *stream* waits for the partner. Over memory that
# ranks share, which groups here use in gloo's place, both return at once too. This notebook
# asks for gloo itself, and uses `dist.send`. Which of these programs for two ranks come to an end?
#
# 1. both send first, then receive;
# 2. both receive first, then send;
# 3. rank 0 sends first, rank 1 receives first.

# %%
# Write your answers in place of None. Running this cell locks them in.
predict(
    both_send_first=None,  # "ends" or "hangs"
    both_receive_first=None,
    one_of_each=None,
)

# %% [markdown]
# A program is written as data here, one list of calls per rank, so that it can be run *and* drawn.
# `play` makes a group that uses gloo.

# %%
SEND, RECEIVE = "send to", "receive from"
both_send_first = [[(SEND, 1), (RECEIVE, 1)], [(SEND, 0), (RECEIVE, 0)]]
both_receive_first = [[(RECEIVE, 1), (SEND, 1)], [(RECEIVE, 0), (SEND, 0)]]
one_of_each = [[(SEND, 1), (RECEIVE, 1)], [(RECEIVE, 0), (SEND, 0)]]


# %%
def play(programs):
    """In each rank: its calls, one after the other. Returns what it received."""
    group = dist.new_group(backend="gloo")
    rank, received = dist.get_rank(), []
    for what, peer in programs[rank]:
        tensor = torch.full((1000,), float(rank))
        if what == SEND:
            dist.send(tensor, dst=peer, group=group)
        else:
            dist.recv(tensor, src=peer, group=group)
            received.append(int(tensor[0]))
    return received


# %% [markdown]
# ## The run
#
# `launch` calls a function in n real ranks. With `hang_timeout=1` it notices when no rank has moved
# for a second, and asks the hang doctor. (On the CPU on any machine. Over NCCL the program
# would stop further down, where it first needs a result.)

# %%
try:
    launch(play, 2, both_send_first, hang_timeout=1, device="cpu")
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


# %% [markdown]
# The cure: ranks with even numbers send first, odd ones receive first. Does that also work in a
# ring of three, where ranks 0 and 2 are neighbours and both even? Predict, then look.

# %%
predict(ring_of_three=None)  # "ends" or "hangs"


# %%
def ring(n):
    """Every rank sends to the next and receives from the one before."""
    programs = []
    for rank in range(n):
        calls = [(SEND, (rank + 1) % n), (RECEIVE, (rank - 1) % n)]
        programs.append(calls if rank % 2 == 0 else calls[::-1])
    return programs


# %%
programs = {
    "both send first": both_send_first,
    "both receive first": both_receive_first,
    "one of each": one_of_each,
    "a ring of 3, even and odd": ring(3),
}
draw_programs({title: (program, meet(program)) for title, program in programs.items()})

# %% [markdown]
# In the odd ring two messages wait for a turn, but one rank that receives first is enough to get
# everybody going. Now the same four programs on real ranks. Do those hang that were predicted to,
# and only those?

# %%
ends = []
for title, program in programs.items():
    _, stuck = meet(program)
    try:
        received = launch(play, len(program), program, hang_timeout=1, device="cpu")
        print(f"{title:26} received {received}")
        assert not stuck
        assert received == [[peer for what, peer in calls if what == RECEIVE] for calls in program]
    except HangError as hang:
        print(f"{title:26} hangs; in the circle: ranks {hang.diagnosis.cycle}")
        assert sorted(stuck) == sorted(hang.diagnosis.cycle)
    ends.append("hangs" if stuck else "ends")

# %%
compare(
    both_send_first=ends[0],
    both_receive_first=ends[1],
    one_of_each=ends[2],
    ring_of_three=ends[3],
)

# %% [markdown]
# ## The second cure: both at once
#
# Even and odd must be thought of wherever two ranks meet. The other cure is one call that holds
# all the messages, so that none of them comes first. `batch_isend_irecv` starts them all; then one
# waits for all. Megatron's `P2PCommunicator` can do either (`batch_p2p_comm`). `shm` is the memory that
# the ranks share.


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
# ## Two messages in the wrong order
#
# Without a tag, messages between two ranks are told apart by their order alone: the first send meets
# the first receive, the second the second. (gloo and shared memory match tags, where a program gives
# them; NCCL has none.)
# Suppose rank 0 sends an activation and then a gradient, of the same shape. Rank 1 wants
# the gradient first, and receives into that buffer first. Predict: hang, error, or neither?

# %%
predict(crossed_messages=None)  # "hang", "error" or "neither"


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


# %%
try:
    _, received = launch(cross, 2, hang_timeout=5, device="cpu")
    happened = "neither"
except RankError as error:
    happened = "hang" if isinstance(error, HangError) else "error"
compare(crossed_messages=happened)
print(received)

# %%
assert received == {"activation": -1.0, "gradient": 1.0}

# %% [markdown]
# Neither, and that is worse than a hang: the two are swapped, and training goes on with nonsense. With two stages that are each other's
# next *and* previous, batched messages can be paired so
# ([Megatron-LM #750](https://github.com/NVIDIA/Megatron-LM/issues/750),
# [#5271](https://github.com/NVIDIA/Megatron-LM/issues/5271)). The package refuses that combination, and
# its tests put microbatches' numbers inside tensors.
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
