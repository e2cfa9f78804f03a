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
# # 10 Memory
#
# **The question.** What fills a rank's memory, and how well can it be known before the job
# starts?
#
# The planner has a model of it: a few formulas, which the tour's calculator uses
# too. Here real tensors are counted on real ranks and held against it.

# %%
# %matplotlib inline
import torch

from minimegatron import launch
from minimegatron.core.utils import get_device
from minimegatron.core.utils import unwrap_model
from minimegatron.notebook import compare, predict
from minimegatron.notebook.drawing import draw_stages
from minimegatron.planner.memory import (
    activation_bytes_per_layer,
    model_state_bytes,
    num_layer_parameters,
    peak_activation_bytes,
)
from minimegatron.planner.plan import plan
from minimegatron.training.tiny_gpt import TinyGPT, where_it_runs
from minimegatron.tracing.activation_meter import ActivationMeter

# %%
RANKS, M = 4, 8
# Layers, hidden size, heads, sequence, micro-batch, vocabulary.
L, H, HEADS, S, B, V = 8, 128, 4, 64, 2, 512
SBH = S * B * H
SIZES = {"num_layers": L, "hidden_size": H, "num_attention_heads": HEADS, "vocab_size": V}
SIZES |= {"seq_length": S, "micro_batch_size": B}
MODEL = SIZES | {"bf16": True, "params_dtype": torch.bfloat16}
IN_FP32 = {"grad_reduce_in_fp32": True}  # bf16 weights, fp32 gradients, fp32 optimizer

# %% [markdown]
# ## Predict
#
# The weights are bf16, 2 bytes each.
#
# 1. Gradients are summed in fp32; Adam keeps two fp32 moments and an fp32 copy of each weight.
#    How many bytes does a parameter cost in all? How many when the distributed optimizer (ZeRO-1)
#    shares Adam's part among 4 ranks?
# 2. A layer has about 12 h² parameters. For one microbatch it keeps about 34 s b h bytes for its
#    backward. With h = 128, s = 64, b = 2, which is larger, the layer's bf16 weights or one
#    microbatch's activations?
# 3. Four stages run 1F1B. Which stage is the fullest, and with what?

# %%
# Write your answers in place of None. Running this cell locks them in.
predict(
    bytes_per_parameter=None,
    bytes_with_zero_1=None,
    larger_in_a_layer=None,  # "weights" or "activations"
    fullest_stage=None,
    mostly_filled_with=None,  # "weights", "gradients", "optimizer" or "activations"
)

# %% [markdown]
# ## Weights, gradients, optimizer
#
# Four copies of the model on four ranks; one step, so that Adam's state exists. Then the bytes
# behind the tensors are added up, memory that tensors share counted once.


# %%
def num_bytes(tensors):
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    return sum(storages.values())


# %%
def state_bytes(gpt, optimizer):
    """Bytes that this rank holds of weights, gradients and optimizer."""
    params = [param for chunk in gpt.chunks for param in chunk.parameters()]
    weights = {param.untyped_storage().data_ptr() for param in params}
    kept = [t for shard in optimizer.shards for t in optimizer.parameter_state(shard).values()]
    buffers = [buffer for chunk in gpt.chunks for buffer in chunk.buffers]
    return {
        "parameters": sum(param.numel() for param in params),
        "weights": num_bytes(params),
        "gradients": num_bytes(buffer.grad_data for buffer in buffers),
        "optimizer": num_bytes(t for t in kept if t.untyped_storage().data_ptr() not in weights),
    }


# %%
MODES = {
    "fp32": (dict(MODEL, bf16=False, params_dtype=torch.float32), {}),
    "bf16": (MODEL, IN_FP32),
    "bf16, ZeRO-1": (MODEL, IN_FP32 | {"use_distributed_optimizer": True}),
}


# %%
def measure_states():
    found = {}
    for mode, (config, ddp) in MODES.items():
        gpt = TinyGPT(ddp=ddp, **config)
        optimizer = gpt.optimizer()
        gpt.step(1)
        optimizer.step()
        found[mode] = state_bytes(gpt, optimizer)
    return found


# %% [markdown]
# ## Activations
#
# `ActivationMeter` sees every tensor but parameters that autograd keeps for backward. First the
# layers by themselves: as they are, over two tensor-parallel ranks, with sequence parallelism too,
# and with full recompute.

# %%
FULL = {"recompute_granularity": "full", "recompute_method": "uniform"}
FULL["recompute_num_layers"] = 1
LAYERS = {
    "alone": {},
    "t = 2": {"tp": 2},
    "t = 2, sequence parallel": {"tp": 2, "sequence_parallel": True},
    "full recompute": FULL,
}


# %%
def measure_layers():
    found = {}
    for name, config in LAYERS.items():
        gpt = TinyGPT(ddp=IN_FP32, **MODEL, **config)
        decoder = unwrap_model(gpt.chunks[0]).decoder
        decoder.final_layernorm = None  # the layers only
        s = S // 2 if config.get("sequence_parallel") else S
        hidden = torch.randn(s, B, H, dtype=torch.bfloat16, device=get_device(), requires_grad=True)
        with ActivationMeter(gpt.chunks) as meter:
            output = decoder(hidden, None)
            found[name] = meter.kept()
            del output
    return found


