"""Layers, losses and random numbers cut over tensor-parallel ranks.

Mirrors: `megatron.core.tensor_parallel`, which also offers them under this one name.
"""

from minimegatron.core.tensor_parallel.cross_entropy import vocab_parallel_cross_entropy
from minimegatron.core.tensor_parallel.data import broadcast_data
from minimegatron.core.tensor_parallel.layers import (
    ColumnParallelLinear,
    RowParallelLinear,
    VocabParallelEmbedding,
)
from minimegatron.core.tensor_parallel.linear_functions import (
    linear_with_grad_accumulation_and_async_allreduce,
)
from minimegatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from minimegatron.core.tensor_parallel.random import (
    CudaRNGStatesTracker,
    get_cuda_rng_tracker,
    get_data_parallel_rng_tracker_name,
    model_parallel_cuda_manual_seed,
)
from minimegatron.core.tensor_parallel.recompute import CheckpointFunction, checkpoint
from minimegatron.core.tensor_parallel.sharding import (
    param_is_not_tensor_parallel_duplicate,
    set_defaults_if_not_set_tensor_model_parallel_attributes,
    set_tensor_model_parallel_attributes,
    shard_parameter,
)
from minimegatron.core.tensor_parallel.standalone_regions import (
    gather_from_sequence_parallel_region,
    gather_from_tensor_model_parallel_region,
    scatter_to_sequence_parallel_region,
    scatter_to_tensor_model_parallel_region,
)
from minimegatron.core.tensor_parallel.tensor_pieces import (
    gather_split_1d_tensor,
    split_tensor_along_last_dim,
    split_tensor_into_1d_equal_chunks,
)
from minimegatron.core.tensor_parallel.uneven_rows import all_to_all
from minimegatron.core.tensor_parallel.weight_grad_store import drain_embedding_wgrad_compute
from minimegatron.core.tensor_parallel.whole_parameters import (
    copy_tensor_model_parallel_attributes,
    gather_parameter,
    unshard_parameter,
)

__all__ = [
    "CheckpointFunction",
    "ColumnParallelLinear",
    "CudaRNGStatesTracker",
    "RowParallelLinear",
    "VocabParallelEmbedding",
    "all_to_all",
    "broadcast_data",
    "checkpoint",
    "copy_tensor_model_parallel_attributes",
    "copy_to_tensor_model_parallel_region",
    "drain_embedding_wgrad_compute",
    "gather_from_sequence_parallel_region",
    "gather_from_tensor_model_parallel_region",
    "gather_parameter",
    "gather_split_1d_tensor",
    "get_cuda_rng_tracker",
    "get_data_parallel_rng_tracker_name",
    "linear_with_grad_accumulation_and_async_allreduce",
    "model_parallel_cuda_manual_seed",
    "param_is_not_tensor_parallel_duplicate",
    "reduce_from_tensor_model_parallel_region",
    "reduce_scatter_to_sequence_parallel_region",
    "scatter_to_sequence_parallel_region",
    "scatter_to_tensor_model_parallel_region",
    "set_defaults_if_not_set_tensor_model_parallel_attributes",
    "set_tensor_model_parallel_attributes",
    "shard_parameter",
    "split_tensor_along_last_dim",
    "split_tensor_into_1d_equal_chunks",
    "unshard_parameter",
    "vocab_parallel_cross_entropy",
]
