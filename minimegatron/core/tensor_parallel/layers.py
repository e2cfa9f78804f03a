"""Linear layers and the embedding, cut over the tensor-parallel ranks.

Counterpart: `megatron.core.tensor_parallel.layers`, same names.

For Y = X W^T with t ranks (Shoeybi et al. 2019, https://arxiv.org/abs/1909.08053):

- column-parallel cuts W's rows (the columns of W^T): rank r computes the piece Y_r from all of X;
- row-parallel cuts W's columns: rank r computes, from X_r alone, one term of the sum Y.

A column-parallel layer followed by a row-parallel one needs no exchange in between.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from minimegatron.core import collectives
from minimegatron.core.model_parallel_config import ModelParallelConfig
from minimegatron.core.parameter_marks import mark_expert_parameters, note_marks
from minimegatron.core.tensor_parallel import autocast_casts, shape_checks
from minimegatron.core.tensor_parallel import frozen_weight as frozen
from minimegatron.core.tensor_parallel import standalone_regions as regions
from minimegatron.core.tensor_parallel.initial_weights import new_weight
from minimegatron.core.tensor_parallel.mappings import (
    _gather_along_first_dim,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from minimegatron.core.tensor_parallel.sharding import set_tensor_model_parallel_attributes
from minimegatron.core.tensor_parallel.utils import (
    VocabUtility,
    divide,
    get_tensor_model_parallel_group_if_none,
    weight_gradient,
)
from minimegatron.core.tensor_parallel.weight_grad_store import OwingLinear, WeightGradStore
from minimegatron.core.utils import without_graph
from minimegatron.exports import all_of

# Megatron has these here.
__getattr__, __dir__ = all_of(__name__, "minimegatron.core.tensor_parallel.linear_functions")

InitMethod = Callable[[torch.Tensor], torch.Tensor]


def _new_bias(
    size: int, dtype: torch.dtype, cut: bool, stride: int = 1, sizes: Sequence[int] | None = None
) -> torch.nn.Parameter:
    """Biases start at zero, for any layout."""
    bias = torch.nn.Parameter(torch.zeros(size, dtype=dtype))
    set_tensor_model_parallel_attributes(bias, cut, 0 if cut else -1, stride, sizes)
    bias.init_method = torch.nn.init.zeros_
    return bias


class VocabParallelEmbedding(torch.nn.Module):
    """An embedding table cut along the vocabulary: rank r holds rows [r V/t, (r+1) V/t).

    Args:
        num_embeddings: V, global; divisible by t.
        embedding_dim: h.
        init_method: draws the full [V, h] table.
        reduce_scatter_embeddings: return [s/t, b, h] for sequence parallelism, not [b, s, h].
        config: dtype of the weight.
        tp_group: None for `parallel_state`'s.
    """

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        *,
        init_method: InitMethod,
        reduce_scatter_embeddings: bool = False,
        config: ModelParallelConfig,
        tp_group: Any = None,
    ):
        super().__init__()
        self.num_embeddings, self.embedding_dim = num_embeddings, embedding_dim
        self.reduce_scatter_embeddings = reduce_scatter_embeddings
        self.tp_group = get_tensor_model_parallel_group_if_none(tp_group)
        rank, size = self.tp_group.rank(), self.tp_group.size()
        first, last = VocabUtility.vocab_range_from_global_vocab_size(num_embeddings, rank, size)
        self.vocab_start_index, self.vocab_end_index = first, last
        self.num_embeddings_per_partition = last - first
        shape, dtype = (last - first, embedding_dim), config.params_dtype
        self.weight = new_weight(shape, dtype, init_method, 0, self.tp_group, vocabulary=True)
        note_marks(self)

    def forward(self, input_: torch.Tensor) -> torch.Tensor:
        """Token ids [b, s] -> [b, s, h], whole on every rank; or [s/t, b, h], see the class."""
        if self.tp_group.size() == 1:
            output_parallel = F.embedding(input_, self.weight)
        else:
            # Ids of other ranks look up row 0 here, and count as zero in the sum. Those of no rank end
            # the run on all, as on one.
            known = (input_ >= 0) & (input_ < self.num_embeddings)
            elsewhere = (input_ < self.vocab_start_index) | (input_ >= self.vocab_end_index)
            local_ids = (input_ - self.vocab_start_index).masked_fill(elsewhere & known, 0)
            found = F.embedding(local_ids, self.weight)
            output_parallel = found.masked_fill(elsewhere.unsqueeze(-1), 0.0)
        if self.reduce_scatter_embeddings:
            output_parallel = output_parallel.transpose(0, 1).contiguous()
            return reduce_scatter_to_sequence_parallel_region(output_parallel, group=self.tp_group)
        return reduce_from_tensor_model_parallel_region(output_parallel, group=self.tp_group)


# -- The matrix product under both linear layers --


class LinearWithGradAccumulationAndAsyncCommunication(torch.autograd.Function):
    """Y = X W^T + bias, whose backward computes dW while the input gradient is reduced.

    dX must be summed over the ranks and dW need not be, and dW does not depend on dX: so dX is
    computed first, its reduction launched, and dW computed while it is under way.

    With `owe`, dW may wait: `owe(X, dY)` keeps the two for it, or says that there is no room. Then X
    is gathered where dW is computed, and not here.
    """

    @staticmethod
    def forward(ctx, input_, weight, bias, allreduce_dgrad, sequence_parallel, owe, tp_group):
        # Saved before gathering: [s/t, b, h], gathered once more in backward.
        ctx.save_for_backward(input_, weight)
        ctx.use_bias = bias is not None
        ctx.allreduce_dgrad, ctx.sequence_parallel = allreduce_dgrad, sequence_parallel
        ctx.owe, ctx.tp_group = owe, tp_group
        if sequence_parallel:
            input_ = _gather_along_first_dim(input_, tp_group)
        return F.linear(input_, weight, bias)

    @staticmethod
    @without_graph
    def backward(ctx, grad_output):
        input_, weight = ctx.saved_tensors
        group = ctx.tp_group
        is_wanted = ctx.owe is not None and ctx.needs_input_grad[1]
        is_owed = is_wanted and ctx.owe(input_, grad_output)

        # -- Launch the gathering of X, compute dX meanwhile --
        total_input, gathering = input_, None
        if ctx.sequence_parallel and not is_owed:
            total_input = input_.new_empty((group.size() * input_.size(0), *input_.shape[1:]))
            own = input_.contiguous()
            gathering = collectives.all_gather(total_input, own, group, async_op=True)
        grad_input = grad_output.matmul(weight)
        if gathering is not None:
            gathering.wait()

        # -- Launch the reduction of dX, compute dW meanwhile --
        reducing = None
        if ctx.allreduce_dgrad:
            reducing = collectives.all_reduce(grad_input, group, async_op=True)
        elif ctx.sequence_parallel:
            of_this_rank, grad_input = grad_input, torch.empty_like(input_)
            reducing = collectives.reduce_scatter(grad_input, of_this_rank, group, async_op=True)
        grad_weight = None if is_owed else weight_gradient(grad_output, total_input)
        grad_bias = grad_output.flatten(0, -2).sum(dim=0) if ctx.use_bias else None
        if reducing is not None:
            reducing.wait()
        return grad_input, grad_weight, grad_bias, None, None, None, None


def linear(
    input: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    allreduce_dgrad: bool,
    sequence_parallel: bool,
    store: WeightGradStore | None,
    tp_group: Any,
) -> torch.Tensor:
    """`linear_with_grad_accumulation_and_async_allreduce`, all by position.

    Weight gradients go to `store`; None to compute them in backward.
    """
    if not weight.requires_grad:
        return frozen.frozen_product(
            input, weight, bias, allreduce_dgrad, sequence_parallel, tp_group
        )
    # With nothing to reduce and nothing to leave for later, torch's own product does: on one tensor
    # rank, and in row-parallel layers, whose input is each rank's own.
    if not allreduce_dgrad and not sequence_parallel and store is None:
        return F.linear(input, weight, bias)
    group = get_tensor_model_parallel_group_if_none(tp_group)
    owe = None if store is None else partial(store.put, weight)
    given = (input, weight, bias)
    in_autocast = torch.is_autocast_enabled(input.device.type)
    given = autocast_casts.cast_for_autocast(*given) if in_autocast else given
    return LinearWithGradAccumulationAndAsyncCommunication.apply(
        *given, allreduce_dgrad, sequence_parallel, owe, group
    )


class ColumnParallelLinear(OwingLinear):
    """Y = X W^T + bias with W's rows cut: rank r computes output features [r n/t, (r+1) n/t).

    Args:
        input_size: h.
        output_size: n, global; divisible by t.
        config: dtype, sequence parallelism, delay, deferral.
        init_method: draws the full [n, h] weight.
        bias: add a bias, which starts at zero.
        gather_output: return [..., n] on every rank, not [..., n/t].
        stride: number of matrices stacked in W, each cut by itself (see `sharding`).
        skip_bias_add: return the bias instead of adding it, for a caller that fuses it.
        is_expert: the layer is an expert's. Then `tp_group` are the ranks that share the expert, and
            the token dispatcher gathers their tokens before it and sums their outputs after it.
        skip_weight_param_allocation: no weight of its own; `forward` gets one (tied output layer).
        embedding_activation_buffer, grad_output_buffer: where a deferred weight gradient's two
            factors are kept, if `config.defer_embedding_wgrad_compute`.
        disable_grad_reduce: leave the input's gradient unsummed.
        tp_group: None for `parallel_state`'s.
        delay_wgrad_compute: leave the gradient of the layer's own weight to `backward_dw`; None for
            the config's. A weight that `forward` is given gets its gradient in backward.
        partition_sizes: for stacked matrices of unequal sizes, this rank's rows of each.
    """

    def __init__(
        self,
        input_size: int,
        output_size: int,
        *,
        config: ModelParallelConfig,
        init_method: InitMethod,
        bias: bool = True,
        gather_output: bool = False,
        stride: int = 1,
        skip_bias_add: bool = False,
        skip_weight_param_allocation: bool = False,
        embedding_activation_buffer: list[torch.Tensor] | None = None,
        grad_output_buffer: list[torch.Tensor] | None = None,
        is_expert: bool = False,
        disable_grad_reduce: bool = False,
        tp_group: Any = None,
        delay_wgrad_compute: bool | None = None,
        partition_sizes: Sequence[int] | None = None,
    ):
        super().__init__()
        self.input_size, self.output_size = input_size, output_size
        self.config = config
        self.gather_output, self.skip_bias_add = gather_output, skip_bias_add
        self.tp_group = get_tensor_model_parallel_group_if_none(tp_group, is_expert)
        self.output_size_per_partition = divide(output_size, self.tp_group.size())
        has_own_exchange = self.tp_group.size() > 1 and not is_expert
        self.sequence_parallel = config.sequence_parallel and has_own_exchange
        self.allreduce_dgrad = (
            has_own_exchange and not self.sequence_parallel and not disable_grad_reduce
        )
        size, dtype, group = self.output_size_per_partition, config.params_dtype, self.tp_group
        self.weight = None
        if not skip_weight_param_allocation:
            shape = (size, input_size)
            self.weight = new_weight(shape, dtype, init_method, 0, group, stride, partition_sizes)
        self.bias = _new_bias(size, dtype, True, stride, partition_sizes) if bias else None
        self.set_up_owing(
            delay_wgrad_compute,
            group if self.sequence_parallel else None,
            embedding_activation_buffer,
            grad_output_buffer,
        )
        mark_expert_parameters(self, is_expert)

    def forward(
        self,
        input_: torch.Tensor,
        weight: torch.Tensor | None = None,
        runtime_gather_output: bool | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """[s, b, h] ([s/t, b, h] with sequence parallelism) -> ([s, b, n/t], bias if not added).

        `weight`, [n/t, h], is used instead of the layer's own, and `runtime_gather_output` instead of
        `gather_output`. Raises ValueError if there is no weight, or one of another shape.
        """
        weight = self.weight if weight is None else weight
        own_shape = (self.output_size_per_partition, self.input_size)
        if weight is None or weight.shape != own_shape:
            shape_checks.refuse_weight(weight, own_shape)
        bias = None if self.skip_bias_add else self.bias
        store = self.store_for(weight) if self.owes else None
        output = linear(
            input_, weight, bias, self.allreduce_dgrad, self.sequence_parallel, store, self.tp_group
        )
        gather = self.gather_output if runtime_gather_output is None else runtime_gather_output
        if gather:
            output = regions.gather_from_tensor_model_parallel_region(output, group=self.tp_group)
        return output, self.bias if self.skip_bias_add else None


class RowParallelLinear(OwingLinear):
    """Y = X W^T + bias with W's columns cut: rank r's product is one term of the sum Y.

    Args:
        input_size: n, global; divisible by t.
        output_size: h.
        config: dtype, sequence parallelism, delay.
        init_method: draws the full [h, n] weight.
        bias: add a bias; it is whole on every rank, and added once, after the sum.
        input_is_parallel: the input is [..., n/t] already, as a column-parallel layer leaves it.
        skip_bias_add: return the bias instead of adding it.
        is_expert: as for `ColumnParallelLinear`; the output is then one term of the sum.
        tp_group: None for `parallel_state`'s.

    Raises:
        ValueError: sequence parallelism with `input_is_parallel=False`.
    """

    def __init__(
        self,
        input_size: int,
        output_size: int,
        *,
        config: ModelParallelConfig,
        init_method: InitMethod,
        bias: bool,
        input_is_parallel: bool,
        skip_bias_add: bool,
        stride: int = 1,
        is_expert: bool = False,
        tp_group: Any = None,
    ):
        super().__init__()
        self.input_size, self.output_size = input_size, output_size
        self.config = config
        self.input_is_parallel, self.skip_bias_add = input_is_parallel, skip_bias_add
        self.tp_group = get_tensor_model_parallel_group_if_none(tp_group, is_expert)
        self.input_size_per_partition = divide(input_size, self.tp_group.size())
        self.is_expert = is_expert
        has_own_exchange = self.tp_group.size() > 1 and not is_expert
        self.sequence_parallel = config.sequence_parallel and has_own_exchange
        shape_checks.check_input_is_cut(self.sequence_parallel, input_is_parallel)
        shape = (output_size, self.input_size_per_partition)
        self.weight = new_weight(shape, config.params_dtype, init_method, 1, self.tp_group, stride)
        self.set_up_owing()
        self.bias = None
        if bias:
            self.bias = _new_bias(output_size, config.params_dtype, cut=False)
            # Added to this rank's part of the sequence: its gradient is one term of a sum. The ranks
            # of a tensor group have different experts, whose biases are not to be summed.
            self.bias.sequence_parallel = config.sequence_parallel and not is_expert
        mark_expert_parameters(self, is_expert)

    def forward(self, input_: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """[s, b, n/t] -> ([s, b, h] or, with sequence parallelism, [s/t, b, h]; bias if not added)."""
        if not self.input_is_parallel:
            input_ = regions.scatter_to_tensor_model_parallel_region(input_, group=self.tp_group)
        store = self.store_for(self.weight) if self.owes else None
        output = linear(input_, self.weight, None, False, False, store, self.tp_group)
        if self.sequence_parallel:
            output = reduce_scatter_to_sequence_parallel_region(output, self.tp_group)
        elif not self.is_expert:
            output = reduce_from_tensor_model_parallel_region(output, self.tp_group)
        is_kept = self.skip_bias_add or self.bias is None
        return (output, self.bias) if is_kept else (output + self.bias, None)
