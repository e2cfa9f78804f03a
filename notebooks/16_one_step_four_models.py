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
# # 16 One step, four models
#
# **The question.** GPT predicts the next token. BERT fills in masked tokens. T5 reads with one stack
# of layers and writes with another. Mamba has layers that are no transformer. Each has a program of
# its own, `pretrain_gpt`, `pretrain_bert`, `pretrain_t5`, `pretrain_mamba`. How much of a training
# step is different?
#
# Here all four programs run on two ranks, with a pipeline of two stages. We look at who calls whom,
# and then at what differs: the batch, the loss, and the messages.

# %%
# %matplotlib inline
import contextlib
import importlib
import io
import sys
import traceback
from functools import partial
from inspect import signature
from unittest.mock import patch

import torch
import torch.distributed as dist

from minimegatron import launch, trace
from minimegatron.core import parallel_state
from minimegatron.core.datasets.stdlib_text import stdlib_files
from minimegatron.core.ssm.ops.ssd_combined import (
    mamba_chunk_scan_combined,
    mamba_recurrence,
)
from minimegatron.exercises.bench.replacing import installed
from minimegatron.notebook import compare, predict
from minimegatron.notebook.drawing import StageOfModel, draw_models
from minimegatron.training.global_vars import destroy_global_vars

# %% [markdown]
# ## Predict
#
# 1. Look at the functions that are active when the model's forward begins: `train_step` called the
#    schedule, the schedule called the next one, and so on. How many of those between `train_step`
#    and the model's forward are other functions in `pretrain_bert` than in `pretrain_gpt`?
# 2. The same for `pretrain_mamba`.
# 3. In GPT, the first stage looks at tokens and the last one at labels. In which of the other three
#    models does *every* stage need a part of the batch?
# 4. T5 on three stages: the first has the encoder, the other two the decoder. How many tensors does
#    the second stage send to the third in the forward of one microbatch?
# 5. A Mamba layer keeps a *state* while it goes along the sequence. The sequence becomes four times as
#    long. How many times as large is the state?

# %%
# Write your answers in place of None. Running this cell locks them in.
predict(
    other_functions_for_bert=None,
    other_functions_for_mamba=None,
    every_stage_reads=None,  # a list of models
    tensors_to_the_third_stage=None,
    times_as_large=None,
)

# %% [markdown]
# ## The four programs
#
# The flags are the real ones. Most are the same for all. Two steps each; the data is text that comes
# with Python, and to save time the programs shall find a few files of it only.

# %%
B, H = 2, 64  # micro-batch size, hidden size
SAME = f"""
    --num-layers 2 --hidden-size {H} --num-attention-heads 4
    --seq-length 32 --max-position-embeddings 32
    --micro-batch-size {B} --global-batch-size 8 --train-iters 2 --lr 1e-3 --eval-iters 0
"""
OWN = {
    "GPT": ("pretrain_gpt", ""),
    "BERT": ("pretrain_bert", ""),
    "T5": ("pretrain_t5", "--decoder-seq-length 16 --pipeline-model-parallel-split-rank 1"),
    "Mamba": ("pretrain_mamba", "--hybrid-override-pattern M* --mamba-head-dim 16"),
}

# %% [markdown]
# Four things are noted on every rank while a program runs, without changing it:
#
# * the tracer's events, as in notebook 06;
# * the *calls*: when the model's first forward begins, which functions of the package are active, the
#   outermost first; and what the model is given;
# * what the model has on this rank;
# * what the loss function returns.

# %%
TEXT = "minimegatron.core.datasets.stdlib_text.stdlib_files"
FEW_FILES = stdlib_files()[:80]
WRAPPERS = ("core/tracing.py", "core/left_out.py")  # they only pass a call on


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
class Notes:
    """What is seen of a program on one rank."""

    def __init__(self):
        self.calls, self.given, self.held, self.loss = [], {}, [], None

    def model_forward(self, forward, model, *args, **kwargs):
        """In the place of the model's forward."""
        if not self.calls:
            self.calls, self.held = calls_from_train_step(), held_by(model)
            given = signature(forward).bind(model, *args, **kwargs).arguments
            self.given = {n: list(x.shape) for n, x in given.items() if torch.is_tensor(x)}
        return forward(model, *args, **kwargs)

    def forward_step(self, forward_step, data_iterator, model):
        """In the place of the program's forward step."""
        output, loss_func = forward_step(data_iterator, model)
        return output, partial(self.loss_func, loss_func)

    def loss_func(self, loss_func, output):
        """In the place of the loss function that it returns."""
        returned = loss_func(output)
        self.loss = f"{len(returned)} values; reported: {', '.join(returned[-1])}"
        return returned


