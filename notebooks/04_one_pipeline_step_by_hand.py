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
# # 04 One pipeline step by hand
#
# **The question.** Autograd works within one process. How does a gradient get from the loss, on the
# last rank, to the embedding, on the first?
#
# Four live ranks hold one GPT in four stages. You carry one microbatch through them, action by action,
# with the three tools that the schedules themselves use, and stop in between to look:
#
# * `forward_step`: one microbatch through one stage;
# * `P2PCommunicator`: a tensor to the next stage, or a gradient to the previous one;
# * `backward_step`: one microbatch's gradients in one stage.

# %%
# %matplotlib inline
import torch

from minimegatron import launch
from minimegatron.notebook import compare, live_ranks, predict
from minimegatron.notebook.drawing import draw_snapshots
from minimegatron.training.tiny_gpt import TinyGPT

ranks = live_ranks(4)

# %%
# %%px
from minimegatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from minimegatron.core.pipeline_parallel.schedules import backward_step, forward_step
from minimegatron.training.tiny_gpt import TinyGPT

gpt = TinyGPT(pp=4, num_layers=4)
gpt.step(1)  # once as usual: what is made on first use, such as connections, is made now
gpt.chunks[0].zero_grad_buffer()

model, config, stage = gpt.chunks[0], gpt.config, gpt.groups.pp.rank()
p2p = P2PCommunicator(gpt.groups.pp, config)
is_first, is_last = stage == 0, stage == 3
SHAPE = (gpt.seq_length, gpt.micro_batch_size, config.hidden_size)
parts = sorted({name.split(".")[0] for name in gpt.gradients()})
torch.set_printoptions(precision=4)
print(f"stage {stage}: {len(gpt.gradients())} parameters, of {', '.join(parts)}")

# %% [markdown]
# ## Predict
#
# Every stage has one transformer layer. The first also has the embedding, the last the output layer
# and the loss.
#
# 1. What travels from stage to stage in the forward: how many tensors, of which shape?
# 2. After stage 3's backward: which ranks have gradients of parameters?
# 3. Stage 2 knows nothing of the loss. What exactly must it be told to go on?
# 4. The embedding's table is used twice, on the first and on the last stage (they are *tied*). When
#    all four backwards are done, is its gradient right?

# %%
# Write your answers in place of None. Running this cell locks them in.
predict(
    shape_of_message=None,  # [16, 2, ...]: 16 tokens, 2 sequences, and?
    have_gradients_after_stage_3=None,  # a list of ranks
    told_to_stage_2=None,  # "the loss", "gradient of its input" or "gradient of its output"
    embeddings_gradient_is_right=None,  # True or False
)

# %% [markdown]
# ## Forward, stage 0
#
# The first stage takes tokens. `forward_step` calls the user's function, which calls the model.

# %%
# %%px
data, reports = gpt.microbatches(1), []
input_tensor = output = output_grad = input_grad = None


def forward():
    """This stage's forward, from `input_tensor` to `output`."""
    global output
    one_microbatch, groups = 1, {"cp_group_size": 1, "is_last_stage": is_last}
    output, _ = forward_step(
        gpt.forward_step, iter(data), model, one_microbatch, input_tensor, reports, config, **groups
    )


def look():
    """What this rank has now, in numbers."""
    squares = sum(gradient.double().square().sum() for gradient in gpt.gradients().values())
    return {"holds activations": output is not None, "gradient norm": float(squares**0.5)}


# %%
snapshots = {"begin": ranks["look()"]}

# %%
# %%px 0
forward()
print("output", tuple(output.shape), output.dtype)
print("made by", output.grad_fn)
print("begins", output[0, 0, :4].detach())

# %% [markdown]
# [s, b, h]: 16 tokens, 2 sequences, 32 features. The output knows how it was made, and through that
# everything that backward will need. All of this is on rank 0 and stays there.
#
# ## The first message
#
# Two ranks take part: one sends, one receives. A message is numbers and nothing else. Predict: the
# tensor that rank 1 receives, does it have a `grad_fn`? Does it require a gradient?

