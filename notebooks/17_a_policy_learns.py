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
# # 17 A policy learns
#
# **The question.** A model shall learn to sort two digits. Nobody shows it a sorted pair. It answers,
# and a function says how good the answer was. Which calls does this need that pretraining does not
# have? And when the reward is known: what does the training step of Megatron make of it?
#
# Here is one step of GRPO on two live ranks, a pipeline of two stages, with the functions of
# `train_rl`. We look at each part: answers, log-probabilities, advantages, update. Then the model
# learns.

# %%
import torch

from minimegatron.notebook import compare, live_ranks, predict

ranks = live_ranks(2)

# %% [markdown]
# ## The run, without its loop
#
# The flags are those of `python -m minimegatron.train_rl`. A prompt is two digits below 4 and the
# token 4, which means "="; an answer is at most three tokens, and token 5 ends it. A rollout has 16
# prompts, and 8 answers to each.

# %%
# %%px
import contextlib
import io
import sys
from functools import partial

from minimegatron import train_rl
from minimegatron.core import parallel_state
from minimegatron.core.distributed import finalize_model_grads
from minimegatron.core.enums import ModelType
from minimegatron.core.inference.communication_utils import broadcast_from_last_pipeline_stage
from minimegatron.core.utils import get_model_config
from minimegatron.rl import grpo_data, rollout, tasks
from minimegatron.core.rerun_state_machine import RerunDataIterator
from minimegatron.rl.grpo_data import GrpoData, judge
from minimegatron.rl.rl_arguments import add_rl_arguments
from minimegatron.rl.rl_utils import calculate_grpo_advantages, logprobs_forward_step
from minimegatron.rl.rollout import generate_answers
from minimegatron.training.global_vars import destroy_global_vars
from minimegatron.training.initialize import initialize_megatron
from minimegatron.training.model_setup import setup_model_and_optimizer
from minimegatron.training.pipeline_schedule import schedule_of_run
from minimegatron.training.training import train_step

P, G, S, ROWS = 16, 8, 6, 128  # prompts, answers to each, tokens of a row, rows
tasks.TASKS["two_digits"] = partial(tasks.sort_digits, num_digits=2, base=4)
FLAGS = f"""
    --num-layers 2 --hidden-size 64 --num-attention-heads 4 --pipeline-model-parallel-size 2
    --seq-length {S} --max-position-embeddings {S} --micro-batch-size 32 --global-batch-size {ROWS}
    --train-iters 200 --lr 3e-3 --lr-decay-style constant --weight-decay 0
    --vocab-size 5 --rl-task two_digits --grpo-prompts-per-step {P} --grpo-group-size {G}
    --grpo-iterations 2 --grpo-clamp-eps-lower 0.2 --grpo-clamp-eps-upper 0.2"""
sys.argv = ["train_rl", *FLAGS.split()]

# %% [markdown]
# Process groups, a new model, and what `train` connects before its first step. `GrpoData` will make
# rollouts by itself, at the end of this notebook; until then we make one by hand.


# %%
# %%px
def build(**changed):
    """What `pretrain` does before it trains. `changed`: arguments that differ from the flags."""
    destroy_global_vars()
    parallel_state.destroy_model_parallel()
    with contextlib.redirect_stdout(io.StringIO()):
        initialize_megatron(add_rl_arguments, train_rl.DEFAULTS | changed)
        rollouts = GrpoData()
        provider = partial(train_rl.model_provider, rollouts)
        built = setup_model_and_optimizer(provider, ModelType.encoder_or_decoder)
    config, optimizer = get_model_config(built[0][0]), built[1]
    config.grad_scale_func = optimizer.scale_loss
    config.finalize_model_grads_func = finalize_model_grads
    return rollouts, config, *built


# %%
# %%px
rollouts, config, model, optimizer, scheduler = build()
schedule, task = schedule_of_run(), tasks.load_task("two_digits")

# %% [markdown]
# ## Predict
#
# 1. Before the first update there is a rollout, and scores of it: the log-probabilities by this
#    model, and those by the model as it was when training began. How often is the schedule called
#    for all that? An answer has at most three tokens.
# 2. On which of the two ranks does the schedule return the scores?
# 3. A rollout is learned from twice. What is the ratio of new to old probability of a token in the
#    first update, on the average?
# 4. In the second update: is any token's ratio outside of its bounds, 0.8 and 1.2?
# 5. Somebody divides the loss by the tokens of the whole batch and returns two values, (loss,
#    report). With M = 4 microbatches, how many times as large is the gradient as with M = 1?