# %%
def calls_from_train_step():
    """(file, function) of the package's active functions, from `train_step` on."""
    active = [
        (frame.filename.rpartition("/minimegatron/")[2], frame.name)
        for frame in traceback.extract_stack()
        if "/minimegatron/" in frame.filename
    ]
    active = [call for call in active if call[0] not in WRAPPERS]
    return active[active.index(("training/training.py", "train_step")) :]


# %%
def run_program(program, flags):
    """The whole program on this rank, as its launch script runs it."""
    module = importlib.import_module(f"minimegatron.{program}")
    model_class = module.model_provider.__annotations__["return"]
    sys.argv = [program, *SAME.split(), *flags.split()]
    notes, forward = Notes(), model_class.forward
    with contextlib.ExitStack() as around:
        around.enter_context(installed(lambda: FEW_FILES, TEXT))
        around.enter_context(contextlib.redirect_stdout(io.StringIO()))
        around.enter_context(contextlib.redirect_stderr(io.StringIO()))
        watched = lambda *args, **kwargs: notes.model_forward(forward, *args, **kwargs)  # noqa: E731
        around.enter_context(patch.object(model_class, "forward", watched))
        step = partial(notes.forward_step, module.forward_step)
        around.enter_context(patch.object(module, "forward_step", step))
        recorded = around.enter_context(trace())
        module.main()
    return {
        "calls": notes.calls,
        "given": notes.given,
        "held": notes.held,
        "loss": notes.loss,
        "trace": recorded if dist.get_rank() == 0 else None,
    }


# %%
def run_programs(models):
    """One after the other, on as many stages as there are ranks."""
    found, stages = {}, dist.get_world_size()
    for model in models:
        program, flags = OWN[model]
        found[model] = run_program(program, f"{flags} --pipeline-model-parallel-size {stages}")
        destroy_global_vars()
        parallel_state.destroy_model_parallel()
    return found


def run_on(stages, *models):
    """By model, what was seen on each rank."""
    ranks = launch(run_programs, stages, models)
    return {model: [rank[model] for rank in ranks] for model in models}


# %%
found = run_on(2, *OWN)
for model, ranks in found.items():
    num_events = sum(len(ranks[0]["trace"].rank(rank).events) for rank in range(2))
    print(f"{model:6} ran on {len(ranks)} ranks; {num_events} events")

# %% [markdown]
# ## Who calls whom
#
# The functions that are active on stage 0 when the model's forward begins. A dot: the same function
# as in the column of GPT.

# %%
calls = {model: ranks[0]["calls"] for model, ranks in found.items()}
assert len({len(one) for one in calls.values()}) == 1  # equally deep in all four
print(" " * 51, *(f"{model:16}" for model in list(OWN)[1:]))
for row in zip(*calls.values(), strict=True):
    file, function = row[0]
    others = ["." if call == row[0] else call[0] for call in row[1:]]
    print(f"{file.rpartition('/')[2]:29}{function[:21]:22}", *(f"{word:16}" for word in others))

# %%
other = {
    model: sum(mine != gpt for mine, gpt in zip(calls[model], calls["GPT"], strict=True))
    for model in OWN
}
print(other)
compare(other_functions_for_bert=other["BERT"], other_functions_for_mamba=other["Mamba"])

# %% [markdown]
# One line differs: `forward_step`, which the program itself brings along. `pretrain_mamba` does not
# even have one of its own, it takes that of `pretrain_gpt`. Everything above it asks for a model and
# a forward step, and knows neither.
#
# That was the way down to the model. The tracer sees more: the backward, the messages, the end of the
# step. Which link called which, and how often?


