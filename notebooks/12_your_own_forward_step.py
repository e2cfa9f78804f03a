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
# # 12 Your own forward step
#
# **The question.** A trainer for reinforcement learning wants log-probabilities, its own loss and
# its own updates, on a model cut over many ranks. What does it have to change in Megatron?
#
# Nothing. It calls `forward_backward_func` itself and passes a `forward_step_func` of its own.
# Here is that pattern from end to end, as ROLL, verl and Megatron's own `train_rl.py` use it:
# log-probabilities of samples, then one update that makes the better ones more likely.

# %%
# %matplotlib inline
from functools import partial

import torch

from minimegatron import launch
from minimegatron.core.utils import get_device
from minimegatron.core.pipeline_parallel.schedules import get_forward_backward_func
from minimegatron.notebook import compare, predict
from minimegatron.notebook.drawing import draw_changes
from minimegatron.training.tiny_gpt import TinyGPT, where_it_runs

PROMPTS, ANSWERS = 4, 4  # four answers to each of four prompts
S, PROMPT_LENGTH, V = 16, 4, 64
MODEL = {"seq_length": S, "vocab_size": V, "params_dtype": torch.float64, "init_method_std": 0.05}

# %% [markdown]
# ## Predict
#
# The model is cut over 2 stages × 2 tensor-parallel ranks.
#
# 1. The log-probabilities are computed with `forward_only=True`. On which of the four ranks are
#    they afterwards?
# 2. No rank has the whole vocabulary. Who computes the log-probability of a token?
# 3. In the first update the policy is still the one that gave the old log-probabilities. What is
#    the ratio of new to old probability? Does clipping it do anything?
# 4. The same samples in 8 microbatches of 2 or 16 of 1: is the gradient the same?

# %%
# Write your answers in place of None. Running this cell locks them in.
predict(
    have_log_probabilities=None,  # a list of ranks
    ratio_in_first_update=None,
    same_gradient=None,  # "always", "never" or "it depends on the loss function"
)

# %% [markdown]
# ## Samples
#
# A sample is a prompt and an answer. The answers here are drawn at random, which is what this
# fresh model would do as well. The reward: the share of the answer's tokens that are below 32. An
# answer's *advantage* is its reward less the mean of its prompt's answers, divided by their
# deviation, as in GRPO. Answers have different lengths.


