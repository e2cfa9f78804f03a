"""What the data-parallel and optimizer tests share: groups, a small model, batches, an observer."""

import torch

from minimegatron.core import parallel_state
from minimegatron.core.orders.placement import Placement
from minimegatron.core.process_groups_config import ProcessGroupCollection
from minimegatron.core.tracing import Call
from minimegatron.core.transformer.transformer_config import TransformerConfig

WIDTH = 24


def make_groups(
    tp: int = 1, pp: int = 1, vp: int | None = None, placement: Placement | None = None
) -> ProcessGroupCollection:
    """Fresh groups; the data-parallel size is what remains of the world."""
    parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(tp, pp, vp, pipeline_placement=placement)
    return ProcessGroupCollection.use_mpu_process_groups()


def make_config(**kwargs) -> TransformerConfig:
    """A configuration whose sizes nobody looks at."""
    return TransformerConfig(num_layers=1, hidden_size=8, num_attention_heads=1, **kwargs)


class Toy(torch.nn.Module):
    """Linear layers and a norm, of sizes that no alignment divides; the same on every rank."""

    def __init__(self, dtype=torch.float64, depth=3, seed=7):
        super().__init__()
        torch.manual_seed(seed)
        self.inner = torch.nn.Linear(5, WIDTH)
        self.layers = torch.nn.ModuleList(torch.nn.Linear(WIDTH, WIDTH) for _ in range(depth))
        self.norm = torch.nn.LayerNorm(WIDTH)
        self.head = torch.nn.Linear(WIDTH, 3, bias=False)
        self.to(dtype)

    def forward(self, x):
        x = self.inner(x)
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return self.head(self.norm(x))


def make_batch(step: int, rank: int, microbatch: int, dtype=torch.float64) -> torch.Tensor:
    """Inputs [4, 5], different for every step, data-parallel rank and microbatch."""
    generator = torch.Generator().manual_seed(10_000 * step + 100 * rank + microbatch)
    return torch.randn(4, 5, generator=generator, dtype=torch.float64).to(dtype)


def loss_of(model: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
    return (model(x).float() if x.dtype == torch.bfloat16 else model(x)).pow(2).mean()


def reference_grads(model: torch.nn.Module, step: int, num_ranks: int, num_microbatches: int):
    """Gradients of one process with all ranks' batches: the mean over ranks and microbatches."""
    dtype = next(model.parameters()).dtype
    model.zero_grad()
    for rank in range(num_ranks):
        for microbatch in range(num_microbatches):
            loss = loss_of(model, make_batch(step, rank, microbatch, dtype))
            (loss / (num_ranks * num_microbatches)).backward()
    return {name: param.grad.clone() for name, param in model.named_parameters()}


def run_microbatches(ddp, step: int, rank: int, num_microbatches: int) -> None:
    """Forward and backward as a schedule without a pipeline does them."""
    dtype = next(ddp.module.parameters()).dtype
    with ddp.no_sync():
        for microbatch in range(num_microbatches - 1):
            x = make_batch(step, rank, microbatch, dtype)
            (loss_of(ddp, x) / num_microbatches).backward()
    x = make_batch(step, rank, num_microbatches - 1, dtype)
    (loss_of(ddp, x) / num_microbatches).backward()


class Recorder:
    """An observer that notes the names and attributes of traced calls, in order of their start."""

    def __init__(self):
        self.calls: list[Call] = []

    def start(self, call: Call) -> None:
        self.calls.append(call)

    def stop(self, call: Call) -> None:
        pass

    def named(self, name: str) -> list[Call]:
        return [call for call in self.calls if call.name == name]
