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
# # 18 Run again, and captured
#
# **The question.** A training step may run twice, because a number in it was bad. Or its Python code
# may not run at all, because a graph repeats what it once did. What does each of them do to a step
# that was written to run once? And what must a step be like, so that neither changes its weights?
#
# Part A runs a step again, on two live ranks. Part B captures a step, in one process. At the end, a
# short look at a stage that is slow.

# %%
import torch

from minimegatron import launch
from minimegatron.notebook import compare, live_ranks, predict

ranks = live_ranks(2)

# %% [markdown]
# ## Part A: a step that is run again
#
# A loss is far too large. Perhaps a chip is broken; perhaps the data are bad. One run of a step cannot
# tell. So with `--rerun-mode validate_results` all ranks run the step once more, from the same weights,
# samples and random numbers. If the result is another one now, the data are not to blame.
#
# A GPT on two stages, four microbatches a step, with dropout:

# %%
# %%px
import contextlib
import io
import logging
import sys
import time
from functools import partial
from unittest.mock import patch

from minimegatron import pretrain_gpt
from minimegatron.core import parallel_state
from minimegatron.core.distributed import DistributedDataParallel, finalize_model_grads
from minimegatron.core.rerun_state_machine import (
    RerunDataIterator,
    get_rerun_state_machine,
    initialize_rerun_state_machine,
)
from minimegatron.core.straggler_detector import StragglerDetector
from minimegatron.core.tensor_parallel.random import keep_rng_states
from minimegatron.core.utils import get_model_config
from minimegatron.training.global_vars import destroy_global_vars, get_train_state
from minimegatron.training.initialize import initialize_megatron
from minimegatron.training.model_setup import setup_model_and_optimizer
from minimegatron.training.pipeline_schedule import schedule_of_run
from minimegatron.training.reruns import keep_state_for_reruns
from minimegatron.training.training import train_step

S, M = 16, 4  # tokens of a sample, microbatches of a step
FLAGS = f"""
    --num-layers 2 --hidden-size 32 --num-attention-heads 4 --pipeline-model-parallel-size 2
    --seq-length {S} --max-position-embeddings {S} --micro-batch-size 1 --global-batch-size {M}
    --train-iters 10 --lr 0.1 --lr-decay-style constant --optimizer sgd --padded-vocab-size 512
    --hidden-dropout 0.1 --attention-dropout 0.1 --rerun-mode validate_results"""
sys.argv = ["notebook", *FLAGS.split()]

# %% [markdown]
# What `pretrain` does before it trains. `keep_state_for_reruns` tells the machine what a run of a step
# changes, and must be put back before the next one: buffers, counts, random numbers.


# %%
# %%px
def build():
    """A new model, with the same weights each time."""
    destroy_global_vars()
    parallel_state.destroy_model_parallel()
    with contextlib.redirect_stdout(io.StringIO()):
        initialize_megatron()
        model, optimizer, scheduler = setup_model_and_optimizer(pretrain_gpt.model_provider)
    config = get_model_config(model[0])
    config.grad_scale_func = optimizer.scale_loss
    config.finalize_model_grads_func = finalize_model_grads
    new_machine(model, device="device 0")
    return model, optimizer, scheduler, config


# %%
# %%px
def new_machine(model, device):
    """That of a process which says that it runs on this device."""
    initialize_rerun_state_machine(mode="validate_results")
    keep_state_for_reruns(get_model_config(model[0]), model)
    get_rerun_state_machine().judge.device_of_rank = lambda: ("node", device)


# The machine writes its verdicts into the log. Show it below the cell, and keep it.
log = io.StringIO()
shown_and_kept = [logging.StreamHandler(stream) for stream in (sys.stdout, log)]
logging.basicConfig(handlers=shown_and_kept, format="%(message)s", level="WARNING", force=True)

# %% [markdown]
# The samples are made up. A `RerunDataIterator` around them keeps those of a step, and can go back.


# %%
# %%px
def samples_from(number):
    """The microbatches of step `number`, from 1 on, and of all later ones."""
    generator = torch.Generator().manual_seed(1)
    texts = torch.randint(256, (10 * M, 1, S + 1), generator=generator)
    for text in texts[(number - 1) * M :]:
        sample = {"tokens": text[:, :-1], "labels": text[:, 1:]}
        yield sample | {"loss_mask": torch.ones(1, S), "position_ids": torch.arange(S)[None]}


# %% [markdown]
# The fault goes into the loss of microbatch 1, on the last stage, in step 3. `runs` says in which runs
# of the step. `validate_result` judges each loss, which is a sum over 16 tokens: 16 · ln 512 = 100 is
# usual. More than 1000 is rejected.