# %%
def links(ranks, rank=0):
    """How often each link was called by each other, on one rank."""
    events, found = ranks[0]["trace"].rank(rank).events, {}
    for event in events:
        parent = None if event.parent is None else events[event.parent].name
        # Inside the model and the optimizer, and on the wire, there is more than the chain.
        if parent is not None and not event.name.startswith(("p2p", "all-reduce", "optimizer-")):
            found[parent, event.name] = found.get((parent, event.name), 0) + 1
    return found


# %%
of_gpt = links(found["GPT"])
for (parent, link), number in of_gpt.items():
    same = [model for model in OWN if links(found[model]).get((parent, link)) == number]
    print(f"{parent:28} -> {link:38}{number:3}  same in: {', '.join(same)}")
for model, ranks in found.items():
    assert {pair for pair in links(ranks) if pair not in of_gpt} == set(), model

# %% [markdown]
# The same links, called by the same links. (T5's stages have two layers each, the others' one.)
#
# ## What differs: the batch
#
# What the model is given, stage by stage: names of the arguments of its forward, with shapes.

# %%
for model, ranks in found.items():
    for stage, rank in enumerate(ranks):
        print(f"{model:6} stage {stage}:", ", ".join(f"{n} {s}" for n, s in rank["given"].items()))

# %%
needed = {model: set(ranks[0]["given"]) & set(ranks[1]["given"]) for model, ranks in found.items()}
for model, names in needed.items():
    print(f"{model:6} on both stages:", ", ".join(sorted(names)) or "nothing")
compare(every_stage_reads=[model for model, names in needed.items() if names])

# %% [markdown]
# GPT and Mamba get the same: tokens and positions on the first stage, labels and their mask on the
# last. A token there looks backwards only, so it never meets the padding at the end.
#
# In BERT tokens look forwards too. A mask of padding keeps them from looking at it, in the attention of
# every layer: so every stage reads the batch. (It gets all of it, and the middle of the model uses the
# mask alone.) In T5 the decoder's layers look at the encoder's text, so they need the mask of *its*
# padding; and stage 1 reads tokens again, because the decoder begins there.
#
# ## What differs: the loss

# %%
for model, ranks in found.items():
    print(f"{model:6} {ranks[-1]['loss']}")

# %% [markdown]
# Three values (sum, number of tokens, report) let a step be a mean over *tokens*. BERT's two values
# (mean, report) make it a mean over microbatches: its loss is a sum of two means, of masked tokens and
# of sentence order. The schedule takes either (notebook 09).
#
# ## What differs: the messages


