"""Put `mini` in front of the import and it works: one script, run in both packages.

`SCRIPT` is a first training run in the manner of megatron-core's documented one: groups, a GPT, a
`forward_step_func` with its `loss_func` bound by `partial`, DDP, the schedule, `finalize_model_grads`,
Adam. It is text: once as written for `megatron.core`, once with `mini` before each import.
"""

import contextlib
import types
import warnings
from unittest import mock

import pytest

from tests.conformance.megatron import cuda_calls_on_cpu, megatron_module
from tests.ranks import run_ranks

megatron_module("models.gpt.gpt_model")
pytestmark = pytest.mark.filterwarnings("ignore")

SCRIPT = '''
from functools import partial

import torch
from torch.optim import Adam

from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.distributed.finalize_model_grads import finalize_model_grads
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.pipeline_parallel.schedules import get_forward_backward_func
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.utils import get_model_config

SEQUENCE, VOCABULARY, MICRO_BATCH, MICROBATCHES = 32, 100, 4, 3


def initialize_distributed(tensor_model_parallel_size=1, pipeline_model_parallel_size=1):
    parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size, pipeline_model_parallel_size
    )


def model_provider():
    config = TransformerConfig(
        num_layers=2,
        hidden_size=16,
        num_attention_heads=4,
        use_cpu_initialization=True,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        pipeline_dtype=torch.float32,
        pipeline_model_parallel_size=parallel_state.get_pipeline_model_parallel_world_size(),
        tensor_model_parallel_size=parallel_state.get_tensor_model_parallel_world_size(),
    )
    return GPTModel(
        config=config,
        transformer_layer_spec=get_gpt_layer_local_spec(),
        vocab_size=VOCABULARY,
        max_sequence_length=SEQUENCE,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
    )


def batches():
    generator = torch.Generator().manual_seed(5)
    while True:
        start = torch.randint(VOCABULARY, (MICRO_BATCH, 1), generator=generator)
        text = (start + 7 * torch.arange(SEQUENCE + 1)) % VOCABULARY
        yield {
            "tokens": text[:, :-1].contiguous(),
            "labels": text[:, 1:].contiguous(),
            "loss_mask": torch.ones(MICRO_BATCH, SEQUENCE),
            "attention_mask": torch.ones(1, 1, SEQUENCE, SEQUENCE).triu(1).bool(),
            "position_ids": torch.arange(SEQUENCE).expand(MICRO_BATCH, -1),
        }


def forward_step_func(data_iterator, model):
    def loss_func(loss_mask, output_tensor):
        mask = loss_mask.view(-1).float()
        loss = (output_tensor.float().view(-1) * mask).sum() / mask.sum()
        return loss, {"lm loss": loss.detach().clone()}

    data = next(data_iterator)
    output_tensor = model(
        data["tokens"], data["position_ids"], data["attention_mask"], labels=data["labels"]
    )
    return output_tensor, partial(loss_func, data["loss_mask"])


def train(tp, pp, num_steps):
    """The loss of every microbatch of every step, where this rank sees it."""
    initialize_distributed(tp, pp)
    model_parallel_cuda_manual_seed(123)
    model = model_provider()
    with torch.no_grad():
        for name, param in model.named_parameters():
            generator = torch.Generator().manual_seed(sum(map(ord, name)))
            ones = 1.0 if param.dim() == 1 and name.endswith("weight") else 0.0
            param.copy_(ones + 0.05 * torch.randn(param.shape, generator=generator))
    ddp_config = DistributedDataParallelConfig(
        grad_reduce_in_fp32=False, overlap_grad_reduce=False, use_distributed_optimizer=False
    )
    model = DistributedDataParallel(
        config=get_model_config(model), ddp_config=ddp_config, module=model
    )
    optimizer = Adam(model.parameters(), lr=1e-2)
    data, losses = batches(), []
    for _ in range(num_steps):
        optimizer.zero_grad()
        model.zero_grad_buffer()
        reports = get_forward_backward_func()(
            forward_step_func=forward_step_func,
            data_iterator=data,
            model=model,
            num_microbatches=MICROBATCHES,
            seq_length=SEQUENCE,
            micro_batch_size=MICRO_BATCH,
            decoder_seq_length=SEQUENCE,
            forward_only=False,
        )
        finalize_model_grads([model])
        for param in model.parameters():
            param.grad = param.main_grad
        optimizer.step()
        losses += [report["lm loss"].item() for report in reports]
    parallel_state.destroy_model_parallel()
    return losses
'''
MINI = SCRIPT.replace("from megatron.", "from minimegatron.")


def load(text: str) -> types.ModuleType:
    module = types.ModuleType("first_training_run")
    exec(compile(text, "first_training_run.py", "exec"), vars(module))
    return module


def train_both(tp: int, pp: int) -> tuple[list[float], list[float]]:
    """Ours runs as it is; theirs needs its questions about the GPU answered."""
    ours = load(MINI).train(tp, pp, 5)
    tracker = megatron_module("tensor_parallel.random").get_cuda_rng_tracker()
    with contextlib.ExitStack() as stack:
        stack.enter_context(warnings.catch_warnings(action="ignore"))
        stack.enter_context(cuda_calls_on_cpu())
        stack.enter_context(mock.patch.object(tracker, "fork", contextlib.nullcontext))
        theirs = load(SCRIPT)
        stack.enter_context(mock.patch.object(theirs, "model_parallel_cuda_manual_seed"))
        return ours, theirs.train(tp, pp, 5)


@pytest.mark.parametrize(("tp", "pp"), [(1, 1), (2, 1), (1, 2)])
def test_mini_before_the_import_is_all(tp: int, pp: int):
    assert MINI.count("minimegatron") == SCRIPT.count("megatron.core") == 9
    results = run_ranks(train_both, tp * pp, tp, pp)
    ours, theirs = results[-1]
    assert len(ours) == 15
    assert ours == pytest.approx(theirs, rel=1e-5)
    assert ours[-1] < 0.95 * ours[0]