# %%
# %%px
def judged(fault, model, loss_func, output):
    loss, *others = loss_func(output)
    machine, microbatch = get_rerun_state_machine(), model.module.current_microbatch
    is_here = (machine.current_iteration, microbatch) == (3, 1)
    if is_here and machine.num_runs in fault.get("runs", []):
        loss = loss * 100
    is_fatal = fault.get("fatal", True)
    machine.validate_result(loss.detach(), lambda value: value > 1000, "large loss", fatal=is_fatal)
    return loss, *others


def forward_step(fault, data_iterator, model):
    output, loss_func = pretrain_gpt.forward_step(data_iterator, model)
    return output, partial(judged, fault, model, loss_func)


# %% [markdown]
# One step, watched: the seven values of `train_step`, and the number of each run that the schedule
# made.


# %%
# %%px
def step(built, samples, fault):
    model, optimizer, scheduler, config = built
    runs = []

    def schedule(**given):
        runs.append(get_rerun_state_machine().num_runs)
        return schedule_of_run()(**given)

    program = partial(forward_step, fault)
    seven = train_step(program, samples, model, optimizer, scheduler, config, schedule)
    _, _, should_checkpoint, should_exit, exit_code, _, _ = seven
    if not should_exit:
        get_train_state().iteration += 1  # as `train` does
    weights = [param.detach().cpu().clone() for param in model[0].parameters()]
    ending = (should_checkpoint, should_exit, exit_code)
    return {"runs": runs, "ending": ending, "weights": weights}


# %%
# %%px
def run(**fault):
    """A new model: two clean steps, then step 3 with the fault. Returns (the steps, the model ...)."""
    built, samples = build(), RerunDataIterator(samples_from(1))
    return [step(built, samples, fault) for _ in range(3)], built


# %% [markdown]
# Why clean steps first? In its first step a process judges nothing, and only logs.
#
# ## Predict
#
# 1. The loss is bad in the first run of step 3, on rank 1, and right in any later run. How often does
#    each of the two ranks run the schedule in this step?
# 2. The bad result is *not fatal*, so training goes on. Are the weights after step 3 those of a run
#    without a fault?
# 3. The same fault, but *fatal*: the run ends. With which exit code: 16 ("resume me on another device,
#    then I can tell") or 17 ("no more runs are needed")?
# 4. A fatal fault that is there in the second run too. Which code?

# %%
# Write your answers in place of None. Running this cell locks them in.
predict(
    runs_on_each_rank=None,  # such as [1, 1]
    weights_are_clean=None,  # True or False
    code_if_it_passes=None,
    code_if_it_comes_again=None,
)

# %% [markdown]
# ## A fault that passes
#
# First a run without a fault, to compare with.

# %%
# %%px
clean, _ = run()
passes, _ = run(runs=[1], fatal=False)

# %%
runs = ranks["[each['runs'] for each in passes]"]
print("runs of steps 1, 2 and 3, on rank 0:", *runs[0])
compare(runs_on_each_rank=[len(of_rank[2]) for of_rank in runs])


# %%
def same(name, number, other="clean", other_number=3):
    """Whether two runs had the same weights after these steps, on all ranks: on a CPU, to the bit."""
    mine, theirs = f"{name}[{number - 1}]['weights']", f"{other}[{other_number - 1}]['weights']"
    pairs = zip(sum(ranks[mine], []), sum(ranks[theirs], []), strict=True)
    # A GPU may add in another order the next time.
    atol = 0 if ranks.device == "cpu" else 1e-5
    return all(torch.allclose(one, two, rtol=0, atol=atol) for one, two in pairs)


# %%
compare(weights_are_clean=same("passes", 3))
assert not same("clean", 3, "clean", 2)  # the comparison itself: a step does move them
assert runs[0] == runs[1] == [[1], [1], [1, 2]]
assert ranks["passes[2]['ending']"] == [(False, False, 0)] * 2

# %% [markdown]
# Only rank 1 has seen the bad loss, and only it writes a line. But no rank can run a pipeline alone.
# So after each run the ranks ask each other: has anybody rejected a result? Then all run again.
#
# The second run gave another result, on the same chip, from the same numbers: a *transient error*.
# The first run's gradients are gone, and the update takes those of the second. Nothing is left of the
# fault.
#
# Now let it be fatal:

# %%
# %%px
ended, _ = run(runs=[1])

# %%
compare(code_if_it_passes=ranks["ended[2]['ending']"][0][2])
assert ranks["ended[2]['ending']"] == [(False, True, 17)] * 2
assert same("ended", 3, "clean", 2)  # step 3 was run twice, and did not update

