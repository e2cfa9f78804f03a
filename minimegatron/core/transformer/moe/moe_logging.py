"""How even the last step was: tokens per expert and losses of balance, layer by layer, over all ranks.

Megatron keeps a dictionary for the process (`save_to_aux_losses_tracker`, `track_moe_metrics`, ... of
`megatron.core.transformer.moe.moe_utils`), from losses alone. Here each router has its own numbers;
nobody asks for them, and nothing is sent, until a line of the log is due.
"""

from dataclasses import dataclass
from typing import Any

import torch

from minimegatron.core.collectives import all_reduce
from minimegatron.core.transformer.moe.expert_bias import routers_of
from minimegatron.core.utils import get_device, get_model_config

LOSSES = (
    "load_balancing_loss",
    "seq_load_balancing_loss",
    "global_load_balancing_loss",
    "z_loss",
)
"""As Megatron calls them in logs."""


@dataclass(frozen=True)
class LayerBalance:
    """One layer with experts, in the last step of training."""

    layer_number: int
    """From 1, within the whole model."""
    tokens_per_expert: list[int]
    """Of all data-parallel ranks and microbatches; without tokens that were dropped."""
    losses: dict[str, float]
    """Without their coefficients; the mean over microbatches and data-parallel ranks."""

    @property
    def imbalance(self) -> float:
        """The busiest expert's tokens over the mean: 1 is even. With E/k one is among all choices."""
        counts = self.tokens_per_expert
        return max(counts) * len(counts) / max(sum(counts), 1)


def balance_of_layers(models: list[torch.nn.Module], pg_collection: Any) -> list[LayerBalance]:
    """Every layer of the model with experts, the same on all ranks. All ranks must call it.

    Empty for a model without experts, and when no step of training has run since the last forward-only
    step began.

    Args:
        models: this stage's chunks, wrapped or not.
        pg_collection: needs pp, tp_cp and tp_dp_cp.
    """
    config = get_model_config(models[0])
    if config.num_moe_experts is None:
        return []
    num_experts = config.num_moe_experts
    # A row for each layer of the whole model, so that all stages send the same.
    num_layers = config.num_layers + (config.mtp_num_layers or 0)
    table = torch.zeros(
        num_layers, num_experts + len(LOSSES) + 1, dtype=torch.float64, device=get_device()
    )
    for router in routers_of(models):
        row = table[router.layer_number - 1]
        row[:num_experts] = router.local_tokens_per_expert
        for column, name in enumerate(LOSSES, num_experts):
            row[column] = router.losses.get(name, 0.0)
        row[-1] = router.num_counted
    for group in (pg_collection.tp_dp_cp, pg_collection.pp):
        all_reduce(table, group)

    found, shares = [], pg_collection.tp_cp.size()
    for number, (*numbers, num_counted) in enumerate(table.tolist(), 1):
        if num_counted:
            # The ranks that share a microbatch have a share each; all have counted it.
            means = [total * shares / num_counted for total in numbers[num_experts:]]
            losses = {name: mean for name, mean in zip(LOSSES, means, strict=True) if mean}
            counts = [int(count) for count in numbers[:num_experts]]
            found.append(LayerBalance(number, counts, losses))
    return found


def describe_balance(models: list[torch.nn.Module], pg_collection: Any) -> dict[str, float]:
    """For a line of the log: "load imbalance" and each loss, as means over the layers with experts.

    As `balance_of_layers`, which it calls: all ranks must call it, and get the same.
    """
    layers = balance_of_layers(models, pg_collection)
    if not layers:
        return {}
    found = {"load imbalance": sum(layer.imbalance for layer in layers) / len(layers)}
    for name in LOSSES:
        values = [layer.losses[name] for layer in layers if name in layer.losses]
        if values:
            found[name.replace("_", " ")] = sum(values) / len(values)
    return found
