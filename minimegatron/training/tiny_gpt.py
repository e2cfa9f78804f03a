"""A GPT small enough for a lesson, cut over the ranks it is built in, and one step of it.

It does from keyword arguments what `training` does from a command line. Megatron has no
counterpart; its own tests build a model of their own in each file.

    def one_step():
        gpt = TinyGPT(pp=4, num_layers=8)
        return gpt.step(num_microbatches=8)

    minimegatron.launch(one_step, 4)

Weights depend on no cut: the same step on one rank gives the same losses and gradients. Where ranks
share sequences, give `calculate_per_token_loss=True` on both sides for that: their parts have different
numbers of tokens that count. Each of them reports the mean loss of its own tokens.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from minimegatron.core import parallel_state
from minimegatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from minimegatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_decoder_block_spec,
    get_gpt_mtp_block_spec,
)
from minimegatron.core.models.gpt.gpt_model import GPTModel
from minimegatron.core.optimizer import MegatronOptimizer, OptimizerConfig, get_megatron_optimizer
from minimegatron.core.orders.orders import get_schedule
from minimegatron.core.pipeline_parallel.schedules import get_forward_backward_func
from minimegatron.core.process_groups_config import ProcessGroupCollection
from minimegatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from minimegatron.core.transformer.layer_placement import ranks_with_word_embedding
from minimegatron.core.transformer.module import Float16Module
from minimegatron.core.transformer.module_state import named_global_parameters
from minimegatron.core.transformer.transformer_config import TransformerConfig
from minimegatron.core.utils import get_device, or_one, unwrap_model
from minimegatron.training.utils import get_batch_on_this_cp_rank

SIZES: dict[str, Any] = {
    "num_layers": 4,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
    "init_method_std": 0.1,
}


class TinyGPT:
    """This rank's chunks of the model, in their data-parallel wrappers, with everything connected.

    Args:
        tp, pp, vp: ranks per layer, stages, chunks per stage (None for no interleaving, or for those
            that the schedule's placement has). What ranks are left over, also by
            `context_parallel_size`, are data-parallel copies.
        vocab_size, seq_length, micro_batch_size: of the made-up data.
        loss_func: `(mask, losses of tokens)` -> what a loss function may return; None for
            `masked_loss`.
        ddp: fields of `DistributedDataParallelConfig`.
        pipeline_schedule: a registered order of work (see `orders`), whose placement decides which
            layers a rank builds; None for Megatron's choice.
        position_embedding_type: None for learned positions, or rotary ones if further tokens are
            predicted (`mtp_num_layers`): those need no table where these are embedded.
        config: fields of `TransformerConfig`, over those of `SIZES`.

    Groups that existed are replaced. `groups`, `config` and `chunks` are there to be looked at.
    """

    def __init__(
        self,
        *,
        tp: int = 1,
        pp: int = 1,
        vp: int | None = None,
        vocab_size: int = 64,
        seq_length: int = 16,
        micro_batch_size: int = 2,
        loss_func: Callable | None = None,
        ddp: dict[str, Any] | None = None,
        pipeline_schedule: str | None = None,
        position_embedding_type: str | None = None,
        **config: Any,
    ):
        if parallel_state.is_initialized():
            parallel_state.destroy_model_parallel()
        placement = None
        if pipeline_schedule is not None:
            placement = get_schedule(pipeline_schedule).placed(pp, vp)
            if vp is None and placement.num_model_chunks > 1:
                vp = placement.num_model_chunks
        self.config = _make_config(tp, pp, vp, pipeline_schedule, config)
        parallel_state.initialize_model_parallel(
            tp,
            pp,
            vp,
            context_parallel_size=self.config.context_parallel_size,
            expert_model_parallel_size=self.config.expert_model_parallel_size,
            expert_tensor_parallel_size=self.config.expert_tensor_parallel_size,
            get_embedding_ranks=partial(ranks_with_word_embedding, self.config, True),
            pipeline_placement=placement,
        )
        torch.manual_seed(1)
        model_parallel_cuda_manual_seed(1)
        self.groups = ProcessGroupCollection.use_mpu_process_groups()
        self.vocab_size, self.seq_length = vocab_size, seq_length
        self.micro_batch_size, self.ddp = micro_batch_size, ddp or {}
        self.loss_func = loss_func or masked_loss
        learned = "learned_absolute" if self.config.mtp_num_layers is None else "rope"
        self.position_embedding_type = position_embedding_type or learned
        self.chunks = [
            self._build_chunk(vp_stage) for vp_stage in ([None] if vp is None else range(vp))
        ]
        hooks = [chunk.no_sync for chunk in self.chunks]
        self.config.no_sync_func = hooks[0] if vp is None else hooks
        self.config.finalize_model_grads_func = finalize_model_grads

    def _build_chunk(self, vp_stage: int | None) -> DistributedDataParallel:
        where = {"ignore_virtual": False, "vp_stage": vp_stage}
        place = {"vp_stage": vp_stage, "pp_rank": self.groups.pp.rank()}
        spec = get_gpt_decoder_block_spec(self.config, **place)
        model: torch.nn.Module = GPTModel(
            self.config,
            spec,
            self.vocab_size,
            self.seq_length,
            pre_process=parallel_state.is_pipeline_first_stage(**where),
            post_process=parallel_state.is_pipeline_last_stage(**where),
            share_embeddings_and_output_weights=True,
            position_embedding_type=self.position_embedding_type,
            mtp_block_spec=get_gpt_mtp_block_spec(self.config, spec, **place),
            pg_collection=self.groups,
            vp_stage=vp_stage,
        ).to(get_device())
        if self.config.bf16 or self.config.fp16:
            model = Float16Module(self.config, model)
        return DistributedDataParallel(
            self.config,
            DistributedDataParallelConfig(**self.ddp),
            model,
            disable_bucketing=not parallel_state.is_pipeline_first_stage(**where),
            pg_collection=self.groups,
        )

    # -- Data --

    def microbatches(self, num: int, seed: int = 1) -> list[dict[str, torch.Tensor]]:
        """This copy's `num` microbatches; those of all copies make up the global batch.

        Each holds tokens and labels, int64 [b, s], and a mask, 0 where a token does not count:
        the i-th microbatch of the global batch leaves out its last i % 3 tokens.
        """
        generator = torch.Generator().manual_seed(seed)
        size = (self.micro_batch_size, self.seq_length + 1)
        copies, copy = self.groups.dp.size(), self.groups.dp.rank()
        found = []
        for i in range(num * copies):
            text = torch.randint(self.vocab_size, size, generator=generator)
            mask = torch.ones(size[0], self.seq_length, dtype=self.loss_dtype)
            mask[:, self.seq_length - i % 3 :] = 0.0
            batch = {"tokens": text[:, :-1], "labels": text[:, 1:], "mask": mask}
            if i % copies == copy:
                found.append({name: value.to(get_device()) for name, value in batch.items()})
        return found

    @property
    def loss_dtype(self) -> torch.dtype:
        """float64 for a model in float64, else float32."""
        return torch.promote_types(self.config.params_dtype, torch.float32)

    # -- One step --

    def forward_step(
        self, data_iterator: Iterator, model: torch.nn.Module
    ) -> tuple[torch.Tensor, Callable]:
        """The `forward_step_func` of `step`."""
        batch = dict(next(data_iterator))
        positions = torch.arange(self.seq_length, device=get_device())
        batch["positions"] = positions.expand_as(batch["tokens"])
        if self.groups.cp.size() > 1:
            batch = get_batch_on_this_cp_rank(batch, self.groups.cp)
        tokens, labels, mask = (batch[name] for name in ("tokens", "labels", "mask"))
        output = model(tokens, batch["positions"], None, labels=labels, loss_mask=mask)
        return output, partial(self.loss_func, mask)

    def step(
        self,
        num_microbatches: int,
        forward_backward_func: Callable | None = None,
        forward_step_func: Callable | None = None,
        data: list[dict[str, torch.Tensor]] | None = None,
        **more: Any,
    ) -> list:
        """Zeroes gradients and runs one schedule; returns what the loss function reported.

        Args:
            num_microbatches: of this copy of the model.
            forward_backward_func: None for the one that fits the groups.
            forward_step_func: None for `forward_step`.
            data: None for `microbatches(num_microbatches)`.
            more: for the schedule, such as `forward_only=True`.
        """
        for chunk in self.chunks:
            chunk.zero_grad_buffer()
        data = self.microbatches(num_microbatches) if data is None else data
        return (forward_backward_func or self._schedule())(
            forward_step_func=forward_step_func or self.forward_step,
            data_iterator=[iter(data) for _ in self.chunks],
            model=self.chunks,
            num_microbatches=num_microbatches,
            seq_length=self.seq_length,
            micro_batch_size=self.micro_batch_size,
            **more,
        )

    def _schedule(self) -> Callable:
        name = self.config.pipeline_schedule
        if name is None:
            return get_forward_backward_func()
        return get_forward_backward_func(pipeline_schedule=name)

    def optimizer(self, **config: Any) -> MegatronOptimizer:
        """An optimizer for this rank's chunks; `config` are fields of `OptimizerConfig`."""
        same = {
            "params_dtype": self.config.params_dtype,
            "bf16": self.config.bf16,
            "fp16": self.config.fp16,
            **{
                k: v
                for k, v in self.ddp.items()
                if k in ("use_distributed_optimizer", "overlap_param_gather")
            },
        }
        optimizer = get_megatron_optimizer(
            OptimizerConfig(**({"lr": 1e-2} | same | config)),
            self.chunks,
            pg_collection=self.groups,
        )
        self.config.grad_scale_func = optimizer.scale_loss
        return optimizer

    def gradients(self) -> dict[str, torch.Tensor]:
        """This rank's gradients by the parameters' names in the whole model, copied to the CPU."""
        return {
            name: param.main_grad.detach().cpu().clone()
            for chunk in self.chunks
            for name, param in named_global_parameters(unwrap_model(chunk))
        }


def _make_config(
    tp: int, pp: int, vp: int | None, pipeline_schedule: str | None, config: dict[str, Any]
) -> TransformerConfig:
    sizes: dict[str, Any] = {
        "tensor_model_parallel_size": tp,
        "pipeline_model_parallel_size": pp,
        "virtual_pipeline_model_parallel_size": vp,
        "pipeline_schedule": pipeline_schedule,
        # Interleaving over two stages cannot use batches.
        "batch_p2p_comm": vp is None or pp > 2,
    }
    return TransformerConfig(**(SIZES | sizes | config))


def masked_loss(
    mask: torch.Tensor, losses: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    """(summed loss, number of tokens, {"loss": their quotient}) of one microbatch."""
    total, num_tokens = (losses * mask).sum(), mask.sum()
    return total, num_tokens, {"loss": total.detach().clone() / or_one(num_tokens)}


def where_it_runs() -> str:
    """The backend and device of this job, in words, for a notebook to print."""
    device = get_device()
    what = torch.cuda.get_device_name(device) if device.type == "cuda" else "the CPU"
    return f"{dist.get_world_size()} ranks on {what}, messages by {dist.get_backend()}"