# %%
# Write your answers in place of None. Running this cell locks them in.
predict(
    calls_before_first_update=None,
    have_scores=None,  # a list of ranks
    ratio_in_first_update=None,
    clipped_in_second_update=None,  # True or False
    gradient_with_four_microbatches=None,  # 1, 4, 1/4, ...
)

# %% [markdown]
# ## A rollout
#
# Which random number draws which token is decided for all rows at once, from a seed; so every layout
# draws the same. Both ranks call `generate_answers`.

# %%
# %%px
generator = torch.Generator().manual_seed(1)
chosen = torch.randint(len(task.prompts), (P,), generator=generator)
prompts = [task.prompts[i] for i in chosen.tolist() for _ in range(G)]
uniforms = torch.rand(ROWS, task.answer_length, generator=generator, dtype=torch.float64)
with torch.no_grad():
    answers = generate_answers(model, prompts, task, uniforms)

# %%
# %%px 0
for row in range(G):
    drawn = answers.logprobs[row][answers.mask[row, 1:]].tolist()
    print(prompts[row], "->", f"{answers.answer(row)!s:10}", [f"{x:.2f}" for x in drawn])

# %% [markdown]
# The numbers at the right are log-probabilities with which the tokens were drawn. A fresh model hardly
# prefers any of six tokens: ln(1/6) is −1.79. Some answers ended early, with token 5.
#
# The logits are on the last stage, and the first stage must read the drawn token next. So what was
# drawn goes from the last stage to all: both ranks have the same answers.

# %%
tokens, logprobs = ranks["answers.tokens.cpu()"], ranks["answers.logprobs.cpu()"]
assert torch.equal(tokens[0], tokens[1]) and torch.equal(logprobs[0], logprobs[1])
lengths = ranks["answers.mask.sum(1).tolist()"][0]
print("answers with 1, 2, 3 tokens:", [lengths.count(n) for n in (1, 2, 3)])

# %% [markdown]
# ## Scores: the schedule, forward only
#
# Now the finished rows go through the model once. The forward step returns no loss function at all,
# `(log-probabilities, None)`; then the schedule returns what the last stage has computed.


# %%
# %%px
def score():
    tokens = answers.tokens
    positions = torch.arange(S, device=device).expand_as(tokens)
    batches = zip(tokens.split(32), positions.split(32), strict=True)
    return schedule(
        forward_step_func=logprobs_forward_step,
        data_iterator=[iter(list(batches))],
        model=model,
        num_microbatches=4,
        seq_length=S,
        micro_batch_size=32,
        forward_only=True,
    )


# %%
# %%px
found = score()
print(f"{len(found)} tensors", *(list(each.shape) for each in found[:1]))

# %%
compare(have_scores=[rank for rank, number in enumerate(ranks["len(found)"]) if number])

# %% [markdown]
# A row of 6 tokens has 5 log-probabilities, for nobody predicted the first token. The other rank needs
# them as well: each rank reads its own microbatches. One more broadcast from the last stage:

# %%
# %%px
whole = torch.cat(found) if found else None
old = broadcast_from_last_pipeline_stage((ROWS, S - 1), torch.float32, whole)
mask = answers.mask.float()
gap = float(((old - answers.logprobs).abs() * mask[:, 1:]).max())

# %%
print(f"drawn with, and scored: {ranks['gap'][0]:.1e} apart at most")
assert max(ranks["gap"]) < 1e-5

# %% [markdown]
# The same, but for rounding: while an answer was drawn, the rest of its row was still empty, and a
# token looks backwards only. If these two differ, something is wrong: another temperature, dropout, a
# token that looks ahead, a mask that is shifted by one.
#
# ## Advantages
#
# The task is plain Python. A token in its place is worth a part of one half, all of them together
# another half. An answer is then compared with the other answers to its prompt.

# %%
# %%px
rewards, is_right = judge(task, answers, torch.arange(ROWS), ROWS)
groups = rewards.view(P, G)
advantages = calculate_grpo_advantages(groups.tolist(), [[1] * G] * P)
advantages = torch.tensor(advantages, dtype=torch.float32, device=device)

# %%
# %%px 0
for row in range(G):
    words = f"reward {rewards[row]:.2f}, advantage {advantages[row]:+.2f}"
    print(prompts[row], "->", f"{answers.answer(row)!s:10}", words)
same = int((groups == groups[:, :1]).all(1).sum())
print(f"{same} of {P} groups have equal rewards, so all their advantages are 0")

