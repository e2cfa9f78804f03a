"""What a layout of ranks holds, computes and moves: bytes and seconds of one rank, from sizes alone.

Called by: `choices`, `calculator`, which translates these functions into JavaScript. Calls: the
planner's counts. Attention is as wide as the model, and keeps no scores; weights are bf16, gradients
fp32, and the optimizer is the distributed one. Nothing that moves is taken to be hidden.
"""

from dataclasses import dataclass
from fractions import Fraction

from cases.memory_cases import layer_flops_per_token
from minimegatron.planner.context_costs import key_value_elements
from minimegatron.planner.expert_memory import (
    all_to_all_bytes,
    expert_activation_bytes,
    num_expert_layer_parameters,
)
from minimegatron.planner.memory import (
    activation_bytes_per_layer,
    message_bytes,
    model_state_bytes,
    num_layer_parameters,
)


@dataclass(frozen=True)
class Layout:
    """A model, how it is cut, and the machine: what the calculator's fields are."""

    L: int
    h: int
    a: int
    V: int
    s: int
    b: int = 1
    E: int = 0
    """Experts of a layer; 0 without."""
    k: int = 2
    """Experts of a token."""
    f: int = 0
    """Width of one expert, which has a gate."""
    t: int = 1
    p: int = 1
    v: int = 1
    d: int = 1
    c: int = 1
    e: int = 1
    M: int = 1
    sp: bool = True
    recompute: str = "selective"
    m: int = 1
    """Bytes of an element of a dropout mask; 0 without dropout."""
    peak: float = 989
    """10¹² operations per second."""
    share: float = 50
    """Percent of the peak that a GPU reaches while it computes."""
    inside: float = 450
    """10⁹ bytes per second of one GPU to others of its node, one way."""
    between: float = 50
    """The same to other nodes."""
    node: int = 8
    """GPUs of a node."""
    memory: float = 80
    """10⁹ bytes of a GPU."""
    reading: float = 3350
    """10⁹ bytes per second that a GPU reads from its memory, or writes."""


# -- Bytes that are held --


def layers_of_rank(x: Layout) -> Fraction:
    return Fraction(x.L, x.p)


def layer_parameters(x: Layout) -> float:
    """Of one rank in one layer, but for its experts."""
    if x.E == 0:
        return Fraction(num_layer_parameters(x.h), x.t)
    sizes = num_expert_layer_parameters(x.h, x.f, x.E, x.e, 1, x.t, 0, False, x.a, x.a, True, False)
    return sizes.dense


def dense_parameters(x: Layout, is_first: bool) -> float:
    """Of one rank, but for its experts."""
    layer = layer_parameters(x)
    table = Fraction(x.V * x.h, x.t) + (x.s * x.h if is_first else 2 * x.h)
    return layers_of_rank(x) * layer + table


def layer_expert_parameters(x: Layout) -> float:
    """Of one rank's experts in one layer, no biases."""
    return Fraction(x.E, x.e) * 3 * x.f * x.h


def expert_parameters(x: Layout) -> float:
    """Of one rank's experts."""
    return layers_of_rank(x) * layer_expert_parameters(x)


def expert_copies(x: Layout) -> float:
    """How many ranks have the same experts: d'."""
    return Fraction(x.t * x.c * x.d, x.e)


def state_bytes(x: Layout, is_first: bool) -> float:
    """Weights, gradients and optimizer of one rank of the first, or of the last, stage."""
    dense = model_state_bytes(dense_parameters(x, is_first), 2, 4, x.d * x.c, True)
    experts = model_state_bytes(expert_parameters(x), 2, 4, expert_copies(x), True)
    return dense.total + experts.total


def layer_activation_bytes(x: Layout, recompute: str) -> float:
    """What one layer keeps for one microbatch."""
    dense = activation_bytes_per_layer(x.s, x.b, x.h, x.a, x.t, x.c, x.sp, recompute, x.m)
    if x.E == 0 or recompute == "full":
        return dense
    tokens = tokens_of_rank(x)
    return (
        dense - 18 * tokens * x.h + expert_activation_bytes(tokens, x.h, x.f, x.E, x.k, 1, 0, True)
    )


