"""This rank's part of the model, wrapped for training, and what updates it.

Counterpart: the functions of the same names in `megatron.training.training`.
"""

from collections.abc import Callable

import torch

from minimegatron.core import parallel_state, tensor_parallel
from minimegatron.core.distributed import DistributedDataParallel, torch_ddp
from minimegatron.core.enums import ModelType
from minimegatron.core.optimizer import MegatronOptimizer, OptimizerConfig, get_megatron_optimizer
from minimegatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from minimegatron.core.parameter_marks import restore_marks
from minimegatron.core.transformer.module import Float16Module
from minimegatron.core.utils import get_device, get_model_config
from minimegatron.training import checkpointing
from minimegatron.training.arguments import ddp_config_from_args, optimizer_config_from_args
from minimegatron.training.function_checks import check_chunk, takes
from minimegatron.training.global_vars import get_args
from minimegatron.training.schedule_args import schedule_settings


def setup_model_and_optimizer(
    model_provider_func: Callable[..., torch.nn.Module],
    model_type: ModelType = ModelType.encoder_or_decoder,
) -> tuple[list[torch.nn.Module], MegatronOptimizer, OptimizerParamScheduler]:
    """Model chunks, optimizer and scheduler; taken from a checkpoint with `--load`."""
    args = get_args()
    model = get_model(model_provider_func, model_type)
    optimizer = get_megatron_optimizer(get_megatron_optimizer_config(), model)
    opt_param_scheduler = get_optimizer_param_scheduler(optimizer)
    if args.load is not None:
        checkpointing.load_checkpoint(model, optimizer, opt_param_scheduler)
    optimizer.check_first()
    return model, optimizer, opt_param_scheduler


def get_model(
    model_provider_func: Callable[..., torch.nn.Module],
    model_type: ModelType = ModelType.encoder_or_decoder,
    wrap_with_ddp: bool = True,
) -> list[torch.nn.Module]:
    """This stage's chunks, one without interleaving: built, moved to the device, wrapped.

    `model_provider_func(pre_process, post_process)` builds one chunk; the flags say whether it begins
    with the embedding and ends with the loss. With interleaving it is given `vp_stage` too, and without
    None, if it takes an argument of that name.
    """
    args = get_args()
    num_chunks = parallel_state.get_virtual_pipeline_model_parallel_world_size()
    model = []
    for vp_stage in [None] if num_chunks is None else range(num_chunks):
        if vp_stage is not None:
            parallel_state.set_virtual_pipeline_model_parallel_rank(vp_stage)
        is_told = vp_stage is not None or takes(model_provider_func, "vp_stage")
        where = {"ignore_virtual": False, "vp_stage": vp_stage}
        chunk = model_provider_func(
            pre_process=parallel_state.is_pipeline_first_stage(**where),
            post_process=parallel_state.is_pipeline_last_stage(**where),
            **({"vp_stage": vp_stage} if is_told else {}),
        )
        check_chunk(chunk)
        chunk.model_type = model_type
        model.append(chunk)

    for chunk in model:
        restore_marks(chunk)
        for param in chunk.parameters():
            tensor_parallel.set_defaults_if_not_set_tensor_model_parallel_attributes(param)
    _print_number_of_parameters(model)
    model = [chunk.to(get_device()) for chunk in model]
    if args.fp16 or args.bf16:
        model = [Float16Module(get_model_config(chunk), chunk) for chunk in model]
    return _wrap_with_ddp(model) if wrap_with_ddp else model


def _print_number_of_parameters(model: list[torch.nn.Module]) -> None:
    if parallel_state.get_data_parallel_rank(with_context_parallel=True) == 0:
        count = sum(param.numel() for chunk in model for param in chunk.parameters())
        print(
            f" > number of parameters on (tensor, pipeline) model parallel rank "
            f"({parallel_state.get_tensor_model_parallel_rank()}, "
            f"{parallel_state.get_pipeline_model_parallel_rank()}): {count}",
            flush=True,
        )


def _wrap_with_ddp(model: list[torch.nn.Module]) -> list[torch.nn.Module]:
    args = get_args()
    is_local = args.DDP_impl == "local"
    wrapper = DistributedDataParallel if is_local else torch_ddp.TorchDistributedDataParallel
    ddp_config = ddp_config_from_args(args)
    # Only the model's first stage has its gradients late enough for buckets to pay: those of later
    # stages have the whole rest of the backward pass to be reduced in.
    where = {"ignore_virtual": False}
    return [
        wrapper(
            get_model_config(chunk),
            ddp_config,
            chunk,
            disable_bucketing=not parallel_state.is_pipeline_first_stage(**where, vp_stage=index),
        )
        for index, chunk in enumerate(model)
    ]


def get_megatron_optimizer_config() -> OptimizerConfig:
    """The arguments that `core.optimizer` knows, under the names it knows them by."""
    return optimizer_config_from_args(get_args())


def get_optimizer_param_scheduler(optimizer: MegatronOptimizer) -> OptimizerParamScheduler:
    """Learning rate and weight decay as functions of the samples seen: iterations x global batch."""
    return OptimizerParamScheduler(optimizer, **schedule_settings(get_args()))
