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
# # 15 Two tokens
#
# **The question.** A model predicts the next token at each position. Can the same step also train it
# on the token after the next, and what does that change in the gradients?
#
# Beside the loss of the next token there is a second loss, of the token after the next, with a small
# factor f = 0.1. One more layer, after the model's own layers, makes what the second loss is computed
# from. This is called multi-token prediction (MTP).
#
# First by hand, then on ranks. Everything is in float64, so that "the same" can be checked.

# %%
# %matplotlib inline
import torch
import torch.distributed as dist
import torch.nn.functional as F

from minimegatron import launch, trace
from minimegatron.core.transformer.module_state import named_global_parameters
from minimegatron.core.utils import unwrap_model
from minimegatron.notebook import compare, predict
from minimegatron.notebook.drawing import StageOfModel, draw_models
from minimegatron.training.tiny_gpt import TinyGPT

torch.set_default_dtype(torch.float64)
M = 2  # microbatches in a step

# %% [markdown]
# ## Predict
#
# 1. A row has 8 labels, and its mask is 0 1 1 1 0 1 1 1: at 6 positions the label counts. For the
#    second loss, each position takes label and mask of the next position. At how many positions does
#    the label count now?
# 2. The step reports the loss of the next token. With MTP, for the same weights and data, is the
#    reported number another one?
# 3. A step has M = 2 microbatches. The schedule divides each microbatch's loss by 2, but it sees the
#    first loss only. If nobody divides the second one, how many times too large is its gradient?
# 4. Three stages: the first has the embedding and one layer, the second one layer and the MTP
#    layer, the third the loss. Input embedding and output layer share one weight. Which stages hold
#    a copy of this weight?

# %%
# Write your answers in place of None. Running this cell locks them in.
predict(
    count_for_second_loss=None,
    reported_loss_changes=None,  # True or False
    times_too_large=None,
    stages_with_embedding=None,  # such as [0, 2]
)

# %% [markdown]
# ## Labels and mask, rolled
#
# Position i has seen tokens 0 to i. Its label is token i + 1. For the second loss it must predict
# token i + 2, which is the label of position i + 1. So all labels move one place to the left, and a
# 0 comes in at the end. The mask moves with them: it says whether a *label* counts.


# %%
def roll(row):
    """One place to the left; the last becomes 0."""
    return torch.cat([row[..., 1:], torch.zeros_like(row[..., :1])], dim=-1)


# %%
text = torch.tensor([3, 1, 4, 1, 5, 9, 2, 6, 5])
tokens, labels = text[:-1], text[1:]
mask = torch.tensor([0.0, 1, 1, 1, 0, 1, 1, 1])
rows = {"position": torch.arange(8), "token": tokens, "label": labels, "mask": mask}
rows |= {"label of the second loss": roll(labels), "its mask": roll(mask)}
for name, row in rows.items():
    print(f"{name:25}", *row.int().tolist())

# %%
n0, n1 = int(mask.sum()), int(roll(mask).sum())
print("labels that count:", n0, "and", n1)
compare(count_for_second_loss=n1)

# %% [markdown]
# The 0 at the front went out, and a 0 came in at the end. Often n₁ is one less than n₀, but here it
# is not: so both are counted. The last position has no label now. The 0 that came in would be a
# valid label, and only the mask keeps it out.
#
# ## A model by hand
#
# A stand-in for a transformer: each position mixes itself with what is before it. The second loss
# comes from `h1`, and `h1` comes from two things: what position i knows (`h0`), and the embedding of
# token i + 1. That does not give the answer away: token i + 2 is what must be predicted.

# %%
V, H = 10, 6
torch.manual_seed(5)
EMBED, DECODER, JOIN, LAYER = (
    (0.5 * torch.randn(shape)).requires_grad_() for shape in [(V, H), (H, H), (2 * H, H), (H, H)]
)
WEIGHTS = {"embedding": EMBED, "decoder": DECODER, "joining": JOIN, "MTP layer": LAYER}


# %%
def norm(x):
    return F.layer_norm(x, x.shape[-1:])


def layer(x, weight):
    """Stands for a transformer layer: position i sees the positions 0 to i."""
    seen = x.cumsum(dim=0) / torch.arange(1, len(x) + 1).unsqueeze(1)
    return x + torch.tanh(seen @ weight)


# %%
def hidden_states(tokens):
    """What the next token, and the one after it, are predicted from; [s, h] each."""
    h0 = norm(layer(EMBED[tokens], DECODER))
    ahead = EMBED[roll(tokens)]
    joined = torch.cat([norm(ahead), norm(h0)], dim=-1) @ JOIN
    return h0, norm(layer(joined, LAYER))


