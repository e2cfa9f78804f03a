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
from minimegatron.core.parameter_marks import note_marks
from minimegatron.core.tensor_parallel.frozen_weight import linear_with_frozen_weight
from minimegatron.core.tensor_parallel.initial_weights import new_weight
from minimegatron.core.tensor_parallel.mappings import (
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from minimegatron.core.tensor_parallel.sharding import (  # noqa: F401  Megatron has them here
    copy_tensor_model_parallel_attributes,
    param_is_not_tensor_parallel_duplicate,
    set_defaults_if_not_set_tensor_model_parallel_attributes,
    set_tensor_model_parallel_attributes,
)
from minimegatron.core.tensor_parallel.standalone_regions import (
    gather_from_tensor_model_parallel_region,
    scatter_to_tensor_model_parallel_region,
)
from minimegatron.core.tensor_parallel.utils import (
    VocabUtility,
    divide,
    get_tensor_model_parallel_group_if_none,
    weight_gradient,
)
from minimegatron.core.tensor_parallel.weight_grad_store import (
    WeightGradStore,
    drain_embedding_wgrad_compute,  # noqa: F401  Megatron has it here
    store_of,
)
from minimegatron.core.utils import without_graph
from minimegatron.exports import lazily

# Megatron has it here.
__getattr__, __dir__ = lazily(
    __name__,
    {
        "linear_with_grad_accumulation_and_async_allreduce": (
            "minimegatron.core.tensor_parallel.linear_functions:"
            "linear_with_grad_accumulation_and_async_allreduce"
        ),
    },
)

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
        self.num_embeddings = num_embeddings
        self.embedding_dim = embedding_dim
        self.reduce_scatter_embeddings = reduce_scatter_embeddings
        self.tp_group = get_tensor_model_parallel_group_if_none(tp_group)
        rank, size = self.tp_group.rank(), self.tp_group.size()
        self.vocab_start_index, self.vocab_end_index = (
            VocabUtility.vocab_range_from_global_vocab_size(num_embeddings, rank, size)
        )
        self.num_embeddings_per_partition = self.vocab_end_index - self.vocab_start_index
        self.weight = new_weight(
            (self.num_embeddings_per_partition, embedding_dim),
            config.params_dtype,
            init_method,
            partition_dim=0,
            tp_group=self.tp_group,
            vocabulary=True,
        )
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
    """Y = X W^T + bias, whose backward hides the input gradient's reduction behind dW.

    dX must be summed over the ranks and dW need not be, and dW does not depend on dX: so dX is
    computed first, its reduction launched, and dW computed while it is under way.

    With `owe`, dW may wait: `owe(X, dY)` keeps the two for it, or says that there is no room. Then X
    is gathered where dW is computed, and not here.
    """

    @staticmethod
    def forward(
        ctx,
        input_,
        weight,
        bias,
        allreduce_dgrad,
        sequence_parallel,
        owe,
        tp_group,
    ):
        # Saved before gathering: [s/t, b, h], gathered once more in backward.
        ctx.save_for_backward(input_, weight)
        ctx.use_bias = bias is not None
        ctx.allreduce_dgrad = allreduce_dgrad
        ctx.sequence_parallel = sequence_parallel
        ctx.owe = owe
        ctx.tp_group = tp_group
        if sequence_parallel:
            total_input, _ = _gather_sequence(input_, tp_group, async_op=False)
        else:
            total_input = input_
        return F.linear(total_input, weight, bias)

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
            total_input, gathering = _gather_sequence(input_, group, async_op=True)
        grad_input = grad_output.matmul(weight)
        if gathering is not None:
            gathering.wait()

        # -- Launch the reduction of dX, compute dW meanwhile --
        reducing = None
        if ctx.allreduce_dgrad:
            reducing = collectives.all_reduce(grad_input, group, async_op=True)
        elif ctx.sequence_parallel:
            partial = grad_input
            grad_input = torch.empty_like(input_)
            reducing = collectives.reduce_scatter(grad_input, partial, group, async_op=True)
        grad_weight = None if is_owed else weight_gradient(grad_output, total_input)
        grad_bias = grad_output.flatten(0, -2).sum(dim=0) if ctx.use_bias else None
        if reducing is not None:
            reducing.wait()
        return grad_input, grad_weight, grad_bias, None, None, None, None


def _gather_sequence(input_: torch.Tensor, group: Any, async_op: bool) -> tuple[torch.Tensor, Any]:
    """[s/t, b, h] -> [s, b, h], and the handle to wait for if asynchronous."""
    gathered = input_.new_empty((group.size() * input_.size(0), *input_.shape[1:]))
    handle = collectives.all_gather(gathered, input_.contiguous(), group, async_op=async_op)
    return gathered, handle


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
        return linear_with_frozen_weight(
            input,
            weight,
            bias,
            allreduce_dgrad=allreduce_dgrad,
            sequence_parallel=sequence_parallel,
            tp_group=tp_group,
        )
    if not allreduce_dgrad and not sequence_parallel and store is None:
        return F.linear(input, weight, bias)
    group = get_tensor_model_parallel_group_if_none(tp_group)
    owe = None if store is None else partial(store.put, weight)
    device = input.device.type
    # Autocast does not reach into a custom function's backward, so the casts are made out here.
    if torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
        input, weight = input.to(dtype), weight.to(dtype)
        bias = None if bias is None else bias.to(dtype)
    return LinearWithGradAccumulationAndAsyncCommunication.apply(
        input, weight, bias, allreduce_dgrad, sequence_parallel, owe, group
    )


def _mark_delayed(weight: torch.nn.Parameter, is_delayed: bool) -> None:
    """Says, as in Megatron, that the hooks of this weight run in `backward_dw`, not in backward."""
    if is_delayed:
        weight.skip_backward_post_hook = True


def mark_expert_parameters(layer: torch.nn.Module, is_expert: bool) -> None:
    """Says of an expert's parameters that they are of the kind `expert` (see `core.parameter`).

    Where experts are cut over the same ranks as everything else they are parameters like others. It is
    a linear layer's last mark: all are noted then.
    """
    config = layer.config
    is_cut_as_others = (
        config.expert_model_parallel_size == 1
        and config.expert_tensor_parallel_size == config.tensor_model_parallel_size
    )
    if is_expert and not is_cut_as_others:
        for param in layer.parameters(recurse=False):
            param.allreduce = False
    note_marks(layer)


class ColumnParallelLinear(torch.nn.Module):
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
        self.input_size = input_size
        self.output_size = output_size
        self.config = config
        self.gather_output = gather_output
        self.skip_bias_add = skip_bias_add
        self.embedding_activation_buffer = embedding_activation_buffer
        self.grad_output_buffer = grad_output_buffer
        self.tp_group = get_tensor_model_parallel_group_if_none(tp_group, is_expert)
        world_size = self.tp_group.size()
        self.output_size_per_partition = divide(output_size, world_size)
        has_own_exchange = world_size > 1 and not is_expert
        self.sequence_parallel = config.sequence_parallel and has_own_exchange
        self.allreduce_dgrad = (
            has_own_exchange and not self.sequence_parallel and not disable_grad_reduce
        )
        self.delay_wgrad_compute = (
            config.delay_wgrad_compute if delay_wgrad_compute is None else delay_wgrad_compute
        )
        self.weight = None
        if not skip_weight_param_allocation:
            shape = (self.output_size_per_partition, input_size)
            self.weight = new_weight(
                shape,
                config.params_dtype,
                init_method,
                0,
                self.tp_group,
                stride,
                partition_sizes=partition_sizes,
            )
            _mark_delayed(self.weight, self.delay_wgrad_compute)
        self._sequence_group = self.tp_group if self.sequence_parallel else None
        self._deferred: WeightGradStore | None = None
        if config.defer_embedding_wgrad_compute and grad_output_buffer is not None:
            self._deferred = WeightGradStore(
                embedding_activation_buffer,
                grad_output_buffer,
                self._sequence_group,
                config.wgrad_deferral_limit,
                until_drained=True,
            )
        self.bias = None
        if bias:
            size = self.output_size_per_partition
            self.bias = _new_bias(size, config.params_dtype, True, stride, partition_sizes)
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
        if weight is None:
            raise ValueError(
                "this ColumnParallelLinear was built with skip_weight_param_allocation and has "
                "no weight; pass weight= to forward"
            )
        own_shape = (self.output_size_per_partition, self.input_size)
        if weight.shape != own_shape:
            raise ValueError(
                f"weight is {list(weight.shape)}, but this rank's rows of it are {list(own_shape)}; "
                "pass this rank's slice"
            )
        store = self._deferred
        if store is None and self.delay_wgrad_compute and weight is self.weight:
            store = store_of(weight, self._sequence_group)
        output_parallel = linear(
            input_,
            weight,
            None if self.skip_bias_add else self.bias,
            self.allreduce_dgrad,
            self.sequence_parallel,
            store,
            self.tp_group,
        )
        output = output_parallel
        gather = self.gather_output if runtime_gather_output is None else runtime_gather_output
        if gather:
            output = gather_from_tensor_model_parallel_region(output_parallel, group=self.tp_group)
        return output, self.bias if self.skip_bias_add else None

    def backward_dw(self) -> None:
        """With `delay_wgrad_compute`: the weight gradient of the oldest microbatch that is owed."""
        if self.delay_wgrad_compute and self.weight is not None:
            store_of(self.weight, self._sequence_group).backward_dw(self.weight)


class RowParallelLinear(torch.nn.Module):
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
        self.input_size = input_size
        self.output_size = output_size
        self.config = config
        self.input_is_parallel = input_is_parallel
        self.skip_bias_add = skip_bias_add
        self.tp_group = get_tensor_model_parallel_group_if_none(tp_group, is_expert)
        self.input_size_per_partition = divide(input_size, self.tp_group.size())
        self.is_expert = is_expert
        has_own_exchange = self.tp_group.size() > 1 and not is_expert
        self.sequence_parallel = config.sequence_parallel and has_own_exchange
        if self.sequence_parallel and not input_is_parallel:
            raise ValueError(
                "a row-parallel layer under sequence_parallel takes features that are cut "
                "already; set input_is_parallel=True or turn sequence_parallel off"
            )
        shape = (output_size, self.input_size_per_partition)
        self.weight = new_weight(shape, config.params_dtype, init_method, 1, self.tp_group, stride)
        self.delay_wgrad_compute = config.delay_wgrad_compute
        _mark_delayed(self.weight, self.delay_wgrad_compute)
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
            input_ = scatter_to_tensor_model_parallel_region(input_, group=self.tp_group)
        store = store_of(self.weight) if self.delay_wgrad_compute else None
        output_parallel = linear(input_, self.weight, None, False, False, store, self.tp_group)
        if self.is_expert:
            output = output_parallel
        elif self.sequence_parallel:
            output = reduce_scatter_to_sequence_parallel_region(output_parallel, self.tp_group)
        else:
            output = reduce_from_tensor_model_parallel_region(output_parallel, self.tp_group)
        if self.skip_bias_add:
            return output, self.bias
        return (output if self.bias is None else output + self.bias), None

    def backward_dw(self) -> None:
        """With `delay_wgrad_compute`: the weight gradient of the oldest microbatch that is owed."""
        if self.delay_wgrad_compute:
            store_of(self.weight).backward_dw(self.weight)
