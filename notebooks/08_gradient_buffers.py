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
# # 08 Gradient buffers
#
# **The question.** Two copies of a model each see half of the batch, and their gradients must be
# summed. A model has hundreds of gradients. Why are there only a few messages, why can they leave
# before backward has ended, and what happens if they leave too early?

# %%
# %matplotlib inline
import torch

from minimegatron import launch, trace
from minimegatron.core.utils import unwrap_model
from minimegatron.launching.launcher import RankError
from minimegatron.notebook import compare, predict
from minimegatron.notebook.drawing import draw_buffer, draw_flights
from minimegatron.training.tiny_gpt import TinyGPT, where_it_runs

COPIES, M = 2, 4
MODEL = {"num_layers": 4, "hidden_size": 128, "seq_length": 32}
BUCKETS = {"overlap_grad_reduce": True, "bucket_size": 200_000}

# %% [markdown]
# ## Predict
#
# Two ranks, each with a whole copy of a GPT of four layers. Four microbatches each, buckets of
# 200,000 elements or a little more. Write down:
#
# 1. Which parameter is in the first bucket: the embedding, or the last layer's MLP?
# 2. How many sums over the two ranks are there in one step: one per parameter, per bucket, per
#    bucket and microbatch?
# 3. During which microbatch does the first one leave?

# %%
# Write your answers in place of None. Running this cell locks them in.
predict(
    embedding_is_in_first_bucket=None,  # True or False
    sums_in_one_step=None,  # "per parameter", "per bucket" or "per bucket and microbatch"
    leaves_during=None,  # a microbatch, counted from 0
)

# %% [markdown]
# ## One stretch of memory
#
# `DistributedDataParallel` allocates one buffer for this model's gradients, and makes
# `param.main_grad` of every parameter a view into it. To sum a stretch of the buffer is to sum all
# gradients in it, without copying.


# %%
def describe_buffer():
    gpt = TinyGPT(**MODEL, ddp=BUCKETS)
    (chunk,) = gpt.chunks
    (buffer,) = chunk.buffers
    params = dict(unwrap_model(chunk).named_parameters())
    start_of_memory = buffer.grad_data.data_ptr()
    places = []
    for name, param in params.items():
        start, end, bucket = buffer.param_index_map[param]
        is_view = param.main_grad.data_ptr() == start_of_memory + 4 * start
        places.append((name, start, end, bucket, is_view))
    return {"places": places, "numel": buffer.numel, "buckets": buffer.layout.buckets}


# %%
layout = launch(describe_buffer, COPIES)[0]
num_params, num_buckets = len(layout["places"]), len(layout["buckets"])
print(f"{num_params} parameters, {layout['numel']:,} gradients, {num_buckets} buckets")
assert all(is_view for *_, is_view in layout["places"])

# %%
draw_buffer([place[:4] for place in layout["places"]], layout["numel"])

# %% [markdown]
# In reverse: backward makes the last layer's gradient first, so it lies first. A bucket is a
# stretch whose gradients arrive one after the other.

# %%
in_buffer = [name for name, *_ in sorted(layout["places"], key=lambda place: place[1])]
assert in_buffer == [name for name, *_ in layout["places"]][::-1]
assert "layers.3" in in_buffer[1] or "final_layernorm" in in_buffer[0]
assert "embedding" in in_buffer[-1]
lengths = [end - start for start, end in layout["buckets"]]
print("elements per bucket:", lengths)
first_bucket = [name for name, _, _, bucket, _ in layout["places"] if bucket == 0]
compare(embedding_is_in_first_bucket=any("embedding" in name for name in first_bucket))
assert all(length >= BUCKETS["bucket_size"] for length in lengths[:-1])

# %% [markdown]
# ## When they leave
#
# A hook on each parameter adds the new gradient to `main_grad` and drops `.grad`. When the last
# gradient of a bucket is in, the bucket is launched; `finalize_model_grads` waits for what is on
# its way. Here is a step with this overlap, and one without, traced on both ranks.