# %%
def messages(ranks):
    """What each stage sends forwards for one microbatch: a list of shapes."""
    sent = []
    for rank in range(len(ranks) - 1):
        events = ranks[0]["trace"].rank(rank).events
        one = next(e for e in events if e.name in ("forward-send", "forward-send-backward-recv"))
        number = events.index(one)
        starts = [e.attributes for e in events if e.parent == number and e.name == "p2p-start"]
        sizes = [start["bytes"] for start in starts if start["doing"] == "sending"]
        sent.append([[size // (4 * B * H), B, H] for size in sizes])  # float32
    return sent


# %%
for model, ranks in found.items():
    print(f"{model:6} stage 0 sends forwards: {messages(ranks)[0]}, [s, b, h]")

# %% [markdown]
# One tensor of [s, b, h] each time: a layer may compute what it likes, as long as this goes in and
# comes out. T5's message is the encoder's finished output, with the length of its text. The decoder
# begins on stage 1, with a text of its own of 16 tokens.
#
# With three stages, stage 2 has layers of the decoder as well. They too look at the encoder's output,
# but their messages come from stage 1:

# %%
three = run_on(3, "T5")["T5"]
for stage, shapes in enumerate(messages(three)):
    print(f"stage {stage} sends forwards: {shapes}")
compare(tensors_to_the_third_stage=len(messages(three)[1]))

# %% [markdown]
# Two tensors: the decoder's own hidden states, and the encoder's output, handed on as it came. Of
# the four models, T5 alone needs more than `[s, b, h]`. The model says so: the method
# `message_shapes` lists what comes in and goes out, `extra_outputs` what is handed on. On the way back
# the encoder's output has two gradients, of this stage and of the stage after it; they are added.
#
# ## The four models
#
# All four in one picture: what each stage holds, what it reads from the batch, and what it sends
# forwards for one microbatch. All of it was noted in the runs. T5 is shown on three stages, the
# others on two.

# %%
shown = found | {"T5": three}
pictures = {}
for model, ranks in shown.items():
    sent = [[str(shape) for shape in shapes] for shapes in messages(ranks)] + [[]]
    pictures[model] = [
        StageOfModel(rank["held"], list(rank["given"]), sends)
        for rank, sends in zip(ranks, sent, strict=True)
    ]
draw_models(pictures)

# %% [markdown]
# The boxes differ, the arrows are alike: each is one tensor of [s, b, h]. T5 has two where both sides
# belong to the decoder. Now look at the colours. Layers of one colour have the same inside: those of
# GPT, of BERT and of T5's encoder. T5's decoder has `cross_attention` too, and a Mamba layer has a
# `mixer` in place of attention and MLP. Mamba's pattern `M*` makes the attention a layer by itself.
#
# ## A stage that is no transformer
#
# Mamba's pattern was `M*`: stage 0 has a Mamba layer, stage 1 an attention layer. Neither the schedule
# nor the other stage could tell. What is different is inside. Attention looks back at all tokens. A
# Mamba layer goes along the sequence and keeps a state S for each head, P rows and N columns:
#
#     S = exp(dt A) S + dt x Bᵀ        y = S C
#
# Here for one sequence: 4 heads, P = 16, N = 8.

# %%
torch.manual_seed(1)
HEADS, P, N = 4, 16, 8


def scan_of(length, chunk=None):
    """The outputs and the last state; token by token, or chunk by chunk."""
    torch.manual_seed(1)
    x, dt = torch.randn(1, length, HEADS, P).double(), torch.rand(1, length, HEADS).double() / 4
    A = -torch.arange(1.0, HEADS + 1).double()
    write, read = torch.randn(2, 1, length, 1, N).double()
    if chunk is None:
        return mamba_recurrence(x, dt, A, write, read, return_final_states=True)
    return mamba_chunk_scan_combined(x, dt, A, write, read, chunk, return_final_states=True)


# %%
sizes = {}
for length in (64, 256):
    (y, state), (in_chunks, _) = scan_of(length), scan_of(length, chunk=16)
    torch.testing.assert_close(y, in_chunks, rtol=1e-12, atol=1e-12)
    keys_and_values = 2 * length * HEADS * P
    sizes[length] = state.numel()
    print(f"{length} tokens: state {list(state.shape)} = {state.numel()} numbers;", end=" ")
    print(f"keys and values of an attention layer: {keys_and_values}")
compare(times_as_large=sizes[256] / sizes[64])

# %% [markdown]
# The state does not grow: it is all that this formula remembers of the tokens before. The formula
# above goes token by token, which is slow. The layer computes the same in chunks, with matrix products;
# the assertion compares both.
#
# ## Change it
#
# * Give Mamba the pattern `*-` in `OWN`: attention, then an MLP. What does each stage have of a usual
#   transformer layer?
# * Give GPT `--num-layers 4`. Which number in the table of links changes, and for which of them?
# * Turn off BERT's second loss with `--bert-no-binary-head`. What does the loss function report now,
#   and what is the model no longer given?
# * T5 with `--pipeline-model-parallel-split-rank 2` on three stages. How many tensors does each stage
#   send? Draw the stages first.
# * Give GPT `--num-layers 4 --num-layers-per-virtual-pipeline-stage 1` in `OWN`, two chunks on each
#   stage. The first assertion fails: what is new in `calls["GPT"]`?
#
# ## Where next
#
# * [BERT and T5](../docs/tour/bert-and-t5.md) and
#   [a stage that is no transformer](../docs/tour/a-stage-that-is-no-transformer.md) in the tour.
# * [ex24](../minimegatron/exercises/catalog/ex24_two_tensor_backward/page.md): the two tensors, and
#   their gradients.
# * Labs: `minimegatron exercises lab start mask-only-on-first-stage`,
#   `... encoder-gradient-not-added`, `... chunk-state-dropped`.
