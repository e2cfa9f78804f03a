"""What a configuration says of its experts; `TransformerConfig` has all of it too.

Megatron writes these fields in `TransformerConfig` itself, under the same names. Here they are apart:
a reader without experts need not see them. The word of the command line for layers with experts is
read as numbers; Megatron's `moe_freq_type` lets Python evaluate it.
"""

import argparse
import ast
import contextlib
import math
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

from minimegatron.core import knobs
from minimegatron.core.subject_fields import enter_hooks
from minimegatron.core.transformer import moe

LONGEST_LIST = 10_000


def number_or_list(word: str) -> int | list[int]:
    """A whole number, or a list of them as Python writes it, with + and *; nothing else is run.

    Raises ArgumentTypeError for another word.

    >>> number_or_list("2"), number_or_list("[0,0,1,1]"), number_or_list("([0]*1+[1]*3)*2")
    (2, [0, 0, 1, 1], [0, 1, 1, 1, 0, 1, 1, 1])
    """
    with contextlib.suppress(ValueError):
        return int(word)
    try:
        return _value(ast.parse(word.strip(), mode="eval").body)
    except (SyntaxError, TypeError, ValueError, RecursionError, MemoryError):
        raise argparse.ArgumentTypeError(
            f"{word!r:.80} is no whole number, and no list such as [0,1,1] or ([0]*1+[1]*3)*2, of "
            f"at most {LONGEST_LIST} numbers; put a list in quotes"
        ) from None


_OPERATORS = {ast.Add: operator.add, ast.Mult: operator.mul}


def _value(node: ast.expr) -> Any:
    match node:
        case ast.Constant(value=int(number)) if not isinstance(number, bool):
            return number
        case ast.List(elts=elements):
            return [operator.index(_value(element)) for element in elements]
        case ast.BinOp(left=left, op=ast.Add() | ast.Mult() as operation, right=right):
            left, right = _value(left), _value(right)
            if isinstance(operation, ast.Mult) and _length(left) * _length(right) > LONGEST_LIST:
                raise ValueError
            return _OPERATORS[type(operation)](left, right)
    raise TypeError


def _length(value: int | list[int]) -> int:
    return len(value) if isinstance(value, list) else value


knob = partial(knobs.knob, section="moe")
compared = partial(knob, compared=True)

LOAD_BALANCING_TYPES = ("aux_loss", "seq_aux_loss", "global_aux_loss", "sinkhorn", "none")
WITH_CAPACITY = ("aux_loss", "seq_aux_loss", "global_aux_loss", "none")
"""Ways to balance that go with a capacity, as in Megatron: a capacity drops what was chosen."""