# %%
predict(has_grad_fn=None, requires_gradient=None)  # True or False

# %%
# %%px 0,1
if stage == 0:
    p2p.send_forward(output, is_last)
else:
    input_tensor = p2p.recv_forward(SHAPE, is_first)
    print("input begins", input_tensor[0, 0, :4].detach())
    print("grad_fn", input_tensor.grad_fn, "- requires_grad", input_tensor.requires_grad)

# %%
snapshots["F 0"] = ranks["look()"]
has_grad_fn, requires_gradient = ranks[
    "input_tensor is not None and (input_tensor.grad_fn is not None, input_tensor.requires_grad)"
][1]
compare(
    has_grad_fn=has_grad_fn,
    requires_gradient=requires_gradient,
    shape_of_message=list(ranks["input_tensor"][1].shape),
)

# %%
assert torch.equal(ranks["output"][0], ranks["input_tensor"][1])
assert ranks["input_tensor.is_leaf if stage == 1 else None"][1]

# %% [markdown]
# The same numbers, bit for bit, but a *leaf*: for autograd on rank 1 the world begins here. It asks
# for a gradient all the same, because that gradient is what rank 0 will need. Stages 1 and 2:


# %%
# %%px
def hand_on(sender):
    """The message from `sender` to the stage after it."""
    global input_tensor
    if stage == sender:
        p2p.send_forward(output, is_last)
    elif stage == sender + 1:
        input_tensor = p2p.recv_forward(SHAPE, is_first)


if stage == 1:
    forward()
hand_on(1)

# %%
snapshots["F 1"] = ranks["look()"]

# %%
# %%px
if stage == 2:
    forward()
hand_on(2)

# %%
snapshots["F 2"] = ranks["look()"]

# %% [markdown]
# ## The last stage, and the loss

# %%
# %%px 3
forward()
print("output", output, "- report", reports[0])

# %%
snapshots["F 3"] = ranks["look()"]
for rank, now in enumerate(snapshots["F 3"]):
    print(f"rank {rank}:", now)
assert all(now["holds activations"] for now in snapshots["F 3"])
assert all(now["gradient norm"] == 0 for now in snapshots["F 3"])

# %% [markdown]
# The forward is over. Four ranks hold four pieces of one computation, and no rank can see another's.
#
# ## Backward, stage 3
#
# The loss is here, so `backward_step` needs no gradient from outside (`None`).


# %%
# %%px
def backward():
    """This stage's backward, from `output_grad` to `input_grad`."""
    global input_grad, output
    input_grad = backward_step(input_tensor, output, output_grad, None, config)
    output = None  # and with it all that autograd had kept


if stage == 3:
    backward()
    print("gradient of my input", tuple(input_grad.shape), "begins", input_grad[0, 0, :4])

# %%
snapshots["B 3"] = ranks["look()"]
norms = [now["gradient norm"] for now in snapshots["B 3"]]
compare(have_gradients_after_stage_3=[rank for rank, norm in enumerate(norms) if norm > 0])

# %%
assert [now["gradient norm"] > 0 for now in snapshots["B 3"]] == [False, False, False, True]

# %% [markdown]
# Rank 3's parameters have gradients, nobody else's. What rank 2 must be told is what rank 3 has just
# found: the gradient of the loss with respect to the tensor that crossed between them. Same shape,
# opposite direction.

# %%
# %%px 2,3
if stage == 3:
    p2p.send_backward(input_grad, is_first)
else:
    output_grad = p2p.recv_backward(SHAPE, is_last)
    backward()
    print("gradient of my input", tuple(input_grad.shape), "begins", input_grad[0, 0, :4])

# %%
snapshots["B 2"] = ranks["look()"]
is_the_same = torch.equal(ranks["output_grad"][2], ranks["input_grad"][3])
compare(told_to_stage_2="gradient of its output" if is_the_same else "something else")
assert is_the_same

# %%
# %%px


