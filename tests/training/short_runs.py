"""A few training steps on this rank, from the command line's flags to a checkpoint: for tests.

Used by `test_checkpointing`, `test_overflow` and `faults.test_files`, in ranks of `run_ranks`.
"""

import contextlib
import dataclasses
import functools
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from minimegatron import pretrain_gpt
from minimegatron.core import parallel_state
from minimegatron.core.datasets import stdlib_corpus, stdlib_text
from minimegatron.core.models.gpt.gpt_model import GPTModel
from minimegatron.core.num_microbatches_calculator import (
    get_current_global_batch_size,
    update_num_microbatches,
)
from minimegatron.core.utils import get_model_config
from minimegatron.training import training
from minimegatron.training.arguments import core_transformer_config_from_args
from minimegatron.training.checkpointing import save_checkpoint
from minimegatron.training.global_vars import destroy_global_vars, get_args, get_train_state
from minimegatron.training.initialize import initialize_megatron
from minimegatron.training.pipeline_schedule import schedule_of_run
from minimegatron.training.progress import broadcast_from_last_stage
from minimegatron.training.utils import (
    get_batch_on_this_cp_rank,
    get_batch_on_this_tp_rank,
)

MODEL = (
    "--num-layers 4 --hidden-size 16 --num-attention-heads 4 --max-position-embeddings 8 "
    "--seq-length 8 --micro-batch-size 1 --global-batch-size 4 --train-iters 20 --lr 1e-2 "
    "--eval-iters 0 --padded-vocab-size 512"
)
TP2, TP4 = "--tensor-model-parallel-size 2", "--tensor-model-parallel-size 4"
PP2, PP4 = "--pipeline-model-parallel-size 2", "--pipeline-model-parallel-size 4"
VP2 = "--num-virtual-stages-per-pipeline-rank 2"
ZERO1 = "--use-distributed-optimizer"


def run(
    flags: str, steps: int, double: bool = False, program: Any = pretrain_gpt, **defaults: Any
) -> dict[str, Any]:
    """Trains to iteration `steps`, from `--load` if given; saves there if `--save` is given.

    Returns the losses of the steps made here, where it began, and the next step's learning rate.
    `double`: a GPT in float64, loss and all. `program` has the functions that `pretrain` calls back,
    and `defaults` are the `args_defaults` that it gives.
    """
    sys.argv = ["test", *MODEL.split(), *flags.split()]
    with little_text():
        return _run(steps, double, program, defaults)


@contextlib.contextmanager
def little_text() -> Iterator[None]:
    """The built-in text is its first files only: samples of 8 tokens would be a million and a half."""
    files = _few_files()
    with (
        mock.patch.object(stdlib_corpus, "stdlib_files", lambda: files),
        mock.patch.object(stdlib_text, "stdlib_files", lambda: files),
    ):
        yield


@functools.cache
def _few_files() -> list[Path]:
    return stdlib_corpus.stdlib_files()[:80]


def _run(steps: int, double: bool, program: Any, defaults: dict[str, Any]) -> dict[str, Any]:
    try:
        initialize_megatron(
            get_embedding_ranks=program.get_embedding_ranks,
            get_position_embedding_ranks=vars(program).get("get_position_embedding_ranks"),
            args_defaults=defaults,
        )
        provider = double_model if double else program.model_provider
        forward_step = double_forward_step if double else program.forward_step
        model, optimizer, scheduler = training.setup_model_and_optimizer(provider)
        state, begin = get_train_state(), get_train_state().iteration
        iterator, _, _ = training._iterators_of_all_chunks(
            program.train_valid_test_datasets_provider, len(model)
        )
        config = get_model_config(model[0])
        training._connect_schedule(config, model, optimizer)
        losses = []
        while state.iteration < steps:
            update_num_microbatches(state.consumed_train_samples)
            loss, *_ = training.train_step(
                forward_step,
                iterator,
                model,
                optimizer,
                scheduler,
                config,
                schedule_of_run(),
            )
            state.iteration += 1
            state.consumed_train_samples += get_current_global_batch_size()
            if double:
                loss = {"lm loss": mean_of_microbatches()}
            means = {key: float(value) for key, value in loss.items()}
            losses.append(broadcast_from_last_stage(means)["lm loss"])
        if get_args().save is not None:
            # As programs for Megatron call it, which counts floating-point operations too.
            save_checkpoint(state.iteration, model, optimizer, scheduler, 1e9)
        return {"losses": losses, "began": begin, "lr": optimizer.param_groups[0]["lr"]}
    finally:
        destroy_global_vars()
        parallel_state.destroy_model_parallel()


def double_model(pre_process=True, post_process=True, vp_stage=None):
    """`pretrain_gpt.model_provider` in float64, which no flag asks for."""
    args = get_args()
    config = dataclasses.replace(
        core_transformer_config_from_args(args),
        params_dtype=torch.float64,
        pipeline_dtype=torch.float64,
    )
    pp_rank = parallel_state.get_pipeline_model_parallel_rank()
    return GPTModel(
        config,
        pretrain_gpt.get_gpt_decoder_block_spec(config, vp_stage=vp_stage, pp_rank=pp_rank),
        args.padded_vocab_size,
        args.max_position_embeddings,
        pre_process=pre_process,
        post_process=post_process,
        share_embeddings_and_output_weights=not args.untie_embeddings_and_output_weights,
        vp_stage=vp_stage,
    )


def double_forward_step(data_iterator, model):
    """`pretrain_gpt.forward_step` whose loss stays in float64."""
    vp_stage = model.module.vp_stage
    batch = get_batch_on_this_cp_rank(get_batch_on_this_tp_rank(data_iterator, vp_stage))
    output = model(batch["tokens"], batch["position_ids"], None, labels=batch["labels"])
    return output, partial(double_loss, batch["loss_mask"])


def double_loss(loss_mask, output):
    """Summed loss, tokens, report."""
    loss, num_tokens = (output * loss_mask).sum(), loss_mask.sum()
    report = torch.stack([loss.detach(), num_tokens])
    reports.append(report)
    return loss, num_tokens.int(), {"lm loss": report}


reports: list[torch.Tensor] = []


def mean_of_microbatches() -> torch.Tensor:
    """The step's loss, which `train_step` reports in float32, in float64."""
    pair = torch.stack(reports).sum(dim=0) if reports else torch.zeros(2, dtype=torch.float64)
    reports.clear()
    group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    torch.distributed.all_reduce(pair, group=group)
    return pair[0] / pair[1]