@dataclass
class MoEConfig:
    """Experts: how many, how tokens choose, how they travel, how the load is balanced."""

    # -- Experts --
    num_moe_experts: int | None = compared(name="--num-experts", dest="num_experts", minimum=1)
    """Experts of each mixture-of-experts layer; by default there are no such layers."""
    moe_ffn_hidden_size: int | None = knob(minimum=1, compared=("moe_ffn_hidden_size", None))
    """Width of an expert; by default that of the MLP."""
    moe_layer_freq: list[int] | int = knob(1, nargs="+", reads=number_or_list, compared=True)
    """Every how many layers one has experts, or a 1 or 0 for each layer of the model: 0 1 1,
    "[0,1,1]" or "([0]*1+[1]*2)".

    N: those whose number, counted from 0, N divides."""
    moe_shared_expert_intermediate_size: int | None = compared(minimum=1)
    """Width of an expert that sees every token; by default there is none."""
    moe_shared_expert_gate: bool = compared(False)
    """Weigh the shared expert by a gate of its own."""

    # -- How a token chooses --
    moe_router_topk: int = compared(2, minimum=1)
    """Experts per token."""
    moe_router_score_function: Literal["softmax", "sigmoid"] = compared("softmax")
    """What makes scores of the router's logits."""
    moe_router_pre_softmax: bool = compared(False)
    """Softmax over all experts, before the choice; by default over the chosen ones."""
    moe_router_topk_scaling_factor: float | None = compared(above=0.0)
    """Multiplies the weights of the chosen experts."""
    moe_router_num_groups: int | None = compared(minimum=1)
    """Divide the experts into groups, of which a token may choose a few."""
    moe_router_group_topk: int | None = compared(minimum=1)
    """Groups per token."""
    moe_router_dtype: Literal["fp32", "fp64"] | None = knob()
    """dtype of the router's logits and weights; by default the model's."""
    moe_input_jitter_eps: float | None = knob(minimum=0.0, below=1.0)
    """Multiply the router's input by noise between 1 - this and 1 + this, in training."""

    # -- Balance --
    moe_router_load_balancing_type: list[str] | str = knob("aux_loss", nargs="+")
    """aux_loss, seq_aux_loss, global_aux_loss, sinkhorn or none; or several of the losses."""
    moe_aux_loss_coeff: list[float] | float = knob(0.0, nargs="+")
    """Weight of the balancing loss, or of each of several."""
    moe_z_loss_coeff: float | None = knob(minimum=0.0)
    """Weight of the loss that keeps the router's logits small."""
    moe_router_enable_expert_bias: bool = compared(False)
    """Balance without a loss.

    A bias is added to the scores for the choice, and moves after each step."""
    moe_router_bias_update_rate: float = knob(1e-3, above=0.0)
    """How far that bias moves per step."""

    # -- How tokens travel --
    moe_token_dispatcher_type: Literal["allgather", "alltoall"] = knob("allgather")
    """Each rank gets all tokens of its expert group, or those that chose one of its experts."""
    moe_expert_capacity_factor: float | None = knob(above=0.0)
    """Tokens that an expert takes at most from each rank, in fair shares; by default all."""
    moe_pad_expert_input_to_capacity: bool = knob(False)
    """Give each expert exactly so many tokens from each rank, with empty ones if need be."""
    moe_token_drop_policy: Literal["probs", "position"] = knob("probs")
    """Which tokens an expert without room drops: the least probable, or the last."""
    moe_apply_probs_on_input: bool = knob(False)
    """Weigh an expert's input, not its hidden activation."""

    # -- What the checks need of other fields --

    @property
    def balancing(self) -> dict[str, float]:
        """By way of balancing, its loss's weight."""
        kinds, weights = self.moe_router_load_balancing_type, self.moe_aux_loss_coeff
        kinds = [kinds] if isinstance(kinds, str) else list(kinds)
        weights = list(weights) if isinstance(weights, Sequence) else [weights]
        if len(kinds) != len(weights):
            raise ValueError(
                f"moe_router_load_balancing_type has {len(kinds)} entries, but moe_aux_loss_coeff has "
                f"{len(weights)}; give one weight for each"
            )
        if not kinds or len(set(kinds)) < len(kinds):
            raise ValueError(
                f"moe_router_load_balancing_type is {kinds}; give each way once, or none for no way"
            )
        return dict(zip(kinds, weights, strict=True))

    @property
    def moe_layer_pattern(self) -> list[bool]:
        """For each layer of the whole model, whether it has experts."""
        freq, num_layers = self.moe_layer_freq, self.num_layers
        if self.num_moe_experts is None:
            return [False] * num_layers
        if isinstance(freq, list) and len(freq) == 1 and num_layers > 1:
            freq = freq[0]  # the command line has one word for a number and for a list of one
        if isinstance(freq, int):
            return [layer % freq == 0 for layer in range(num_layers)]
        return [bool(has_experts) for has_experts in freq]

    def check_experts(self) -> None:
        """Fills defaults and hooks; raises ValueError, with numbers and remedy, for what cannot be."""
        enter_hooks(self, self.num_moe_experts is not None, partial(_hooks, self))
        if self.num_moe_experts is None:
            _refuse_without_experts(self)
            return
        if self.moe_ffn_hidden_size is None:
            self.moe_ffn_hidden_size = self.ffn_hidden_size
        for check in (_check_sizes, _check_layers, _check_choice, _check_balance, _check_travel):
            check(self)


def _hooks(config: Any) -> dict[str, tuple[Callable, ...]]:
    scales = (moe.moe_utils.scale_as_mean, moe.moe_utils.scale_as_sum)
    return {
        "aux_loss_scale_funcs": scales[::-1] if config.calculate_per_token_loss else scales,
        "before_step_funcs": (moe.expert_bias.forget_step,),
        "around_step_funcs": (moe.moe_utils.scale_put_back,),
        "after_grads_funcs": (moe.expert_bias.update_biases,),
        "log_funcs": (moe.moe_logging.describe_balance,),
    }


def _refuse_without_experts(config: Any) -> None:
    for name, value in (
        ("expert_model_parallel_size", config.expert_model_parallel_size > 1),
        ("moe_ffn_hidden_size", config.moe_ffn_hidden_size),
        ("moe_shared_expert_intermediate_size", config.moe_shared_expert_intermediate_size),
        ("overlap_moe_expert_parallel_comm", config.overlap_moe_expert_parallel_comm),
    ):
        if value:
            raise ValueError(
                f"{name} is {getattr(config, name)}, but num_moe_experts is not given, so no layer has "
                f"experts; give num_moe_experts, or drop {name}"
            )


