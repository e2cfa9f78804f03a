"""What a stage must hold: activations over time, weights, gradients, optimizer state.

Megatron's counterpart, for the activation formula only, is
`megatron.training.theoretical_memory_usage`.

Letters: s sequence length, b micro-batch size, h hidden size, a attention heads, t tensor-parallel
ranks, c context-parallel ranks, d data-parallel ranks.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction

from minimegatron.planner.actions import COMMUNICATE, KINDS, Time, parts_of
from minimegatron.planner.plan import Plan
from minimegatron.planner.simulator import Simulation

Bytes = int | Fraction

# -- Activations, counted from a plan --


def activation_timeline(
    simulation: Simulation,
    rank: int,
    bytes_per_microbatch: Bytes | Sequence[Bytes] = 1,
    share: int | Fraction = 1,
    bytes_per_layer: Bytes = 0,
) -> list[tuple[Time, Bytes]]:
    """(time, held from then on) for each change: what the rank's activations take up.

    A forward's activations count from its start, and are freed at the end of its backward; so the
    backward and the forward of one moment do not share. Where the backward comes in two parts,
    `share` is what must be kept between them, of what the forward kept.

    In a pair of combined 1F1B the backward frees layer after layer what the forward comes to hold: both
    together have at most `bytes_per_layer` more than the larger of them. It counts as that, though a
    real pair frees the experts' part of a layer before it takes that of the next. Other pairs hold both
    to their end.

    `bytes_per_microbatch` is one number per chunk and microbatch, or one per virtual stage in model
    order; 1 counts microbatches. A forward-only step keeps nothing.

    >>> from minimegatron.planner.plan import plan
    >>> from minimegatron.planner.simulator import simulate
    >>> activation_timeline(simulate(plan("1f1b", 2, 2)), rank=0)
    [(0, 1), (1, 2), (6, 1), (9, 0)]
    """
    plan = simulation.plan
    if plan.config.forward_only:
        return [(0, 0)]
    held: Bytes = 0
    points: list[tuple[Time, Bytes]] = []
    for index, change in _changes(plan, rank, bytes_per_microbatch, share, bytes_per_layer):
        held += change
        times = simulation.starts if change > 0 else simulation.ends
        points.append((times[rank][index], held))
    return points


def peak_activation_bytes(
    plan: Plan,
    rank: int,
    bytes_per_microbatch: Bytes | Sequence[Bytes] = 1,
    share: int | Fraction = 1,
    bytes_per_layer: Bytes = 0,
) -> Bytes:
    """The most that the rank's activations take up at once. Needs no times: order is enough.

    >>> from minimegatron.planner.plan import plan
    >>> four_layers, one_layer = 4, 1
    >>> [peak_activation_bytes(plan(name, 1, 8), 0, four_layers, bytes_per_layer=one_layer)
    ...  for name in ("no-pipelining", "combined")]
    [4, 5]
    """
    if plan.config.forward_only:
        return 0
    held = peak = 0
    for _, change in _changes(plan, rank, bytes_per_microbatch, share, bytes_per_layer):
        held += change
        peak = max(peak, held)
    return peak


def _changes(
    plan: Plan,
    rank: int,
    sizes: Bytes | Sequence[Bytes],
    share: int | Fraction,
    bytes_per_layer: Bytes,
) -> Iterator[tuple[int, Bytes]]:
    """(index of the action, what it adds), for work that changes what is held.

    Of a pair, first what the one part adds, then what the other one frees.
    """
    for index, action in enumerate(plan.ranks[rank]):
        if action.kind == COMMUNICATE:
            continue
        changes = [
            KINDS[part.kind].held(share) * _size_of(plan, rank, part.chunk, sizes)
            for part in parts_of(action)
        ]
        if action.parts and plan.pairs_go_by_layers:
            changes = [bytes_per_layer, sum(changes) - bytes_per_layer]
        yield from ((index, change) for change in sorted(changes, reverse=True) if change)


def _size_of(plan: Plan, rank: int, chunk: int, sizes: Bytes | Sequence[Bytes]) -> Bytes:
    if not isinstance(sizes, Sequence):
        return sizes
    if len(sizes) != plan.config.num_virtual_stages:
        raise ValueError(
            f"{len(sizes)} activation sizes for {plan.config.num_virtual_stages} virtual stages; "
            "give one number, or one per virtual stage in model order"
        )
    return sizes[plan.config.placement.stage_of(rank, chunk)]


# -- Activations, from the model's sizes --


def activation_bytes_per_layer(
    seq_length: int,
    micro_batch_size: int,
    hidden_size: int,
    num_attention_heads: int,
    tensor_parallel_size: int = 1,
    context_parallel_size: int = 1,
    sequence_parallel: bool = False,
    recompute: str = "selective",
    mask_bytes: int = 1,
) -> Bytes:
    """Bytes that one transformer layer keeps for the backward of one microbatch, on one rank.

    Source: Korthikanti et al. 2022 (arXiv:2205.05198), table 2: 16-bit activations, two dropout masks
    of one byte, GELU, feed-forward size 4h, as many key heads as query heads. sbh times

    | recompute     | t ranks                    | and sequence parallelism |
    |---------------|----------------------------|--------------------------|
    | `"none"`      | 10 + 24/t + 5as/(ht)       | 34/t + 5as/(ht)          |
    | `"selective"` | 10 + 24/t                  | 34/t                     |
    | `"full"`      | 2                          | 2/t                      |

    "selective" recomputes the attention scores. A fused attention kernel never stores them, so its
    layers need the "selective" row without recomputing. Context parallelism divides s.

    `mask_bytes`: of an element of these two masks; 0 without dropout. It changes the 10 and the 34.

    >>> activation_bytes_per_layer(2048, 1, 12288, 96, 8, recompute="none") / 2**20
    552.0
    """
    if recompute not in ("none", "selective", "full"):
        raise ValueError(f"recompute is {recompute!r}; use none, selective or full")
    t = tensor_parallel_size
    local_seq_length = Fraction(seq_length, context_parallel_size)
    unit = local_seq_length * micro_batch_size * hidden_size
    if recompute == "full":
        return _whole(unit * Fraction(2, t if sequence_parallel else 1))
    not_cut = 8 + 2 * mask_bytes
    factor = Fraction(not_cut + 24, t) if sequence_parallel else not_cut + Fraction(24, t)
    if recompute == "none":
        factor += Fraction(5 * num_attention_heads * seq_length, hidden_size * t)
    return _whole(unit * factor)


def message_bytes(
    seq_length: int,
    micro_batch_size: int,
    hidden_size: int,
    tensor_parallel_size: int = 1,
    context_parallel_size: int = 1,
    sequence_parallel: bool = False,
    bytes_per_element: int = 2,
    num_further_tokens: int = 0,
) -> Bytes:
    """Bytes of one activation or gradient between two stages, from one rank to one rank.

    [s/c, b, h], and s/c/t with sequence parallelism. Without it each of the t ranks sends the same
    full copy. Behind a stage of its own that predicts K further tokens it is (1 + K) times as long.

    >>> message_bytes(2048, 1, 1024), message_bytes(2048, 1, 1024, 4, sequence_parallel=True)
    (4194304, 1048576)
    """
    parts = context_parallel_size * (tensor_parallel_size if sequence_parallel else 1)
    length = Fraction(seq_length * (1 + num_further_tokens), parts)
    elements = length * micro_batch_size * hidden_size
    return _whole(elements * bytes_per_element)


# -- Weights, gradients, optimizer --


def num_layer_parameters(
    hidden_size: int,
    ffn_hidden_size: int | None = None,
    num_attention_heads: int = 1,
    num_query_groups: int | None = None,
    gated_linear_unit: bool = False,
    add_bias_linear: bool = True,
    norm_has_bias: bool = True,
) -> int:
    """Parameters of one transformer layer, before tensor parallelism divides it.

    Defaults are GPT-2's: 12h² + 13h.

    >>> num_layer_parameters(768) == 12 * 768**2 + 13 * 768
    True
    """
    h, f = hidden_size, ffn_hidden_size or 4 * hidden_size
    groups = num_query_groups or num_attention_heads
    qkv = h + 2 * (h * groups // num_attention_heads)
    fc1 = 2 * f if gated_linear_unit else f
    weights = h * qkv + h * h + h * fc1 + f * h
    biases = (qkv + h + fc1 + h) if add_bias_linear else 0
    norms = 2 * (2 * h if norm_has_bias else h)
    return weights + biases + norms


@dataclass(frozen=True)
class ModelStateBytes:
    """Bytes on one rank that do not depend on the schedule."""

    weights: Bytes
    gradients: Bytes
    optimizer: Bytes

    @property
    def total(self) -> Bytes:
        return self.weights + self.gradients + self.optimizer


def model_state_bytes(
    num_parameters: int,
    params_bytes: int = 2,
    gradient_bytes: int = 4,
    data_parallel_size: int = 1,
    use_distributed_optimizer: bool = False,
) -> ModelStateBytes:
    """Weights, gradient buffer and Adam state of the parameters that one rank holds.

    Bytes per parameter; the distributed optimizer shards what stands in the optimizer column over
    the d data-parallel ranks.

    | weights, gradients | weights | gradients | optimizer | sum | with sharding |
    |--------------------|---------|-----------|-----------|-----|---------------|
    | 4, 4 (fp32)        | 4       | 4         | 8         | 16  | 8 + 8/d       |
    | 2, 4 (bf16)        | 2       | 4         | 12        | 18  | 6 + 12/d      |
    | 2, 2 (fp16)        | 2       | 2         | 16        | 20  | 4 + 16/d      |

    The optimizer holds two fp32 moments; with 2-byte weights also fp32 main weights, and with
    2-byte gradients fp32 main gradients. Sources: Rajbhandari et al. 2020 (arXiv:1910.02054),
    section 3; the table on distributed optimizers in Megatron-Core's user guide.

    >>> model_state_bytes(1000).total, model_state_bytes(1000, 2, 4, 4, True).total
    (18000, 9000)
    """
    per_parameter = 8 + (4 if params_bytes == 2 else 0) + (4 if gradient_bytes == 2 else 0)
    shards = data_parallel_size if use_distributed_optimizer else 1
    return ModelStateBytes(
        num_parameters * params_bytes,
        num_parameters * gradient_bytes,
        _whole(Fraction(num_parameters * per_parameter, shards)),
    )


def _whole(value: Fraction) -> Bytes:
    return value.numerator if value.denominator == 1 else value
