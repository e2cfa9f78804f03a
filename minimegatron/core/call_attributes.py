"""What observers are told of a call: read from its arguments.

Torch-free. Megatron has no counterpart.
"""

from typing import Any


def of_collective(arguments: dict[str, Any]) -> dict[str, Any]:
    """Bytes, shape and dtype of its tensor, ranks of its group. Raises TypeError where one is None."""
    tensor, group = arguments.get("tensor", arguments.get("input")), arguments["group"]
    for name, value in (("tensor", tensor), ("group", group)):
        if value is None:
            raise TypeError(f"a collective needs a {name}, and got None")
    return {
        "bytes": tensor.numel() * tensor.element_size(),
        "shape": tuple(tensor.shape),
        "dtype": str(tensor.dtype).removeprefix("torch."),
        "group_size": group.size(),
    }
