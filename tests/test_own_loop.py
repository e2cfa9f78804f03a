"""A program that has its own loop around the core, as Megatron's first example has, on two ranks.

Made-up data, a tensor-parallel GPT, torch's own Adam, a checkpoint of the model's weights.
"""

from collections.abc import Iterator
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

from minimegatron.core import dist_checkpointing, parallel_state
from minimegatron.core.datasets.blended_megatron_dataset_builder import (
    BlendedMegatronDatasetBuilder,
)
from minimegatron.core.datasets.gpt_dataset import GPTDatasetConfig, MockGPTDataset
from minimegatron.core.datasets.utils import compile_helpers
from minimegatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from minimegatron.core.distributed.finalize_model_grads import finalize_model_grads
from minimegatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from minimegatron.core.models.gpt.gpt_model import GPTModel
from minimegatron.core.pipeline_parallel.schedules import get_forward_backward_func
from minimegatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from minimegatron.core.transformer.transformer_config import TransformerConfig
from minimegatron.training.tokenizer.tokenizer import _NullTokenizer
from tests.ranks import run_ranks

LENGTH, VOCAB, BATCH, STEPS = 32, 48, 4, 6


def make_model() -> GPTModel:
    config = TransformerConfig(
        num_layers=2,
        hidden_size=16,
        num_attention_heads=4,
        use_cpu_initialization=True,
        gated_linear_unit=True,
        pipeline_dtype=torch.float32,
        hidden_dropout=0.0,
        attention_dropout=0.0,
    )
    return GPTModel(
        config=config,
        transformer_layer_spec=get_gpt_layer_local_spec(),
        vocab_size=VOCAB + 16,
        max_sequence_length=LENGTH,
    )


def batches() -> Iterator:
    if dist.get_rank() == 0:
        compile_helpers()
    dist.barrier()
    config = GPTDatasetConfig(
        random_seed=0,
        sequence_length=LENGTH,
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
        tokenizer=_NullTokenizer(vocab_size=VOCAB),
        mid_level_dataset_surplus=0.005,
    )
    builder = BlendedMegatronDatasetBuilder(MockGPTDataset, [100, 10, 0], lambda: True, config)
    return iter(DataLoader(builder.build()[0], batch_size=BATCH))


def loss_func(mask: torch.Tensor, output: torch.Tensor) -> tuple[torch.Tensor, dict]:
    loss = (output.float() * mask).sum() / mask.sum()
    return loss, {"lm loss": loss.detach()}


def forward_step(data: Iterator, model: torch.nn.Module) -> tuple:
    batch = next(data)
    inputs = (batch[name] for name in ("tokens", "position_ids", "attention_mask"))
    return model(*inputs, labels=batch["labels"]), partial(loss_func, batch["loss_mask"])


def a_run(folder: str) -> list:
    parallel_state.initialize_model_parallel(2, 1)
    model_parallel_cuda_manual_seed(123)
    model = make_model()
    wrapped = DistributedDataParallel(
        config=model.config,
        ddp_config=DistributedDataParallelConfig(
            grad_reduce_in_fp32=False,
            overlap_grad_reduce=False,
            use_distributed_optimizer=False,
        ),
        module=model,
    )
    optimizer, data = torch.optim.Adam(wrapped.parameters(), lr=0.01), batches()
    one_step = partial(
        get_forward_backward_func(),
        forward_step_func=forward_step,
        data_iterator=data,
        num_microbatches=1,
        seq_length=LENGTH,
        micro_batch_size=BATCH,
        decoder_seq_length=LENGTH,
    )
    losses = []
    for _ in range(STEPS):
        wrapped.zero_grad_buffer()
        (report,) = one_step(model=wrapped, forward_only=False)
        finalize_model_grads([wrapped])
        for param in wrapped.parameters():
            param.grad = param.main_grad
        optimizer.step()
        losses.append(float(report["lm loss"]))
    # -- Its weights, in another model --
    weights = model.sharded_state_dict(prefix="")
    dist_checkpointing.save(sharded_state_dict=weights, checkpoint_dir=f"{folder}/ckpt")
    model_parallel_cuda_manual_seed(5)
    other = make_model()
    differed = not torch.equal(other.output_layer.weight, model.output_layer.weight)
    checkpoint = dist_checkpointing.load(other.sharded_state_dict(prefix=""), f"{folder}/ckpt")
    other.load_state_dict(checkpoint)
    same = all(map(torch.equal, other.parameters(), model.parameters()))
    return [losses, differed, same]


@pytest.mark.processes
def test_a_loop_of_its_own_trains_and_loads_what_it_saved(tmp_path):
    first, second = run_ranks(a_run, 2, str(tmp_path))
    assert first == second
    losses, differed, same = first
    assert losses[-1] < losses[0] - 0.3 and differed and same
