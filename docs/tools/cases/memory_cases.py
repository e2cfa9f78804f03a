"""The pages' cases of memory and of floating-point operations, for models of real sizes.

Called by: `cases`, `calculator`. Calls: the planner's formulas.
"""

from fractions import Fraction
from types import SimpleNamespace

from cases.case_words import size_words, table
from minimegatron.planner.memory import (
    activation_bytes_per_layer,
    model_state_bytes,
    num_layer_parameters,
)
from minimegatron.planner.plan import plan
from minimegatron.planner.plan_report import number_words

# -- Memory --

GPT3 = SimpleNamespace(s=2048, h=12288, a=96, layers=96)
SEVEN = SimpleNamespace(s=4096, h=4096, a=32, layers=32)


def activation_table(model: SimpleNamespace = GPT3, t: int = 8) -> str:
    rows = []
    for recompute in ("none", "selective", "full"):
        plain = activation_bytes_per_layer(model.s, 1, model.h, model.a, t, recompute=recompute)
        sp = activation_bytes_per_layer(
            model.s, 1, model.h, model.a, t, sequence_parallel=True, recompute=recompute
        )
        rows.append([recompute, size_words(plain), size_words(sp)])
    return table(["recompute", f"t = {t}", "and sequence parallelism"], rows)


def layer_activations(model: SimpleNamespace = GPT3, t: int = 8) -> str:
    return size_words(activation_bytes_per_layer(model.s, 1, model.h, model.a, t, recompute="none"))


def stage_activations(pp: int = 8, t: int = 8, m: int = 64, model: SimpleNamespace = GPT3) -> str:
    """What the first and the last stage hold at their peak, 1F1B, selective recompute and SP."""
    layer = activation_bytes_per_layer(model.s, 1, model.h, model.a, t, sequence_parallel=True)
    planned = plan("1f1b", pp, m)
    stage = layer * model.layers // pp
    first, last = (planned.peak_in_flight(r) * stage for r in (0, pp - 1))
    return f"{size_words(first)} on the first stage, {size_words(last)} on the last"


def parameters(model: SimpleNamespace = SEVEN) -> int:
    return model.layers * num_layer_parameters(model.h)


def state_table(model: SimpleNamespace = SEVEN, d: int = 8) -> str:
    n = parameters(model)
    rows = []
    for name, w, g in (
        ("fp32", 4, 4),
        ("bf16, fp32 gradients", 2, 4),
        ("fp16, fp16 gradients", 2, 2),
    ):
        whole = model_state_bytes(n, w, g)
        cut = model_state_bytes(n, w, g, d, True)
        rows.append(
            [name, *(size_words(x) for x in (whole.weights, whole.gradients, whole.optimizer))]
            + [size_words(whole.total), size_words(cut.total)]
        )
    head = ["dtypes", "weights", "gradients", "optimizer", "sum", f"sum, sharded over d = {d}"]
    return table(head, rows)


def state_bytes_per_parameter(d: int = 1) -> str:
    return number_words(Fraction(model_state_bytes(1000, 2, 4, d, d > 1).total, 1000))


def state_words(d: int = 1, model: SimpleNamespace = SEVEN) -> str:
    return size_words(model_state_bytes(parameters(model), 2, 4, d, d > 1).total)


# -- FLOPs --


def layer_flops_per_token(h: int, s: int, ffn: int | None = None) -> int:
    """Floating-point operations of one layer's forward, per token: 2 per weight and token, and
    attention's two products of s positions (causal masks not exploited).

    >>> layer_flops_per_token(1024, 2048) == 24 * 1024**2 + 4 * 2048 * 1024
    True
    """
    f = ffn or 4 * h
    return 2 * (4 * h * h + 2 * h * f) + 4 * s * h


def model_flops_per_token(h: int, s: int, layers: int, vocabulary: int) -> int:
    """Forward and backward (twice the forward), output layer included."""
    return 3 * (layers * layer_flops_per_token(h, s) + 2 * h * vocabulary)


def mfu(tokens_per_second: float, flops_per_token: float, gpus: int, peak: float) -> float:
    """Model FLOPs utilisation: useful operations over what the devices could do."""
    return tokens_per_second * flops_per_token / (gpus * peak)