# %% [markdown]
# ## A fault that comes again

# %%
# %%px
again, built = run(runs=[1, 2])

# %%
compare(code_if_it_comes_again=ranks["again[2]['ending']"][0][2])
assert ranks["again[2]['ending']"] == [(True, True, 16)] * 2
assert same("again", 3, "clean", 2)

# %% [markdown]
# `train_step` returned (.., True, True, 16, ..): save a checkpoint, end the run, with code 16. There
# was no update, and the weights are those after step 2. So this is the checkpoint of step 2, with one
# thing more: what the machine knows.

# %%
# %%px
state = get_rerun_state_machine().state_dict()
put_back_random_numbers = keep_rng_states(built[0])  # a checkpoint has them too

# %%
# %%px 1
for name in ("failed", "initial_result", "suspicious_device"):
    print(f"{name}: {state[name]}")

# %% [markdown]
# The same chip gives the same bad number twice. It may be broken, or the number may be right. Another
# device must decide. We do not have a second one here, so a new machine says that it is on one. All
# else is real: it loads the state, and the next step is the third run.


# %%
# %%px
def resumed(**fault):
    new_machine(built[0], device="device 1")
    get_rerun_state_machine().load_state_dict(state)
    put_back_random_numbers()
    return [step(built, RerunDataIterator(samples_from(3)), fault)]


# %% [markdown]
# ## Predict
#
# 1. On device 1 the loss is right. The verdict: "persistent error" or "correct result"?
# 2. On device 1 the loss is just as large. The verdict?
# 3. The exit codes of these two runs?

# %%
predict(
    verdict_if_right_elsewhere=None,
    verdict_if_same_elsewhere=None,
    codes_elsewhere=None,  # such as [0, 16]
)

# %%
# %%px
right_elsewhere = resumed()

# %%
# %%px
same_elsewhere = resumed(runs=[1])

# %%
right, same_again = ranks["log.getvalue().splitlines()[-2:]"][1]  # rank 1's last two lines
verdicts = [line.split(": ")[1].split(" of ")[0] for line in (right, same_again)]
names = ("right_elsewhere", "same_elsewhere")
endings = [ranks[f"{name}[0]['ending']"][0] for name in names]
compare(
    verdict_if_right_elsewhere=verdicts[0],
    verdict_if_same_elsewhere=verdicts[1],
    codes_elsewhere=[code for _, _, code in endings],
)
assert verdicts == ["persistent error", "correct result"]
assert endings == [(False, True, 17)] * 2
assert same("same_elsewhere", 1, "clean", 2)

# %% [markdown]
# A *persistent error* is one of device 0: replace it. A *correct result* is what any device computes:
# look at data, learning rate, program. The code is 17 both times, because the log has the answer. And
# the weights have still not moved since step 2.
#
# ## Two traps
#
# Who writes a training loop around this machine must give a second run what the first one had. Leave
# out one part, on purpose:
#
# * The iterator does not go back: the second run reads the next four microbatches.
# * Gradients are set to zero before the first run only.
#
# ## Predict
#
# 1. The fault comes again, and is fatal, but the iterator does not go back. Which exit code?
# 2. The fault passes, and is not fatal, but the second run does not set gradients to zero. What
#    follows: "clean weights", "spoilt weights" or "an error"?

# %%
predict(code_if_not_rewound=None, what_if_not_zeroed=None)

# %%
# %%px
with patch.object(RerunDataIterator, "rewind", lambda self: None):
    not_rewound, _ = run(runs=[1, 2])


# %%
# %%px
def zero_in_first_run(chunk):
    if get_rerun_state_machine().num_runs == 1:
        zero_grad_buffer(chunk)


zero_grad_buffer, refused = DistributedDataParallel.zero_grad_buffer, ""
with patch.object(DistributedDataParallel, "zero_grad_buffer", zero_in_first_run):
    try:
        run(runs=[1], fatal=False)
    except RuntimeError as error:
        refused = str(error)

# %%
refused = ranks["refused"][0]
compare(
    code_if_not_rewound=ranks["not_rewound[2]['ending']"][0][2],
    what_if_not_zeroed="an error" if refused else "weights of some kind",
)
print("The error:", refused.partition(";")[0])

# %% [markdown]
# The first trap gives a wrong verdict, and nothing else. Other samples have another loss, so the
# machine sees a *transient error*. It says 17 about a chip that may be broken for good. With dropout,
# random numbers that are not put back do the same.
#
# In the second trap the verdict is right, because the losses are. But gradients would be those of
# both runs, the bad one too, and the machine compares results, not gradients. Here the gradient
# buffers notice it. A loop of your own, around another optimizer, may not.