# %%
def make_samples():
    generator = torch.Generator().manual_seed(3)
    num = PROMPTS * ANSWERS
    prompts = torch.randint(V, (PROMPTS, PROMPT_LENGTH), generator=generator)
    answers = torch.randint(V, (num, S + 1 - PROMPT_LENGTH), generator=generator)
    lengths = torch.randint(4, S + 2 - PROMPT_LENGTH, (num,), generator=generator)
    text = torch.cat([prompts.repeat_interleave(ANSWERS, dim=0), answers], dim=1)
    # Position i predicts token i + 1: the answer's first token is predicted at the prompt's last.
    places = torch.arange(S)
    mask = (places >= PROMPT_LENGTH - 1) & (places < PROMPT_LENGTH - 1 + lengths.unsqueeze(1))
    rewards = ((text[:, 1:] < V // 2) & mask).sum(1) / lengths
    of_prompt = rewards.view(PROMPTS, ANSWERS)
    deviation = of_prompt.std(1, keepdim=True) + 1e-6
    advantages = ((of_prompt - of_prompt.mean(1, keepdim=True)) / deviation).view(-1)
    return {
        "tokens": text[:, :-1],
        "labels": text[:, 1:],
        "mask": mask.double(),
        "advantages": advantages.double(),
    }


# %%
SAMPLES = make_samples()
print("tokens per answer:", [int(n) for n in SAMPLES["mask"].sum(1)])
print("advantages:       ", [round(float(a), 1) for a in SAMPLES["advantages"]])


# %%
def microbatches(samples, size):
    """Cuts the samples into microbatches of `size`, on this rank's device."""
    pieces = zip(*(value.split(size) for value in samples.values()), strict=True)
    return [
        {name: piece.to(get_device()) for name, piece in zip(samples, of_one, strict=True)}
        for of_one in pieces
    ]


# %% [markdown]
# ## The forward step
#
# One function for everything. What differs, the loss, is bound to it with `functools.partial`; so
# the schedule sees a function of two arguments and knows nothing of rewards.
#
# With labels, the model returns −log p of each label: the cross entropy is computed over the
# tensor-parallel ranks, each with its part of the vocabulary. So a log-probability is the
# negative of that.


# %%
def inner_forward_step(loss_func, data_iterator, model):
    batch = next(data_iterator)
    positions = torch.arange(S, device=get_device()).expand_as(batch["tokens"])
    output = model(batch["tokens"], positions, None, labels=batch["labels"])
    return output, partial(loss_func, batch)


def log_probabilities(batch, output, non_loss_data=True):
    """With `collect_non_loss_data` the schedule keeps whatever this returns, as it is."""
    return -output


# %%
def policy_loss(batch, output, clip=0.2):
    """GRPO's advantages and clipping, normalised per token as DAPO does: (sum, tokens, report)."""
    ratio = torch.exp(-output - batch["old"])
    advantages = batch["advantages"].unsqueeze(1)
    gain = torch.minimum(ratio * advantages, ratio.clamp(1 - clip, 1 + clip) * advantages)
    total, num_tokens = -(gain * batch["mask"]).sum(), batch["mask"].sum().int()
    report = {
        "loss": total.detach() / num_tokens,
        "furthest ratio": ((ratio - 1).abs() * batch["mask"]).max().detach(),
    }
    return total, num_tokens, report


# %% [markdown]
# And the call. On every rank, with the same arguments; nobody asks which stage it is on.


# %%
def run_schedule(gpt, loss_func, batches, **more):
    return get_forward_backward_func()(
        forward_step_func=partial(inner_forward_step, loss_func),
        data_iterator=iter(batches),
        model=gpt.chunks,
        num_microbatches=len(batches),
        seq_length=S,
        micro_batch_size=len(batches[0]["tokens"]),
        **more,
    )


# %%
def compute_log_probabilities(gpt, batches):
    with torch.no_grad():
        return run_schedule(
            gpt, log_probabilities, batches, forward_only=True, collect_non_loss_data=True
        )


# %%
def one_update(cut, size):
    """On every rank: old log-probabilities, one update, new log-probabilities."""
    gpt = TinyGPT(**cut, calculate_per_token_loss=True, **MODEL)
    optimizer = gpt.optimizer(lr=3e-3, adam_eps=1e-4, clip_grad=1.0)
    batches = microbatches(SAMPLES, size)

    old = compute_log_probabilities(gpt, batches)
    # They exist on the last stage, which is where the loss is computed: no one else needs them.
    for batch, of_batch in zip(batches, old, strict=False):
        batch["old"] = of_batch

    for chunk in gpt.chunks:
        chunk.zero_grad_buffer()
    reports = run_schedule(gpt, policy_loss, batches)
    success, norm, _ = optimizer.step()
    assert success

    new = compute_log_probabilities(gpt, batches)
    stage = gpt.groups.pp.rank()
    return {
        "where": where_it_runs(),
        "stage": stage,
        "old": torch.cat(old).cpu() if old else None,
        "new": torch.cat(new).cpu() if new else None,
        "ratios": [float(report["furthest ratio"]) for report in reports],
        "loss": [float(report["loss"]) for report in reports],
        "norm": norm,
    }


# %%
ranks = launch(one_update, 4, {"tp": 2, "pp": 2}, 2)
(alone,) = launch(one_update, 1, {}, 2)
print(ranks[0]["where"])
for number, rank in enumerate(ranks):
    shape = None if rank["old"] is None else tuple(rank["old"].shape)
    print(
        f"rank {number}: stage {rank['stage']}, log-probabilities {shape}, norm {rank['norm']:.6f}"
    )

# %%
compare(
    have_log_probabilities=[r for r, rank in enumerate(ranks) if rank["old"] is not None],
    ratio_in_first_update=1 + max(ranks[-1]["ratios"]),
)

# %% [markdown]
# ## The picture
#
# Each point is an answer: how good it was, and how much more likely the update made it.

# %%
mask, advantages = SAMPLES["mask"], SAMPLES["advantages"]
last = ranks[-1]
change = ((last["new"] - last["old"]) * mask).sum(1)

draw_changes(advantages, change, per_prompt=ANSWERS)

# %% [markdown]
# ## Check the claim

# %%
# Only the last stage has them, both of its tensor-parallel ranks the same, and in the samples' order.
assert [rank["old"] is None for rank in ranks] == [rank["stage"] < last["stage"] for rank in ranks]
assert all(torch.equal(rank["old"], last["old"]) for rank in ranks if rank["old"] is not None)
for which in ("old", "new"):  # cut over four ranks or not: the same before the update, and after
    torch.testing.assert_close(last[which], alone[which], rtol=1e-7, atol=1e-9)

# %%
# They are log-probabilities: of 64 tokens, and a fresh model hardly prefers any.
assert (last["old"] < 0).all() and abs(float(last["old"].exp().mean()) * V - 1) < 0.1

# In the first update the ratio is 1: nothing is clipped, and the loss is minus the mean advantage.
assert max(last["ratios"]) < 1e-12
for report, batch in zip(last["loss"], microbatches(SAMPLES, 2), strict=True):
    weighted = (batch["advantages"].unsqueeze(1) * batch["mask"]).sum() / batch["mask"].sum()
    assert abs(report + float(weighted)) < 1e-9

# %%
# Better answers became more likely, worse ones less.
correlation = float(torch.corrcoef(torch.stack([advantages, change]))[0, 1])
print(f"correlation of advantage and change: {correlation:.2f}")
assert correlation > 0.6
assert change[advantages > 0.5].mean() > 0 > change[advantages < -0.5].mean()

# %% [markdown]
# ## By what is it divided?
#
# The trap of notebook 09 again, and where RL trainers fall into it. The number of samples per
# microbatch is a question of memory; it must not change the gradient. Three ways to normalise,
# each with microbatches of 2 and of 1:


# %%
def mean_of_microbatch(batch, output):
    total, num_tokens, report = policy_loss(batch, output)
    return total / num_tokens, report


# %%
def mean_of_all_by_hand(num_tokens, num_microbatches, batch, output):
    # The schedule will divide by the number of microbatches (and data parallelism by that of copies).
    total, _, report = policy_loss(batch, output)
    return total / num_tokens * num_microbatches, report


# %%
def gradient_of(contract, size):
    per_token = contract == "sum and number, flag on"
    gpt = TinyGPT(tp=2, pp=2, calculate_per_token_loss=per_token, **MODEL)
    batches = microbatches(SAMPLES, size)
    for batch, old in zip(batches, compute_log_probabilities(gpt, batches), strict=False):
        batch["old"] = old
    loss_func = {
        "sum and number, flag on": policy_loss,
        "mean of the microbatch": mean_of_microbatch,
        "mean of all, times M": partial(
            mean_of_all_by_hand, float(SAMPLES["mask"].sum()), len(batches)
        ),
    }[contract]
    for chunk in gpt.chunks:
        chunk.zero_grad_buffer()
    run_schedule(gpt, loss_func, batches)
    return torch.cat([gradient.flatten() for gradient in gpt.gradients().values()])


# %%
CONTRACTS = ["sum and number, flag on", "mean of the microbatch", "mean of all, times M"]


def all_gradients():
    return {(name, size): gradient_of(name, size) for name in CONTRACTS for size in (2, 1)}


found = launch(all_gradients, 4)[0]

# %%
right = found["sum and number, flag on", 2]
errors = {key: float((g - right).norm() / right.norm()) for key, g in found.items()}
print(f"{'off the first':26} size 2     size 1")
for name in CONTRACTS:
    print(f"{name:26} {errors[name, 2]:.1e}    {errors[name, 1]:.1e}")
are_same = {errors[name, 1] < 1e-10 and errors[name, 2] < 1e-10 for name in CONTRACTS}
words = {(True,): "always", (False,): "never"}
compare(same_gradient=words.get(tuple(are_same), "it depends on the loss function"))

# %%
for name in ("sum and number, flag on", "mean of all, times M"):
    assert errors[name, 2] < 1e-10 and errors[name, 1] < 1e-10
assert errors["mean of the microbatch", 2] > 0.05 and errors["mean of the microbatch", 1] > 0.05

# %% [markdown]
# The mean over a microbatch weighs short answers more, and by another amount for every size of
# microbatch: the same run with other memory settings trains on another objective. Either give the
# schedule sum and number and let `finalize_model_grads` divide once, or divide by the global
# number yourself and undo the schedule's division by M.
#
# ## Change it
#
# * Make three updates with the same old log-probabilities (a loop around the update in
#   `one_update`). From which on do the ratios leave 1? When does clipping begin to act?
# * Cut the model otherwise: `{"pp": 4}`, `{"tp": 4}`, `{"pp": 2, "vp": 2}` on two ranks (then
#   `data_iterator` is a list, one per chunk). What has to change in `inner_forward_step`?
# * Forget `forward_only=True` for the log-probabilities. Who complains, and about what? Then leave
#   `torch.no_grad()` out too: who complains now, and why?
#
# ## Where next
#
# * [forward_step](../docs/tour/forward-step.md), and [the loss
#   contract](../docs/tour/loss-contract.md) in the tour.
# * Exercise [ex08](../minimegatron/exercises/catalog/ex08_loss_contract/page.md).
# * The real program to copy from is `minimegatron/pretrain_gpt.py`: the same pair of functions,
#   for pretraining.
