"""A very small GPT's training step, on these ranks or in one process: what a check compares.

Megatron has no counterpart.

Initial weights depend on names only and microbatches on their number in the global batch, so every
way of cutting the step must give the gradients that one process gets. The student's room has
`on_these_ranks`; `gpt_step_judge`, in another process, has `one_process`, and compares.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

from minimegatron.core import parallel_state
from minimegatron.core.collectives import all_reduce
from minimegatron.core.distributed.distributed_data_parallel import DistributedDataParallel
from minimegatron.core.distributed.distributed_data_parallel_config import (
    DistributedDataParallelConfig,
)
from minimegatron.core.distributed.finalize_model_grads import finalize_model_grads
from minimegatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_local_spec,
    get_gpt_mtp_block_spec,
)
from minimegatron.core.models.gpt.gpt_model import GPTModel
from minimegatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from minimegatron.core.orders.orders import placement_of
from minimegatron.core.parameter import tensor_group
from minimegatron.core.pipeline_parallel.schedules import (
    forward_backward_no_pipelining,
    get_forward_backward_func,
)
from minimegatron.core.process_groups_config import ProcessGroupCollection
from minimegatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from minimegatron.core.tensor_parallel.sharding import shard_parameter
from minimegatron.core.transformer.layer_placement import ranks_with_word_embedding
from minimegatron.core.transformer.module_state import named_global_parameters
from minimegatron.core.transformer.transformer_config import TransformerConfig
from minimegatron.core.utils import get_attr_wrapped_model, get_model_config, unwrap_model
from minimegatron.exercises.bench import apart
from minimegatron.exercises.bench.family_steps import (
    FAMILIES,
    ModelOfStep,
    sum_of_losses,
    tokens_with_mask,
)
from minimegatron.exercises.bench.policy_step import policy_batches, policy_step
from minimegatron.exercises.bench.repeated_step import judged, run_until_accepted
from minimegatron.exercises.bench.step_case import (
    HEADS,
    HIDDEN,
    MICRO_BATCH,
    SEQ,
    VOCAB,
    StepCase,
)
from minimegatron.training.utils import get_batch_on_this_cp_rank


@dataclass(frozen=True)
class Seat:
    """A place in a process group, without a connection: what code that sends nothing asks for."""

    place: int = 0
    num_places: int = 1

    def rank(self) -> int:
        return self.place

    def size(self) -> int:
        return self.num_places

    def name(self) -> str:
        """Of a backend whose messages have no tags."""
        return "nccl"


def _transformer_config(case: StepCase) -> TransformerConfig:
    style: dict[str, Any] = {}
    if case.swiglu:
        style = {
            "gated_linear_unit": True,
            "activation_func": F.silu,
            "add_bias_linear": False,
            "ffn_hidden_size": 12,
        }
    if case.num_experts:
        style |= _of_experts(case)
    style |= family_of(case).config
    if case.mtp:
        # Large, so that a mistake in these losses is seen.
        style |= {"mtp_num_layers": case.mtp, "mtp_loss_scaling_factor": 0.5}
    return TransformerConfig(
        num_layers=case.layers,
        hidden_size=HIDDEN,
        num_attention_heads=HEADS,
        hidden_dropout=case.dropout,
        attention_dropout=0.0,
        params_dtype=torch.float64,
        pipeline_dtype=torch.float64,
        tensor_model_parallel_size=case.tp,
        context_parallel_size=case.cp,
        cp_comm_type=case.comm,
        pipeline_model_parallel_size=case.pp,
        virtual_pipeline_model_parallel_size=case.vp,
        sequence_parallel=case.sequence_parallel,
        batch_p2p_comm=not (case.vp and case.pp == 2),
        calculate_per_token_loss=case.per_token,
        init_method_std=0.1,
        init_seed=case.seed + 1,
        **style,
    )


def _of_experts(case: StepCase) -> dict[str, Any]:
    """What a config says of experts. The loss of their balance is large, so that it is seen."""
    return {
        "num_moe_experts": case.num_experts,
        "moe_ffn_hidden_size": 12,
        "moe_router_topk": case.topk,
        # After the choice of one expert, its weight would always be 1.
        "moe_router_pre_softmax": case.topk == 1,
        "moe_token_dispatcher_type": case.dispatcher,
        "moe_router_load_balancing_type": case.balance,
        "moe_aux_loss_coeff": 0.0 if case.balance == "none" else 0.5,
        "expert_model_parallel_size": case.ep,
        "expert_tensor_parallel_size": case.etp,
        "overlap_moe_expert_parallel_comm": case.overlap_moe,
    }


def _optimizer_config(case: StepCase) -> OptimizerConfig:
    # A large eps: a key's bias has no gradient but round-off, which Adam would turn into a step.
    scaling: dict[str, Any] = {}
    if case.loss_scale is not None:
        scaling = {
            "fp16": True,
            "initial_loss_scale": case.loss_scale,
            "min_loss_scale": case.loss_scale / 4,
            "loss_scale_window": case.loss_scale_window,
            "hysteresis": case.hysteresis,
        }
    return OptimizerConfig(
        lr=0.05,
        adam_eps=1e-3,
        clip_grad=case.clip_grad,
        params_dtype=torch.float64,
        use_distributed_optimizer=case.distributed_optimizer,
        **scaling,
    )


def batches(seed: int, num: int) -> list[dict[str, torch.Tensor]]:
    """The global batch's microbatches, with a different number of unmasked tokens in each."""
    return tokens_with_mask(seed, num)


