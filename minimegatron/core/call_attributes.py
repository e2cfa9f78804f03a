"""What observers are told of a call: read from its arguments.

Torch-free. Megatron has no counterpart. Each function is what a `@traced` link has as `describe`.
"""

from typing import Any


def of_forward(arguments: dict[str, Any]) -> dict[str, Any]:
    """Of `forward_step`."""
    return {
        "microbatch": arguments["current_microbatch"],
        "chunk": arguments["vp_stage"] or 0,
        "is_last_stage": arguments["is_last_stage"],
    }


def of_loss(arguments: dict[str, Any]) -> dict[str, Any]:
    """Of `forward_step_calc_loss`."""
    return {"chunk": arguments["vp_stage"] or 0}


def of_message(arguments: dict[str, Any]) -> dict[str, Any]:
    """Of a message that starts."""
    message = arguments["message"]
    return {
        "peer": message.peer,
        "payload": message.payload,
        "doing": _doing(message),
        "bytes": message.tensor.numel() * message.tensor.element_size(),
    }


def of_message_wait(arguments: dict[str, Any]) -> dict[str, Any]:
    """Of waiting for a message; `number` says how many like it came before in this step."""
    handle = arguments["handle"]
    return {
        "stage": handle.stage,
        "peer": handle.message.peer,
        "payload": handle.message.payload,
        "doing": _doing(handle.message),
        "number": handle.number,
    }


def _doing(message: Any) -> str:
    return "sending" if message.is_send else "receiving"


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


def of_bucket_launch(arguments: dict[str, Any]) -> dict[str, Any]:
    """Numbers of the group's buckets, bytes of their gradients, and how many parameters they have."""
    group = arguments["self"]
    return {
        "bucket": [bucket.bucket_id for bucket in group.buckets],
        "bytes": sum(b.grad_data.numel() * b.grad_data.element_size() for b in group.buckets),
        "num_params": len(group.params),
    }


def of_model_forward(arguments: dict[str, Any]) -> dict[str, Any]:
    """The chunk and the number of its layers."""
    model = arguments["self"]
    return {"chunk": model.vp_stage or 0, "layers": model.decoder.num_layers_per_pipeline_rank}


def of_layer_forward(arguments: dict[str, Any]) -> dict[str, Any]:
    """The layer's number in the whole model."""
    return {"layer": arguments["self"].layer_number}
