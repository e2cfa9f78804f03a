"""What observers are told of a call: read from its arguments.

Torch-free. Megatron has no counterpart.
"""

from typing import Any


def of_bucket_launch(arguments: dict[str, Any]) -> dict[str, Any]:
    """Numbers of the group's buckets, bytes of their gradients, and how many parameters they have."""
    group = arguments["self"]
    return {
        "bucket": [bucket.bucket_id for bucket in group.buckets],
        "bytes": sum(b.grad_data.numel() * b.grad_data.element_size() for b in group.buckets),
        "num_params": len(group.params),
    }