def loss_of(hidden, labels):
    """Of each position, [s]. The output layer is the embedding, for both losses."""
    return F.cross_entropy(hidden @ EMBED.T, labels, reduction="none")


# %% [markdown]
# ## The two losses of a step
#
# Two microbatches, of one row each; more labels count in the first. There are two ways to weigh
# tokens. Without the flag `calculate_per_token_loss` every *microbatch* weighs the same: each loss is
# a mean, and the step has the mean of the means. With the flag the first loss's *tokens* weigh the
# same: there are sums, and all is divided once by N, the tokens of the whole step.

# %%
other = torch.tensor([2, 7, 1, 8, 2, 8, 1, 8, 2])
other_mask = torch.tensor([1.0, 1, 1, 0, 0, 0, 0, 0])
BATCHES = [(tokens, labels, mask), (other[:-1], other[1:], other_mask)]
N = sum(mask.sum() for _, _, mask in BATCHES)
FACTOR, DEPTHS = 0.1, 1  # mtp_loss_scaling_factor, mtp_num_layers


# %%
def weights_of_tokens(mask, per_token, N):
    """What one token of this microbatch weighs in the step, for the first and second loss."""
    n0, n1 = mask.sum(), roll(mask).sum().clamp(min=1)
    f = FACTOR / DEPTHS
    return (1 / N, f * n0 / n1 / N) if per_token else (1 / n0 / M, f / n1 / M)


# %%
print("flag    microbatch   n0  n1   weight of a token: first loss, second loss")
for per_token in (False, True):
    for number, (_, _, own_mask) in enumerate(BATCHES):
        first, second = weights_of_tokens(own_mask, per_token, N)
        counts = f"{int(own_mask.sum()):2} {int(roll(own_mask).sum()):3}"
        print(f"{per_token!s:8}{number:10} {counts:>8} {first:30.4f} {second:11.5f}")

# %% [markdown]
# With the flag, the second loss is multiplied by n₀/n₁. Then the n₁ tokens together weigh f times as
# much as the n₀ tokens of the first loss, in each microbatch. (The `clamp` is for a microbatch with
# nothing left to predict: 0/0 would be NaN.)
#
# The step as one sum, and its gradients:


# %%
def sum_of_step(per_token):
    total = 0
    for tokens, labels, mask in BATCHES:
        h0, h1 = hidden_states(tokens)
        first, second = weights_of_tokens(mask, per_token, N)
        total = total + first * (mask * loss_of(h0, labels)).sum()
        total = total + second * (roll(mask) * loss_of(h1, roll(labels))).sum()
    return total


# %%
wanted = {flag: torch.autograd.grad(sum_of_step(flag), WEIGHTS.values()) for flag in (False, True)}

# %% [markdown]
# ## The autoscaler
#
# A schedule does not work with such a sum. It gets one loss from the model, the first, scales it and
# calls backward. The second loss must come along without being part of it. The trick: an operation
# that gives back its first input unchanged. In backward it hands the gradient on, and it gives the
# *losses* a gradient too, as if they had been added to the total.


# %%
class Attach(torch.autograd.Function):
    """`hidden`, unchanged. In backward each of `losses` gets the gradient `scale`."""

    scale = 1.0

    @staticmethod
    def forward(ctx, hidden, losses):
        ctx.save_for_backward(losses)
        return hidden.view_as(hidden)

    @staticmethod
    def backward(ctx, grad):
        (losses,) = ctx.saved_tensors
        return grad, Attach.scale * torch.ones_like(losses)


# %%
def step_with_autoscaler(per_token, scale):
    """One backward per microbatch. Returns the reported losses and the gradients."""
    Attach.scale = scale
    for weight in WEIGHTS.values():
        weight.grad = None
    reported = []
    for tokens, labels, mask in BATCHES:
        h0, h1 = hidden_states(tokens)
        n0, n1 = mask.sum(), roll(mask).sum().clamp(min=1)
        second = FACTOR / DEPTHS * roll(mask) * loss_of(h1, roll(labels))
        h0 = Attach.apply(h0, second * (n0 if per_token else 1) / n1)
        total = (mask * loss_of(h0, labels)).sum()  # the first loss alone
        (total if per_token else total / n0 / M).backward()
        reported.append((total / n0).item())
    return reported, [weight.grad / (N if per_token else 1) for weight in WEIGHTS.values()]


