"""Layers, losses and random numbers cut over tensor-parallel ranks.

Mirrors: `megatron.core.tensor_parallel`, which also offers them under this one name. Here they are
looked up on first use: half of them are for other models than a plain one.
"""

from minimegatron.exports import lazily

_HERE = "minimegatron.core.tensor_parallel"

__getattr__, __dir__ = lazily(
    __name__,
    {
        "CheckpointFunction": f"{_HERE}.recompute:CheckpointFunction",
        "ColumnParallelLinear": f"{_HERE}.layers:ColumnParallelLinear",
        "CudaRNGStatesTracker": f"{_HERE}.random:CudaRNGStatesTracker",
        "RowParallelLinear": f"{_HERE}.layers:RowParallelLinear",
        "VocabParallelEmbedding": f"{_HERE}.layers:VocabParallelEmbedding",
        "all_to_all": f"{_HERE}.uneven_rows:all_to_all",
        "broadcast_data": f"{_HERE}.data:broadcast_data",
        "checkpoint": f"{_HERE}.recompute:checkpoint",
        "copy_tensor_model_parallel_attributes": (
            f"{_HERE}.whole_parameters:copy_tensor_model_parallel_attributes"
        ),
        "copy_to_tensor_model_parallel_region": (
            f"{_HERE}.mappings:copy_to_tensor_model_parallel_region"
        ),
        "drain_embedding_wgrad_compute": (
            f"{_HERE}.weight_grad_store:drain_embedding_wgrad_compute"
        ),
        "gather_from_sequence_parallel_region": (
            f"{_HERE}.standalone_regions:gather_from_sequence_parallel_region"
        ),
        "gather_from_tensor_model_parallel_region": (
            f"{_HERE}.standalone_regions:gather_from_tensor_model_parallel_region"
        ),
        "gather_parameter": f"{_HERE}.whole_parameters:gather_parameter",
        "gather_split_1d_tensor": f"{_HERE}.tensor_pieces:gather_split_1d_tensor",
        "get_cuda_rng_tracker": f"{_HERE}.random:get_cuda_rng_tracker",
        "get_data_parallel_rng_tracker_name": f"{_HERE}.random:get_data_parallel_rng_tracker_name",
        "linear_with_grad_accumulation_and_async_allreduce": (
            f"{_HERE}.linear_functions:linear_with_grad_accumulation_and_async_allreduce"
        ),
        "model_parallel_cuda_manual_seed": f"{_HERE}.random:model_parallel_cuda_manual_seed",
        "param_is_not_tensor_parallel_duplicate": (
            f"{_HERE}.sharding:param_is_not_tensor_parallel_duplicate"
        ),
        "reduce_from_tensor_model_parallel_region": (
            f"{_HERE}.mappings:reduce_from_tensor_model_parallel_region"
        ),
        "reduce_scatter_to_sequence_parallel_region": (
            f"{_HERE}.mappings:reduce_scatter_to_sequence_parallel_region"
        ),
        "scatter_to_sequence_parallel_region": (
            f"{_HERE}.standalone_regions:scatter_to_sequence_parallel_region"
        ),
        "scatter_to_tensor_model_parallel_region": (
            f"{_HERE}.standalone_regions:scatter_to_tensor_model_parallel_region"
        ),
        "set_defaults_if_not_set_tensor_model_parallel_attributes": (
            f"{_HERE}.sharding:set_defaults_if_not_set_tensor_model_parallel_attributes"
        ),
        "set_tensor_model_parallel_attributes": (
            f"{_HERE}.sharding:set_tensor_model_parallel_attributes"
        ),
        "shard_parameter": f"{_HERE}.sharding:shard_parameter",
        "split_tensor_along_last_dim": f"{_HERE}.tensor_pieces:split_tensor_along_last_dim",
        "split_tensor_into_1d_equal_chunks": (
            f"{_HERE}.tensor_pieces:split_tensor_into_1d_equal_chunks"
        ),
        "unshard_parameter": f"{_HERE}.whole_parameters:unshard_parameter",
        "vocab_parallel_cross_entropy": f"{_HERE}.cross_entropy:vocab_parallel_cross_entropy",
    },
)
