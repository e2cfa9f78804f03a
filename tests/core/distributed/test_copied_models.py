"""A copy of a model, as for a mean of weights over steps: its own weights, and the same groups."""

import copy

import pytest
import torch

from minimegatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from minimegatron.core.models.gpt import GPTModel
from minimegatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from minimegatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from minimegatron.core.transformer.module import Float16Module
from minimegatron.core.transformer.transformer_config import TransformerConfig
from minimegatron.core.utils import unwrap_model
from tests.core.distributed.common import make_groups
from tests.ranks import run_ranks

TOKENS = torch.arange(8)[None]


def loss_of(model: torch.nn.Module) -> torch.Tensor:
    return model(TOKENS, TOKENS, None, labels=TOKENS).float().mean()


def trained(model: torch.nn.Module):
    """The model in its wrapper, and its optimizer; its config calls both, as in a training loop."""
    config = model.config
    wrapped = DistributedDataParallel(config, DistributedDataParallelConfig(), model)
    options = OptimizerConfig(optimizer="sgd", sgd_momentum=0.0, lr=0.5, bf16=config.bf16)
    optimizer = get_megatron_optimizer(options, [wrapped])
    config.grad_scale_func, config.no_sync_func = optimizer.scale_loss, wrapped.no_sync
    return wrapped, optimizer


def step(wrapped: torch.nn.Module, optimizer) -> float:
    wrapped.zero_grad_buffer()
    loss = loss_of(wrapped)
    loss.backward()
    wrapped.finish_grad_sync()
    assert optimizer.step()[0]
    return loss.item()


def copy_and_train(num_experts: int | None, bf16: bool) -> list[float]:
    groups = make_groups()
    config = TransformerConfig(
        num_layers=1,
        hidden_size=8,
        num_attention_heads=2,
        num_moe_experts=num_experts,
        add_bias_linear=num_experts is None,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        bf16=bf16,
    )
    inner = GPTModel(
        config, get_gpt_layer_local_spec(num_experts), vocab_size=16, max_sequence_length=8
    )
    model, optimizer = trained(Float16Module(config, inner) if bf16 else inner)
    step(model, optimizer)
    with pytest.raises(TypeError, match=r"Parallel cannot be copied: copy the model inside"):
        copy.deepcopy([model])
    copied = copy.deepcopy(model.module)
    assert unwrap_model(copied).pg_collection.tp is unwrap_model(model).pg_collection.tp
    assert copied.config is not config and unwrap_model(copied).config is copied.config
    assert copied.config.no_sync_func == model.no_sync and groups.tp is not None
    losses = [loss_of(copied).item(), step(model, optimizer), loss_of(copied).item()]
    again, its_optimizer = trained(copied)
    assert config.grad_scale_func == optimizer.scale_loss  # the copy's has been set, not ours
    losses.append(step(again, its_optimizer))
    return [*losses, loss_of(again).item(), loss_of(model).item()]


@pytest.mark.parametrize(("num_experts", "bf16"), [(None, False), (2, True)])
def test_v5_a_copy_of_a_model_has_its_own_weights_and_trains(num_experts, bf16):
    """Was: TypeError, cannot pickle a ProcessGroup."""
    ((first, of_model, untouched, of_copy, copys_next, models_next),) = run_ranks(
        copy_and_train, 1, num_experts, bf16
    )
    assert first == of_model == untouched == of_copy
    # In bf16, the model's main copy has kept what its weights have not, and the copy's has not.
    assert copys_next == pytest.approx(models_next, rel=1e-3 if bf16 else 0) != first