# %%
for per_token, scale in ((False, 1 / M), (True, 1.0)):
    reported, found = step_with_autoscaler(per_token, scale)
    for gradient, of_sum in zip(found, wanted[per_token], strict=True):
        torch.testing.assert_close(gradient, of_sum, rtol=1e-12, atol=1e-12)
print("autoscaler and sum: the same gradients, with the flag and without")

# %%
with torch.no_grad():
    alone = [
        ((mask * loss_of(hidden_states(tokens)[0], labels)).sum() / mask.sum()).item()
        for tokens, labels, mask in BATCHES
    ]
print("reported with MTP:", reported, " without:", alone)
compare(reported_loss_changes=reported != alone)
assert reported == alone

# %% [markdown]
# The forward is the identity, so the reported loss is the same to the last bit. The gradient is not:
# the embedding and the decoder now hear from the second loss too.
#
# The scale is 1/M without the flag, because the schedule divides the first loss by M. It is 1 with
# the flag, where both are divided by N at the end. In the package the function is called
# `MTPLossAutoScaler`, and the schedule sets its scale after each forward. What if nobody does?

# %%
_, unscaled = step_with_autoscaler(per_token=False, scale=1.0)
_, without = step_with_autoscaler(per_token=False, scale=0.0)
for name, much, none, right in zip(WEIGHTS, unscaled, without, wanted[False], strict=True):
    part, right_part = much - none, right - none  # what the second loss adds
    ratio = part.norm() / right_part.norm()
    print(f"{name:10} second loss adds {right_part.norm():.4f}, unscaled {part.norm():.4f}")
compare(times_too_large=round(ratio.item(), 6))

# %% [markdown]
# This is easy to overlook: training still works, with another factor f, which changes when the
# number of microbatches changes.
#
# ## The real model
#
# A GPT of two layers with an MTP layer after them, on one rank. What does the MTP layer add to the
# parameters, and does the package weigh the losses as we did?
#
# `explicit_sum` takes the model apart: the decoder, the block of MTP layers, and the output layer,
# which is the embedding. The block returns one tensor, h₀ followed by h₁.

# %%
MTP = {
    "num_layers": 2,
    "mtp_num_layers": DEPTHS,
    "mtp_loss_scaling_factor": FACTOR,
    "params_dtype": torch.float64,
    "position_embedding_type": "none",
}


# %%
def explicit_sum(gpt, per_token):
    """The step's sum, from the parts of the model on this rank."""
    model = unwrap_model(gpt.chunks[0])
    data, total = gpt.microbatches(M), 0
    N = sum(batch["mask"].sum() for batch in data)
    for batch in data:
        labels, mask = batch["labels"], batch["mask"]
        weights = weights_of_tokens(mask, per_token, N)
        h0 = model.decoder(model.embedding(batch["tokens"], None), None)
        hidden = model.mtp(batch["tokens"], None, h0, None, embedding=model.embedding)
        for h, weight in zip(hidden.chunk(2), weights, strict=True):
            logits = h @ model.embedding.word_embeddings.weight.T
            losses = F.cross_entropy(logits.permute(1, 2, 0), labels, reduction="none")
            total = total + weight * (mask * losses).sum()
            labels, mask = roll(labels), roll(mask)
    return total


# %%
def real_step(per_token):
    gpt = TinyGPT(calculate_per_token_loss=per_token, **MTP)
    gpt.step(M)
    gradients = gpt.gradients()
    names, params = zip(*named_global_parameters(unwrap_model(gpt.chunks[0])), strict=True)
    wanted = torch.autograd.grad(explicit_sum(gpt, per_token), params)
    on_cpu = [gradient.cpu() for gradient in wanted]  # as `gradients` are
    return {"gradients": gradients, "of the sum": dict(zip(names, on_cpu, strict=True))}


# %%
def with_and_without_flag():
    return {per_token: real_step(per_token) for per_token in (False, True)}


# %%
(alone,) = launch(with_and_without_flag, 1)
for per_token, found in alone.items():
    torch.testing.assert_close(found["gradients"], found["of the sum"], rtol=1e-10, atol=1e-10)
    print(f"flag {per_token}: {len(found['gradients'])} gradients are those of the explicit sum")
for name, gradient in alone[False]["gradients"].items():
    if name.startswith("mtp") and "transformer_layer" not in name:
        print(f"{name:35} {list(gradient.shape)}")

