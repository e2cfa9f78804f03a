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
# # 09 The whole step
#
# **The question.** What happens between two updates of the weights, which function calls which, and
# by what is the gradient divided?

# %%
# %matplotlib inline
import contextlib
import io
import sys
from functools import partial

import torch

from minimegatron import launch, pretrain_gpt, trace
from minimegatron.core import tracing
from minimegatron.core.distributed import finalize_model_grads
from minimegatron.core.model_parallel_config import ModelParallelConfig
from minimegatron.core.pipeline_parallel.schedules import (
    forward_step_calc_loss,
    get_forward_backward_func,
)
from minimegatron.core.utils import get_model_config
from minimegatron.notebook import compare, predict, show_wide
from minimegatron.notebook.counting import Diary
from minimegatron.notebook.drawing import draw_calls, draw_weights
from minimegatron.training.tiny_gpt import TinyGPT, where_it_runs
from minimegatron.training.initialize import initialize_megatron
from minimegatron.training.training import (
    build_train_valid_test_data_iterators,
    setup_model_and_optimizer,
    train_step,
)

# %% [markdown]
# ## Predict
#
# Four ranks: two stages, two copies of the model. A global batch of 8 samples, one sample per
# microbatch. In one call of `train_step`:
#
# 1. How often is `forward_step` called on each rank?
# 2. Put into order: clip the gradient, sum it over the two copies, sum the tied embedding over
#    the stages, set it to zero, divide the loss by the number of microbatches.
# 3. The two copies hold different gradients until... which call?
# 4. Your loss function returns (sum of losses, number of tokens, report), and
#    `calculate_per_token_loss` is off, as it is by default. One microbatch has 2 tokens, another 16.
#    Does every token pull equally on the weights?

# %%
# Write your answers in place of None. Running this cell locks them in.
predict(
    forward_steps_per_rank=None,
    order=None,  # of ["clip", "sum over copies", "sum the embedding", "divide the loss"]
    copies_differ_until=None,  # "backward-compute", "finalize-model-grads" or "optimizer"
    tokens_pull_equally=None,  # True or False
)

# %% [markdown]
# ## The program
#
# What `torchrun -m minimegatron.pretrain_gpt` does, up to its first steps. `train` would fill in
# the hooks and loop; here both are in sight. The flags are the real ones.

# %%
FLAGS = """
    --pipeline-model-parallel-size 2 --micro-batch-size 1 --global-batch-size 8
    --num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 64
    --max-position-embeddings 64 --hidden-dropout 0 --attention-dropout 0
    --lr 1e-3 --lr-decay-style constant --train-iters 3
"""


# %%
def set_up():
    """Model, optimizer, scheduler and data from the flags, as `pretrain` has them."""
    sys.argv = ["notebook", *FLAGS.split()]
    with contextlib.redirect_stdout(io.StringIO()):  # what training prints of its set-up
        initialize_megatron()
        model, optimizer, scheduler = setup_model_and_optimizer(pretrain_gpt.model_provider)
        provider = partial(pretrain_gpt.train_valid_test_datasets_provider, vp_stage=None)
        train_data, _, _ = build_train_valid_test_data_iterators(provider)
    config = get_model_config(model[0])
    config.grad_scale_func = optimizer.scale_loss
    config.finalize_model_grads_func = finalize_model_grads
    in_order = (train_data, model, optimizer, scheduler, config, get_forward_backward_func())
    return pretrain_gpt.forward_step, *in_order


# %% [markdown]
# In each rank three steps: one so that what is made on first use is made, one traced, and one with a
# *diary*, an observer that notes how large the gradient is at the ends of some links, and whether
# weights have moved.


# %%
def three_steps():
    everything = set_up()
    _, _, model, *_ = everything
    train_step(*everything)
    with trace() as recorded:
        losses, *_, grad_norm, _ = train_step(*everything)
    with tracing.observed_by(diary := Diary(model[0])):
        train_step(*everything)
    return {
        "where": where_it_runs(),
        "trace": recorded if torch.distributed.get_rank() == 0 else None,
        "losses": {name: float(loss) for name, loss in losses.items()},
        "norm": grad_norm,
        "diary": diary.lines,
    }


# %%
ranks = launch(three_steps, 4)
print(ranks[0]["where"])
recorded = ranks[0]["trace"]
for number, rank in enumerate(ranks):
    place = recorded.rank(number).coordinates
    print(f"rank {number}: stage {place['pp']}, copy {place['dp']}", rank["norm"], rank["losses"])

# %% [markdown]
# Only the last stage knows a loss; all ranks know one and the same norm.
#
# ## The call tree
#
# Of rank 2 (stage 1, copy 0), all that concerns microbatch 0, and the calls around it. Read it
# from the left: each function stands under the one that calls it, with its line in the source.

# %%
show_wide(recorded.tree(2, step=0, microbatch=0))

# %% [markdown]
# And of rank 0 the upper levels, from the last backward on:

# %%
lines = recorded.tree(0, step=0, depth=3).splitlines()
last_backward = max(i for i, line in enumerate(lines) if "backward_step" in line)
show_wide("\n".join(lines[:2] + ["   ..."] + lines[last_backward:]))

