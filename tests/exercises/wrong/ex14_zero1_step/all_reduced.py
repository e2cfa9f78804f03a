"""All gradients are summed everywhere: every rank's shard is right.

Expected: This way twice the bytes of a reduce-scatter cross
"""

from minimegatron.core.collectives import all_gather, all_reduce


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
    return all_reduce(bucket.grad_data, self.data_parallel_group, async_op=True)


def _gather(self, bucket):
    return all_gather(
        bucket.param_data,
        shard_buffer(bucket.param_data, self.data_parallel_group),
        self.data_parallel_group,
        async_op=True,
    )
