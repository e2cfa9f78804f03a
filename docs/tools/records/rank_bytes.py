"""Records the bytes that each rank holds in a step, counted tensor by tensor, into rank_bytes.json.

Run by: `python docs/tools/record.py rank-bytes`, about a minute on two cores. Calls:
`minimegatron.launch` on up to eight ranks, `TinyGPT`, `ActivationMeter`.

    {"provenance", "runs": {name: {"sizes": {letter: value},
     "ranks": [{"weights", "gradients", "optimizer", "activations"}, ...]}}}

`sizes` are those of `cases.layout_costs.Layout`. `activations` is the most that autograd kept at once
while the step ran.
"""

from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from minimegatron import launch
from minimegatron.core.optimizer import MegatronOptimizer
from minimegatron.tracing.activation_meter import ActivationMeter
from minimegatron.training.tiny_gpt import TinyGPT
from records.recorded_words import keep, provenance

SIZES = {"s": 64, "b": 2, "h": 256, "a": 8, "L": 4, "V": 1024, "M": 4, "m": 0, "sp": False}
EXPERTS = {"E": 8, "k": 2, "f": 256}
RUNS: dict[str, dict[str, Any]] = {
    "one rank": {},
    "one rank, recompute": {"recompute": "full"},
    "t = 2": {"t": 2},
    "t = 2, sequence parallel": {"t": 2, "sp": True},
    "p = 4": {"p": 4},
    "p = 2, v = 2": {"p": 2, "v": 2},
    "p = 4, recompute": {"p": 4, "recompute": "full"},
    "d = 4": {"d": 4, "M": 2},
    "c = 2": {"c": 2},
    "t = 2, p = 2, d = 2, sequence parallel": {"t": 2, "p": 2, "d": 2, "sp": True},
    "d = 4, e = 4, experts": {"d": 4, "e": 4, "M": 2, **EXPERTS},
    "p = 2, d = 4, e = 2, experts": {"p": 2, "d": 4, "e": 2, **EXPERTS},
}
"""Name -> what differs from `SIZES`."""
WITHOUT_SCORES = {"recompute": "selective"}
"""The row of the formula of a model whose attention keeps no scores."""


def sizes_of(name: str) -> dict[str, Any]:
    return SIZES | WITHOUT_SCORES | RUNS[name]


def num_ranks(sizes: dict[str, Any]) -> int:
    return sizes.get("t", 1) * sizes.get("p", 1) * sizes.get("d", 1) * sizes.get("c", 1)


def measure(name: str) -> dict[str, int]:
    """One step of one run, on this rank."""
    sizes = sizes_of(name)
    gpt = TinyGPT(**_arguments(sizes))
    optimizer = gpt.optimizer()
    with ActivationMeter(gpt.chunks) as meter:
        gpt.step(sizes["M"])
    optimizer.step()
    weights = [param for chunk in gpt.chunks for param in chunk.parameters()]
    gradients = [one.grad_data for chunk in gpt.chunks for one in chunk.all_buffers]
    return {
        "weights": _bytes_of(weights),
        "gradients": _bytes_of(gradients),
        "optimizer": _bytes_of(_state_of(optimizer)),
        "activations": meter.peak,
    }


def _arguments(sizes: dict[str, Any]) -> dict[str, Any]:
    arguments: dict[str, Any] = {
        "tp": sizes.get("t", 1),
        "pp": sizes.get("p", 1),
        "vp": sizes.get("v"),
        "context_parallel_size": sizes.get("c", 1),
        "sequence_parallel": sizes["sp"],
        "num_layers": sizes["L"],
        "hidden_size": sizes["h"],
        "num_attention_heads": sizes["a"],
        "vocab_size": sizes["V"],
        "seq_length": sizes["s"],
        "micro_batch_size": sizes["b"],
        "bf16": True,
        "params_dtype": torch.bfloat16,
        "ddp": {"grad_reduce_in_fp32": True, "use_distributed_optimizer": True},
    }
    if sizes["recompute"] == "full":
        arguments |= {"recompute_granularity": "full", "recompute_method": "uniform"}
        arguments["recompute_num_layers"] = 1
    if "E" in sizes:
        arguments |= {
            "num_moe_experts": sizes["E"],
            "moe_router_topk": sizes["k"],
            "moe_ffn_hidden_size": sizes["f"],
            "expert_model_parallel_size": sizes["e"],
            "moe_token_dispatcher_type": "alltoall",
            "gated_linear_unit": True,
            "activation_func": F.silu,
            "add_bias_linear": False,
        }
    return arguments


def _state_of(optimizer: MegatronOptimizer) -> Iterable[torch.Tensor]:
    for one in getattr(optimizer, "chained_optimizers", None) or [optimizer]:
        for shard in one.shards:
            yield shard.main_param
            yield from one.parameter_state(shard).values()


def _bytes_of(tensors: Iterable[torch.Tensor]) -> int:
    """Of their memory; what several of them share counts once."""
    storages = {}
    for tensor in tensors:
        storage = tensor.untyped_storage()
        storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


def main() -> None:
    """Measures all and writes the file."""
    runs = {}
    for name in RUNS:
        sizes = sizes_of(name)
        ranks = launch(partial(measure, name), num_ranks(sizes))
        runs[name] = {"sizes": sizes, "ranks": ranks}
        print(name, ranks[0], ranks[-1])
    keep("rank_bytes", {"provenance": provenance("rank-bytes"), "runs": runs})
