"""What layers of experts hold and send: parameters, optimizer state, activations, all-to-alls.

Megatron has no counterpart for these counts; `megatron.training.theoretical_memory_usage` has the
parameters of all experts together.

Letters as in `memory`, and T = sb/(tc), tokens that a rank routes; E experts; k experts for each token;
f the width of one expert; e expert-parallel, e' expert-tensor-parallel, d' expert-data-parallel ranks.
Loads are taken to be even: a rank's experts get T k tokens.
"""

from fractions import Fraction
from typing import NamedTuple

from minimegatron.planner.memory import (
    Bytes,
    ModelStateBytes,
    activation_bytes_per_layer,
    model_state_bytes,
    num_layer_parameters,
)


class LayerParameters(NamedTuple):
    """Parameters of one layer of experts on one rank."""

    dense: int
    """Attention, norms, router, shared expert: reduced over d·c ranks."""
    experts: int
    """This rank's E/e experts: reduced over d' ranks."""


def num_expert_layer_parameters(
    hidden_size: int,
    moe_ffn_hidden_size: int,
    num_moe_experts: int,
    expert_model_parallel_size: int = 1,
    expert_tensor_parallel_size: int = 1,
    tensor_model_parallel_size: int = 1,
    moe_shared_expert_intermediate_size: int = 0,
    moe_shared_expert_gate: bool = False,
    num_attention_heads: int = 1,
    num_query_groups: int | None = None,
    gated_linear_unit: bool = False,
    add_bias_linear: bool = True,
    norm_has_bias: bool = True,
) -> LayerParameters:
    """Parameters of one layer of experts that one rank holds.

    A router has E h, each expert 2 f h (3 f h with a gated unit), of which a rank has a part in e'. A
    shared expert has no biases. Output projections' biases, norms and router are whole on each rank.

    >>> num_expert_layer_parameters(8, 16, 4, 2, gated_linear_unit=True, add_bias_linear=False).experts
    768
    """
    h, t = hidden_size, tensor_model_parallel_size
    attention = num_layer_parameters(
        h, h, num_attention_heads, num_query_groups, False, add_bias_linear, norm_has_bias
    )
    mlp = 2 * h * h + 2 * h * add_bias_linear
    whole = h * add_bias_linear + 2 * h * (1 + norm_has_bias)
    dense = whole + (attention - mlp - whole) // t + num_moe_experts * h
    if shared := moe_shared_expert_intermediate_size:
        dense += (3 if gated_linear_unit else 2) * shared * h // t + h * moe_shared_expert_gate
    f = moe_ffn_hidden_size // expert_tensor_parallel_size
    fc1 = 2 * f if gated_linear_unit else f
    expert = fc1 * h + f * h + (fc1 + h) * add_bias_linear
    return LayerParameters(dense, num_moe_experts // expert_model_parallel_size * expert)


def expert_model_state_bytes(
    parameters: LayerParameters,
    data_parallel_size: int,
    expert_data_parallel_size: int,
    params_bytes: int = 2,
    gradient_bytes: int = 4,
    use_distributed_optimizer: bool = False,
) -> tuple[ModelStateBytes, ModelStateBytes]:
    """(of what is dense, of the experts): weights, gradients and Adam state on one rank.

    The distributed optimizer cuts the one over d·c ranks, the other over d' = world/(e' e p): with many
    expert-parallel ranks an expert's state is hardly cut at all.

    >>> dense, experts = expert_model_state_bytes(LayerParameters(1000, 1000), 8, 2,
    ...                                           use_distributed_optimizer=True)
    >>> dense.optimizer, experts.optimizer
    (1500, 6000)
    """
    dense, experts = (
        model_state_bytes(number, params_bytes, gradient_bytes, size, use_distributed_optimizer)
        for number, size in zip(
            parameters, (data_parallel_size, expert_data_parallel_size), strict=True
        )
    )
    return dense, experts


# -- Activations --


def expert_activation_bytes(
    num_tokens: int,
    hidden_size: int,
    moe_ffn_hidden_size: int,
    num_moe_experts: int,
    moe_router_topk: int = 2,
    expert_tensor_parallel_size: int = 1,
    moe_shared_expert_intermediate_size: int = 0,
    gated_linear_unit: bool = False,
) -> Bytes:
    """Bytes that router and experts keep for the backward of T tokens, on one rank, in 16 bits.

    | what is kept                                 | bytes                              |
    |----------------------------------------------|------------------------------------|
    | the router's input                           | 2 T h                              |
    | scores (fp32), probabilities, the map        | 7 T E                              |
    | choice, its weights, indices, probabilities  | 30 T k                             |
    | the experts' input                           | 2 T k h e'                         |
    | around the activation, and scaled by p       | 6 T k f; 10 T k f with a gated one |
    | what is added up, by torch's `index_add`     | 2 T k h                            |
    | a shared expert of width f'                  | 4 T f'; 8 T f' with a gated one    |

    No biases; no auxiliary loss, which keeps its own scores. What all-to-alls send is not kept.

    >>> expert_activation_bytes(512, 64, 96, 8, 2, gated_linear_unit=True) / 512
    2676.0
    """
    T, h, k = num_tokens, hidden_size, moe_router_topk
    f, shared = moe_ffn_hidden_size, moe_shared_expert_intermediate_size
    of_router = 2 * h + 7 * num_moe_experts + 30 * k
    of_copy = 2 * h * expert_tensor_parallel_size + (10 if gated_linear_unit else 6) * f + 2 * h
    return T * (of_router + k * of_copy + (8 if gated_linear_unit else 4) * shared)


def expert_layer_activation_bytes(
    seq_length: int,
    micro_batch_size: int,
    hidden_size: int,
    num_attention_heads: int,
    moe_ffn_hidden_size: int,
    num_moe_experts: int,
    moe_router_topk: int = 2,
    tensor_parallel_size: int = 1,
    context_parallel_size: int = 1,
    recompute: str = "selective",
    **experts: int,
) -> Bytes:
    """Bytes that one whole layer of experts keeps for one microbatch, on one rank.

    The dense layer of `memory.activation_bytes_per_layer` with sequence parallelism (which experts need
    where t > 1), with the 18 sbh of its MLP exchanged. `experts`: more for `expert_activation_bytes`.
    With recompute "full" a layer keeps its input alone.
    """
    t, c = tensor_parallel_size, context_parallel_size
    sizes = (seq_length, micro_batch_size, hidden_size, num_attention_heads)
    dense = activation_bytes_per_layer(*sizes, t, c, True, recompute)
    if recompute == "full":
        return dense
    num_tokens = Fraction(seq_length * micro_batch_size, t * c)
    mine = (hidden_size, moe_ffn_hidden_size, num_moe_experts, moe_router_topk)
    total = (
        dense
        - 18 * hidden_size * num_tokens
        + expert_activation_bytes(num_tokens, *mine, **experts)
    )
    return int(total) if total == int(total) else total


# -- What is sent --


def all_to_all_bytes(
    num_tokens: int,
    hidden_size: int,
    moe_router_topk: int,
    expert_model_parallel_size: int,
    bytes_per_element: int = 2,
) -> Bytes:
    """Bytes that one rank sends to others for one layer and microbatch, forward and backward together.

    Four all-to-alls of T k h (e - 1)/e elements, dispatch and combine, there and back; two of the
    probabilities, T k (e - 1)/e elements.

    >>> all_to_all_bytes(1024, 512, 2, 4) == 4 * 1024 * 2 * 512 * 3 // 4 * 2 + 2 * 1024 * 2 * 3 // 4 * 2
    True
    """
    e = expert_model_parallel_size
    copies = num_tokens * moe_router_topk * Fraction(e - 1, e)
    total = copies * (4 * hidden_size + 2) * bytes_per_element
    return int(total) if total == int(total) else total