# %% [markdown]
# The same as a picture. Time runs to the right, each row is called by the row above it.

# %%
draw_calls(recorded, ranks=[0, 2])

# %% [markdown]
# ## Check the order

# %%
for rank in recorded.ranks:
    calls = rank.events
    names = [event.name for event in calls if event.parent == 0]
    # One schedule, one update. Then the ranks agree whether it was done, and on the norm; the last
    # stage also averages the loss over the copies.
    is_last = rank.coordinates["pp"] == rank.sizes["pp"] - 1
    assert names == ["forward-backward", "optimizer"] + ["all-reduce"] * (3 if is_last else 2)
    (schedule,) = (i for i, event in enumerate(calls) if event.name == "forward-backward")
    below = [event.name for event in calls if event.parent == schedule]
    assert below.count("forward-compute") == below.count("backward-compute") == 8 // 1 // 2
    assert below[-1] == "finalize-model-grads"  # after the last backward, before the optimizer
compare(forward_steps_per_rank=below.count("forward-compute"))
assert recorded.compare_with_plan(dp=0) == recorded.compare_with_plan(dp=1) == []

# %% [markdown]
# And what each link does to gradient and weights, on the two copies of stage 0:

# %%
print(f"{'':34}  gradient, rank 0    rank 1   weights moved by")
for (what, mine, moved), (_, other, _) in zip(ranks[0]["diary"], ranks[1]["diary"], strict=True):
    print(f"{what:34}  {mine:16.4f}  {other:8.4f}  {moved:15.4f}")

# %%
whats, norms, moved = zip(*ranks[0]["diary"], strict=True)
of_other_copy = [norm for _, norm, _ in ranks[1]["diary"]]
last = max(i for i, norm in enumerate(norms) if i > 1 and norm != of_other_copy[i])
compare(copies_differ_until=whats[last + 1].split()[0])
WORDS = {
    "loss-compute": "divide the loss",
    "bucket-launch": "sum over copies",
    "embedding-grads-all-reduce": "sum the embedding",
    "optimizer-clip-main-grad": "clip",
}
calls = [event.name for event in recorded.rank(2).events if event.name in WORDS]
compare(order=[WORDS[name] for name in dict.fromkeys(calls)])

# %%
assert whats == (
    "train-step begins",
    "forward-backward begins",
    *["backward-compute has ended"] * 4,
    "finalize-model-grads has ended",
    "optimizer has ended",
)
assert norms[0] > 0 and norms[1] == 0  # what the last step left; then zero
assert all(norms[i] != of_other_copy[i] for i in range(2, 6))  # each copy's own samples
assert norms[6] == of_other_copy[6]  # finalize: now both copies have the mean
assert not any(moved[:7]) and moved[7] > 0  # weights move in the optimizer, nowhere else

# %% [markdown]
# The jump at `finalize` is the tied embedding: its other half comes from the last stage, where
# the same weight makes the logits. The last line is smaller, for clipping writes into the buffer.
#
# So the order is: zero; divide each microbatch's loss while running all of them; sum over copies;
# sum the tied embedding; clip; update.
#
# ## By what is the gradient divided?
#
# The loss function may return two things or three, and `calculate_per_token_loss` may be on or
# off. The documentation says this, with M microbatches per copy and d copies:
#
# | the loss function returns | flag | gradient |
# |---|---|---|
# | (sum, n, report) | off | mean over microbatches and copies of the mean per token |
# | (sum, n, report) | on | mean over all tokens of the global batch |
# | (mean, report) | off | mean over microbatches and copies of that mean |
# | (mean, report) | on | d times the row above |
#
# Do not believe it; measure it. The gradient is a weighted sum of the tokens' gradients. So take
# a batch whose microbatches have very different numbers of tokens, compute each microbatch's own
# gradient in one process, and find out which weights make up the gradient that the real step
# gives.

# %%
COPIES, M = 2, 3
# Two sequences of up to 16 tokens per microbatch.
NUM_TOKENS = [2 * 16, 2 * 2, 2 * 9, 2 * 4, 2 * 12, 2 * 1]
DOUBLE = {"num_layers": 2, "params_dtype": torch.float64}