# %%
assert ranks["not_rewound[2]['ending']"] == [(False, True, 17)] * 2
assert all("zero_grad_buffer() was not called" in text for text in ranks["refused"])

# %% [markdown]
# ## Part B: a step that is captured
#
# Now the opposite. Python needs longer to ask for a small step than a GPU needs to compute it. So one
# step is *captured*: its tensor operations are written down, with the memory that they read and write.
# From then on they are *replayed*. `FullCudaGraphWrapper` stands around the schedule and does this.
#
# On a GPU that is a CUDA graph. Here it is a stand-in that records operations on the CPU. It keeps the
# same rules, and says where Python has broken one.
#
# Six steps of two microbatches. The loss function appends to a list:

# %%
from minimegatron.core.full_cuda_graph import FullCudaGraphWrapper, destroy_full_cuda_graphs
from minimegatron.core.pipeline_parallel.schedules import get_forward_backward_func
from minimegatron.core.recorded_graph import HostReadError
from minimegatron.training.tiny_gpt import TinyGPT, masked_loss

STEPS, WARMUP = 6, 2


class Noted:
    """The loss function of TinyGPT, and a list that grows whenever Python calls it."""

    def __init__(self):
        self.list = []

    def __call__(self, mask, losses):
        found = masked_loss(mask, losses)
        self.list.append(found[2]["loss"])
        return found


# %%
def six_steps(loss_func, is_captured=True):
    """Yields what the schedule returned, before the optimizer's step."""
    gpt = TinyGPT(num_layers=2, loss_func=loss_func)
    optimizer, schedule = gpt.optimizer(), get_forward_backward_func()
    if is_captured:
        schedule = FullCudaGraphWrapper(schedule, cuda_graph_warmup_steps=WARMUP)
    for number in range(STEPS):
        data = gpt.microbatches(2, seed=number)
        yield gpt.step(2, schedule, data=data, forward_only=False)
        optimizer.step()
    destroy_full_cuda_graphs()


# %%
def watched(is_captured):
    noted, found = Noted(), {"losses": [], "calls": [], "results": []}
    for results in six_steps(noted, is_captured):
        found["losses"].append([float(report["loss"]) for report in results])
        found["calls"].append(len(noted.list))
        found["results"].append(results)
    kept = found.pop("results")
    found["same tensor"] = kept[-2][0]["loss"] is kept[-1][0]["loss"]
    found["read at the end"] = [float(results[0]["loss"]) for results in kept]
    found["list at the end"] = [float(loss) for loss in noted.list]
    return found


# %% [markdown]
# And a loss function that is curious: it reads a number, as many do.


# %%
def curious(mask, losses):
    found = masked_loss(mask, losses)
    if found[0].item() > 1e6:
        print("what a loss!")
    return found


# %%
def until_it_fails():
    done = 0
    try:
        for _ in six_steps(curious):
            done += 1
    except HostReadError as error:
        destroy_full_cuda_graphs()
        return done + 1, str(error)
    return None, "it does not fail"


# %% [markdown]
# ## Predict
#
# 1. Steps 1 and 2 are eager, step 3 is captured. How often has Python called the loss function after
#    each of the six steps?
# 2. Are the losses of all six steps those of an eager run, to the bit?
# 3. Each step's result is kept, and read after the last step. The captured run: how many different
#    losses are there, of six?
# 4. The curious loss function works in eager steps. In which step does it fail?

# %%
predict(
    calls_of_loss_function=None,  # six numbers: after step 1, after step 2, ...
    losses_are_equal=None,  # True or False
    different_losses_at_the_end=None,
    curious_fails_in_step=None,
)


# %%
def part_b():
    return watched(is_captured=False), watched(is_captured=True), until_it_fails()


(of_rank,) = launch(part_b, 1, device="cpu")
eager, captured, (failed_in, message) = of_rank

# %%
KINDS = ["eager"] * WARMUP + ["capture, then replay"] + ["replay"] * (STEPS - WARMUP - 1)
print(f"{'step':21}{'losses of its two microbatches':>32}{'calls so far':>15}{'eager run':>12}")
for number, kind in enumerate(KINDS):
    one, two = captured["losses"][number]
    calls = captured["calls"][number], eager["calls"][number]
    print(f"{kind:21}{one:>20.4f}{two:>12.4f}{calls[0]:>15}{calls[1]:>12}")
compare(
    calls_of_loss_function=captured["calls"],
    losses_are_equal=captured["losses"] == eager["losses"],
)