def hand_back(sender):
    """The gradient from `sender` to the stage before it."""
    global output_grad
    if stage == sender:
        p2p.send_backward(input_grad, is_first)
    elif stage == sender - 1:
        output_grad = p2p.recv_backward(SHAPE, is_last)


hand_back(2)
if stage == 1:
    backward()

# %%
snapshots["B 1"] = ranks["look()"]

# %%
# %%px
hand_back(1)
if stage == 0:
    backward()
p2p.finish()

# %%
snapshots["B 0"] = ranks["look()"]

# %% [markdown]
# ## The picture
#
# What each rank had after each action. Blue: it holds activations, waiting for a gradient. Orange:
# its parameters have gradients, of the norm that is written there.

# %%
draw_snapshots(snapshots)

# %% [markdown]
# Down the stairs and up again. Stage 0 holds its activations longest, stage 3 for a moment. A
# pipeline schedule runs many such stairs at once, and has to decide how many may overlap.
#
# ## Is it right?
#
# Compare with the schedule itself: the same microbatch, through `forward_backward_func`. Question 4
# from the beginning: which of the gradients differs?

# %%
# %%px
by_hand = gpt.gradients()
gpt.step(1, data=data)
by_schedule = gpt.gradients()
differ = [name for name in by_hand if not torch.equal(by_hand[name], by_schedule[name])]
differ

# %%
compare(embeddings_gradient_is_right=not any("embedding" in name for name in ranks["differ"][0]))

# %% [markdown]
# Everything is the same to the last bit, but for the embedding's table. Rank 0 has the gradient of
# its use as embedding, rank 3 that of its use as output layer. The table is one table; its gradient is
# the sum. The schedule ends with `finalize_model_grads`, which adds the two. By hand:

# %%
name = "embedding.word_embeddings.weight"
mine = [ranks["by_hand"][rank][name] for rank in (0, 3)]
right = [ranks["by_schedule"][rank][name] for rank in (0, 3)]
print(f"norms: as embedding {mine[0].norm():.3f}, as output layer {mine[1].norm():.3f}")

assert ranks["differ"] == [[name], [], [], [name]]
assert not torch.equal(mine[0], mine[1])
assert torch.allclose(mine[0] + mine[1], right[0]) and torch.equal(right[0], right[1])

# %% [markdown]
# And on one rank, without any message? Weights do not depend on the cut, so the four ranks' gradients
# together must be those of one process.


# %%
def on_one_rank():
    gpt = TinyGPT(pp=1, num_layers=4)
    gpt.step(1)
    return gpt.gradients()


(whole,) = launch(on_one_rank, 1, device=ranks.device)
pieces = {name: grad for of_rank in ranks["by_schedule"] for name, grad in of_rank.items()}
assert pieces.keys() == whole.keys()
assert all(torch.allclose(pieces[name], whole[name], rtol=1e-4, atol=1e-6) for name in whole)
print(f"all {len(whole)} gradients of the four stages are those of one process")

# %% [markdown]
# ## Change it
#
# The four ranks are still there, with all their variables.
#
# * Tamper with a message: on stage 1, send `output * 2` on. Which gradients change, and does anything
#   notice?
# * Receive the input without a wish for its gradient: `input_tensor = input_tensor.detach()` on
#   stage 2, before its forward. Which rank complains, and when?
# * On rank 2 alone, call `hand_on(1)` once more: it receives what nobody sends. Who tells you, how
#   soon, and what is lost?
# * Carry two microbatches through. What must each stage now keep two of, and in which order do the
#   backwards take them?

# %%
ranks.stop()

# %% [markdown]
# ## Where next
#
# * The three tools, line by line: [forward_step](../docs/tour/forward-step.md),
#   [messages](../docs/tour/p2p.md), [backward_step](../docs/tour/backward-step.md).
# * [Exercise 6](../minimegatron/exercises/catalog/ex06_one_f_one_b/page.md) puts the same actions into
#   an order (`minimegatron exercises start ex06`), and so does
#   [the next notebook](05_gpipe_to_1f1b.ipynb).