# %% [markdown]
# And then whole steps: 1F1B over four stages, without recompute and with.


# %%
def measure_steps():
    found = {}
    for name, config in {"kept": {}, "recomputed": FULL}.items():
        gpt = TinyGPT(pp=RANKS, ddp=IN_FP32, deallocate_pipeline_outputs=True, **MODEL, **config)
        optimizer = gpt.optimizer()
        with ActivationMeter(gpt.chunks) as meter:
            gpt.step(M)
        optimizer.step()
        after_each = max(meter.after_each)
        found[name] = state_bytes(gpt, optimizer) | {"activations": after_each, "peak": meter.peak}
    return found


# %%
def measure_everything():
    return measure_states(), measure_layers(), measure_steps(), where_it_runs(), get_device().type


by_rank = launch(measure_everything, RANKS)
states, layers, _, where, device = by_rank[0]
stages = [of_rank[2] for of_rank in by_rank]
print(where)

# %% [markdown]
# ## Measured against the model: what does not depend on the schedule


# %%
def model_of(mode):
    """What the planner's model says of this way to train."""
    config, ddp = MODES[mode]
    return model_state_bytes(
        states[mode]["parameters"],
        params_bytes=2 if config["bf16"] else 4,
        gradient_bytes=4,
        data_parallel_size=RANKS,
        use_distributed_optimizer="use_distributed_optimizer" in ddp,
    )


# %%
per_parameter = {}
print("bytes per parameter   weights  gradients  optimizer     sum   model")
for mode, found in states.items():
    model, parts = model_of(mode), [found[part] for part in ("weights", "gradients", "optimizer")]
    sums = [part / found["parameters"] for part in [*parts, sum(parts), model.total]]
    print(f"{mode:20}" + "".join(f"{number:10.2f}" for number in sums))
    per_parameter[mode] = sums[3]
    for part, wanted in zip(parts, (model.weights, model.gradients, model.optimizer), strict=True):
        assert abs(part / wanted - 1) < 0.01, (mode, part, wanted)

# %%
compare(
    bytes_per_parameter=per_parameter["bf16"],
    bytes_with_zero_1=per_parameter["bf16, ZeRO-1"],
)

# %% [markdown]
# 18 bytes for a parameter of 2: the weight itself is the smallest part. ZeRO-1 leaves weights and
# gradients alone and divides the 12 bytes of the optimizer by the number of copies.
#
# How many parameters are there? Counted from the formulas: L layers, one embedding for words and
# one for positions, the final norm. The output layer is tied to the embedding.

# %%
counted = L * num_layer_parameters(H) + (V + S) * H + 2 * H
assert {found["parameters"] for found in states.values()} == {counted}
assert num_layer_parameters(H) == 12 * H**2 + 13 * H
print(f"{counted:,} parameters, {num_layer_parameters(H):,} in each layer")

# %% [markdown]
# ## Measured against the model: one layer, one microbatch
#
# Everything that one layer keeps, in units of s b h bytes:

# %%
one_layer = layers["alone"][: len(layers["alone"]) // L]
for kept in one_layer:
    print(f"{kept.num_bytes / SBH:6.3f}  {kept.dtype:9} {list(kept.shape)}")
print(f"{sum(kept.num_bytes for kept in one_layer) / SBH:6.3f}  in all")

of_weights = 2 * num_layer_parameters(H)
of_activations = sum(kept.num_bytes for kept in one_layer)
print(f"\nbytes of the layer's weights {of_weights:,}, of these activations {of_activations:,}")
compare(larger_in_a_layer="activations" if of_activations > of_weights else "weights")
assert of_activations > of_weights

# %% [markdown]
# Read it from the top. Attention: the input of the first norm (2), its mean and deviation, the
# input of the projection to queries, keys and values (2), those three in one piece (6), a number
# per row of the softmax, the attention's output (2). The MLP: the input of the second norm (2),
# two numbers again, the input of the wide projection (2), before and after GELU (8 each).
#
# Korthikanti et al. (2022) count the same terms, and two dropout masks of 1 byte, so 34. This
# model runs without dropout: 32. The attention scores, 5 a s² b bytes in their table, are not
# there: a fused attention kernel never stores them. That is their row for "selective" recompute.

# %%
MASKS = 2  # of dropout, one byte each; not divided by t, but by sequence parallelism
CASES = {
    "alone": ({}, MASKS),
    "t = 2": ({"tensor_parallel_size": 2}, MASKS),
    "t = 2, sequence parallel": ({"tensor_parallel_size": 2, "sequence_parallel": True}, MASKS / 2),
    "full recompute": ({"recompute": "full"}, 0),
}
# A GPU's kernels keep some tensors in a layout of their own.
TOLERANCE = 0.02 if device == "cpu" else 0.1

# %%
print(f"{'in units of sbh':26}  measured   model")
for name, (options, masks) in CASES.items():
    measured = sum(kept.num_bytes for kept in layers[name]) / L / SBH
    model = activation_bytes_per_layer(S, B, H, HEADS, **options) / SBH - masks
    print(f"{name:26}  {measured:8.3f}  {float(model):6}   {measured / float(model) - 1:+.1%}")
    assert abs(measured / float(model) - 1) < TOLERANCE

# %% [markdown]
# Tensor parallelism divides what lies inside attention and MLP, but not the 10 (here 8) of norms
# and block inputs. Sequence parallelism divides those too. Full recompute keeps the layer's input
# only.
#
# ## The whole stage
#
# Now all four parts on each stage of the pipeline. What the model needs besides: how many
# microbatches a stage holds, which the planner counts, and on the last stage the final norm and
# the logits, 4 s b h + 4 s b V.


# %%
def model_of_stage(stage, recompute="selective"):
    layer = activation_bytes_per_layer(S, B, H, HEADS, recompute=recompute)
    layer -= 0 if recompute == "full" else MASKS * SBH
    one = L // RANKS * layer
    if stage == RANKS - 1:
        one += 4 * SBH + 4 * S * B * V
    num_parameters = L // RANKS * num_layer_parameters(H)
    if stage == 0:
        num_parameters += (V + S) * H
    if stage == RANKS - 1:
        num_parameters += V * H + 2 * H  # the tied embedding's second copy, the final norm
    state = model_state_bytes(num_parameters)
    return {
        "weights": state.weights,
        "gradients": state.gradients,
        "optimizer": state.optimizer,
        "activations": peak_activation_bytes(plan("1f1b", RANKS, M), stage, one),
    }


# %%
measured = {way: [of_rank[way] for of_rank in stages] for way in ("kept", "recomputed")}
modelled = {
    way: [model_of_stage(stage, recompute) for stage in range(RANKS)]
    for way, recompute in (("kept", "selective"), ("recomputed", "full"))
}
draw_stages(measured, modelled)

# %%
PARTS = ("weights", "gradients", "optimizer", "activations")
sums = [sum(of_stage[part] for part in PARTS) for of_stage in measured["kept"]]
fullest = max(range(RANKS), key=sums.__getitem__)
compare(
    fullest_stage=fullest,
    mostly_filled_with=max(PARTS, key=measured["kept"][fullest].__getitem__),
)

# %%
for way, of_stages in measured.items():
    for stage, found in enumerate(of_stages):
        model = modelled[way][stage]
        assert all(found[part] == model[part] for part in PARTS[:3]), (way, stage)
        # At the pipeline's ends a microbatch also keeps its token numbers, up to 24 bytes each.
        numbers = 24 * S * B * plan("1f1b", RANKS, M).peak_in_flight(stage)
        off = abs(found["activations"] - model["activations"])
        assert off < TOLERANCE * model["activations"] + numbers, (way, stage)
    sums = [sum(found[part] for part in PARTS) / 2**20 for found in of_stages]
    print(f"{way:10}: MiB per stage", [round(size, 1) for size in sums])
    assert way != "kept" or M < RANKS or max(sums) == sums[0]

# %%
held = [found["activations"] for found in measured["kept"]]
for stage in range(RANKS - 1):  # 4, 3, 2 microbatches; the last stage's are larger, with the logits
    wanted = plan("1f1b", RANKS, M).peak_in_flight(stage) * held[1]
    assert abs(held[stage] * plan("1f1b", RANKS, M).peak_in_flight(1) / wanted - 1) < 0.01
print("At the very peak, recompute also holds the layer that it is just making anew:")
for stage, found in enumerate(measured["recomputed"]):
    extra = (found["peak"] - found["activations"]) / SBH
    print(f"  stage {stage}: {extra:5.1f} sbh more")
    assert 0 < extra < 32 * (1 + TOLERANCE) + (4 + 4 * V / H if stage == RANKS - 1 else 0)

# %% [markdown]
# Stage 0 is the fullest, though the last one has the logits: the first stage holds the most
# microbatches. Activations grow with s b h, weights and states with h²: notebook 11 has both for
# models of the size that is trained in earnest.
#
# ## Change it
#
# * Set `M = 2`. Which stages need less now? Set `M = 64`. Which need more?
# * Give `measure_steps` `vp=2` beside `pp=RANKS`, and the model the plan `"interleaved"` with
#   `vpp=2` and half of `one`, which is right but for the last stage. Predict the first stage's
#   activations. (See notebook 07.)
# * Set `"hidden_dropout": 0.1` in `MODEL`. How many bytes has a mask on this device?
#
# ## Where next
#
# * [Formulas](../docs/formulas.md): where 34 and 18 come from; and
#   [the calculator](../docs/tour/what-it-costs.md#calculator), for sizes that fill GPUs.
# * [The distributed optimizer](../docs/tour/distributed-optimizer.md) in the tour, with exercise
#   [ex14](../minimegatron/exercises/catalog/ex14_zero1_step/page.md). Exercise
#   [ex18](../minimegatron/exercises/catalog/ex18_memory_cap/page.md) asks for a schedule under a memory cap.