# %% [markdown]
# `enorm` and `hnorm` are the two norms, `eh_proj` is what we called joining; then come a whole
# transformer layer, which is not listed here, and a final norm.
#
# ## On stages
#
# A layout says which stage has what: E embedding, t transformer layer, m MTP layer, L loss; a bar
# ends a stage. The model on two stages, and on three. On three, the MTP layer is not on the stage of
# the loss:


# %%
def held_by(model):
    """The parts of a model on this rank: (name, what one layer has; its norms are left out)."""
    held = []
    for name, part in model.named_children():
        for layer in getattr(part, "layers", []):
            inside = [one for one, _ in layer.named_children() if not one.endswith("norm")]
            held.append((name, inside))
        if not hasattr(part, "layers"):
            held.append((name, []))
    return held


# %%
def step_on_stages(layout):
    stages = layout.count("|") + 1
    gpt = TinyGPT(pp=stages, pipeline_model_parallel_layout=layout, **MTP)
    gpt.step(M)
    gradients = gpt.gradients()
    with trace() as recorded:
        gpt.step(M)
    model = unwrap_model(gpt.chunks[0])
    params = model.named_parameters()
    return {
        "gradients": gradients,
        "held": held_by(model),
        "copy": [name for name, param in params if getattr(param, "shared_embedding", False)],
        "trace": recorded if dist.get_rank() == 0 else None,
    }


# %%
two, three = (launch(step_on_stages, p, way) for p, way in ((2, "Et|tmL"), (3, "Et|tm|L")))
for ranks in (two, three):
    for rank, found in enumerate(ranks):
        print(f"{len(ranks)} stages, rank {rank}: {len(found['gradients']):2} gradients,", end=" ")
        print("copy of the embedding:", *found["copy"])
        for name, gradient in found["gradients"].items():
            wanted = alone[False]["gradients"][name]
            torch.testing.assert_close(gradient, wanted, rtol=1e-10, atol=1e-10)
compare(stages_with_embedding=[rank for rank, found in enumerate(three) if found["copy"]])

# %% [markdown]
# All three. The first stage embeds the tokens; the MTP layer embeds the tokens that come next; the
# last stage needs the weight for both losses. On two stages the copy of stage 1 serves the MTP layer
# and the output layer.
#
# Each copy gets another part of the gradient. After the last microbatch the parts are summed over the
# stages that hold a copy, so that all copies stay the same. A stage that was left out of this sum
# would go its own way; the package refuses it.
#
# And what do stages send? The MTP layer hands on h₁ *and* h₀, for the first loss needs h₀:


# %%
def sent_by(ranks, rank):
    """The shapes of what a rank sends forwards."""
    events = ranks[0]["trace"].rank(rank).events
    return {tuple(event.attributes["shape"]) for event in events if event.name == "forward-send"}


(before_mtp,), (after_mtp,) = (sent_by(three, rank) for rank in range(2))
print(f"rank 0 sends to rank 1: {before_mtp}, [length, micro-batch, hidden]")
print(f"rank 1 sends to rank 2: {after_mtp}")
assert after_mtp[0] == 2 * before_mtp[0]

# %% [markdown]
# The same as a picture, made from what each rank holds and from what it sent:

# %%
draw_models(
    {
        f"layout {layout}": [
            StageOfModel(found["held"], sends=[str(list(s)) for s in sent_by(ranks, rank)])
            for rank, found in enumerate(ranks)
        ]
        for layout, ranks in (("Et|tmL", two), ("Et|tm|L", three))
    }
)

# %% [markdown]
# After the MTP layer the message is twice as long: h₀, then h₁. The order of the schedule is the one
# that you know; this message has another size.
#
# ## Change it
#
# * Take the labels of the second loss without a roll: `loss_of(h1, labels)`, also in the sum. Do the
#   assertions notice? What would such a model learn?
# * In `step_with_autoscaler`, write `Attach.apply(...)` without `h0 =`. Which weights get no gradient
#   at all, so that the last line fails? Would the reported loss be another one?
# * In a new cell, `MTP["mtp_num_layers"] = 2`, and `step_on_stages` with the layout `Et|tmm|L`. How
#   long are the messages after m now? What does the second MTP layer predict?
#
# ## Where next
#
# * [Predicting two tokens](../docs/tour/predicting-two-tokens.md) in the tour: the code.
# * [ex23](../minimegatron/exercises/catalog/ex23_predict_two_tokens/page.md): write the second loss.
# * [Notebook 16](16_one_step_four_models.ipynb) goes on: here the model had one layer more, there it is
#   another model.
# * [Notebook 19](19_a_ring_of_attention.ipynb) has another question about a sequence: what if it is
#   too long for one rank?
