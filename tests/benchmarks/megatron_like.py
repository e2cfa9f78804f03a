"""One training step written once, for `megatron.core` and for `minimegatron.core`.

Read by: `demo_speed`, `bucket_overlap`, `gpu_mfu`, `first_step`. The two packages have the same names,
so the loop below is the same but for the import: a GPT, DDP, the schedule, the optimizer, put together
as in Megatron's `train_step`.
"""

import contextlib
import importlib
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch

from tests.benchmarks.peers import PeerMissing, cuda_calls_on_cpu, experts_on_cpu

OURS, THEIRS = "minimegatron.core", "megatron.core"

_NAMES = {
    "parallel_state": "",
    "tensor_parallel.data": "broadcast_data",
    "distributed": "DistributedDataParallel DistributedDataParallelConfig",
    "distributed.finalize_model_grads": "finalize_model_grads",
    "models.gpt.gpt_layer_specs": (
        "get_gpt_decoder_block_spec get_gpt_layer_local_spec get_gpt_mtp_block_spec"
    ),
    "models.gpt.gpt_model": "GPTModel",
    "optimizer": "OptimizerConfig get_megatron_optimizer",
    "pipeline_parallel.schedules": "get_forward_backward_func",
    "tensor_parallel.random": "get_cuda_rng_tracker model_parallel_cuda_manual_seed",
    "transformer.module": "Float16Module",
    "transformer.transformer_config": "TransformerConfig",
}


def load(package: str) -> SimpleNamespace:
    """The names that a training step needs, from either package; PeerMissing with the reason."""
    warnings.filterwarnings("ignore", module=r"megatron\.")
    core = SimpleNamespace(package=package)
    for module, names in _NAMES.items():
        try:
            with warnings.catch_warnings(action="ignore"):
                loaded = importlib.import_module(f"{package}.{module}")
        except ImportError as error:
            raise PeerMissing(f"{package} cannot be imported ({error})") from error
        for name in names.split():
            setattr(core, name, getattr(loaded, name))
        if not names:
            setattr(core, module, loaded)
    return core


@contextlib.contextmanager
def surroundings(core: SimpleNamespace) -> Iterator[None]:
    """What megatron-core needs where there is no GPU: its questions about one, answered."""
    if core.package == OURS or torch.cuda.is_available():
        yield
        return
    with contextlib.ExitStack() as stack:
        stack.enter_context(cuda_calls_on_cpu())
        stack.enter_context(experts_on_cpu())
        stack.enter_context(mock.patch.object(torch.distributed, "new_group", _new_group_over_gloo))
        # Its random states are those of a GPU's generators; there is no dropout here to need them.
        tracker = core.get_cuda_rng_tracker()
        stack.enter_context(mock.patch.object(tracker, "fork", contextlib.nullcontext))
        # Clipping insists on a GPU's tensors, by the name of their type.
        stack.enter_context(mock.patch.object(torch.Tensor, "type", _type_as_on_gpu))
        yield


_type, _new_group = torch.Tensor.type, torch.distributed.new_group


def _new_group_over_gloo(*args: Any, **options: Any) -> torch.distributed.ProcessGroup:
    """What a program of megatron-core's has on CPUs. The default group here may be over our backend."""
    return _new_group(*args, **{**options, "backend": options.get("backend") or "gloo"})