# %%
by_group = ranks["advantages.view(P, G).cpu()"][0]
assert by_group.mean(1).abs().max() < 1e-6  # better than the others, so on the average 0
assert torch.equal(ranks["advantages.cpu()"][0], ranks["advantages.cpu()"][1])

# %% [markdown]
# ## One update, and another
#
# What the program's `forward_step` reads for a microbatch: tokens, advantages, old log-probabilities,
# mask, positions, log-probabilities of the first model, and those of drawing. The first model is
# still this one.


# %%
# %%px
def microbatches(size):
    positions = torch.arange(S, device=device).expand_as(answers.tokens)
    drawn = answers.logprobs.to(old.dtype)
    fields = (answers.tokens, advantages, old, mask, positions, old, drawn)
    return list(zip(*(field.split(size) for field in fields), strict=True))


def update():
    rows = RerunDataIterator(microbatches(32))
    step = (train_rl.forward_step, rows, model, optimizer, scheduler, config, schedule)
    losses, *_, norm, _ = train_step(*step)
    return {name: float(loss) for name, loss in losses.items()} | {"gradient norm": norm}


# %% [markdown]
# `train_step` is the one of pretraining. It knows nothing of rewards.

# %%
# %%px
first = update()
second = update()

# %%
# %%px
print("reported:", ", ".join(first))

# %%
first, second = (dict(ranks[name][-1]) for name in ("first", "second"))
for name in first:
    print(f"{name:26}{first[name]:10.5f}{second[name]:10.5f}")

# %%
ABOVE, BELOW = "rl/truncated_from_above", "rl/truncated_from_below"
clipped = [each[ABOVE] + each[BELOW] for each in (first, second)]
compare(
    ratio_in_first_update=first["rl/pi_over_pi_old"],
    clipped_in_second_update=clipped[1] > 0,
)

# %% [markdown]
# The loss exists on the last stage alone. In the first update the policy is still the one that was
# scored, through the same microbatches: every ratio is exactly 1, and nothing is clipped. If yours is
# not 1 here, old and new log-probabilities do not come from the same computation. The loss is then
# minus the mean advantage of a token, a number that says little. The gradient is what counts.
#
# In the second update the model has moved. Where a token has gone past its bound in the wanted
# direction, its product is flat: the token has the gradient of the KL term alone.

# %%
is_exact = ranks["device.type"][0] == "cpu"  # a GPU may choose other kernels with gradients
assert abs(first["rl/pi_over_pi_old"] - 1) <= (0 if is_exact else 1e-5) and clipped[0] == 0
assert abs(second["rl/pi_over_pi_old"] - 1) > 1e-3 and 0 < clipped[1] < 1
weighed = ranks["float((advantages.unsqueeze(1) * mask[:, 1:]).sum() / mask[:, 1:].sum())"][0]
assert abs(first["lm loss"] + weighed) < 1e-5
assert "lm loss" not in ranks["first"][0]

# %% [markdown]
# ## Who divides by what
#
# A microbatch had 32 rows, M = 4. It may have all 128, M = 1, or 8, M = 16. How many rows fit into
# memory at once must not change what is learned. Four ways to hand over the same loss of each token,
# with N tokens in the whole batch:


# %%
# %%px
N = float(mask[:, 1:].sum())
WAYS = {  # per-token flag, and what is returned
    "sum and number, flag on": (True, lambda M, loss, n, report: (loss, n, report)),
    "sum and number, flag off": (False, lambda M, loss, n, report: (loss, n, report)),
    "sum / N": (False, lambda M, loss, n, report: (loss / N, report)),
    "sum / N * M": (False, lambda M, loss, n, report: (loss / N * M, report)),
}


def forward_step(hand_over, data_iterator, model):
    output, loss_func = train_rl.forward_step(data_iterator, model)
    return output, lambda tensor: hand_over(*loss_func(tensor))


# %%
# %%px
def gradient_norm(way, size):
    """On a new model, with the weights that made the rollout."""
    per_token, returned = WAYS[way]
    _, _, model, optimizer, _ = build(calculate_per_token_loss=per_token)
    batches = microbatches(size)
    schedule(
        forward_step_func=partial(forward_step, partial(returned, len(batches))),
        data_iterator=iter(batches),
        model=model,
        num_microbatches=len(batches),
        seq_length=S,
        micro_batch_size=size,
        forward_only=False,
    )
    optimizer.prepare_grads()
    return float(optimizer.get_grad_norm())