# %%
def run(ddp):
    gpt = TinyGPT(**MODEL, ddp=ddp)
    gpt.step(M)  # what is made on first use is made now
    with trace() as recorded:
        gpt.step(M)
    return {
        "where": where_it_runs(),
        "trace": recorded if torch.distributed.get_rank() == 0 else None,
        "gradients": gpt.gradients(),
        "left over": [n for n, p in gpt.chunks[0].named_parameters() if p.grad is not None],
    }


# %%
def run_all(configs):
    return [run(ddp) for ddp in configs]


by_rank = launch(run_all, COPIES, [BUCKETS, {}])
overlapped, plain = ([results[i] for results in by_rank] for i in range(2))
print(overlapped[0]["where"])


# %%
def by_name(recorded, name, rank=0):
    """(index, event) of every call of that name."""
    return [(i, e) for i, e in enumerate(recorded.rank(rank).events) if e.name == name]


runs = {"with overlap": overlapped, "without": plain}
draw_flights({title: ranks[0]["trace"].rank(0) for title, ranks in runs.items()})

# %% [markdown]
# ## Check the claim

# %%
recorded = overlapped[0]["trace"]
launches = by_name(recorded, "bucket-launch")
last_backward, backward = by_name(recorded, "backward-compute")[-1]
per = {num_params: "parameter", num_buckets: "bucket", num_buckets * M: "bucket and microbatch"}
compare(
    sums_in_one_step=f"per {per[len(launches)]}",
    leaves_during=recorded.rank(0).events[launches[0][1].parent].action.microbatch,
)

# %%
assert (
    len(launches) == num_buckets
)  # one per bucket and step: not per parameter, not per microbatch
in_order = [launched.attributes["bucket"] for _, launched in launches]
assert in_order == [[bucket] for bucket in range(num_buckets)]
assert all(launched.parent == last_backward for _, launched in launches)  # inside the last backward
assert [launched.attributes["bytes"] for _, launched in launches] == [4 * n for n in lengths]

# %%
recorded = plain[0]["trace"]
((_, only_launch),) = by_name(recorded, "bucket-launch")
((finalize, _),) = by_name(recorded, "finalize-model-grads")
assert only_launch.parent == finalize and only_launch.attributes["bytes"] == 4 * layout["numel"]

# The sums are the same, on both ranks, and no `.grad` is left.
for name, gradient in plain[0]["gradients"].items():
    for ranks in (overlapped, plain):
        torch.testing.assert_close(ranks[1]["gradients"][name], gradient, rtol=1e-5, atol=1e-7)
assert overlapped[0]["left over"] == []
print(f"{num_params} gradients, {num_buckets} sums, all launched inside the last backward")

# %% [markdown]
# ## `no_sync`, forgotten on purpose
#
# Gradients of M microbatches add up in the buffer. Only when the last one is in may a bucket
# leave. So the schedule runs all but the last microbatch within `no_sync()`. Take that away. What
# happens?

# %%
predict(without_no_sync=None)  # "an error", "other gradients" or "nothing"


# %%
def forgetful_step():
    gpt = TinyGPT(**MODEL, ddp=BUCKETS)
    gpt.config.no_sync_func = None  # the mistake
    gpt.step(M)


try:
    launch(forgetful_step, COPIES)
except RankError as error:
    message = next(line for line in str(error).splitlines() if "RuntimeError" in line)
    compare(without_no_sync="an error")
    print(message)

# %%
assert "came after its bucket was launched" in message

# %% [markdown]
# This package refuses. Code without that guard does one of two things; which one decides where it lets
# gradients go ([picotron #5](https://github.com/huggingface/picotron/pull/5) is about that place). So
# here is the loop by hand, with a choice of when to sum:


# %%
def by_hand(gpt, data, sum_after):
    """Forward and backward of each microbatch; sums over the ranks after those in `sum_after`."""
    (chunk,) = gpt.chunks
    chunk.zero_grad_buffer()
    for i, batch in enumerate(data):
        losses, loss_func = gpt.forward_step(iter([batch]), chunk)
        total, num_tokens, _ = loss_func(losses)
        (total / num_tokens / len(data)).backward()
        if i in sum_after:
            chunk.start_grad_sync()
            chunk.finish_grad_sync()
    return gpt.gradients()