def _check_sizes(config: Any) -> None:
    num_experts, ep = config.num_moe_experts, config.expert_model_parallel_size
    etp, tp = config.expert_tensor_parallel_size, config.tensor_model_parallel_size
    if num_experts % ep:
        raise ValueError(
            f"num_moe_experts {num_experts} is not divisible by expert_model_parallel_size {ep}; "
            f"try {num_experts // ep * ep or ep} experts"
        )
    for name, parts_name, parts in (
        ("moe_ffn_hidden_size", "expert_tensor_parallel_size", etp),
        ("moe_shared_expert_intermediate_size", "tensor_model_parallel_size", tp),
    ):
        size = getattr(config, name)
        if size is not None and size % parts:
            raise ValueError(
                f"{name} {size} is not divisible by {parts_name} {parts}; make it a multiple of {parts}"
            )
    if etp > 1 and config.add_bias_linear:
        raise ValueError(
            f"expert_tensor_parallel_size {etp} with biases: each of the {etp} ranks that share an "
            "expert would add its bias; set add_bias_linear=False, or use "
            "expert_tensor_parallel_size 1"
        )
    if tp > 1 and not config.sequence_parallel:
        raise ValueError(
            f"num_moe_experts {num_experts} with tensor_model_parallel_size {tp} needs "
            "sequence_parallel; without it all tensor-parallel ranks would send the same tokens"
        )
    if config.moe_shared_expert_intermediate_size is not None and config.add_bias_linear:
        raise ValueError(
            "moe_shared_expert_intermediate_size with biases: shared experts have none; set "
            "add_bias_linear=False"
        )
    if config.moe_shared_expert_gate and config.moe_shared_expert_intermediate_size is None:
        raise ValueError(
            "moe_shared_expert_gate weighs a shared expert, but there is none; give "
            "moe_shared_expert_intermediate_size"
        )


def _check_layers(config: Any) -> None:
    freq, num_layers = config.moe_layer_freq, config.num_layers
    if isinstance(freq, list) and len(freq) == 1 and num_layers > 1:
        (freq,) = freq
    if isinstance(freq, int):
        if freq < 1:
            raise ValueError(f"moe_layer_freq is {freq}; give 1 or more")
    elif len(freq) != num_layers:
        raise ValueError(
            f"moe_layer_freq lists {len(freq)} layers, but num_layers is {num_layers}; list all of them"
        )
    elif set(freq) - {0, 1}:
        raise ValueError(f"moe_layer_freq is {freq}; give a 1 or a 0 for each layer")


def _check_choice(config: Any) -> None:
    num_experts, topk = config.num_moe_experts, config.moe_router_topk
    if topk > num_experts:
        raise ValueError(
            f"moe_router_topk {topk} is more than num_moe_experts {num_experts}; choose fewer"
        )
    is_softmax = config.moe_router_score_function == "softmax"
    is_always_one = topk == 1 and is_softmax and not config.moe_router_pre_softmax
    if is_always_one and "sinkhorn" not in config.balancing:
        raise ValueError(
            "moe_router_topk 1 with softmax over the chosen experts: the one weight is always 1, so "
            "the router gets no gradient; set moe_router_pre_softmax"
        )
    if config.moe_apply_probs_on_input and topk != 1:
        raise ValueError(
            f"moe_apply_probs_on_input with moe_router_topk {topk}; it needs moe_router_topk 1"
        )
    _check_groups(config)


def _check_groups(config: Any) -> None:
    num_groups, group_topk = config.moe_router_num_groups, config.moe_router_group_topk
    num_experts, topk = config.num_moe_experts, config.moe_router_topk
    if num_groups is None and group_topk is None:
        return
    if num_groups is None or group_topk is None:
        raise ValueError(
            f"moe_router_num_groups is {num_groups} and moe_router_group_topk is {group_topk}; "
            "give both"
        )
    if num_experts % num_groups:
        raise ValueError(
            f"num_moe_experts {num_experts} is not divisible by moe_router_num_groups {num_groups}; "
            "groups have one size"
        )
    if group_topk > num_groups:
        raise ValueError(
            f"moe_router_group_topk {group_topk} is more than moe_router_num_groups {num_groups}; "
            "choose fewer"
        )
    if topk % group_topk or topk // group_topk > num_experts // num_groups:
        raise ValueError(
            f"moe_router_topk {topk} over moe_router_group_topk {group_topk} groups of "
            f"{num_experts // num_groups} experts: each group gives the same number of experts, and "
            "has so many; change one of them"
        )