# %%
assert captured["calls"] == [2, 4, 6, 6, 6, 6] and eager["calls"] == [2, 4, 6, 8, 10, 12]
assert captured["losses"] == eager["losses"]
assert len({loss for losses in eager["losses"] for loss in losses}) == 2 * STEPS

# %% [markdown]
# In a replay no Python of the schedule runs. The list does not grow, a counter does not count, a hook
# is not called. All the same the losses are right: each replay read the new samples, because the wrapper
# had copied them to where the captured step reads.
#
# ## Results that are read late

# %%
for name, found in (("eager", eager), ("captured", captured)):
    at_once = [losses[0] for losses in found["losses"]]
    for when, losses in (("at once", at_once), ("at the end", found["read at the end"])):
        print(f"{name:8} read {when:10}", *(f"{loss:.4f}" for loss in losses))
compare(different_losses_at_the_end=len(set(captured["read at the end"])))

# %% [markdown]
# Every replay returns the same tensors, at the same place, with new numbers. Who keeps a result and
# reads it later, reads the last step's. The eager steps' results are their own. So read, or
# `clone()`, before the next call: `train_step` adds its losses up at once.
#
# The list has the same trap. Its last two entries were appended in step 3, and hold the losses of step
# 6.

# %%
assert captured["read at the end"][WARMUP:] == [captured["losses"][-1][0]] * (STEPS - WARMUP)
assert captured["list at the end"][-2:] == captured["losses"][-1]
assert captured["same tensor"] and not eager["same tensor"]

# %% [markdown]
# ## A number that is read

# %%
compare(curious_fails_in_step=failed_in)
print(message)
assert failed_in == WARMUP + 1 and "Tensor.item() in curious" in message

# %% [markdown]
# During a capture nothing is computed yet, so there is no number to read; and what Python decides by
# it would be decided for all replays. The cure: keep it a tensor, return it in the report, and read
# it after the call.
#
# This is why a run cannot have both parts of this notebook: `validate_result` must look at each
# result as it arises. `--rerun-mode validate_results` with `--cuda-graph-impl full_iteration` is
# refused before the first step.
#
# ## Last: a stage that is slow
#
# A third thing that no loss shows. Stage 1 sleeps for 30 ms in each forward. Who looks at the clock
# sees that all ranks are slow, because they wait for each other. `stimer`, which stands around the
# forward in `pretrain_gpt.forward_step`, leaves the waiting out (`--log-straggler`):

# %%
# %%px
built, samples, stimer = build(), RerunDataIterator(samples_from(1)), StragglerDetector()
step(built, samples, {})  # what is made on first use is made now
stimer.configure(world_size, rank, enabled=True, coordinates={"stage": rank})
if rank == 1:
    built[0][0].register_forward_pre_hook(lambda *_: time.sleep(0.03))
begun = time.monotonic()
for _ in range(3):
    step(built, samples, {})
seconds = (time.monotonic() - begun) / 3
print(f"a step: {1000 * seconds:.0f} ms")

# %%
# %%px
with contextlib.redirect_stdout(io.StringIO()) as said:
    stimer.report(log_interval=3)
stimer.configure(world_size, rank)  # off again

# %%
report = ranks["said.getvalue()"][0]
print(report)
assert min(ranks["seconds"]) > 4 * 0.03  # both ranks' steps are long ...
assert "slowest: rank 1 (stage 1)" in report  # ... and one is why

# %% [markdown]
# ## Change it
#
# The ranks are still there, with all their variables.
#
# * `resumed()` with `device="device 0"` in its `new_machine`: the scheduler has given us the same
#   device again. Which code, and what does the log say?
# * Let the trap be a third one: `get_rerun_state_machine().state_restore_func = lambda kept: None` at
#   the end of `new_machine`. Which verdict has a fault that comes again? What, if you set
#   both dropouts to 0?
# * Plant the fault in step 1. What does the log say, and what do the weights?
# * Let `curious` put `found[0] > 1e6` into its report, `found[2]`, in place of reading it. Does it fail?
# * Give `WARMUP = 0`. And append `number` to a list in the loop of `six_steps`: does that list grow?
# * Slow down stage 0 as well, by 20 ms.

# %%
ranks.stop()

# %% [markdown]
# ## Where next
#
# * [A step that is run again](../docs/tour/a-step-that-is-run-again.md) and
#   [a step that is captured](../docs/tour/a-step-that-is-captured.md) in the tour.
# * `minimegatron/core/rerun/states.py` draws which run follows which, and
#   `minimegatron/core/full_cuda_graph.py` has the wrapper.
# * [Notebook 09](09_the_whole_step.ipynb): the step that both of them repeat.
