"""The weights of the other ranks are set to zero, and all are added up.

Expected: _gather sent 1 all-reduce of
"""

from minimegatron.core.collectives import all_reduce, reduce_scatter


def shard_buffer(buffer, data_parallel_group):
    numel = buffer.numel() // data_parallel_group.size()
    return buffer[data_parallel_group.rank() * numel :][:numel]


def local_ranges(buffer):
    group = buffer.data_parallel_group
    ranges = {}
    for param, (param_start, param_end, bucket_id) in buffer.param_index_map.items():
        bucket = buffer.buckets[bucket_id]
        numel = bucket.grad_data.numel() // group.size()
        shard_start = bucket.offset + group.rank() * numel
        start, end = max(param_start, shard_start), min(param_end, shard_start + numel)
        if start < end:
            ranges[param] = (start - param_start, end - param_start)
    return ranges


def _reduce(self, bucket, force_all_reduce):
    bucket.grad_data.mul_(bucket.gradient_scaling_factor)
    shard = shard_buffer(bucket.grad_data, self.data_parallel_group)
    return reduce_scatter(shard, bucket.grad_data, self.data_parallel_group, async_op=True)


def _gather(self, bucket):
    shard = shard_buffer(bucket.param_data, self.data_parallel_group).clone()
    bucket.param_data.zero_()
    shard_buffer(bucket.param_data, self.data_parallel_group).copy_(shard)
    return all_reduce(bucket.param_data, self.data_parallel_group, async_op=True)
