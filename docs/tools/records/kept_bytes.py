"""Records what a layer keeps for backward, tensor by tensor, into kept_bytes.json beside it.

Run by: `python docs/tools/record.py kept-bytes`, about half a minute on two cores. Calls:
`minimegatron.launch` on two ranks, `ActivationMeter`.

    {"provenance", "sizes": {...}, "runs": {name: {"t", "sequence_parallel", "recompute", "mask_bytes",
     "kept": [[shape, dtype, bytes], ...], "peak"}}}

`kept` is that of one layer and one microbatch on rank 0, in the order in which forward made it.
`peak` is the most that was kept at once while the backward of all layers ran.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from minimegatron import launch
from minimegatron.core.utils import unwrap_model
from minimegatron.tracing.activation_meter import ActivationMeter
from minimegatron.training.tiny_gpt import TinyGPT
from records.recorded_words import keep, provenance

NUM_LAYERS = 4
SIZES = {
    "num_layers": NUM_LAYERS,
    "hidden_size": 256,
    "num_attention_heads": 8,
    "vocab_size": 512,
    "seq_length": 128,
    "micro_batch_size": 2,
}
MODEL = {"bf16": True, "params_dtype": torch.bfloat16}
FULL = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
SELECTIVE = {"recompute_granularity": "selective"}
DROPOUT = {"hidden_dropout": 0.1}
RUNS: dict[str, tuple[int, bool, str, dict[str, Any]]] = {
    "as it is": (1, False, "selective", {}),
    "with dropout": (1, False, "selective", DROPOUT),
    "recompute: selective": (1, False, "selective", SELECTIVE),
    "recompute: full": (1, False, "full", FULL),
    "t = 2": (2, False, "selective", {}),
    "t = 2, recompute: full": (2, False, "full", FULL),
    "t = 2, sequence parallel": (2, True, "selective", {}),
    "t = 2, sequence parallel, with dropout": (2, True, "selective", DROPOUT),
    "t = 2, sequence parallel, recompute: full": (2, True, "full", FULL),
}
"""Name -> t, sequence parallelism, the row of the formula, options of the config.

The kernel of attention keeps no scores, so without recompute it is the formula's selective row.
"""
MASK_BYTES = 2
"""Of an element of a dropout mask, on the CPU: it is kept in the activation's dtype."""


def measure(names: Sequence[str]) -> dict[str, dict[str, Any]]:
    """These runs, on this rank."""
    found = {}
    for name in names:
        t, is_sequence_parallel, recompute, options = RUNS[name]
        config = {**SIZES, **MODEL, **options, "tp": t, "sequence_parallel": is_sequence_parallel}
        gpt = TinyGPT(ddp={"grad_reduce_in_fp32": True}, **config)
        decoder = unwrap_model(gpt.chunks[0]).decoder
        decoder.final_layernorm = None  # the layers only
        s = SIZES["seq_length"] // (t if is_sequence_parallel else 1)
        shape = (s, SIZES["micro_batch_size"], SIZES["hidden_size"])
        hidden = torch.randn(shape, dtype=torch.bfloat16, requires_grad=True)
        with ActivationMeter(gpt.chunks) as meter:
            output = decoder(hidden, None)
            kept = meter.kept()
            output.sum().backward()
        of_one = kept[: len(kept) // NUM_LAYERS]
        found[name] = {
            "t": t,
            "sequence_parallel": is_sequence_parallel,
            "recompute": recompute,
            "mask_bytes": MASK_BYTES if options is DROPOUT else 0,
            "kept": [[list(one.shape), one.dtype, one.num_bytes] for one in of_one],
            "peak": meter.peak,
        }
    return found


def main() -> None:
    """Measures all and writes the file."""
    runs = launch(partial(measure, tuple(RUNS)), 2)[0]
    keep("kept_bytes", {"provenance": provenance("kept-bytes"), "sizes": SIZES, "runs": runs})