def chunks_in_flight(x: Layout, is_first: bool) -> float:
    """Chunks' worth of microbatches that a rank of the first, or of the last, stage holds."""
    after = x.p - 1 if is_first else 0
    if x.v == 1:
        return min(x.M, after + 1)
    return min(x.M * x.v, 2 * after + (x.v - 1) * x.p + 1)


def loss_bytes(x: Layout) -> float:
    """What the last stage keeps after its layers: the norm's input and output, and fp32 logits."""
    tokens = Fraction(x.s * x.b, x.c)
    return 4 * tokens * (Fraction(x.h, x.t if x.sp else 1) + Fraction(x.V, x.t))


def activation_bytes(x: Layout, is_first: bool) -> float:
    """All that one rank of the first, or of the last, stage keeps at its peak."""
    kept = layer_activation_bytes(x, x.recompute)
    held = chunks_in_flight(x, is_first) * Fraction(layers_of_rank(x), x.v) * kept
    again = layer_activation_bytes(x, "selective") - kept
    loss = loss_bytes(x) if x.p == 1 or not is_first else 0
    return held + max(again, loss)


def held_bytes(x: Layout) -> float:
    """Of the rank that holds most: it is on the first stage or on the last."""
    first = state_bytes(x, True) + activation_bytes(x, True)
    last = state_bytes(x, False) + activation_bytes(x, False)
    return max(first, last)


# -- Operations, and bytes that are moved --


def dense_flops(x: Layout) -> float:
    """Of one token's forward in one layer, but for its experts."""
    if x.E == 0:
        return layer_flops_per_token(x.h, x.s)
    return 8 * x.h * x.h + 4 * x.s * x.h + 2 * x.h * x.E


def expert_flops(x: Layout) -> float:
    """Of one token's forward in its experts of one layer."""
    return 6 * x.k * x.h * x.f if x.E > 0 else 0


def passes(x: Layout) -> float:
    """Forward, backward of twice its work, and with recompute a second forward."""
    return 4 if x.recompute == "full" else 3


def tokens_of_rank(x: Layout) -> float:
    """Of one microbatch; tensor-parallel ranks share the work on theirs."""
    return Fraction(x.s * x.b, x.t * x.c)


def layer_flops(x: Layout) -> float:
    """Of one rank for one layer and microbatch, there and back."""
    return passes(x) * (dense_flops(x) + expert_flops(x)) * tokens_of_rank(x)


def output_flops(x: Layout) -> float:
    """Of one rank's output layer for one microbatch, there and back."""
    return 3 * 2 * x.h * x.V * tokens_of_rank(x)


def model_flops(x: Layout) -> float:
    """Of one token in the whole model, forward and backward."""
    return 3 * (x.L * (dense_flops(x) + expert_flops(x)) + 2 * x.h * x.V)


def tensor_bytes(x: Layout) -> float:
    """Moved by a rank for one layer and microbatch, as its matrices are cut.

    An all-reduce there and back around the two products of attention, and around those of an MLP. With
    sequence parallelism it is a reduce-scatter and an all-gather, and the first product's input is
    gathered once more in backward. Experts are not cut.
    """
    one_way = Fraction(2 * (x.t - 1) * x.s * x.b * x.h, x.t * x.c)
    times = (5 if x.sp else 4) + (2 if x.recompute == "full" else 0)
    return times * one_way * (1 if x.E > 0 else 2)


def context_bytes(x: Layout) -> float:
    """Moved by a rank for one layer and microbatch, by a ring of keys and values."""
    if x.c == 1:
        return 0
    u = key_value_elements(x.s, x.b, x.a, Fraction(x.h, x.a), x.c, x.t)
    hops = 3 * x.c - 2
    return 2 * u * (hops + (x.c - 1 if x.recompute == "full" else 0))