def uneven_data(gpt, num):
    """The microbatches of this copy, with NUM_TOKENS tokens unmasked in those of the global batch."""
    data = gpt.microbatches(num)
    for i, batch in enumerate(data):
        of_all = i * gpt.groups.dp.size() + gpt.groups.dp.rank()
        batch["mask"].zero_()
        batch["mask"][:, : NUM_TOKENS[of_all] // 2] = 1.0
    return data


# %%
def loss_of_three(mask, losses):
    total, num_tokens = (losses * mask).sum(), mask.sum().int()
    return total, num_tokens, {"loss": total.detach() / num_tokens}


def loss_of_two(mask, losses):
    mean = (losses * mask).sum() / mask.sum()
    return mean, {"loss": mean.detach()}


# %%
def flat(gradients):
    return torch.cat([gradient.flatten() for gradient in gradients.values()])


def each_alone():
    """In one process: the gradient of every microbatch's summed loss."""
    gpt = TinyGPT(**DOUBLE)
    found = []
    for batch in uneven_data(gpt, COPIES * M):
        gpt.chunks[0].zero_grad_buffer()
        output, loss_func = gpt.forward_step(iter([batch]), gpt.chunks[0])
        loss_func(output)[0].backward()
        found.append(flat(gpt.gradients()))
    return torch.stack(found)


# %%
ROWS = [(loss_of_three, False), (loss_of_three, True), (loss_of_two, False), (loss_of_two, True)]


def each_row():
    """On two copies: the gradient of a real step, for every row of the table."""
    found = []
    for loss_func, per_token in ROWS:
        gpt = TinyGPT(calculate_per_token_loss=per_token, loss_func=loss_func, **DOUBLE)
        gpt.step(M, data=uneven_data(gpt, M))
        found.append(flat(gpt.gradients()))
    return found


# %%
(alone,) = launch(each_alone, 1)
of_rows = launch(each_row, COPIES)[0]

# %%
weights = []
for gradient in of_rows:
    # The weights w for which w @ alone comes closest to the gradient.
    found = torch.linalg.lstsq(alone.T, gradient.unsqueeze(1)).solution.squeeze(1)
    # And it fits exactly.
    torch.testing.assert_close(found @ alone, gradient, rtol=1e-8, atol=1e-12)
    weights.append(found)

# %%
all_tokens = sum(NUM_TOKENS)
names = [
    f"{len(loss_func(torch.ones(1), torch.ones(1)))} values, flag {'on' if per_token else 'off'}"
    for loss_func, per_token in ROWS
]
of_a_mean = {name: (all_tokens * w).tolist() for name, w in zip(names, weights, strict=True)}
draw_weights(of_a_mean, NUM_TOKENS)
compare(tokens_pull_equally=max(of_a_mean[names[0]]) / min(of_a_mean[names[0]]) < 1.01)

# %% [markdown]
# Orange is a plain mean over all tokens. Only one of the four combinations gives it.

# %%
tokens = torch.tensor(NUM_TOKENS, dtype=torch.float64)
mean_of_means = 1 / (M * COPIES * tokens)
mean_of_tokens = torch.full_like(tokens, 1 / all_tokens)
expected = [mean_of_means, mean_of_tokens, mean_of_means, COPIES * mean_of_means]
for name, found, wanted in zip(names, weights, expected, strict=True):
    torch.testing.assert_close(found, wanted, rtol=1e-6, atol=1e-12)
    ratio, together = float(found.max() / found.min()), float(found @ tokens)
    print(
        f"{name}: the largest weight is {ratio:4.1f} times the smallest; all add up to {together:.2f}"
    )

# %% [markdown]
# In the last row nothing divides by the number of copies: with the flag on, gradients are summed
# over them and later divided by the number of tokens, but a loss function with two values reports
# none. In an RL trainer the auxiliary losses of experts, which only that last division would have made
# small, then had norms in the thousands ([verl #6609](https://github.com/verl-project/verl/issues/6609)).
#
# The table leaves context parallelism out. There c ranks share each sequence. If a rank takes the
# mean over its own tokens only, the gradient is c times too large. Where does that c stand? The
# function can be asked directly:


# %%
def backward_starts_from(context_ranks):
    loss, _ = forward_step_calc_loss(
        model=None,
        output_tensor=torch.tensor(6.0),
        loss_func=lambda mean: (mean, {"loss": mean}),
        config=ModelParallelConfig(),
        vp_stage=None,
        collect_non_loss_data=False,
        num_microbatches=M,
        forward_data_store=[],
        cp_group_size=context_ranks,
        is_last_stage=True,
    )
    return float(loss)


# %%
for context_ranks in (1, 4):
    loss = backward_starts_from(context_ranks)
    print(f"a mean of 6 with {context_ranks} context-parallel ranks: backward starts from {loss}")
    assert loss == 6.0 * context_ranks / M

# %% [markdown]
# Later the gradient is divided by d · c; the factor c takes the c out again. That is right for a
# mean over *all* ranks' tokens, where each rank has only a term of the sum.
#
# ## Change it
#
# * Give all microbatches the same number of tokens. Predict the four panels.
# * In `FLAGS`, add `--overlap-grad-reduce` and set `config.no_sync_func = model[0].no_sync`
#   beside the other hooks. Which call now starts the sum over copies, and what do the diary's
#   norms say after the last backward?
# * Add `--fp16`. After a backward the diary's norms are `nan`; no weight moves. Which call of the
#   tree decides that? Try `--initial-loss-scale 1024` as well.
#
# ## Where next
#
# * [train_step](../docs/tour/train-step.md) and [the loss
#   contract](../docs/tour/loss-contract.md) in the tour; [a whole step,
#   replayed](../docs/tour/whole-step.md).
# * Exercises [ex08](../minimegatron/exercises/catalog/ex08_loss_contract/page.md) and
#   [ex13](../minimegatron/exercises/catalog/ex13_gradient_norm/page.md).