def _check_balance(config: Any) -> None:
    balancing = config.balancing
    for kind, weight in balancing.items():
        if kind not in LOAD_BALANCING_TYPES:
            raise ValueError(
                f"moe_router_load_balancing_type {kind!r} is unknown; use "
                f"{', '.join(LOAD_BALANCING_TYPES)}"
            )
        if not 0.0 <= weight < math.inf:
            raise ValueError(f"moe_aux_loss_coeff is {weight}; give 0 or more")
        if kind in ("sinkhorn", "none") and weight:
            raise ValueError(
                f"moe_router_load_balancing_type {kind!r} has no loss, but moe_aux_loss_coeff is "
                f"{weight}; set it to 0"
            )
        if kind in ("sinkhorn", "none") and len(balancing) > 1:
            raise ValueError(
                f"moe_router_load_balancing_type {kind!r} stands alone, but {len(balancing)} are given"
            )
    if "sinkhorn" in balancing:
        _refuse_with_sinkhorn(config)
    if config.moe_router_enable_expert_bias and config.moe_router_score_function == "softmax":
        raise ValueError(
            "moe_router_enable_expert_bias needs moe_router_score_function 'sigmoid': a bias is added "
            "to scores, and those of a softmax depend on each other"
        )


def _refuse_with_sinkhorn(config: Any) -> None:
    """It has a choice and weights of its own; nothing would read these fields."""
    for name, value in (
        ("moe_router_enable_expert_bias", config.moe_router_enable_expert_bias),
        ("moe_router_score_function", config.moe_router_score_function != "softmax"),
        ("moe_router_topk_scaling_factor", config.moe_router_topk_scaling_factor),
        ("moe_router_num_groups", config.moe_router_num_groups),
    ):
        if value:
            raise ValueError(
                f"{name} is {getattr(config, name)}, but moe_router_load_balancing_type 'sinkhorn' has "
                f"a choice and weights of its own; drop {name}"
            )


def _check_travel(config: Any) -> None:
    factor = config.moe_expert_capacity_factor
    if factor is None and config.moe_pad_expert_input_to_capacity:
        raise ValueError(
            "moe_pad_expert_input_to_capacity needs a capacity; give moe_expert_capacity_factor"
        )
    most = config.num_moe_experts / config.moe_router_topk
    if config.moe_pad_expert_input_to_capacity and factor > most:
        raise ValueError(
            f"moe_expert_capacity_factor {factor} with moe_pad_expert_input_to_capacity gives an "
            "expert more places than a rank has tokens; give at most num_moe_experts / "
            f"moe_router_topk = {most:g}"
        )
    if config.moe_pad_expert_input_to_capacity and config.variable_seq_lengths:
        raise ValueError(
            "moe_pad_expert_input_to_capacity needs the same number of tokens on every rank, but "
            "variable_seq_lengths is on; turn one of them off"
        )
    without = [kind for kind in config.balancing if kind not in WITH_CAPACITY]
    if factor is not None and without:
        raise ValueError(
            f"moe_expert_capacity_factor {factor} does not go with moe_router_load_balancing_type "
            f"{without[0]!r}; use {', '.join(WITH_CAPACITY)}"
        )
    if config.moe_token_dispatcher_type == "allgather" and config.variable_seq_lengths:
        raise ValueError(
            "variable_seq_lengths needs moe_token_dispatcher_type 'alltoall': an all-gather takes the "
            "same number of tokens from every rank"
        )
    if config.overlap_moe_expert_parallel_comm:
        _check_overlap(config)


def _check_overlap(config: Any) -> None:
    flag = "overlap_moe_expert_parallel_comm"
    if config.expert_model_parallel_size == 1:
        raise ValueError(
            f"{flag} hides the tokens' way to other ranks, but expert_model_parallel_size is 1; use 2 "
            "or more"
        )
    if config.moe_token_dispatcher_type != "alltoall":
        raise ValueError(
            f"{flag} needs moe_token_dispatcher_type 'alltoall', not "
            f"{config.moe_token_dispatcher_type!r}"
        )
    p = config.pipeline_model_parallel_size
    if p > 1 and config.virtual_pipeline_model_parallel_size is None:
        raise ValueError(
            f"{flag} with pipeline_model_parallel_size {p} needs several chunks per stage: plain 1F1B "
            "has no forward to run beside a backward; set virtual_pipeline_model_parallel_size"
        )
    if config.recompute_granularity == "full":
        raise ValueError(
            f"{flag} runs each layer in pieces, which recompute_granularity 'full' would run again as "
            "one; use 'selective', or turn one of them off"
        )
    if config.num_microbatches_with_partial_activation_checkpoints is not None:
        raise ValueError(
            f"{flag} does not go with num_microbatches_with_partial_activation_checkpoints; drop one"
        )
    if config.pipeline_schedule is not None:
        raise ValueError(
            f"{flag} has an order of its own, but pipeline_schedule is {config.pipeline_schedule}; "
            "drop one of them"
        )