def expert_bytes(x: Layout) -> float:
    """Moved by a rank for one layer and microbatch, by all-to-alls."""
    if x.E == 0:
        return 0
    once = all_to_all_bytes(tokens_of_rank(x), x.h, x.k, x.e)
    return once * Fraction(3 if x.recompute == "full" else 2, 2)


def stage_bytes(x: Layout) -> float:
    """Of one message between two stages."""
    return message_bytes(x.s, x.b, x.h, x.t, x.c, x.sp)


def copies_bytes(x: Layout) -> float:
    """Moved by a rank for each step: fp32 gradients scattered, bf16 weights gathered."""
    dense = Fraction(x.d * x.c - 1, x.d * x.c) * dense_parameters(x, True)
    experts = Fraction(expert_copies(x) - 1, expert_copies(x)) * expert_parameters(x)
    return 6 * (dense + experts)


# -- Seconds --


def rate(x: Layout) -> float:
    """Operations per second of a GPU that computes."""
    return x.peak * 1e12 * x.share / 100


def speed(x: Layout, ranks: float) -> float:
    """Bytes per second within a group that takes up so many neighbouring ranks."""
    return (x.inside if ranks <= x.node else x.between) * 1e9


def tensor_seconds(x: Layout) -> float:
    return tensor_bytes(x) / speed(x, x.t)


def context_seconds(x: Layout) -> float:
    return context_bytes(x) / speed(x, x.t * x.c)


def expert_seconds(x: Layout) -> float:
    return expert_bytes(x) / speed(x, x.e)


def stage_seconds(x: Layout) -> float:
    return stage_bytes(x) / speed(x, x.t * x.c * x.d * x.p) if x.p > 1 else 0


def copies_seconds(x: Layout) -> float:
    return copies_bytes(x) / speed(x, x.t * x.c * x.d)


def weight_seconds(x: Layout, parameters: float) -> float:
    """To read weights for a microbatch's forward and backward, and to add to their gradients.

    Of each parameter 2 bytes twice (three times with recompute), and 4 bytes read and written.
    """
    return (2 * (passes(x) - 1) + 8) * parameters / (x.reading * 1e9)


def work_seconds(x: Layout) -> float:
    """Of one layer and microbatch: its operations, or its weights' reading if that takes longer."""
    tokens = passes(x) * tokens_of_rank(x)
    dense = max(dense_flops(x) * tokens / rate(x), weight_seconds(x, layer_parameters(x)))
    experts = weight_seconds(x, layer_expert_parameters(x))
    return dense + max(expert_flops(x) * tokens / rate(x), experts)


def moving_seconds(x: Layout) -> float:
    """Of one layer and microbatch: what is moved within it."""
    return tensor_seconds(x) + context_seconds(x) + expert_seconds(x)


def stage_work_seconds(x: Layout) -> float:
    """Of a stage without the output layer, for one microbatch."""
    return layers_of_rank(x) * (work_seconds(x) + moving_seconds(x))


def output_seconds(x: Layout) -> float:
    """Of the output layer, for one microbatch: the last stage has it on top."""
    return output_flops(x) / rate(x)


def step_seconds(x: Layout) -> float:
    """The last stage's work, the way of one microbatch to it and back, and what copies exchange."""
    one = stage_work_seconds(x)
    messages = 2 * x.v * stage_seconds(x)
    way = (x.p - 1) / x.v * (one + messages)
    return x.M * (one + output_seconds(x) + messages) + way + copies_seconds(x)


def useful_share(x: Layout) -> float:
    """Of the peak: what the model's operations would take alone, over the step."""
    layers = layers_of_rank(x) * layer_flops(x) * 3 / passes(x)
    useful = x.M * (layers + output_flops(x) / x.p)
    return useful / (x.peak * 1e12) / step_seconds(x)