# %%
VARIANTS = {
    "after the last": [M - 1],
    "after every one": list(range(M)),
    "after the first": [0],
}
predict(
    same_as_one_process=None,  # a list of names out of VARIANTS
    most_megabytes=None,  # one of them
)


# %%
def try_variants():
    gpt = TinyGPT(**MODEL)
    data = gpt.microbatches(M)
    results = {}
    for name, sum_after in VARIANTS.items():
        with trace() as recorded:
            gradients = by_hand(gpt, data, sum_after)
        sums = by_name(recorded, "all-reduce", torch.distributed.get_rank())
        results[name] = gradients, sum(event.attributes["bytes"] for _, event in sums)
    return results


# %%
def one_process():
    """The truth: the whole batch on one rank."""
    gpt = TinyGPT(**MODEL)
    return by_hand(gpt, gpt.microbatches(COPIES * M), sum_after=[])


ranks = launch(try_variants, COPIES)
(truth,) = launch(one_process, 1)


# %%
def distance(a, b):
    """|a - b| / |b| over all gradients together."""
    difference = sum((a[name] - b[name]).square().sum() for name in b)
    return float((difference / sum(b[name].square().sum() for name in b)).sqrt())


# %%
print("summed            MB sent  off the truth, rank 0 and 1   ranks apart")
found = {}
for name in VARIANTS:
    gradients = [ranks[copy][name][0] for copy in range(COPIES)]
    errors = [distance(of_rank, truth) for of_rank in gradients]
    apart = distance(*gradients)
    num_bytes = ranks[0][name][1]
    found[name] = num_bytes, errors, apart
    print(f"{name:16} {num_bytes / 1e6:8.1f}  {errors[0]:12.1e} {errors[1]:12.1e}  {apart:14.1e}")

# %%
compare(
    same_as_one_process=[name for name, (_, errors, _) in found.items() if max(errors) < 1e-4],
    most_megabytes=max(found, key=lambda name: found[name][0]),
)

# %%
num_bytes, errors, apart = found["after the last"]
assert num_bytes == 4 * layout["numel"] and max(errors) < 1e-4 and apart < 1e-6

many_bytes, errors, apart = found["after every one"]
assert many_bytes == M * num_bytes and max(errors) < 1e-4 and apart < 1e-6

few_bytes, errors, apart = found["after the first"]
assert few_bytes == num_bytes and min(errors) > 0.1 and apart > 0.1

# %% [markdown]
# * **After every one** gives the right gradient, for a reason worth a minute: before each sum the
#   buffer is multiplied by 1/d, so what was already equal on all ranks comes back as it was. But
#   it costs M times the messages. Nothing fails; the job is only slow.
# * **After the first** is what a forgotten `no_sync` does when buckets leave once. It sends as
#   much as the right way. But what the later microbatches add stays on each rank. The ranks then
#   update differently, and from that step on they train two different models. Nothing fails here
#   either, and every rank's loss may well go on falling.
#
# Only a comparison with one process, or between ranks, finds it.
#
# ## Change it
#
# * Set `bucket_size` to 50,000 and to 10,000,000. Predict the number of launches, and where in
#   backward the first one is. Which is better on a slow network, and which when backward is
#   short?
# * Add `"use_distributed_optimizer": True` to `BUCKETS`. Which collective takes the all-reduce's
#   place, and do the buckets' ends move? One assertion fails: why is it right to?
# * Add `"after the first and the last": [0, M - 1]` to `VARIANTS`. Predict the megabytes and the
#   errors.
#
# ## Where next
#
# * [Grad buffers](../docs/tour/grad-buffers.md) and [finalize](../docs/tour/finalize.md) in the
#   tour.
# * Exercises [ex09](../minimegatron/exercises/catalog/ex09_grad_buffers/page.md), and
#   [ex10](../minimegatron/exercises/catalog/ex10_wrong_gradient_sync/page.md), which gives you three loops of the kind
#   above.
# * Notebook 09 shows where this stands in the whole step, notebook 10 what the distributed
#   optimizer saves.
