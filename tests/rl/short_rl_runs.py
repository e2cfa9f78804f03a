"""A few training steps of `train_rl` on this rank, for tests: flags in, what each step found out.

In ranks of `run_ranks`.
"""

import dataclasses
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from minimegatron import pretrain_gpt, train_rl
from minimegatron.core import parallel_state
from minimegatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from minimegatron.core.models.gpt.gpt_model import GPTModel
from minimegatron.core.num_microbatches_calculator import (
    get_current_global_batch_size,
    update_num_microbatches,
)
from minimegatron.core.utils import get_model_config
from minimegatron.rl.grpo_data import GrpoData
from minimegatron.rl.rl_arguments import add_rl_arguments
from minimegatron.training import training
from minimegatron.training.arguments import core_transformer_config_from_args
from minimegatron.training.checkpointing import save_checkpoint
from minimegatron.training.global_vars import destroy_global_vars, get_args, get_train_state
from minimegatron.training.initialize import initialize_megatron
from minimegatron.training.pipeline_schedule import schedule_of_run
from minimegatron.training.progress import broadcast_from_last_stage

MODEL = (
    "--num-layers 4 --hidden-size 16 --num-attention-heads 2 --max-position-embeddings 16 "
    "--position-embedding-type rope --seq-length 8 --micro-batch-size 2 --global-batch-size 8 "
    "--train-iters 20 --lr 1e-2 --lr-decay-style constant --grpo-prompts-per-step 4 "
    "--grpo-group-size 4 --grpo-clamp-eps-lower 0.2 --grpo-clamp-eps-upper 0.28 "
    "--grpo-kl-beta 0.05 --init-method-std 0.3"
)
"""16 rows make 2 steps, gone through twice: a rollout every 4 steps."""

LAYOUTS = {
    "alone": "",
    "d=2": "",
    "p=2": "--pipeline-model-parallel-size 2",
    "p=2, v=2": "--pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2",
    "t=2": "--tensor-model-parallel-size 2",
    "t=2, sequence parallel": "--tensor-model-parallel-size 2 --sequence-parallel",
    "c=2": "--context-parallel-size 2",
}


class Run:
    """A model in float32 or float64, connected as `pretrain` does, and its rollouts."""

    def __init__(self, flags: str, double: bool = False):
        sys.argv = ["test", *MODEL.split(), *flags.split()]
        self.rollouts = GrpoData()
        initialize_megatron(
            add_rl_arguments,
            train_rl.DEFAULTS,
            get_embedding_ranks=pretrain_gpt.get_embedding_ranks,
        )
        provider = partial(_double_model if double else train_rl.model_provider, self.rollouts)
        built = training.setup_model_and_optimizer(provider)
        self.model, self.optimizer, self.scheduler = built
        self.config = get_model_config(self.model[0])
        training._connect_schedule(self.config, self.model, self.optimizer)
        for chunk in self.model:
            chunk.train()

    def step(self) -> dict[str, float]:
        """One training step; its figures, on every rank."""
        state = get_train_state()
        update_num_microbatches(state.consumed_train_samples)
        iterator = self.rollouts(self.model, self.optimizer, state.iteration)
        found, *_, norm, _ = training.train_step(
            train_rl.forward_step,
            iterator,
            self.model,
            self.optimizer,
            self.scheduler,
            self.config,
            schedule_of_run(),
        )
        state.iteration += 1
        state.consumed_train_samples += get_current_global_batch_size()
        figures = broadcast_from_last_stage({key: float(value) for key, value in found.items()})
        return figures | {"norm": norm}

    def save(self) -> None:
        save_checkpoint(get_train_state().iteration, self.model, self.optimizer, self.scheduler)

    def all_rows(self) -> dict[str, torch.Tensor]:
        """The rollout of all copies, [rows, ...] in order."""
        group = parallel_state.get_data_parallel_group()
        found = {}
        for name, rows in self.rollouts.rows.items():
            parts = [torch.empty_like(rows) for _ in range(group.size())]
            torch.distributed.all_gather(parts, rows.contiguous(), group=group)
            found[name] = torch.cat(parts, dim=1).flatten(0, 1)
        return found


def run(
    flags: str, steps: int, double: bool = False, more: Callable[[Run], Any] | None = None
) -> dict[str, Any]:
    """Trains to iteration `steps`, from `--load` if given; saves if `--save` is given.

    Returns the figures of each step, the rows of the last rollout, where it began, and what `more`
    says of the run at its end.
    """
    try:
        this = Run(flags, double)
        began = get_train_state().iteration
        figures = [this.step() for _ in range(began, steps)]
        if get_args().save is not None:
            this.save()
        said = None if more is None else more(this)
        return {"figures": figures, "rows": this.all_rows(), "began": began, "said": said}
    finally:
        leave()


def leave() -> None:
    destroy_global_vars()
    if parallel_state.is_initialized():
        parallel_state.destroy_model_parallel()


def _double_model(rollouts, pre_process=True, post_process=True, vp_stage=None):
    """`train_rl.model_provider` in float64, which no flag asks for."""
    args = get_args()
    config = dataclasses.replace(
        core_transformer_config_from_args(args),
        params_dtype=torch.float64,
        pipeline_dtype=torch.float64,
    )
    pp_rank = parallel_state.get_pipeline_model_parallel_rank()
    chunk = GPTModel(
        config,
        get_gpt_decoder_block_spec(config, vp_stage=vp_stage, pp_rank=pp_rank),
        args.padded_vocab_size,
        args.max_position_embeddings,
        pre_process=pre_process,
        post_process=post_process,
        share_embeddings_and_output_weights=not args.untie_embeddings_and_output_weights,
        position_embedding_type=args.position_embedding_type,
        vp_stage=vp_stage,
    )
    rollouts.attach(chunk)
    return chunk