# %%
# %%px
norms = {(way, ROWS // size): gradient_norm(way, size) for way in WAYS for size in (ROWS, 32, 8)}

# %%
norms = ranks["norms"][0]
print(f"{'':26} M = 1     M = 4     M = 16")
for way in ranks["list(WAYS)"][0]:
    print(f"{way:26}", *(f"{norms[way, M]:.5f}  " for M in (1, 4, 16)))
compare(gradient_with_four_microbatches=norms["sum / N", 4] / norms["sum / N", 1])

# %% [markdown]
# The schedule divides by M what it is given in two values. Who has divided by all tokens must undo this
# division: that is ROLL's factor (with d copies of the model it is M · d). With the flag off, three
# values give a mean of the microbatches' means; the norm differs a little, and it is another
# objective. Gradients in RL are clipped by their norm, and Adam does not care for a factor: a wrong
# divisor trains all the same, only otherwise.

# %%
right = norms["sum and number, flag on", 1]
for way in ("sum and number, flag on", "sum / N * M"):
    assert all(abs(norms[way, M] / right - 1) < 1e-4 for M in (1, 4, 16)), way
assert abs(norms["sum / N", 4] / right - 1 / 4) < 1e-4
assert abs(norms["sum and number, flag off", 16] / right - 1) > 2e-3

# %% [markdown]
# ## The whole run
#
# `train` asks `GrpoData` for its microbatches before each step. It makes rollout, scores and
# advantages, as we did by hand; each rollout lasts for two updates. We note with what the schedule is
# called.

# %%
# %%px
rollouts, config, model, optimizer, scheduler = build()
calls = []


def noted():
    def call(**given):
        name = getattr(given["forward_step_func"], "__name__", "?")
        calls.append((name, given.get("forward_only", False)))
        return schedule_of_run()(**given)

    return call


rollout.schedule_of_run = grpo_data.schedule_of_run = noted


# %%
# %%px
def train(num_updates):
    exact = []
    for iteration in range(num_updates):
        batches = rollouts(model, optimizer, iteration)
        train_step(train_rl.forward_step, batches, model, optimizer, scheduler, config, noted())
        exact.append(float(rollouts.figures[2]))
    return exact


exact = train(100)

# %%
calls, exact = ranks["calls"][0], ranks["exact"][0]
for name, forward_only in calls[:7]:
    print(f"{name:24} forward_only={forward_only}")
compare(calls_before_first_update=[forward_only for _, forward_only in calls].index(False))

# %% [markdown]
# Three calls draw three tokens, one scores by this model, one by the model of the beginning. Then come
# two updates. Seven calls of one function, with three forward steps.
#
# Share of right answers, in every fifth rollout:

# %%
for update in range(0, 100, 10):
    print(f"update {update:3} {exact[update]:5.2f} {'#' * int(50 * exact[update])}")

# %% [markdown]
# And the control: the same, but the rewards are dealt out by lot. What learns from that is no learner.

# %%
# %%px
rollouts, config, model, optimizer, scheduler = build(rl_shuffle_rewards=True)
control = train(100)

# %%
learned, shuffled = (sum(values[-20:]) / 20 for values in (exact, ranks["control"][0]))
print(
    f"right answers over the last 10 rollouts: {learned:.2f}; with shuffled rewards {shuffled:.2f}"
)
assert learned > 0.8 and shuffled < 0.3

# %% [markdown]
# ## Change it
#
# The ranks are still there, with all their variables.
#
# * Build with `build(grpo_iterations=6)`, and train. How does the share of clipped tokens grow from one
#   update to the next? Does it learn with fewer rollouts?
# * Build with `grpo_kl_beta=0.5`. What does the policy give up, and what does it keep?
# * Reward an answer's *length* instead: `tasks.TASKS` gets a function that returns a `Task` with
#   another `reward`. After how many updates does the model never end an answer?
# * Build with `rl_default_temperature=2.0` between the rollout and `score()`. Which assertion fails?
# * Leave the mask out of the loss: give `torch.ones_like(mask)` in `microbatches`. What is the model
#   then taught about its prompts?

# %%
ranks.stop()

# %% [markdown]
# ## Where next
#
# * [Reinforcement learning through the same function](../docs/tour/reinforcement-learning.md) in the
#   tour, and [the loss contract](../docs/tour/loss-contract.md).
# * [Notebook 12](12_your_own_forward_step.ipynb): the same pattern without `train_rl`.
# * The program to copy from: `minimegatron/train_rl.py`, and `minimegatron/rl/tasks.py` for a reward of
#   your own.