def _share_of_mean(
    mask: torch.Tensor, num_tokens: torch.Tensor, output: torch.Tensor
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Of ranks that share sequences: this one's part of the mean over `num_tokens`, those of all."""
    total = (output * mask).sum()
    return total / num_tokens, {"loss": total.detach().clone()}


def forward_step_func(
    data_iterator: Iterator, model: torch.nn.Module, return_schedule_plan: bool = False
) -> tuple:
    """As a user writes it: one microbatch through the model, and what makes a loss of it."""
    whole = next(data_iterator)
    cp_group = get_attr_wrapped_model(model, "pg_collection").cp
    positions = torch.arange(SEQ).expand(MICRO_BATCH, SEQ)
    batch = get_batch_on_this_cp_rank(whole | {"positions": positions}, cp_group)
    run = model.build_schedule_plan if return_schedule_plan else model
    targets = {"labels": batch["labels"], "loss_mask": batch["mask"]}
    output = run(batch["tokens"], batch["positions"], None, **targets)
    if cp_group.size() > 1 and not get_model_config(model).calculate_per_token_loss:
        return output, partial(_share_of_mean, batch["mask"], whole["mask"].sum())
    return output, partial(sum_of_losses, batch["mask"])


def _build_gpt(
    case: StepCase,
    config: TransformerConfig,
    groups: ProcessGroupCollection,
    first: bool,
    last: bool,
    vp_stage: int | None,
) -> GPTModel:
    spec = get_gpt_layer_local_spec(case.num_experts or None)
    further = get_gpt_mtp_block_spec(config, spec, vp_stage=vp_stage, pp_rank=groups.pp.rank())
    return GPTModel(
        config,
        spec,
        VOCAB,
        SEQ,
        pre_process=first,
        post_process=last,
        share_embeddings_and_output_weights=case.tied,
        position_embedding_type="rope" if case.rope or case.mtp else "learned_absolute",
        mtp_block_spec=further,
        pg_collection=groups,
        vp_stage=vp_stage,
    )


GPT = ModelOfStep(_build_gpt, batches, forward_step_func)
GPTS = {"gpt": GPT, "policy": ModelOfStep(_build_gpt, policy_batches, policy_step)}


class GptStep:
    """This rank's chunks of the model, wrapped, with their optimizer and their part of the data."""

    def __init__(self, case: StepCase, groups: ProcessGroupCollection):
        self.case, self.groups, self.family = case, groups, family_of(case)
        self.config = _transformer_config(case)
        self.chunks = [self._chunk(chunk_id) for chunk_id in range(case.vp or 1)]
        self.optimizer = get_megatron_optimizer(
            _optimizer_config(case), self.chunks, pg_collection=groups
        )
        self.config.finalize_model_grads_func = finalize_model_grads
        no_sync = [chunk.no_sync for chunk in self.chunks]
        self.config.no_sync_func = no_sync[0] if case.vp is None else no_sync
        if case.loss_scale is not None:
            self.config.grad_scale_func = self.optimizer.scale_loss
        dp_rank, dp_size = groups.dp.rank(), groups.dp.size()
        self.data = self.family.batches(case.seed, case.num_microbatches * dp_size)[
            dp_rank::dp_size
        ]

    def _chunk(self, chunk_id: int) -> DistributedDataParallel:
        case, place = self.case, (self.groups.pp.rank(), chunk_id)
        placement = placement_of(self.config)
        ends = (placement.is_first(*place), placement.is_last(*place))
        vp_stage = None if case.vp is None else chunk_id
        model = self.family.build(case, self.config, self.groups, *ends, vp_stage)
        ddp_config = DistributedDataParallelConfig(
            use_distributed_optimizer=case.distributed_optimizer,
            overlap_grad_reduce=case.overlap_grad_reduce,
            bucket_size=2000,
        )
        return DistributedDataParallel(
            self.config,
            ddp_config,
            model,
            disable_bucketing=chunk_id > 0,
            pg_collection=self.groups,
        )

    def forward_backward(self, function: Callable | None = None) -> list[dict[str, torch.Tensor]]:
        """Forward, backward and finalize, as `train_step` does it; returns the loss reports.

        `function` is another schedule than the one that `get_forward_backward_func` chooses.
        """
        if self.case.dropout:
            torch.manual_seed(self.case.seed)
        run = partial(self._run, function)
        num_chunks, of_step = len(self.chunks), self.data
        if self.case.rerun:
            further = self.family.batches(self.case.seed + 1, self.case.num_microbatches)
            reports = run_until_accepted(run, of_step + further, num_chunks)
        else:
            reports = run([iter(of_step) for _ in range(num_chunks)])
        for report in reports if self.groups.cp.size() > 1 else []:
            all_reduce(report["loss"], self.groups.cp)
        return reports

    def _run(
        self, function: Callable | None, data_iterator: list[Iterator]
    ) -> list[dict[str, torch.Tensor]]:
        for chunk in self.chunks:
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()
        if function is None:
            is_cut = self.case.pp > 1
            function = get_forward_backward_func() if is_cut else forward_backward_no_pipelining
        forward_step = self.family.forward_step
        if self.case.rerun:
            forward_step = judged(forward_step, dist.get_rank())
        return function(
            forward_step_func=forward_step,
            data_iterator=data_iterator,
            model=self.chunks,
            num_microbatches=self.case.num_microbatches,
            seq_length=self.family.seq_length,
            decoder_seq_length=SEQ,
            micro_batch_size=MICRO_BATCH,
            pg_collection=self.groups,
        )

    def meet(self) -> None:
        """Waits for all ranks: if one is stuck, the others are found here and not in the next case."""
        apart.meet()

    def parameters(self) -> list[tuple[str, torch.nn.Parameter]]:
        """This rank's parameters, under their names in the full model."""
        return [
            named for chunk in self.chunks for named in named_global_parameters(unwrap_model(chunk))
        ]

    def gradients(self) -> dict[str, torch.Tensor]:
        """Copies of this rank's raw gradients, under their names in the full model.

        The second copy of a tied embedding, on a later stage, has the first one's name.
        """
        return {name: param.main_grad.clone() for name, param in self.parameters()}

    def mine(self, full: torch.Tensor, param: torch.nn.Parameter) -> torch.Tensor:
        """This rank's piece of a weight or gradient of the full model."""
        group = tensor_group(param, self.groups)
        return shard_parameter(full, param, group.rank(), group.size())


def family_of(case: StepCase) -> ModelOfStep:
    """What its step needs to know."""
    return (GPTS | FAMILIES)[case.family]


def make_groups(case: StepCase) -> ProcessGroupCollection:
    """The process groups for a case, in place of whatever there was; every rank must call it."""
    copies = family_of(case).embedding_ranks(case)
    if case.mtp:
        ranks = partial(ranks_with_word_embedding, _transformer_config(case), case.tied)
        copies = {"get_embedding_ranks": ranks}
    parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=case.tp,
        context_parallel_size=case.cp,
        pipeline_model_parallel_size=case.pp,
        virtual_pipeline_model_parallel_size=case.vp,
        expert_model_parallel_size=case.ep,
        expert_tensor_parallel_size=case.etp,
        order=case.order,
        **copies,
    )
    model_parallel_cuda_manual_seed(1)
    return ProcessGroupCollection.use_mpu_process_groups()


def on_these_ranks(values: dict[str, Any]) -> GptStep:
    """The step as a case cuts it, `StepCase`'s fields; every rank must call it."""
    case = StepCase(**values)
    return GptStep(case, make_groups(case))