def _type_as_on_gpu(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    if args or kwargs:
        return _type(tensor, *args, **kwargs)
    return _type(tensor).replace("torch.", "torch.cuda.")


@dataclass(frozen=True)
class Shape:
    """Of a GPT and of its batch. Dropout is off, as in `make demo`."""

    num_layers: int
    hidden_size: int
    num_attention_heads: int
    seq_length: int
    micro_batch_size: int
    num_microbatches: int
    vocab_size: int
    tp: int = 1
    pp: int = 1
    dp: int = 1
    ep: int = 1
    experts: dict[str, Any] = field(default_factory=dict)
    """Fields of the configuration, by name."""
    further: int | None = None
    """Tokens that are predicted beyond the next one."""
    optimizer: dict[str, Any] = field(default_factory=dict)
    bf16: bool = False
    positions: str = "rope"

    @property
    def tokens_per_step(self) -> int:
        """Of all copies of the model."""
        return self.dp * self.num_microbatches * self.micro_batch_size * self.seq_length


class Training:
    """This rank's part of a GPT in training, over the groups that `core.parallel_state` has.

    Args:
        core: see `load`.
        device: where the model is put.
    """

    def __init__(self, core: SimpleNamespace, shape: Shape, device: str = "cpu"):
        self.core, self.shape, self.device = core, shape, device
        self.losses: list[float] = []
        self.grad_norm = 0.0
        with surroundings(core):
            if device != "cpu":
                core.model_parallel_cuda_manual_seed(1)
            self.model = self._build_model()
            self.optimizer = core.get_megatron_optimizer(self._optimizer_config(), [self.model])
        self.config.grad_scale_func = self.optimizer.scale_loss
        self.config.finalize_model_grads_func = core.finalize_model_grads

    def _build_model(self) -> torch.nn.Module:
        core, shape = self.core, self.shape
        dtype = torch.bfloat16 if shape.bf16 else torch.float32
        self.config = core.TransformerConfig(
            num_layers=shape.num_layers,
            hidden_size=shape.hidden_size,
            num_attention_heads=shape.num_attention_heads,
            tensor_model_parallel_size=shape.tp,
            pipeline_model_parallel_size=shape.pp,
            expert_model_parallel_size=shape.ep,
            mtp_num_layers=shape.further,
            hidden_dropout=0.0,
            attention_dropout=0.0,
            params_dtype=dtype,
            pipeline_dtype=dtype,
            bf16=shape.bf16,
            use_cpu_initialization=device_is_cpu(self.device),
            **shape.experts,
            **({"gradient_accumulation_fusion": False} if core.package == THEIRS else {}),
        )
        layer = core.get_gpt_layer_local_spec(self.config.num_moe_experts)
        gpt = core.GPTModel(
            self.config,
            layer,
            shape.vocab_size,
            shape.seq_length,
            pre_process=core.parallel_state.is_pipeline_first_stage(),
            post_process=core.parallel_state.is_pipeline_last_stage(),
            share_embeddings_and_output_weights=True,
            position_embedding_type=shape.positions,
            mtp_block_spec=core.get_gpt_mtp_block_spec(self.config, layer, False),
        ).to(self.device)
        if shape.bf16:
            gpt = core.Float16Module(self.config, gpt)
        ddp_config = core.DistributedDataParallelConfig(grad_reduce_in_fp32=shape.bf16)
        return core.DistributedDataParallel(self.config, ddp_config, gpt)

    def _optimizer_config(self) -> Any:
        return self.core.OptimizerConfig(
            optimizer="adam",
            bf16=self.shape.bf16,
            params_dtype=torch.bfloat16 if self.shape.bf16 else torch.float32,
            **{"lr": 1e-3, "min_lr": 1e-4, "clip_grad": 1.0, **self.shape.optimizer},
        )

    def step(self) -> None:
        """One global batch: gradients to zero, the schedule, the update."""
        shape = self.shape
        with surroundings(self.core):
            self.model.zero_grad_buffer()
            self.optimizer.zero_grad()
            reports = self.core.get_forward_backward_func()(
                forward_step_func=self._forward_step,
                data_iterator=iter(self.batches),
                model=[self.model],
                num_microbatches=shape.num_microbatches,
                seq_length=shape.seq_length,
                micro_batch_size=shape.micro_batch_size,
                forward_only=False,
            )
            _, self.grad_norm, _ = self.optimizer.step()
        self.losses = [float(total / count) for total, count in (r["lm loss"] for r in reports)]

    def _forward_step(self, data_iterator: Iterator, model: torch.nn.Module):
        tokens, labels, position_ids = self._get_batch(data_iterator)
        return model(tokens, position_ids, None, labels=labels), loss_func

    def _get_batch(self, data_iterator: Iterator) -> tuple:
        """As Megatron does it: the first tensor-parallel rank has the batch, the others get it."""
        state = self.core.parallel_state
        if not (state.is_pipeline_first_stage() or state.is_pipeline_last_stage()):
            return None, None, None
        keys, batch = ["tokens", "labels"], next(data_iterator)
        mine = batch if state.get_tensor_model_parallel_rank() == 0 else None
        got = self.core.broadcast_data(keys, mine, torch.int64)
        positions = torch.arange(self.shape.seq_length, device=got["tokens"].device)
        return got["tokens"], got["labels"], positions.expand_as(got["tokens"])

    @property
    def batches(self) -> list[dict[str, torch.Tensor]]:
        """The same tokens in every step."""
        if not hasattr(self, "_batches"):
            generator = torch.Generator().manual_seed(7)
            shape = self.shape
            size = (shape.num_microbatches, shape.micro_batch_size, shape.seq_length + 1)
            text = torch.randint(shape.vocab_size, size, generator=generator).to(self.device)
            self._batches = [
                {"tokens": part[:, :-1].contiguous(), "labels": part[:, 1:].contiguous()}
                for part in text
            ]
        return self._batches


def loss_func(output: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, dict]:
    """Summed loss, tokens, and both for the log; as in `pretrain_gpt.py`."""
    loss = output.float().sum()
    num_tokens = torch.tensor(output.numel(), dtype=torch.int, device=output.device)
    report = torch.cat([loss.detach().clone().view(1), num_tokens.view(1)])
    return loss, num_tokens, {"lm loss": report}


def device_is_cpu(device: str) -> bool:
    """
    >>> device_is_cpu("cpu"), device_is_cpu("cuda:0")
    (True, False)
    """
    return torch.device(device).type == "cpu"


def same_weights(source: Training, target: Training) -> None:
    """Gives `target` the weights of `source`; the names are the same in both packages."""
    have = target.model.module.state_dict()
    weights = {k: v for k, v in source.model.module.state_dict().items() if v is not None}
    target.model.module.load_state_dict({**have, **weights})


Step = Callable[[], None]
